//! Duration of a poll of the schedule among many parked entries, and their size.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName, Schedule};
use hapax_core::{Entropy, EntryId, OperationId};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::SeededEntropy;
use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::Outcome;

/// Size of a note, in bytes.
const NOTE: usize = 300;

const CALLERS: u64 = 256;

/// Number of polls in a measurement.
const POLLS: usize = 2_000;

const PARKED: Duration = Duration::from_secs(30 * 86_400);

const QUEUES: usize = 10;

pub(crate) async fn measure(entries: u64) -> Outcome<()> {
    let server = crate::server().await;
    let options: PostgresOptions = server.url("postgres").parse()?;
    // A checkpoint on a busy disk may delay the commits of the entries.
    let options = options.timeout(Duration::from_secs(60));
    let store = Arc::new(PostgresStore::connect(options).await?);
    let queues: Vec<_> =
        (0..QUEUES).map(|of| QueueName::new(format!("transfer/{of}"))).collect::<Result<_, _>>()?;
    println!("{entries} entries with notes of {NOTE} bytes, in {QUEUES} queues");
    polls(&store, &queues, "no entry").await?;
    let before = Instant::now();
    fill(&store, &queues, entries, PARKED).await?;
    println!("inserted: {:.0}/s", entries as f64 / before.elapsed().as_secs_f64());
    size(&server, entries).await;
    polls(&store, &queues, "all parked").await?;
    let before = Instant::now();
    let counted = store.queues().await?;
    println!("queues counted: {} in {:.0?}", counted.len(), before.elapsed());
    fill(&store, &queues, 100, Duration::ZERO).await?;
    polls(&store, &queues, "100 due").await
}

async fn fill(
    store: &Arc<PostgresStore>,
    queues: &[QueueName],
    entries: u64,
    due_in: Duration,
) -> Outcome<()> {
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let (store, queues) = (Arc::clone(store), queues.to_vec());
        let entropy = SeededEntropy::new(entries << 16 | caller);
        callers.spawn(async move {
            for number in (caller..entries).step_by(CALLERS as usize) {
                let mut operation = [0; 32];
                entropy.fill(&mut operation)?;
                let operation = OperationId::from_bytes(operation);
                let key = EntryKey { operation, id: EntryId::fresh(&entropy)? };
                let queue = queues[number as usize % queues.len()].clone();
                // Spread over a day.
                let due_in = due_in + due_in / 30 * (number % 1_000) as u32 / 1_000;
                let note = Bytes::from(vec![b'n'; NOTE]);
                store.insert(NewEntry { key, queue, due_in, note }).await?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        });
    }
    while let Some(ended) = callers.join_next().await {
        ended??;
    }
    Ok(())
}

async fn polls(store: &PostgresStore, queues: &[QueueName], what: &str) -> Outcome<()> {
    let limit = NonZeroU32::MIN.saturating_add(63);
    for queues in [&queues[..1], queues] {
        let mut took = Vec::with_capacity(POLLS);
        let mut found = 0;
        for _ in 0..POLLS {
            let before = Instant::now();
            found = store.due(queues, limit).await?.entries.len();
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
    Ok(())
}

async fn size(server: &PostgresServer, entries: u64) {
    let text = format!(
        "SELECT 'table ' || pg_table_size(relid) / {entries} || ' bytes an entry, indexes '
        || pg_indexes_size(relid) / {entries}
        FROM pg_stat_user_tables WHERE relname = 'hapax_schedule'"
    );
    println!("{}", server.sql("postgres", &text).await);
}
