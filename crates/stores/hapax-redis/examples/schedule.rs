//! Duration of a poll of the schedule among many parked entries, and their size in memory.
//!
//!     cargo run --release -p hapax-redis --example schedule -- [ENTRIES]
//!
//! Starts its own server.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a measurement that fails may break off"
)]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule};
use hapax_core::{Entropy, EntryId, OperationId};
use hapax_redis::{RedisOptions, RedisStore};
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::RedisServer;
use tokio::task::JoinSet;

/// Size of a note, in bytes.
const NOTE: usize = 300;

const CALLERS: u64 = 64;

/// Number of polls in a measurement.
const POLLS: usize = 2_000;

const PARKED: Duration = Duration::from_secs(30 * 86_400);

const QUEUES: usize = 10;

#[tokio::main]
async fn main() {
    let entries = std::env::args().nth(1).map_or(1_000_000, |text| text.parse().expect("a number"));
    let server = RedisServer::start().await;
    let store = Arc::new(RedisStore::connect(RedisOptions::new(server.url())).await.unwrap());
    let queues: Vec<_> =
        (0..QUEUES).map(|of| QueueName::new(format!("transfer/{of}")).unwrap()).collect();
    println!("{entries} entries with notes of {NOTE} bytes, in {QUEUES} queues");
    polls(&store, &queues, "no entry").await;
    let (empty, before) = (memory(&server).await, Instant::now());
    fill(&store, &queues, entries, PARKED).await;
    println!("inserted: {:.0}/s", entries as f64 / before.elapsed().as_secs_f64());
    println!("memory: {} bytes an entry", (memory(&server).await - empty) / entries);
    polls(&store, &queues, "all parked").await;
    let before = Instant::now();
    let counted = store.queues().await.unwrap();
    println!("queues counted: {} in {:.1?}", counted.len(), before.elapsed());
    let before = Instant::now();
    let page = store.entries(None, NonZeroU32::MIN.saturating_add(999)).await.unwrap();
    println!("a page of {}: {:.1?}", page.entries.len(), before.elapsed());
    fill(&store, &queues, 100, Duration::ZERO).await;
    polls(&store, &queues, "100 due").await;
}

async fn fill(store: &Arc<RedisStore>, queues: &[QueueName], entries: u64, due_in: Duration) {
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let (store, queues) = (Arc::clone(store), queues.to_vec());
        let entropy = SeededEntropy::new(entries << 16 | caller);
        callers.spawn(async move {
            for number in (caller..entries).step_by(CALLERS as usize) {
                let mut operation = [0; 32];
                entropy.fill(&mut operation).unwrap();
                let operation = OperationId::from_bytes(operation);
                let key = EntryKey { operation, id: EntryId::fresh(&entropy).unwrap() };
                let queue = queues[number as usize % queues.len()].clone();
                // Spread over a day.
                let due_in = due_in + due_in / 30 * (number % 1_000) as u32 / 1_000;
                let note = Bytes::from(vec![b'n'; NOTE]);
                store.insert(NewEntry { key, queue, due_in, note }).await.unwrap();
            }
        });
    }
    callers.join_all().await;
}

async fn polls(store: &RedisStore, queues: &[QueueName], what: &str) {
    let limit = NonZeroU32::MIN.saturating_add(63);
    for queues in [&queues[..1], queues] {
        let mut took = Vec::with_capacity(POLLS);
        let mut found = 0;
        for _ in 0..POLLS {
            let before = Instant::now();
            found = store.due(queues, limit).await.unwrap().entries.len();
            took.push(before.elapsed());
        }
        took.sort_unstable();
        println!(
            "{what}, a poll of {} queues for 64: {found} found, p50 {:.0?}, p99 {:.0?}",
            queues.len(),
            took[POLLS / 2],
            took[POLLS * 99 / 100],
        );
    }
}

async fn memory(server: &RedisServer) -> u64 {
    let info = server.command("INFO memory").await;
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
    used.and_then(|used| used.trim().parse().ok()).expect("the server reports its memory")
}
