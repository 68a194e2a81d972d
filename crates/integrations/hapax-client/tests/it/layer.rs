//! The client as a layer of tower.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use hapax_client::{
    Client, Operation, OperationLayer, OperationServiceError, RequestError, SendError, Server,
};
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, client, open};

type Content = UnsyncBoxBody<Bytes, std::io::Error>;

/// An inner service that counts its requests, and fails at `/fail`.
fn inner(
    count: &Arc<AtomicU32>,
) -> impl Service<
    Request<Content>,
    Response = Response<Full<Bytes>>,
    Error = std::io::Error,
    Future: Send,
> + Clone
+ use<> {
    let count = Arc::clone(count);
    service_fn(move |request: Request<Content>| {
        count.fetch_add(1, Ordering::Relaxed);
        let end = match request.uri().path() {
            "/fail" => Err(std::io::Error::other("inner")),
            _ => Ok(Response::new(Full::from("inner"))),
        };
        std::future::ready(end)
    })
}

fn content(text: &'static str) -> Content {
    Full::from(text).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn request(bank: &Bank, path: &str, body: Content) -> Request<Content> {
    Request::post(bank.url(path)).body(body).unwrap()
}

fn operation(name: &str, bank: &Bank, body: Content) -> Request<Content> {
    let mut request = request(bank, "/payments", body);
    request.extensions_mut().insert(Operation::new(name));
    request
}

async fn rejected(client: &Client, request: Request<Content>) -> SendError {
    let count = Arc::default();
    let service = OperationLayer::new(client.clone()).layer(inner(&count));
    let end = service.oneshot(request).await.map(|response| response.status());
    assert_eq!(count.load(Ordering::Relaxed), 0);
    match end {
        Err(OperationServiceError::Operation(error)) => error,
        end => panic!("{end:?}"),
    }
}

/// A body that declares a length, and has frames of its own choice.
struct Declared(SizeHint, Content);

impl Body for Declared {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        std::pin::Pin::new(&mut self.1).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        self.0
    }
}

fn declared<const N: usize>(
    length: u64,
    frames: [Result<Frame<Bytes>, std::io::Error>; N],
) -> Content {
    let body = StreamBody::new(stream::iter(frames)).boxed_unsync();
    Declared(SizeHint::with_exact(length), body).boxed_unsync()
}

#[tokio::test]
async fn a_request_with_an_operation_is_sent_once_and_others_reach_the_inner_service() {
    let bank = Bank::start().await;
    let (client, count) = (client(&bank, Server::hapax()).await, Arc::default());
    let mut service = OperationLayer::new(client.clone()).layer(inner(&count));
    for _ in 0..3 {
        let request = operation("invoice/17", &bank, content("1999 cents"));
        let response = service.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!(response.status(), 201);
        assert_eq!(response.body().size_hint().exact(), Some(7));
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "paid 10");
    }
    assert_eq!((bank.arrived().len(), count.load(Ordering::Relaxed)), (1, 0));
    let response = service.ready().await.unwrap().call(request(&bank, "/", content("x"))).await;
    let body = response.unwrap().into_body().collect().await.unwrap().to_bytes();
    assert_eq!((&*body, bank.arrived().len()), (&b"inner"[..], 1));
    let end = service.oneshot(request(&bank, "/fail", content("x"))).await;
    let Err(OperationServiceError::Inner(error)) = end.map(|it| it.status()) else { panic!() };
    assert_eq!((error.to_string(), count.load(Ordering::Relaxed)), ("inner".to_owned(), 2));
}

#[tokio::test]
async fn a_strict_client_rejects_a_request_of_a_stack_without_an_operation() {
    let bank = Bank::start().await;
    let client = open(&bank, Server::hapax()).strict().build().await.unwrap();
    let end = rejected(&client, request(&bank, "/", content("x"))).await;
    assert!(matches!(end, SendError::Request(RequestError::NoName)), "{end:?}");
}

