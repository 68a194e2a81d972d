//! The client as a middleware of reqwest-middleware, among others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax_client::{Client, Operation, RequestError, SendError, Server};
use http::Extensions;
use http_body_util::Full;
use reqwest::{Body, Request, Response};
use reqwest_middleware::{
    ClientBuilder, ClientWithMiddleware, Error, Middleware, Next, RequestBuilder, Result,
};

use crate::bank::{Act, Bank, answer};
use crate::world::{client, open};

/// Sends each request three times, the last one with another header if `marks`, and counts them.
#[derive(Clone, Default)]
struct Again {
    sent: Arc<AtomicU32>,
    marks: bool,
}

#[async_trait]
impl Middleware for Again {
    async fn handle(
        &self,
        mut request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        for _ in 0..2 {
            let copy = request.try_clone().expect("a body of bytes");
            self.sent.fetch_add(1, Ordering::Relaxed);
            // An error is tried again too.
            let _ = next.clone().run(copy, extensions).await;
        }
        if self.marks {
            request.headers_mut().insert("x-try", "3".parse().unwrap());
        }
        self.sent.fetch_add(1, Ordering::Relaxed);
        next.run(request, extensions).await
    }
}

fn stack(client: &Client) -> ClientWithMiddleware {
    ClientBuilder::new(reqwest::Client::new()).with(client.clone()).build()
}

fn pay(http: &ClientWithMiddleware, bank: &Bank) -> RequestBuilder {
    http.post(bank.url("/")).body("1999 cents").with_extension(Operation::new("invoice/17"))
}

/// Returns the error of the client behind that of the stack.
fn cause(end: Result<Response>) -> SendError {
    match end {
        Err(Error::Middleware(error)) => error.downcast().unwrap(),
        end => panic!("{end:?}"),
    }
}

#[tokio::test]
async fn a_request_with_an_operation_is_sent_once_and_others_pass_untouched() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let http = stack(&client);
    for _ in 0..3 {
        assert_eq!(pay(&http, &bank).send().await.unwrap().text().await.unwrap(), "paid 10");
    }
    assert_eq!(bank.arrived().len(), 1);
    let own = || http.post(bank.url("/")).header("authorization", "Bearer mine").body("x").send();
    for _ in 0..2 {
        assert_eq!(own().await.unwrap().status(), 201);
    }
    let arrived = bank.arrived();
    assert_eq!(arrived.len(), 3);
    assert_eq!(arrived[2].header("authorization"), Some("Bearer mine"));
    assert_eq!(arrived[2].header("idempotency-key"), None);
}

#[tokio::test]
async fn a_strict_client_rejects_a_request_without_an_operation() {
    let bank = Bank::start().await;
    let client = open(&bank, Server::hapax()).strict().build().await.unwrap();
    let http = stack(&client);
    let end = cause(http.post(bank.url("/")).send().await);
    assert!(matches!(end, SendError::Request(RequestError::NoName)), "{end:?}");
    assert_eq!(bank.connections(), 0);
    assert_eq!(pay(&http, &bank).send().await.unwrap().status(), 201);
}

#[tokio::test]
async fn a_retry_above_the_client_gets_the_stored_response_of_its_operation() {
    let bank = Bank::start().await;
    bank.act([Act::Execute(answer(500, &["idempotency-replayed: true"], "no"))]);
    let client = client(&bank, Server::hapax()).await;
    let again = Again::default();
    let http = ClientBuilder::new(reqwest::Client::new()).with(again.clone());
    let http = http.with(client.clone()).build();
    let answer = pay(&http, &bank).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), again.sent.load(Ordering::Relaxed)), (500, 3));
    assert_eq!((bank.arrived().len(), bank.effects()), (1, vec![1]));
    // Another header for a try makes another request of it.
    let http = ClientBuilder::new(reqwest::Client::new());
    let http = http.with(Again { marks: true, ..again }).with(client.clone()).build();
    let end = cause(pay(&http, &bank).send().await);
    assert!(matches!(end, SendError::Reused), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn a_retry_above_the_client_continues_an_operation_that_is_pending() {
    let bank = Bank::start().await;
    bank.act([Act::Silent]);
    let client =
        open(&bank, Server::hapax()).idle_timeout(Duration::from_secs(1)).build().await.unwrap();
    let http = ClientBuilder::new(reqwest::Client::new()).with(Again::default());
    let http = http.with(client.clone()).build();
    let operation = Operation::new("n").wait(Duration::from_millis(700));
    let request = http.post(bank.url("/")).with_extension(operation);
    assert_eq!(request.send().await.unwrap().status(), 201);
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn a_middleware_below_the_client_gets_no_operation() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let below = Again::default();
    let http = ClientBuilder::new(reqwest::Client::new()).with(client.clone());
    let http = http.with(below.clone()).build();
    assert_eq!(pay(&http, &bank).send().await.unwrap().status(), 201);
    assert_eq!((below.sent.load(Ordering::Relaxed), bank.arrived().len()), (0, 1));
    http.post(bank.url("/")).send().await.unwrap();
    assert_eq!((below.sent.load(Ordering::Relaxed), bank.arrived().len()), (3, 4));
}

#[tokio::test]
async fn a_redirect_is_not_followed_and_a_stream_is_not_sent() {
    let (bank, other) = (Bank::start().await, Bank::start().await);
    let client = client(&bank, Server::hapax()).await;
    let http = stack(&client);
    for status in [301, 303, 307] {
        let location = format!("location: {}", other.url("/"));
        bank.act([Act::Execute(answer(status, &[&location], ""))]);
        let request =
            http.post(bank.url("/")).with_extension(Operation::new(format!("n/{status}")));
        assert_eq!(request.send().await.unwrap().status().as_u16(), status);
    }
    let stream = pay(&http, &bank).body(Body::wrap(Full::new(Bytes::from("x"))));
    let end = cause(stream.send().await);
    assert!(matches!(end, SendError::Request(RequestError::Stream)), "{end:?}");
    assert_eq!((bank.arrived().len(), other.connections()), (3, 0));
}
