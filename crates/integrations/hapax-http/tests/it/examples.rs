//! The examples, as they are, run.

use std::net::SocketAddr;

use hapax_http::Body;
use hapax_testkit::http::{Protocol, TestClient, TestResponse};
use http::{HeaderName, Request};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tonic::transport::server::TcpIncoming;

#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/payments.rs"]
mod in_axum;
#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/hyper.rs"]
mod in_hyper;
#[allow(dead_code, reason = "its `main` is for people")]
#[path = "../../examples/tonic/main.rs"]
pub(crate) mod in_tonic;

async fn post(
    address: SocketAddr,
    path: &str,
    key: Option<&str>,
    body: &'static str,
) -> TestResponse {
    let mut request = Request::post(path).header("authorization", "Bearer me");
    if let Some(key) = key {
        request = request.header(HeaderName::from_static("idempotency-key"), key);
    }
    let client = TestClient { address, protocol: Protocol::Http1 };
    client.send(request.body(Body::from(bytes::Bytes::from(body))).unwrap()).await
}

#[tokio::test]
async fn axum() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (end, ended) = oneshot::channel::<()>();
    let until = async move { drop(ended.await) };
    let server = tokio::spawn(in_axum::serve(listener, in_axum::layer().unwrap(), until));
    let pay = |key, body| post(address, "/payments", key, body);
    let first = pay(Some("p-1"), "100").await;
    assert!(first.text().starts_with("charged 100 under "), "{first:?}");
    pay(Some("p-1"), "100").await.is_replay(201, first.text());
    pay(None, "100").await.is_rejected(400, "missing-key");
    // The handler said that nothing happened: the same key executes again, under another fence.
    let busy = pay(Some("p-2"), "0").await;
    let again = pay(Some("p-2"), "0").await;
    assert_eq!(again.header("idempotency-replayed"), "false");
    assert_ne!(again.text(), busy.text());
    // Somebody who never says the rest does not hold up the end.
    let mut half = TcpStream::connect(address).await.unwrap();
    half.write_all(b"POST /payments HTTP/1.1\r\n").await.unwrap();
    end.send(()).unwrap();
    tokio::time::timeout(hapax_testkit::http::TIMEOUT, server).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn hyper() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(in_hyper::serve(listener, in_hyper::layer().unwrap()));
    post(address, "/", Some("p-1"), "100").await.is_first(200, "charged 100\n");
    post(address, "/", Some("p-1"), "100").await.is_replay(200, "charged 100\n");
    post(address, "/", Some("p-1"), "999").await.is_rejected(422, "key-reused");
    server.abort();
}

#[tokio::test]
async fn tonic() {
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = tokio::spawn(in_tonic::serve(incoming, in_tonic::layer().unwrap()));
    let heard = in_tonic::ask(address).await.unwrap();
    let [first, replay, reuse] = &heard[..] else { panic!("{heard:?}") };
    assert!(first.starts_with("o-1 under "), "{heard:?}");
    assert_eq!(first, replay);
    assert!(reuse.starts_with("key-reused: "), "{heard:?}");
    server.abort();
}
