//! What the tests of the layer have in common.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{
    Clock, Idempotency, MemoryCapacity, MemoryStore, OnUnknown, OperationId, Policy, Secret, Store,
    StoreError, Timestamp,
};
use hapax_http::Body;
use hapax_http::server::{
    IdempotencyLayer, MissingScope, Observer, RequestEvent, RouteOptions, RoutePolicy, ScopeSource,
};
use http::header::{AUTHORIZATION, HeaderMap};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt};
use tracing_subscriber::fmt::MakeWriter;

pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// An engine over a store that can fail, and all that is observed.
pub(crate) struct World {
    pub(crate) engine: Idempotency,
    pub(crate) store: Arc<Moody>,
    pub(crate) heard: Arc<Heard>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::on(|store| store)
    }

    pub(crate) fn with_secret() -> Self {
        Self::on(|store| store.secret(Secret::new([7; 32])))
    }

    fn on(change: impl FnOnce(MemoryStore) -> MemoryStore) -> Self {
        let clock = Arc::new(PausedClock(Instant::now()));
        let store = Arc::new(Moody {
            inner: change(MemoryStore::new(clock, MemoryCapacity::default())),
            mood: watch::Sender::new(Mood::Well),
        });
        let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
        Self { engine, store, heard: Arc::default() }
    }

    /// Another process on the same store.
    pub(crate) fn other_process(&self) -> Self {
        let store = Arc::clone(&self.store);
        let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>).build().unwrap();
        Self { engine, store, heard: Arc::default() }
    }

    pub(crate) fn layer(&self, options: RouteOptions) -> IdempotencyLayer {
        let scope = ScopeSource::headers([AUTHORIZATION], MissingScope::Reject);
        let policy = RoutePolicy::new(scope, options).unwrap();
        let heard = Arc::clone(&self.heard) as Arc<dyn Observer>;
        IdempotencyLayer::new(self.engine.clone(), policy).observer(heard)
    }

    pub(crate) fn app<H, A>(&self, options: RouteOptions, handler: H) -> impl App + use<H, A>
    where
        H: Fn(Request<Body>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        app_of(&self.layer(options), handler)
    }

    pub(crate) fn events(&self) -> Vec<RequestEvent> {
        std::mem::take(&mut self.heard.0.lock().unwrap())
    }
}

pub(crate) fn app_of<H, A>(layer: &IdempotencyLayer, handler: H) -> impl App + use<H, A>
where
    H: Fn(Request<Body>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let handler: Arc<HandlerFn> = Arc::new(move |request| Box::pin(handler(request)));
    layer.layer(Handler(handler))
}

type HandlerFn = dyn Fn(Request<Body>) -> BoxFuture<'static, Response<Body>> + Send + Sync;

/// One type for all handlers, so that the layer is compiled once.
#[derive(Clone)]
struct Handler(Arc<HandlerFn>);

impl Service<Request<Body>> for Handler {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = (self.0)(request);
        Box::pin(async move { Ok(answer.await) })
    }
}

/// A service behind the layer.
pub(crate) trait App:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + Sync
    + 'static
{
}

impl<S> App for S where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static
{
}

