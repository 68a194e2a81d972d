//! Rate of a consumer in claim mode, beside bare claims and completions, in one run, on a file
//! and on PostgreSQL.
//!
//! `cargo run --release -p hapax-messages --example claims_rate -- [MESSAGES] [ROUNDS] [CALLERS]`
//! starts a private server, which syncs. A consumer has as many handlers, which do nothing, as
//! there are callers.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a measurement"
)]

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, InFlight, OnUnknown, OperationRequest,
    Outcome, Policy, Store, Terms,
};
use hapax_file::{FileOptions, FileStore};
use hapax_messages::{
    Consumer, ConsumerLimits, Inbox, Message, MessageExecution, MessageFailure, MessageId,
};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::messages::{MemoryBroker, MemoryDeadLetters};
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(30 * 24 * 60 * 60);
const PAYLOAD: [u8; 200] = [b'x'; 200];

#[derive(Clone, Copy)]
struct Load {
    messages: u64,
    callers: usize,
}

/// A request with the payload of the messages.
struct SamePayload;

impl OperationRequest for SamePayload {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("message/1").unwrap()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::builder("hapax 1 message").field(&PAYLOAD).finish())
    }
}

/// Claims and completes by callers that take ids from one counter.
async fn bare(engine: &Idempotency, load: Load, round: u64) -> Duration {
    let policy = Policy {
        terms: Terms { lease: LEASE, retention: RETENTION, on_unknown: OnUnknown::Reexecute },
        in_flight: InFlight::Reject,
        hook: None,
        keep_released: LEASE,
    };
    let next = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let mut callers = JoinSet::new();
    for _ in 0..load.callers {
        let (engine, next) = (engine.clone(), Arc::clone(&next));
        callers.spawn(async move {
            let scope = Inbox::scope("bare");
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= load.messages {
                    return;
                }
                let key = MessageId::new(format!("bare-{round}-{number}")).unwrap().to_key();
                let claim = engine.claim(&scope, &key, &SamePayload, &policy).await.unwrap();
                let Claim::Execute(lease) = claim else { panic!("{claim:?}") };
                lease.complete(Outcome::new("message/1", "handled"), None).await.unwrap();
            }
        });
    }
    callers.join_all().await;
    begun.elapsed()
}

async fn consumer(engine: &Idempotency, load: Load, round: u64) -> Duration {
    let broker = MemoryBroker::default();
    for number in 0..load.messages {
        let message = Message::new("memory://rate", PAYLOAD.to_vec());
        broker.send(message.with_header("message-id", format!("consumer-{round}-{number}")));
    }
    let inbox = Inbox::builder("rate", engine.clone())
        .reexecute()
        .lease(LEASE)
        .retention(RETENTION)
        .dead_letters(Arc::new(MemoryDeadLetters::default()))
        .build()
        .unwrap();
    let limits = ConsumerLimits {
        handlers: NonZeroUsize::new(load.callers).unwrap(),
        max_unacknowledged: NonZeroUsize::new(load.callers * 4).unwrap(),
        ..ConsumerLimits::default()
    };
    let handler = |_: MessageExecution| std::future::ready(Ok::<_, MessageFailure>(()));
    let consumer = Consumer::new(inbox, Arc::new(broker.clone()), handler, limits).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let begun = Instant::now();
    let running = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    broker.emptied().await;
    let took = begun.elapsed();
    let _ = stop.send(());
    assert!(running.await.unwrap());
    took
}

async fn compare(name: &str, store: Arc<dyn Store>, load: Load, rounds: u64) {
    let engine = Idempotency::builder(store).build().unwrap();
    let mut ratios = Vec::new();
    for round in 0..rounds {
        // The first of the two is another one each time: stores grow.
        let (bare, consumer) = if round % 2 == 0 {
            (bare(&engine, load, round).await, consumer(&engine, load, round).await)
        } else {
            let consumer = consumer(&engine, load, round).await;
            (bare(&engine, load, round).await, consumer)
        };
        let rate = |took: Duration| load.messages as f64 / took.as_secs_f64();
        let ratio = rate(consumer) / rate(bare);
        println!(
            "{name}: {:.0}/s bare, {:.0}/s by the consumer: {ratio:.2}",
            rate(bare),
            rate(consumer)
        );
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    println!("{name}: median {:.2} ({least:.2} to {most:.2})", ratios[ratios.len() / 2]);
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse().unwrap());
    let messages = arguments.next().unwrap_or(20_000);
    let rounds = arguments.next().unwrap_or(5);
    let callers = arguments.next().unwrap_or(64);
    let load = Load { messages, callers: usize::try_from(callers).unwrap() };

    let folder = tempfile::tempdir().unwrap();
    let file = Arc::new(FileStore::open(FileOptions::new(folder.path().join("records"))).unwrap());
    compare("file", Arc::clone(&file) as Arc<dyn Store>, load, rounds).await;
    file.close().await;

    let options = PostgresServerOptions::new().set("fsync", "on");
    let server = PostgresServer::start_with(options).await;
    let options: PostgresOptions = server.url("postgres").parse().unwrap();
    let store = PostgresStore::connect(options).await.unwrap();
    compare("postgres", Arc::new(store), load, rounds).await;
}
