//! gRPC, unary, from a client to a server through the gateway.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{Buf, BufMut};
use hapax_core::{Inspect, MemoryCapacity, MemoryStore, OnUnknown, SystemClock};
use hapax_gateway::{Config, Gateway, OpenStore, UpstreamProtocol};
use hapax_http::server::KeyRule;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::admin::Away;
use crate::world::config;

/// Messages that are text.
#[derive(Clone, Copy, Default)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, text: String, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        Ok(Some(String::from_utf8(bytes.to_vec()).unwrap()))
    }
}

/// `shop.Charge/Make`: fails with the status that the message names, or numbers its answers; `wait`
/// waits until it is let go.
#[derive(Clone, Default)]
pub(crate) struct Charge {
    runs: Arc<AtomicUsize>,
    begun: Arc<Notify>,
    pub(crate) go: Arc<Notify>,
}

impl tower_service::Service<Request<String>> for Charge {
    type Response = Response<String>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<String>, Status>> + Send>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Status>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let run = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
        let this = self.clone();
        Box::pin(async move {
            assert!(request.metadata().contains_key("idempotency-fence"));
            this.begun.notify_one();
            let text = request.into_inner();
            if text == "wait" {
                this.go.notified().await;
            }
            if let Ok(code) = text.parse::<i32>() {
                return Err(Status::new(Code::from_i32(code), format!("failed by {run}")));
            }
            let mut response = Response::new(format!("run {run}"));
            response.metadata_mut().insert("x-kept", MetadataValue::from_static("yes"));
            Ok(response)
        })
    }
}

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) charge: Charge,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, charge) = (listener.local_addr().unwrap(), Charge::default());
        let served = charge.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let charge = served.clone();
                let service = service_fn(move |request| {
                    let charge = charge.clone();
                    async move {
                        let mut grpc = tonic::server::Grpc::new(Text);
                        Ok::<_, std::convert::Infallible>(grpc.unary(charge, request).await)
                    }
                });
                let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, charge, task }
    }

    pub(crate) fn config(&self) -> Config {
        let mut config = config(format!("http://{}", self.address).parse().unwrap());
        config.transport.upstream_protocol = UpstreamProtocol::Http2;
        config
    }

    pub(crate) fn runs(&self) -> usize {
        self.charge.runs.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Client(Channel);

impl Client {
    async fn connect(address: SocketAddr) -> Self {
        Self(Endpoint::from_str(&format!("http://{address}")).unwrap().connect().await.unwrap())
    }

    async fn make(&self, key: Option<&str>, text: &str) -> Result<Response<String>, Status> {
        let mut request = Request::new(text.to_owned());
        if let Some(key) = key {
            request.metadata_mut().insert("idempotency-key", key.parse().unwrap());
        }
        let mut grpc = Grpc::new(self.0.clone());
        grpc.ready().await.unwrap();
        let path = http::uri::PathAndQuery::from_static("/shop.Charge/Make");
        grpc.unary(request, path, Text).await
    }

    async fn fails(&self, key: Option<&str>, text: &str) -> (Code, String) {
        let status = self.make(key, text).await.unwrap_err();
        (status.code(), status.message().to_owned())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_16_a_grpc_replay_has_the_first_response_and_its_status() {
    let server = Server::start().await;
    let mut config = server.config();
    config.policy.on_unknown = OnUnknown::Reexecute;
    let gateway = Gateway::start(config).await.unwrap();
    let client = Client::connect(gateway.local_addr()).await;
    for replayed in ["false", "true", "true"] {
        let answer = client.make(Some("k"), "pay").await.unwrap();
        assert_eq!(answer.get_ref(), "run 1");
        assert_eq!(answer.metadata().get("idempotency-replayed").unwrap(), replayed);
        assert_eq!(answer.metadata().get("x-kept").unwrap(), "yes");
    }
    // A final failure, which comes as trailers only, is replayed as well.
    for _ in 0..2 {
        let failed = client.fails(Some("final"), "9").await;
        assert_eq!(failed, (Code::FailedPrecondition, "failed by 2".into()));
    }
    // A retryable one is not kept, and neither is an unknown one.
    for (key, code) in [("retryable", Code::Unavailable), ("unknown", Code::Internal)] {
        let text = (code as i32).to_string();
        let first = client.fails(Some(key), &text).await;
        let again = client.fails(Some(key), &text).await;
        assert_eq!((first.0, again.0), (code, code));
        assert_ne!(first.1, again.1);
    }
    assert_eq!(server.runs(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_16_rejections_are_grpc_statuses() {
    let server = Server::start().await;
    let mut config = server.config();
    config.policy.key = KeyRule::Required;
    config.policy.max_request_body = 1000;
    let gateway = Gateway::start(config).await.unwrap();
    let client = Client::connect(gateway.local_addr()).await;
    client.make(Some("k"), "pay").await.unwrap();
    let reused = client.fails(Some("k"), "pay more").await;
    assert_eq!(reused.0, Code::FailedPrecondition);
    assert!(reused.1.starts_with("key-reused"), "{reused:?}");
    for (key, word) in
        [(None, "missing-key"), (Some("a, b"), "invalid-key"), (Some("\""), "invalid-key")]
    {
        let (code, message) = client.fails(key, "pay").await;
        assert_eq!(code, Code::InvalidArgument, "{message}");
        assert!(message.starts_with(word), "{message}");
    }
    let large = client.fails(Some("large"), &"x".repeat(2000)).await;
    assert_eq!(large.0, Code::ResourceExhausted, "{large:?}");
    assert_eq!(server.runs(), 1);

    let waiting = Client(client.0.clone());
    let first = tokio::spawn(async move { waiting.make(Some("slow"), "wait").await });
    server.charge.begun.notified().await;
    // The first one's permit may have been kept from before.
    crate::world::until("it runs", || server.runs() == 2).await;
    let (code, message) = client.fails(Some("slow"), "wait").await;
    assert_eq!(code, Code::Aborted, "{message}");
    assert!(message.starts_with("in-flight"), "{message}");
    server.charge.go.notify_one();
    assert_eq!(first.await.unwrap().unwrap().get_ref(), "run 2");
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_16_an_unavailable_store_is_grpc_status_unavailable() {
    let server = Server::start().await;
    let store = MemoryStore::new(Arc::new(SystemClock), MemoryCapacity::default());
    let store = Arc::new(Away { store, away: AtomicBool::new(true) });
    let opened = OpenStore::new(Arc::clone(&store) as Arc<dyn Inspect>, None);
    let gateway = Gateway::start_on(server.config(), opened).await.unwrap();
    let client = Client::connect(gateway.local_addr()).await;
    let (code, message) = client.fails(Some("k"), "pay").await;
    assert_eq!(code, Code::Unavailable);
    assert!(message.starts_with("store-unavailable"), "{message}");
    assert_eq!(server.runs(), 0);
    store.away.store(false, Ordering::SeqCst);
    crate::world::until("the register is read", || !gateway.engine().quarantines().pauses()).await;
    assert_eq!(client.make(Some("k"), "pay").await.unwrap().get_ref(), "run 1");

    // Nobody listens there.
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let mut config = config(format!("http://{gone}").parse().unwrap());
    config.transport.upstream_protocol = UpstreamProtocol::Http2;
    let gateway = Gateway::start(config).await.unwrap();
    let client = Client::connect(gateway.local_addr()).await;
    let (code, message) = client.fails(Some("k"), "pay").await;
    assert_eq!(code, Code::Unavailable);
    assert!(message.starts_with("upstream-unreachable"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wire_16_an_unknown_outcome_is_grpc_status_failed_precondition() {
    let server = Server::start().await;
    let mut config = server.config();
    config.policy.upstream_timeout = Duration::from_millis(300);
    config.policy.on_unknown = OnUnknown::Block;
    let gateway = Gateway::start(config).await.unwrap();
    let client = Client::connect(gateway.local_addr()).await;
    let (code, message) = client.fails(Some("k"), "wait").await;
    assert_eq!(code, Code::DeadlineExceeded);
    assert!(message.starts_with("upstream-timeout"), "{message}");
    let (code, message) = client.fails(Some("k"), "wait").await;
    assert_eq!(code, Code::FailedPrecondition);
    assert!(message.starts_with("outcome-unknown"), "{message}");
    assert_eq!(server.runs(), 1);
}
