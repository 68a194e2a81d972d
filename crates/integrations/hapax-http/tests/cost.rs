//! The cost of a request with a key, counted without a clock: allocations, tasks, round trips to the
//! store, and system calls. `cost.txt` has the numbers, which may only fall.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use hapax_core::store::{
    BoxFuture, Capabilities, Reaped, Snapshot, Store, StoreError, Swap, Swapped,
};
use hapax_core::{MemoryStore, OperationId};
use hapax_http::Body;
use hapax_http::server::IdempotencyLayer;
use http::{HeaderValue, Request, Response};
use tower_layer::Layer;
use tower_service::Service;

/// Number of requests, of which the median counts: collections grow now and then.
const REQUESTS: usize = 101;

/// A store in memory whose round trips are counted.
#[derive(Debug, Default)]
struct Counted {
    store: MemoryStore,
    trips: AtomicU64,
}

impl Store for Counted {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.trips.fetch_add(1, Ordering::Relaxed);
        self.store.swap(swap)
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.trips.fetch_add(1, Ordering::Relaxed);
        self.store.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.store.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        self.store.capabilities()
    }
}

#[derive(Clone)]
struct Handler;

impl Service<Request<Body>> for Handler {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        std::future::ready(Ok(Response::new(Body::from(bytes::Bytes::from_static(b"{}")))))
    }
}

fn request(key: usize) -> Request<Body> {
    let body = format!(r#"{{"amount":100,"note":"{}"}}"#, "n".repeat(175));
    let key = HeaderValue::try_from(format!("8e03978e-40d5-43e8-bc93-{key:012}")).unwrap();
    Request::post("/payments")
        .header("content-type", "application/json")
        .header("authorization", "Bearer me")
        .header("idempotency-key", key)
        .body(Body::from(bytes::Bytes::from(body)))
        .unwrap()
}

/// Returns the number of tasks that were spawned before: tokio numbers them.
fn tasks() -> u64 {
    tokio::spawn(async {}).id().to_string().parse().unwrap()
}

/// Executes a request in one poll: nothing waits, as it would with a task.
fn poll(
    service: &mut impl Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    request: Request<Body>,
) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(service.poll_ready(&mut context).is_ready());
    let mut response = Box::pin(service.call(request));
    assert!(response.as_mut().poll(&mut context).is_ready());
}

/// Returns allocations, tasks and round trips of the median request.
async fn cost(
    store: &Counted,
    service: &mut impl Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    keys: impl Fn(usize) -> usize,
) -> [u64; 3] {
    let mut costs: [Vec<u64>; 3] = Default::default();
    for number in 0..REQUESTS {
        // A task that never waits gets no more from tokio.
        tokio::task::yield_now().await;
        let (request, before, trips) =
            (request(keys(number)), tasks(), store.trips.load(Ordering::Relaxed));
        let counted = allocation_counter::measure(|| poll(service, request));
        let counts = [
            counted.count_total - 1,
            tasks() - before - 1,
            store.trips.load(Ordering::Relaxed) - trips,
        ];
        costs.iter_mut().zip(counts).for_each(|(costs, count)| costs.push(count));
    }
    costs.map(|mut costs| {
        costs.sort_unstable();
        costs[REQUESTS / 2]
    })
}

#[tokio::test]
async fn a_request_costs_no_more_than_before() {
    let store = Arc::new(Counted::default());
    let layer = IdempotencyLayer::builder(Arc::clone(&store)).build().unwrap();
    let mut service = layer.layer(Handler);
    // The first execution spawns the task of the renewals.
    let warm_up = service.call(request(usize::MAX / 2));
    assert_eq!(warm_up.await.unwrap().status(), 200);
    let mut found = BTreeMap::new();
    for (case, keys) in [("execution", (|number| number) as fn(usize) -> usize), ("replay", |_| 0)]
    {
        let counts = cost(&store, &mut service, keys).await;
        for (what, count) in ["allocations", "tasks", "round trips"].into_iter().zip(counts) {
            found.insert(format!("{case}: {what}"), count);
        }
    }
    let found: String = found.iter().map(|(what, count)| format!("{what} {count}\n")).collect();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cost.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(file, &found).unwrap();
    }
    let expected = std::fs::read_to_string(file).unwrap();
    assert_eq!(
        found, expected,
        "the costs in tests/cost.txt may only fall; write lower ones with UPDATE_GOLDEN=1"
    );
}

/// Runs the requests in a process of its own, whose system calls strace records.
mod strace {
    use super::*;

    /// Set for that process.
    const TRACED: &str = "HAPAX_TRACED";

    /// Files that do not exist. The process looks for them before and after the requests, so that
    /// its record shows which system calls lie between.
    const MARKS: [&str; 2] = ["/begin-of-requests", "/end-of-requests"];

    /// System calls of the allocator.
    const MEMORY: [&str; 6] = ["brk", "mmap", "munmap", "mprotect", "mremap", "madvise"];

    #[test]
    fn a_request_makes_no_system_call() {
        if std::env::var_os(TRACED).is_some() {
            return execute();
        }
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("record");
        let name = "strace::a_request_makes_no_system_call";
        let output = std::process::Command::new("strace")
            .args(["-f", "-qq", "-o"])
            .arg(&record)
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(TRACED, "1")
            .output()
            .expect("strace is installed, by `cargo xtask setup`");
        assert!(output.status.success(), "{output:?}");
        let record = std::fs::read_to_string(record).unwrap();
        let at = |mark: &str| record.lines().position(|line| line.contains(mark)).unwrap();
        let [begin, end] = MARKS.map(at);
        let lines: Vec<&str> = record.lines().collect();
        // Each line begins with the number of its thread.
        let thread = lines[begin].split(' ').next().unwrap();
        let call = |line: &&str| Some(line.strip_prefix(thread)?.trim_start().to_owned());
        let calls: Vec<String> = lines[begin + 1..end].iter().filter_map(call).collect();
        let is_memory = |call: &String| MEMORY.iter().any(|name| call.starts_with(name));
        // Randomness is read in blocks.
        let (random, other): (Vec<_>, Vec<_>) = calls
            .iter()
            .filter(|call| !is_memory(call))
            .partition(|call| call.starts_with("getrandom"));
        assert!(other.is_empty(), "{REQUESTS} requests: {other:#?}");
        assert!(random.len() < REQUESTS / 20, "{REQUESTS} requests: {random:#?}");
    }

    fn execute() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let service = runtime.block_on(async {
            let layer = IdempotencyLayer::builder(MemoryStore::default()).build().unwrap();
            let mut service = layer.layer(Handler);
            assert_eq!(service.call(request(usize::MAX / 2)).await.unwrap().status(), 200);
            service
        });
        let [begin, end] = MARKS;
        assert!(!std::path::Path::new(begin).exists());
        for number in 0..REQUESTS {
            poll(&mut service.clone(), request(number));
        }
        assert!(!std::path::Path::new(end).exists());
    }
}
