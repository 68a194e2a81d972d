//! A store's own rate: callers that swap without HTTP and without an engine, two swaps a request, a
//! claim and its completion. With 64 callers a store that batches has 64 swaps to a batch.
//!
//!     cost-swaps memory|file|redis|postgres [PATH|URL] --callers 64
//!
//! Writes the result to standard output as JSON. With `--fill`, it only adds finished records.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use hapax::store::{Draft, Stamp, Swap, Swapped};
use hapax::{
    Entropy, FileOptions, FileStore, Fingerprint, FingerprintScheme, LeaseId, MemoryCapacity,
    Extensions, MemoryStore, Notes, OnUnknown, OperationId, Outcome, PostgresOptions, PostgresStore, Record,
    RecordState, RedisOptions, RedisStore, Store, SystemClock, SystemEntropy, Terms, WriteId,
};
use hapax_bench_cost::process::{Cores, Times};
use hapax_bench_cost::sample::{Sample, micros};
use hapax_bench_cost::{Any, wire};

/// Capacity of the memory store: more than a run can fill.
const CAPACITY: MemoryCapacity = MemoryCapacity { records: 100_000_000, bytes: 8 << 30 };

/// Measures a store's own rate
#[derive(Parser)]
struct Args {
    /// One of: memory, file, redis, postgres
    store: String,
    /// Path of the file, or URL of the server
    location: Option<String>,
    #[arg(long, default_value_t = 64)]
    callers: usize,
    /// Length of the measured window
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Time before it
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
    /// Add so many finished records, in the order of their ids, and measure nothing
    #[arg(long, value_name = "RECORDS")]
    fill: Option<u64>,
    #[command(flatten)]
    cores: Cores,
}

#[tokio::main]
async fn main() -> ExitCode {
    hapax_bench_cost::exit(run().await)
}

async fn run() -> Result<(), Any> {
    let args = Args::parse();
    let store = open(&args).await?;
    if let Some(records) = args.fill {
        return fill(store, records, args.callers).await;
    }
    let warmed = Instant::now() + Duration::from_secs_f64(args.warmup);
    let ended = warmed + Duration::from_secs_f64(args.seconds);
    let callers: Vec<_> = (0..args.callers)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(call(store, warmed, ended))
        })
        .collect();
    // Not a timer of the runtime: callers on a store that answers at once keep its worker busy.
    std::thread::sleep(warmed.saturating_duration_since(Instant::now()));
    let times = || Times::now(std::process::id(), args.cores);
    let before = times()?;
    std::thread::sleep(ended.saturating_duration_since(Instant::now()));
    let used = times()?.since(&before);
    let mut latencies = Vec::new();
    for caller in callers {
        latencies.extend(caller.await??);
    }
    let sample = Sample::of(&mut latencies, ended - warmed, &used);
    println!("{}", serde_json::to_string(&sample)?);
    Ok(())
}

async fn open(args: &Args) -> Result<Arc<dyn Store>, Any> {
    let location = || args.location.as_deref().ok_or("the store needs a path or a URL");
    Ok(match args.store.as_str() {
        "memory" => Arc::new(MemoryStore::new(Arc::new(SystemClock), CAPACITY)),
        "file" => Arc::new(FileStore::open(FileOptions::new(location()?))?),
        "redis" => Arc::new(RedisStore::connect(RedisOptions::new(location()?)).await?),
        "postgres" => {
            let options: PostgresOptions = location()?.parse()?;
            Arc::new(PostgresStore::connect(options).await?)
        }
        _ => return Err("no such store: expected memory, file, redis or postgres".into()),
    })
}

/// Adds finished records whose ids ascend, which is the quickest order for a tree, and divides the
/// range of ids evenly, so that later ids fall between them.
async fn fill(store: Arc<dyn Store>, records: u64, callers: usize) -> Result<(), Any> {
    let step = u64::MAX / records.max(1);
    let next = Arc::new(AtomicU64::new(0));
    let callers: Vec<_> = (0..callers)
        .map(|_| {
            let (store, next) = (Arc::clone(&store), Arc::clone(&next));
            tokio::spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= records {
                        return Ok::<_, Any>(());
                    }
                    let claim = claim()?;
                    let mut id = *claim.id.as_bytes();
                    id[..8].copy_from_slice(&(number * step).to_be_bytes());
                    let record = finished(&claim);
                    let draft = Draft { record, lease: Duration::ZERO, ..claim.draft };
                    let id = OperationId::from_bytes(id);
                    store.swap(Swap { id, draft, ..claim }).await?;
                    if number % 1_000_000 == 0 && number > 0 {
                        eprintln!("{number} of {records} records");
                    }
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok(())
}

/// Executes requests until `ended`, and returns the latencies of those in the window, in
/// microseconds.
async fn call(store: Arc<dyn Store>, warmed: Instant, ended: Instant) -> Result<Vec<u32>, Any> {
    let mut latencies = Vec::new();
    loop {
        let began = Instant::now();
        execute(&*store).await?;
        let now = Instant::now();
        if now >= ended {
            return Ok(latencies);
        }
        if now >= warmed {
            latencies.push(micros(now - began));
        }
        // Takes turns with other callers where the store answers at once.
        tokio::task::consume_budget().await;
    }
}

/// Claims a new key and completes it.
async fn execute(store: &dyn Store) -> Result<(), Any> {
    let claim = claim()?;
    let record = finished(&claim);
    let complete = Swap {
        id: claim.id,
        expected: Some(claim.write_id),
        write_id: WriteId::fresh(&SystemEntropy)?,
        draft: Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, ..claim.draft.clone() },
    };
    for swap in [claim, complete] {
        if !matches!(store.swap(swap).await?, Swapped::Stored(_)) {
            return Err("a conflict on a new key".into());
        }
    }
    Ok(())
}

/// Returns the record of a claim with its outcome.
fn finished(claim: &Swap) -> Record {
    let outcome =
        Outcome::new("http/1", format!("content-type: application/json\n{}", wire::ANSWER));
    Record { state: RecordState::Done(outcome), ..claim.draft.record.clone() }
}

fn claim() -> Result<Swap, Any> {
    let mut id = [0; 32];
    SystemEntropy.fill(&mut id)?;
    let lease_id = LeaseId::fresh(&SystemEntropy)?;
    let (lease, retention) = (Duration::from_secs(30), Duration::from_secs(86_400));
    let record = Record {
        scheme: FingerprintScheme::new("http/1;body=canonical")?,
        fingerprint: Fingerprint::from_bytes(id),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms: Terms { lease, retention, on_unknown: OnUnknown::Block },
        checkpoint: None,
        notes: Notes::default(),
        extensions: Extensions::default(),
        state: RecordState::InFlight,
    };
    let draft = Draft { record, stamp: Stamp::NextFence, lease, keep: Some(retention) };
    let write_id = WriteId::fresh(&SystemEntropy)?;
    Ok(Swap { id: OperationId::from_bytes(id), expected: None, write_id, draft })
}