/// A whole answer.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn replayed(&self) -> Option<&str> {
        self.header("idempotency-replayed")
    }

    /// The code of a problem; empty for any other answer.
    pub(crate) fn code(&self) -> String {
        if self.header("content-type") != Some("application/problem+json") {
            return String::new();
        }
        let problem = self.problem();
        assert_eq!(problem["status"], self.status.as_u16());
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.starts_with(char::is_uppercase) && detail.ends_with('.'), "{detail:?}");
        problem["code"].as_str().unwrap().to_owned()
    }

    pub(crate) fn problem(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

pub(crate) async fn send(app: &impl App, request: Request<Body>) -> Answer {
    read(app.clone().oneshot(request).await.unwrap()).await
}

pub(crate) async fn read(response: Response<Body>) -> Answer {
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned();
    Answer { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
}

/// Sends a request on a task of its own.
pub(crate) fn begin(app: &impl App, request: Request<Body>) -> tokio::task::JoinHandle<Answer> {
    let app = app.clone();
    tokio::spawn(async move { send(&app, request).await })
}

/// A payment of alice's.
pub(crate) fn pay(key: &str, body: &str) -> Request<Body> {
    Request::post("/payments")
        .header("authorization", "Bearer alice")
        .header("idempotency-key", key)
        .header("content-type", "application/json")
        .body(Body::from(Bytes::copy_from_slice(body.as_bytes())))
        .unwrap()
}

pub(crate) fn respond(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// Counts runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Runs(Arc<AtomicUsize>);

impl Runs {
    /// Counts one, and says which it is, from 1.
    pub(crate) fn next(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Resolves when there have been `count` runs.
    pub(crate) async fn reach(&self, count: usize) {
        while self.count() < count {
            tokio::task::yield_now().await;
        }
    }
}

/// Something that handlers wait for.
#[derive(Clone, Debug)]
pub(crate) struct Signal(Arc<watch::Sender<bool>>);

impl Signal {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    pub(crate) fn give(&self) {
        self.0.send_replace(true);
    }

    pub(crate) async fn wait(&self) {
        let _ = self.0.subscribe().wait_for(|given| *given).await;
    }
}

/// A body of these frames, counted as they are read.
#[derive(Debug)]
pub(crate) struct Frames {
    frames: VecDeque<io::Result<Frame<Bytes>>>,
    pub(crate) read: Runs,
}

impl Frames {
    pub(crate) fn new(frames: impl IntoIterator<Item = io::Result<Frame<Bytes>>>) -> Self {
        Self { frames: frames.into_iter().collect(), read: Runs::default() }
    }

    /// `count` frames of `size` bytes.
    pub(crate) fn of(count: usize, size: usize) -> Self {
        Self::new((0..count).map(|_| Ok(Frame::data(Bytes::from(vec![b'x'; size])))))
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.read.next();
        Poll::Ready(self.frames.pop_front())
    }
}

pub(crate) fn with_policy(change: impl FnOnce(&mut Policy)) -> RouteOptions {
    let mut options = RouteOptions::default();
    change(&mut options.policy);
    options
}

/// Options under which what is unknown executes again.
pub(crate) fn reexecute() -> RouteOptions {
    with_policy(|policy| policy.terms.on_unknown = OnUnknown::Reexecute)
}

#[derive(Debug, Default)]
pub(crate) struct Heard(Mutex<Vec<RequestEvent>>);

impl Observer for Heard {
    fn observe(&self, _: &str, event: RequestEvent) {
        self.0.lock().unwrap().push(event);
    }
}

/// The store's clock goes with tokio's, so that paused time moves leases too.
#[derive(Debug)]
struct PausedClock(Instant);

impl Clock for PausedClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1 << 40).after(self.0.elapsed())
    }
}

/// What a store does with what it is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mood {
    /// It works.
    Well,
    /// It refuses.
    Down,
    /// It writes and answers when it is well again.
    Slow,
    /// It can be read, but refuses writes.
    ReadOnly,
    /// It answers that what it holds is damaged.
    Damaged,
}

/// The memory store, with moods.
#[derive(Debug)]
pub(crate) struct Moody {
    inner: MemoryStore,
    mood: watch::Sender<Mood>,
}

impl Moody {
    pub(crate) fn is(&self, mood: Mood) {
        self.mood.send_replace(mood);
    }

    pub(crate) fn len(&self) -> usize {
        self.inner.len()
    }

    async fn ready(&self) -> Result<(), StoreError> {
        let mood = *self.mood.subscribe().wait_for(|mood| *mood != Mood::Slow).await.unwrap();
        match mood {
            Mood::Down => Err(StoreError::unavailable("down")),
            Mood::Damaged => Err(StoreError::corrupt("damaged")),
            Mood::Well | Mood::Slow | Mood::ReadOnly => Ok(()),
        }
    }
}

impl Store for Moody {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            self.ready().await?;
            if *self.mood.borrow() == Mood::ReadOnly {
                return Err(StoreError::unavailable("read-only"));
            }
            self.inner.swap(swap).await
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            self.ready().await?;
            self.inner.load(key).await
        })
    }

    fn reap(&self, limit: std::num::NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.inner.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.inner.capabilities()
    }
}

/// The log of a test.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Log {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}
