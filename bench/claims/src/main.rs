//! Rate of a consumer in claim mode, beside bare claims and completions on the same store, in one run.
//!
//!     cargo run --release --manifest-path bench/claims/Cargo.toml --target-dir target -- \
//!         [BROKER] [MESSAGES] [ROUNDS] [CALLERS]
//!
//! BROKER is memory, kafka, rabbitmq or all, which is the default. Stores are a file and PostgreSQL, which
//! sync. A consumer has as many handlers, which do nothing, as there are callers. The messages are there
//! before it starts; the first fifth, with the start of a group, is not measured.

mod brokers;

use std::error::Error;
use std::num::{NonZeroU16, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, InFlight, OnUnknown, OperationRequest,
    Outcome as Stored, Policy, Store, Terms,
};
use hapax_file::{FileOptions, FileStore};
use hapax_messages::{
    Consumer, ConsumerLimits, Inbox, MessageExecution, MessageFailure, MessageId,
};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::messages::MemoryDeadLetters;
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use brokers::Broker;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(30 * 24 * 60 * 60);
const PAYLOAD: [u8; 200] = [b'x'; 200];

#[derive(Clone, Copy)]
struct Load {
    messages: u64,
    callers: NonZeroU16,
}

/// A request with the payload of the messages.
struct SamePayload(FingerprintScheme);

impl OperationRequest for SamePayload {
    fn scheme(&self) -> FingerprintScheme {
        self.0.clone()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::builder("hapax 1 message").field(&PAYLOAD).finish())
    }
}

/// Returns messages per second from the first fifth to the end.
async fn rate(messages: u64, handled: impl Fn() -> u64) -> f64 {
    let reached = async |count: u64| {
        while handled() < count {
            sleep(Duration::from_millis(1)).await;
        }
        (Instant::now(), handled())
    };
    let (begun, first) = reached(messages / 5).await;
    let (ended, last) = reached(messages).await;
    (last - first) as f64 / (ended - begun).as_secs_f64()
}

/// Claims and completes by callers that take ids from one counter.
async fn bare(engine: &Idempotency, load: Load, name: &str) -> Outcome<f64> {
    let policy = Policy {
        terms: Terms { lease: LEASE, retention: RETENTION, on_unknown: OnUnknown::Reexecute },
        in_flight: InFlight::Reject,
        hook: None,
        settle: None,
        keep_released: LEASE,
    };
    let request = Arc::new(SamePayload(FingerprintScheme::new("message/1")?));
    let (next, completed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut callers = JoinSet::new();
    for _ in 0..load.callers.get() {
        let (engine, request) = (engine.clone(), Arc::clone(&request));
        let (next, completed) = (Arc::clone(&next), Arc::clone(&completed));
        let name = name.to_owned();
        callers.spawn(async move {
            let scope = Inbox::scope("bare");
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= load.messages {
                    return Ok(());
                }
                let key = MessageId::new(format!("{name}-{number}"))?.to_key();
                let Claim::Execute(lease) = engine.claim(&scope, &key, &*request, &policy).await?
                else {
                    return Outcome::Err("expected a new id, found a record".into());
                };
                lease.complete(Stored::new("message/1", "handled"), None).await?;
                completed.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let ended = async {
        while let Some(ended) = callers.join_next().await {
            ended??;
        }
        Outcome::Ok(())
    };
    let rate = rate(load.messages, || completed.load(Ordering::Relaxed));
    let (rate, ended) = tokio::join!(rate, ended);
    ended?;
    Ok(rate)
}

async fn consumer(engine: &Idempotency, load: Load, broker: &Broker, queue: &str) -> Outcome<f64> {
    let source = broker.fill(queue, load.messages).await?;
    let inbox = Inbox::builder(queue, engine.clone())
        .reexecute()
        .lease(LEASE)
        .retention(RETENTION)
        .dead_letters(Arc::new(MemoryDeadLetters::default()))
        .build()?;
    let callers = NonZeroUsize::from(load.callers);
    let limits = ConsumerLimits {
        handlers: callers,
        max_unacknowledged: callers.saturating_mul(NonZeroUsize::MIN.saturating_add(3)),
        ..ConsumerLimits::default()
    };
    let handler = |_: MessageExecution| std::future::ready(Ok::<_, MessageFailure>(()));
    let consumer = Consumer::new(inbox, source, handler, limits)?;
    let monitor = consumer.monitor();
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run(async {
        let _ = stopped.await;
    }));
    let rate = rate(load.messages, || monitor.stats().handled).await;
    let _ = stop.send(());
    if !running.await? {
        return Err("expected a consumer that drains, found messages that were dropped".into());
    }
    Ok(rate)
}

async fn compare(
    store: (&str, Arc<dyn Store>),
    broker: &str,
    load: Load,
    rounds: u64,
) -> Outcome<()> {
    let (name, store) = store;
    let engine = Idempotency::builder(store).namespace("").build()?;
    let started = Broker::start(broker).await?;
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let (own, queue) = (format!("bare-{broker}-{round}"), format!("{broker}-{round}"));
        // The first of the two is another one each time: stores grow.
        let (bare, consumer) = if round % 2 == 0 {
            let bare = bare(&engine, load, &own).await?;
            (bare, consumer(&engine, load, &started, &queue).await?)
        } else {
            let consumer = consumer(&engine, load, &started, &queue).await?;
            (bare(&engine, load, &own).await?, consumer)
        };
        let ratio = consumer / bare;
        println!("{broker}, {name}: {bare:.0}/s bare, {consumer:.0}/s by the consumer: {ratio:.2}");
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    if let ([least, ..], [.., most]) = (&*ratios, &*ratios) {
        let median = ratios[ratios.len() / 2];
        println!("{broker}, {name}: median {median:.2} ({least:.2} to {most:.2})");
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let brokers = match arguments.first().map(String::as_str) {
        None | Some("all") => Broker::NAMES.to_vec(),
        Some(name) => vec![name],
    };
    let callers = NonZeroU16::new(u16::try_from(number(3, 64)?)?).ok_or("expected a caller")?;
    let (load, rounds) = (Load { messages: number(1, 40_000)?, callers }, number(2, 5)?);

    for broker in brokers {
        let folder = tempfile::tempdir()?;
        let file = Arc::new(FileStore::open(FileOptions::new(folder.path().join("records")))?);
        compare(("file", Arc::clone(&file) as _), broker, load, rounds).await?;
        file.close().await;

        let server =
            PostgresServer::start_with(PostgresServerOptions::new().set("fsync", "on")).await;
        let options: PostgresOptions = server.url("postgres").parse()?;
        let store = PostgresStore::connect(options).await?;
        compare(("PostgreSQL", Arc::new(store)), broker, load, rounds).await?;
    }
    Ok(())
}
