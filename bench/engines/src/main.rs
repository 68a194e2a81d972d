//! Embedded engines behind one swap. `ENGINE.md` of the crate `hapax-file` has the results.
//!
//!     hapax-bench-engines rate ENGINE CALLERS SECONDS DIRECTORY
//!     hapax-bench-engines fill ENGINE RECORDS DIRECTORY    # then single swaps until it is killed
//!     hapax-bench-engines open ENGINE DIRECTORY            # after that
//!     hapax-bench-engines full ENGINE DIRECTORY            # on a small file system of its own
//!     hapax-bench-engines bulk RECORDS DIRECTORY           # a large file for the store, quickly
//!     hapax-bench-engines purge RECORDS DIRECTORY          # the store's: claims while it reaps

mod engine;
mod group;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use engine::Failure;
use group::Seam;
use hapax_core::store::{Draft, Stamp, Swap};
use hapax_core::{
    Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Outcome, Record, RecordState,
    Store, SystemEntropy, Terms, WriteId,
};
use hapax_file::{FileStore, FileOptions, SecretSource};

/// Bytes of an answer.
const ANSWER: usize = 200;
/// Bytes of a value that is loaded in bulk: with them a page is as full as by chance.
const BULK: usize = 560;
const CHUNK: u64 = 100_000;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["rate", engine, callers, seconds, directory] => {
            let seconds = Duration::from_secs(seconds.parse()?);
            rate(engine, callers.parse()?, seconds, Path::new(directory)).await
        }
        ["fill", engine, records, directory] => {
            fill(engine, records.parse()?, Path::new(directory)).await
        }
        ["open", engine, directory] => reopen(engine, Path::new(directory)).await,
        ["full", engine, directory] => full(engine, Path::new(directory)).await,
        ["bulk", records, directory] => bulk(records.parse()?, Path::new(directory)).await,
        ["purge", records, directory] => purge(records.parse()?, Path::new(directory)).await,
        _ => Err("rate, fill, open, full or purge: see the head of main.rs".into()),
    }
}

