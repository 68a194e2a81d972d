//! Cost of the store compared with the same script called directly through the same client: claims
//! and their completions, by a given number of concurrent callers.
//!
//!     cargo run --release -p hapax-redis --example throughput -- [CALLERS] [SECONDS]
//!
//! Starts its own server. Rounds alternate, so that other load on the machine affects both.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a measurement that fails may break off"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{
    Entropy, Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Outcome, Record,
    RecordState, Sealer, Store, SystemEntropy, Terms, WriteId,
};
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::servers::RedisServer;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;

const ROUNDS: usize = 5;
const OUTCOME: usize = 512;

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let callers = arguments.next().unwrap_or(64);
    let seconds = arguments.next().unwrap_or(3);
    let server = RedisServer::start().await;
    let store = Arc::new(RedisStore::connect(RedisOptions::new(server.url())).await.unwrap());
    let client = redis::Client::open(server.url()).unwrap();
    let raw = Raw::new(client.get_multiplexed_async_connection().await.unwrap()).await;
    println!("{callers} callers, requests (claim and completion) a second:");
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let span = Duration::from_secs(seconds);
        let by_script = measure(callers, span, raw.clone(), |raw, key| async move {
            raw.request(key).await;
        })
        .await;
        let by_store = measure(callers, span, Arc::clone(&store), |store, key| async move {
            request(&store, key).await;
        })
        .await;
        ratios.push(by_store / by_script);
        println!("  script {by_script:8.0}   store {by_store:8.0}   {:.2}", by_store / by_script);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median of the ratios: {:.2}", ratios[ROUNDS / 2]);
}

/// Returns the requests per second.
async fn measure<T, F>(
    callers: u64,
    span: Duration,
    on: T,
    request: impl Fn(T, OperationId) -> F + Clone + Send + 'static,
) -> f64
where
    T: Clone + Send + 'static,
    F: Future<Output = ()> + Send,
{
    let (over, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    let began = Instant::now();
    for _ in 0..callers {
        let (on, request) = (on.clone(), request.clone());
        let (over, count) = (Arc::clone(&over), Arc::clone(&count));
        tasks.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                request(on.clone(), OperationId::from_bytes(random())).await;
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    tokio::time::sleep(span).await;
    over.store(true, Ordering::Relaxed);
    tasks.join_all().await;
    count.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64()
}

async fn request(store: &RedisStore, key: OperationId) {
    let claim = claim(key);
    let complete = complete(&claim);
    for swap in [claim, complete] {
        let answer = store.swap(swap).await.unwrap();
        assert!(matches!(answer, Swapped::Stored(_)), "{answer:?}");
    }
}

/// Calls of the same script through the same client, with arguments of the same length.
#[derive(Clone)]
struct Raw {
    connection: MultiplexedConnection,
    hash: Arc<str>,
    in_flight: Arc<[u8]>,
    done: Arc<[u8]>,
}

impl Raw {
    async fn new(mut connection: MultiplexedConnection) -> Self {
        let script = redis::Script::new(include_str!("../src/swap.lua"));
        let hash = script.load_async(&mut connection).await.unwrap();
        let sealed = |swap: &Swap| {
            let sealer = Sealer::checksum();
            sealer.seal(&swap.id, swap.write_id, &swap.draft.record, &SystemEntropy).unwrap().into()
        };
        let claim = claim(OperationId::from_bytes([1; 32]));
        let (in_flight, done) = (sealed(&claim), sealed(&complete(&claim)));
        Self { connection, hash: hash.into(), in_flight, done }
    }

    async fn request(mut self, key: OperationId) {
        let name = format!("hapax:{key}");
        let (first, second): ([u8; 16], [u8; 16]) = (random(), random());
        for (write_id, expected, fence, lease, end, sealed) in [
            (first, &[][..], "1", "30000000", "0", &self.in_flight),
            (second, &first[..], "0", "0", "1", &self.done),
        ] {
            let mut command = redis::cmd("EVALSHA");
            command.arg(&*self.hash).arg(1).arg(&name).arg(&write_id[..]).arg(expected).arg(fence);
            command.arg(lease).arg("86400000000").arg("30000000").arg(end).arg(&**sealed);
            let answer: Vec<Vec<u8>> = command.query_async(&mut self.connection).await.unwrap();
            assert_eq!(answer[0], b"S");
        }
    }
}

fn claim(key: OperationId) -> Swap {
    let lease_id = LeaseId::from_bytes(random());
    let lease = Duration::from_secs(30);
    let retention = Duration::from_secs(86_400);
    let record = Record {
        scheme: FingerprintScheme::new("bench/1").unwrap(),
        fingerprint: Fingerprint::from_bytes([7; 32]),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms: Terms { lease, retention, on_unknown: OnUnknown::Reexecute },
        checkpoint: None,
        notes: hapax_core::Notes::default(),
        extensions: hapax_core::Extensions::default(),
        state: RecordState::InFlight,
    };
    let draft = Draft { record, stamp: Stamp::NextFence, lease, keep: Some(retention) };
    Swap { id: key, expected: None, write_id: WriteId::from_bytes(random()), draft }
}

fn complete(claim: &Swap) -> Swap {
    let state = RecordState::Done(Outcome::new("bench/1", vec![b'x'; OUTCOME]));
    let record = Record { state, ..claim.draft.record.clone() };
    let keep = claim.draft.keep;
    let draft = Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, keep };
    let write_id = WriteId::from_bytes(random());
    Swap { id: claim.id, expected: Some(claim.write_id), write_id, draft }
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemEntropy.fill(&mut bytes).unwrap();
    bytes
}