#[tokio::test]
async fn an_operation_keeps_nothing_that_the_inner_service_has_reserved_for_it() {
    let bank = Bank::start().await;
    let strict = open(&bank, Server::hapax()).strict().build().await.unwrap();
    let client = client(&bank, Server::hapax()).await;
    for (client, has_operation) in [(client, true), (strict, false)] {
        let inner = tower::limit::ConcurrencyLimit::new(inner(&Arc::default()), 1);
        let mut one = OperationLayer::new(client).layer(inner);
        let mut other = one.clone();
        let request = match has_operation {
            true => operation("n", &bank, content("x")),
            false => request(&bank, "/", content("x")),
        };
        let end = one.ready().await.unwrap().call(request).await;
        assert_eq!(end.is_ok(), has_operation);
        let ready =
            tokio::time::timeout(LONG, ServiceExt::<Request<Content>>::ready(&mut other)).await;
        assert!(ready.expect("it waits for the other clone").is_ok());
        drop(one);
    }
}

#[tokio::test]
async fn a_body_that_cannot_be_sent_again_is_rejected_before_anything_is_stored() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let data = |text: &'static str| Ok(Frame::data(Bytes::from(text)));
    let stream = StreamBody::new(stream::iter([data("x")])).boxed_unsync();
    let trailers = declared(1, [data("x"), Ok(Frame::trailers(http::HeaderMap::new()))]);
    for body in [stream, trailers] {
        let end = rejected(&client, operation("n", &bank, body)).await;
        assert!(matches!(end, SendError::Request(RequestError::Stream)), "{end:?}");
    }
    let broken = declared(2, [data("x"), Err(std::io::Error::other("cable"))]);
    let (short, long) = (declared(2, [data("x")]), declared(1, [data("x"), data("y")]));
    for (body, text) in [(broken, "cable"), (short, "expected 2"), (long, "expected 1")] {
        let end = rejected(&client, operation("n", &bank, body)).await;
        assert!(matches!(end, SendError::Request(RequestError::BrokenBody(_))), "{end:?}");
        assert!(end.to_string().contains(text), "{end}, expected {text}");
    }
    // It is not read to be rejected.
    let end = rejected(&client, operation("n", &bank, declared(1 << 40, []))).await;
    assert!(matches!(end, SendError::Request(RequestError::Body { .. })), "{end:?}");
    let relative = Request::post("/").extension(Operation::new("n")).body(content("x")).unwrap();
    let end = rejected(&client, relative).await;
    assert!(matches!(end, SendError::Request(RequestError::Url)), "{end:?}");
    assert_eq!(bank.connections(), 0);
    assert!(client.pending().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_redirect_is_the_response_in_a_stack() {
    let (bank, other) = (Bank::start().await, Bank::start().await);
    let (client, count) = (client(&bank, Server::hapax()).await, Arc::default());
    let service = OperationLayer::new(client).layer(inner(&count));
    for status in [301, 303, 307] {
        let location = format!("location: {}", other.url("/"));
        bank.act([Act::Execute(answer(status, &[&location], ""))]);
        let request = operation(&format!("n/{status}"), &bank, content("x"));
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status().as_u16(), status);
    }
    assert_eq!((bank.arrived().len(), other.connections()), (3, 0));
}

#[tokio::test]
async fn a_dropped_response_of_a_stack_does_not_stop_its_operation() {
    let bank = Bank::start().await;
    bank.act([Act::Silent]);
    let client =
        open(&bank, Server::hapax()).idle_timeout(Duration::from_secs(1)).build().await.unwrap();
    let service = OperationLayer::new(client).layer(inner(&Arc::default()));
    let send = || service.clone().oneshot(operation("n", &bank, content("x")));
    let sent = tokio::spawn(send());
    bank.wait_for(1).await;
    sent.abort();
    assert!(sent.await.unwrap_err().is_cancelled());
    assert_eq!(send().await.unwrap().status(), 201);
    assert_eq!(bank.effects(), [1]);
}