/// Requests (a claim and its completion) one after the other, by each of `callers`.
async fn rate(
    engine: &str,
    callers: usize,
    time: Duration,
    directory: &Path,
) -> Result<(), Failure> {
    let seam = group::open(engine, directory)?;
    let before = written_bytes();
    let started = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..callers {
        let seam = Arc::clone(&seam);
        tasks.push(tokio::spawn(async move {
            let mut took = Vec::new();
            while started.elapsed() < time {
                let request = Instant::now();
                execute(&*seam).await?;
                took.push(request.elapsed());
            }
            Ok::<_, Failure>(took)
        }));
    }
    let mut took = Vec::new();
    for task in tasks {
        took.extend(task.await??);
    }
    let elapsed = started.elapsed().as_secs_f64();
    took.sort_unstable();
    let requests = took.len();
    let at = |share: f64| took[((requests - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
    println!(
        "{engine:12} {callers:3} callers: {:8.0} requests/s, {requests} requests, \
         p50 {:.2} ms, p99 {:.2} ms, {:.1} KiB written per request",
        requests as f64 / elapsed,
        at(0.5),
        at(0.99),
        (written_bytes() - before) as f64 / 1024.0 / requests as f64,
    );
    Ok(())
}

/// Writes records, says so, and goes on with single requests until somebody kills it.
async fn fill(engine: &str, records: u64, directory: &Path) -> Result<(), Failure> {
    let seam = group::open(engine, directory)?;
    let left = Arc::new(AtomicU64::new(records));
    let started = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..512 {
        let (seam, left) = (Arc::clone(&seam), Arc::clone(&left));
        tasks.push(tokio::spawn(async move {
            let more =
                || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            while more().is_ok() {
                execute(&*seam).await?;
            }
            Ok::<_, Failure>(())
        }));
    }
    for task in tasks {
        task.await??;
    }
    println!(
        "{engine}: {records} records in {:.0} s, {} MiB on disk, resident {} MiB",
        started.elapsed().as_secs_f64(),
        size(directory) >> 20,
        resident() >> 20,
    );
    let (started, mut requests) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs(5) {
        execute(&*seam).await?;
        requests += 1;
    }
    println!("{engine}: then {} requests/s by one caller", requests / 5);
    println!("filled");
    loop {
        execute(&*seam).await?;
    }
}

/// Opens what a killed process left, and claims a key.
async fn reopen(engine: &str, directory: &Path) -> Result<(), Failure> {
    let started = Instant::now();
    let seam = group::open(engine, directory)?;
    let opened = started.elapsed();
    execute(&*seam).await?;
    println!(
        "{engine}: open after {:.3} s, first request answered after {:.3} s, resident {} MiB",
        opened.as_secs_f64(),
        started.elapsed().as_secs_f64(),
        resident() >> 20,
    );
    Ok(())
}

/// Fills its disk; then makes room and sees whether the engine goes on by itself.
async fn full(engine: &str, directory: &Path) -> Result<(), Failure> {
    let ballast = directory.join("ballast");
    std::fs::create_dir_all(directory)?;
    std::fs::write(&ballast, vec![1; 8 << 20])?;
    let seam = group::open(engine, directory)?;
    let mut acknowledged = 0_u64;
    let error = loop {
        match execute(&*seam).await {
            Ok(()) => acknowledged += 1,
            Err(error) => break error,
        }
    };
    println!("{engine}: {acknowledged} requests, then: {}", chain(&*error));
    std::fs::remove_file(&ballast)?;
    let freed = Instant::now();
    for attempt in 1.. {
        match execute(&*seam).await {
            Ok(()) => {
                println!("{engine}: goes on after attempt {attempt}, {:?}", freed.elapsed());
                break;
            }
            Err(error) if freed.elapsed() > Duration::from_secs(3) => {
                println!("{engine}: still refuses 3 s after room was made: {}", chain(&*error));
                break;
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    drop(seam);
    if !engine.starts_with("hapax") {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let count = engine::open(engine, directory)?.count()?;
        println!("{engine}: opened anew it has {count} records");
    }
    Ok(())
}

/// A file of the store with as many entries as asked for, for what depends on their number alone:
/// they are loaded in order, by the engine, and no store could read them.
async fn bulk(records: u64, directory: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(directory)?;
    let path = directory.join("hapax.db");
    FileStore::open(FileOptions::new(&path).secret(SecretSource::None))?.close().await;
    let cells = redb::TableDefinition::<&[u8; 32], &[u8]>::new("cells");
    let due = redb::TableDefinition::<&[u8; 40], ()>::new("due");
    let database = redb::Database::open(&path)?;
    let step = u64::MAX / records;
    for chunk in 0..records.div_ceil(CHUNK) {
        let mut transaction = database.begin_write()?;
        transaction.set_two_phase_commit(true);
        {
            let (mut cells, mut due) =
                (transaction.open_table(cells)?, transaction.open_table(due)?);
            for record in chunk * CHUNK..records.min((chunk + 1) * CHUNK) {
                let (mut key, mut entry) = ([7; 32], [7; 40]);
                key[..8].copy_from_slice(&(record * step).to_be_bytes());
                entry[..8].copy_from_slice(&(u64::MAX - records + record).to_be_bytes());
                cells.insert(&key, [0x5a; BULK].as_slice())?;
                due.insert(&entry, ())?;
            }
        }
        transaction.commit()?;
    }
    drop(database);
    println!("{records} entries of {BULK} bytes, {} MiB on disk", size(directory) >> 20);
    Ok(())
}

/// How long requests of 16 callers take, without and with a reaper at work.
async fn purge(records: u64, directory: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(directory)?;
    let options = FileOptions::new(directory.join("hapax.db")).secret(SecretSource::None);
    let store = Arc::new(FileStore::open(options)?);
    let left = Arc::new(AtomicU64::new(records));
    let mut tasks = Vec::new();
    for _ in 0..512 {
        let (store, left) = (Arc::clone(&store), Arc::clone(&left));
        tasks.push(tokio::spawn(async move {
            let more =
                || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
            while more().is_ok() {
                let mut due = claim()?;
                due.draft.keep = Some(Duration::ZERO);
                due.draft.record.terms.lease = Duration::ZERO;
                Seam::swap(&*store, due).await?;
            }
            Ok::<_, Failure>(())
        }));
    }
    for task in tasks {
        task.await??;
    }
    let usual = claims(&store).await?;
    let before = store.stats().removed;
    let reaping = {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            loop {
                let reaped = store.reap(std::num::NonZeroU32::MIN.saturating_add(999)).await;
                assert!(reaped.is_ok_and(|reaped| reaped.more), "too few records to reap");
            }
        })
    };
    let reaped = claims(&store).await?;
    let removed = store.stats().removed - before;
    assert!(!reaping.is_finished(), "too few records to reap");
    println!(
        "p99 of a request by 16 callers: {usual:.2} ms, {reaped:.2} ms while {removed} were reaped"
    );
    std::process::exit(0);
}

/// The 99th percentile of requests by 16 callers over five seconds, in milliseconds.
async fn claims(store: &Arc<FileStore>) -> Result<f64, Failure> {
    let started = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..16 {
        let store = Arc::clone(store);
        tasks.push(tokio::spawn(async move {
            let mut took = Vec::new();
            while started.elapsed() < Duration::from_secs(5) {
                let request = Instant::now();
                execute(&*store).await?;
                took.push(request.elapsed());
            }
            Ok::<_, Failure>(took)
        }));
    }
    let mut took = Vec::new();
    for task in tasks {
        took.extend(task.await??);
    }
    took.sort_unstable();
    Ok(took[(took.len() - 1) * 99 / 100].as_secs_f64() * 1e3)
}

fn chain(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(Some(error), |error| error.source());
    sources.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// One request: a new key claimed and completed.
async fn execute(seam: &dyn Seam) -> Result<(), Failure> {
    let claim = claim()?;
    let outcome = Outcome::new("bench/1", vec![b'x'; ANSWER]);
    let record = Record { state: RecordState::Done(outcome), ..claim.draft.record.clone() };
    let draft = Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, ..claim.draft };
    let (key, expected, write_id) =
        (claim.id, Some(claim.write_id), WriteId::fresh(&SystemEntropy)?);
    let done = Swap { id: key, expected, write_id, draft };
    for swap in [claim, done] {
        if !seam.swap(swap).await? {
            return Err("a conflict on a key of one's own".into());
        }
    }
    Ok(())
}

fn claim() -> Result<Swap, Failure> {
    let mut key = [0; 32];
    hapax_core::Entropy::fill(&SystemEntropy, &mut key)?;
    let lease_id = LeaseId::fresh(&SystemEntropy)?;
    let (lease, retention) = (Duration::from_secs(30), Duration::from_secs(86_400));
    let record = Record {
        scheme: FingerprintScheme::new("http/1;body=canonical")?,
        fingerprint: Fingerprint::from_bytes(key),
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
    let write_id = WriteId::fresh(&SystemEntropy)?;
    Ok(Swap { id: OperationId::from_bytes(key), expected: None, write_id, draft })
}

/// Bytes this process has sent towards the disk.
fn written_bytes() -> u64 {
    field("/proc/self/io", "write_bytes:")
}

/// Bytes of memory it holds.
fn resident() -> u64 {
    field("/proc/self/status", "VmRSS:") << 10
}

fn field(path: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

fn size(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .map(|path: PathBuf| if path.is_dir() { size(&path) } else { blocks(&path) })
        .sum()
}

fn blocks(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    path.metadata().map_or(0, |metadata| metadata.blocks() * 512)
}
