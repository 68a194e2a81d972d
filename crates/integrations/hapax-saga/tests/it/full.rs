//! A process that has no room for a saga that it starts.

use std::future::pending;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::{BoxFuture, Capabilities, Reaped, Snapshot, Swap, Swapped};
use hapax_core::{Idempotency, MemoryStore, OperationId, Store, StoreError, Timestamp};
use hapax_saga::{Saga, Sagas};
use tokio::time::{Instant, sleep};

use crate::world::{World, key, scope};

/// Time after an insertion in which other processes poll.
const SLOW: Duration = Duration::from_secs(2);

/// A store whose insertions return late.
#[derive(Debug)]
struct SlowInsert(Arc<MemoryStore>);

impl SlowInsert {
    fn schedule(&self) -> &dyn Schedule {
        self.0.capabilities().schedule.unwrap()
    }
}

impl Store for SlowInsert {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        self.0.swap(swap)
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        self.0.load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        self.0.reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities { schedule: Some(self), ..self.0.capabilities() }
    }
}

impl Schedule for SlowInsert {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let inserted = self.schedule().insert(entry).await;
            sleep(SLOW).await;
            inserted
        })
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        self.schedule().due(queues, limit)
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        self.schedule().postpone(key, expected, due_in)
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        self.schedule().remove(key)
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        self.schedule().entries(after, limit)
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        self.schedule().queues()
    }
}

#[tokio::test(start_paused = true)]
async fn a_saga_without_room_at_its_start_is_run_by_another_process_at_once() {
    let saga = Saga::define("nap", 1, ()).flow(move |op, seconds: u64| async move {
        // It runs meanwhile: it is too short for parking.
        op.sleep("nap", Duration::from_secs(seconds)).await;
        Ok::<_, String>(seconds)
    });
    let (world, saga) = (World::new(), saga.unwrap());
    let engine = Idempotency::builder(SlowInsert(Arc::clone(&world.store))).build().unwrap();
    let full = Sagas::builder(engine).register(&saga).max_running(1).build().unwrap();
    let driving = full.clone();
    tokio::spawn(async move { driving.run(pending(), Duration::ZERO).await });
    full.start(&saga, &scope(), &key("first"), &9).await.unwrap();
    let other = world.process(&saga);
    let started = full.start(&saga, &scope(), &key("second"), &0).await.unwrap();
    let begin = Instant::now();
    assert_eq!(started.outcome().await.unwrap(), 0);
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    drop(other);
}
