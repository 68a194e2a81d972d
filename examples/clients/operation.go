package main

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	mrand "math/rand"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

const retention = 24 * time.Hour // for which the server keeps a key

type operation struct {
	Key    string `json:"key"`
	Since  int64  `json:"since"` // in milliseconds since 1970
	Caller string `json:"caller"`
	Body   string `json:"body"`
}

// keep returns what the file has: the key and the body of the first run. The file is complete and on the disk before
// the first try, and never replaced. In a service it is a row of the database, committed before the first try.
func keep(path, body, token string) (kept operation, err error) {
	random := make([]byte, 32)
	if _, err = rand.Read(random); err != nil {
		return kept, err
	}
	key, caller := hex.EncodeToString(random[:16]), sha256.Sum256([]byte(token))
	made := operation{key, time.Now().UnixMilli(), hex.EncodeToString(caller[:]), body}
	draft := path + "." + hex.EncodeToString(random[16:])
	if err = write(draft, made); err != nil {
		return kept, err
	}
	err = os.Link(draft, path)
	if err != nil && !errors.Is(err, fs.ErrExist) { // otherwise an earlier run kept it
		return kept, err
	}
	if err = os.Remove(draft); err != nil {
		return kept, err
	}
	if err = sync(filepath.Dir(path)); err != nil {
		return kept, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return kept, err
	}
	if err = json.Unmarshal(text, &kept); err != nil {
		return kept, err
	}
	if kept.Caller != made.Caller {
		return kept, fmt.Errorf("%s: the token has changed: look the operation up at the server", path)
	}
	if time.Since(time.UnixMilli(kept.Since)) > retention*9/10 {
		return kept, fmt.Errorf("%s: too old: look the operation up at the server", path)
	}
	return kept, nil
}

func write(path string, made operation) error {
	text, err := json.Marshal(made)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return err
	}
	return sync(path)
}

func sync(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	return file.Sync()
}

// again returns whether another try with this key and body may get another response.
func again(status int, header http.Header, code string) bool {
	if header.Get("Idempotency-Replayed") == "true" || header.Get("Idempotent-Replayed") == "true" {
		return false
	}
	switch status {
	case 408, 425, 429, 500, 502, 503, 504:
		return true
	case 409:
		unknown := code == "outcome-unknown" && header.Get("Retry-After") != ""
		return unknown || code == "in-flight" || code == "superseded" || code == "idempotency_key_in_use"
	}
	return false
}

// code returns the code of a failure: of a problem document of Hapax, or of an error of Stripe.
func code(body []byte) string {
	var failure struct {
		Code  string
		Error struct{ Code string }
	}
	_ = json.Unmarshal(body, &failure) // any other body has no code
	if failure.Error.Code != "" {
		return failure.Error.Code
	}
	return failure.Code
}

// delay returns how long to wait before the next try: the time in Retry-After, seconds or a date, but at least the
// backoff, and a minute at most.
func delay(tries int, retryAfter string) time.Duration {
	jitter := 0.5 + mrand.New(mrand.NewSource(time.Now().UnixNano())).Float64()
	wait := time.Duration(float64(250*time.Millisecond<<tries) * jitter)
	if seconds, err := strconv.Atoi(retryAfter); err == nil && seconds <= 60 {
		wait = max(wait, time.Duration(seconds)*time.Second)
	} else if err == nil {
		wait = time.Minute
	} else if date, err := http.ParseTime(retryAfter); err == nil {
		wait = max(wait, time.Until(date))
	}
	return min(wait, time.Minute)
}

func max(a, b time.Duration) time.Duration {
	if a > b {
		return a
	}
	return b
}

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}
