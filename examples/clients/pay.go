// Sends a payment with net/http. usage: TOKEN=… go run pay.go operation.go URL FILE BODY
package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"time"
)

var client = http.Client{
	Timeout: 30 * time.Second, // the default client waits forever
	CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // a redirect would take key and body to another host
	},
}

func pay(url string, kept operation, token string) (string, error) {
	for tries := 0; ; tries++ {
		status, header, body, err := send(url, kept, token)
		if err == nil && !again(status, header, code(body)) {
			return fmt.Sprintf("%d %s", status, body), nil
		}
		if tries == 9 {
			return "", fmt.Errorf("no outcome yet: %d %s %v", status, body, err)
		}
		time.Sleep(delay(tries, header.Get("Retry-After")))
	}
}

func send(url string, kept operation, token string) (int, http.Header, []byte, error) {
	request, err := http.NewRequest("POST", url, strings.NewReader(kept.Body))
	if err != nil {
		return 0, nil, nil, err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", kept.Key)
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body) // a body that breaks off is no response
	return response.StatusCode, response.Header, body, err
}

func main() {
	url, token := os.Args[1], os.Getenv("TOKEN")
	kept, err := keep(os.Args[2], os.Args[3], token)
	if err != nil {
		log.Fatal(err)
	}
	response, err := pay(url, kept, token)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(response)
}
