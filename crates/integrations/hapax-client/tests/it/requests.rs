//! Requests of reqwest as operations.

use std::time::Duration;

use bytes::Bytes;
use hapax_client::{Operation, RequestError, SendError, Server};
use http_body_util::Full;
use reqwest::{Body, Method};

use crate::bank::{Act, Bank, answer};
use crate::world::{client, open};

fn post(bank: &Bank, path: &str) -> reqwest::RequestBuilder {
    reqwest::Client::new().post(bank.url(path))
}

#[tokio::test]
async fn a_request_of_reqwest_is_sent_once_and_its_response_is_stored() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let send = async || {
        let request = post(&bank, "/payments?a=b").header("x-note", "one").body("1999 cents");
        client.execute("invoice/17", request.build().unwrap()).await.unwrap()
    };
    for _ in 0..2 {
        let response = send().await;
        assert_eq!(
            (response.status().as_u16(), response.url().as_str()),
            (201, &*bank.url("/payments?a=b"))
        );
        assert_eq!(response.headers()["content-length"], "7");
        assert_eq!(response.text().await.unwrap(), "paid 10");
    }
    let arrived = bank.arrived();
    assert_eq!(arrived.len(), 1, "the kept answer needs no request");
    assert_eq!(
        (&*arrived[0].line, &*arrived[0].body),
        ("POST /payments?a=b HTTP/1.1", &b"1999 cents"[..])
    );
    assert_eq!(arrived[0].header("x-note"), Some("one"));
    let key = client.key("invoice/17").unwrap();
    assert_eq!(arrived[0].header("idempotency-key"), Some(&*format!("\"{}\"", key.as_str())));
    // The client's own request is the same one.
    let own = client.post(bank.url("/payments?a=b")).operation("invoice/17").body("1999 cents");
    assert_eq!(own.header("x-note", "one").send().await.unwrap().response.status, 201);
    let other = post(&bank, "/payments?a=b").body("2000 cents").build().unwrap();
    let end = client.execute("invoice/17", other).await;
    assert!(matches!(end, Err(SendError::Reused)), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn the_defaults_and_redirects_of_a_reqwest_client_do_not_apply() {
    let (bank, other) = (Bank::start().await, Bank::start().await);
    let client = client(&bank, Server::hapax()).await;
    let headers = [("authorization", "Bearer hush"), ("x-default", "hush")];
    let headers = headers.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
    let theirs = reqwest::Client::builder().default_headers(headers.into_iter().collect());
    let theirs = theirs.build().unwrap();
    for status in [301, 302, 303, 307, 308] {
        let location = format!("location: {}", other.url("/elsewhere"));
        bank.act([Act::Execute(answer(status, &[&location], "moved"))]);
        let request = theirs.post(bank.url("/")).body("x").build().unwrap();
        let response = client.execute(format!("n/{status}"), request).await.unwrap();
        assert_eq!(response.status().as_u16(), status);
        assert_eq!(response.headers()["location"], *other.url("/elsewhere"));
    }
    assert_eq!((bank.arrived().len(), other.connections()), (5, 0));
    let names: Vec<_> = bank.arrived()[0].headers.keys().cloned().collect();
    assert_eq!(names, ["content-length", "host", "idempotency-key"]);
}

#[tokio::test]
async fn a_stream_or_a_secret_of_reqwest_is_rejected_before_anything_is_stored() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    // It has a length, but no bytes that reqwest could send twice.
    let stream = Body::wrap(Full::new(Bytes::from("x")));
    let stream = client.execute("n", post(&bank, "/").body(stream).build().unwrap()).await;
    assert!(matches!(stream, Err(SendError::Request(RequestError::Stream))), "{stream:?}");
    let secret = post(&bank, "/").bearer_auth("t").build().unwrap();
    let secret = client.execute("n", secret).await;
    assert!(
        matches!(secret, Err(SendError::Request(RequestError::SecretHeader { .. }))),
        "{secret:?}"
    );
    let undeclared = reqwest::Client::new().request(Method::PUT, "http://127.0.0.1:1/");
    let end = client.execute("n", undeclared.build().unwrap()).await;
    assert!(matches!(end, Err(SendError::Request(RequestError::Undeclared { .. }))), "{end:?}");
    assert_eq!(bank.connections(), 0);
    assert!(client.pending().await.unwrap().is_empty());
}

#[tokio::test]
async fn the_timeout_of_a_request_is_the_time_for_which_its_caller_waits() {
    let bank = Bank::start().await;
    bank.act([Act::Silent]);
    let client =
        open(&bank, Server::hapax()).idle_timeout(Duration::from_secs(1)).build().await.unwrap();
    let request = || post(&bank, "/").timeout(Duration::from_millis(50)).build().unwrap();
    let end = client.execute("n", request()).await;
    assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    // That of the operation comes first.
    let operation = Operation::new("n").wait(Duration::from_secs(60));
    assert_eq!(client.execute(operation, request()).await.unwrap().status(), 201);
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn an_operation_of_reqwest_ends_after_its_own_time() {
    let bank = Bank::start().await;
    bank.act(std::iter::repeat_n(Act::Answer(answer(503, &[], "")), 100));
    let client = client(&bank, Server::hapax()).await;
    let operation = Operation::new("n").within(Duration::from_millis(300));
    let end = client.execute(operation, post(&bank, "/").build().unwrap()).await;
    let Err(SendError::Unknown(text)) = end else { panic!("{end:?}") };
    assert!(text.contains("a response within 300ms"), "{text}");
}
