//! Helpers of the rules.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_core::store::{Draft, Reaped, Snapshot, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{
    EntryId, Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Outcome, Record,
    RecordState, Store, StoreError, Terms, WriteId,
};

use super::StoreFixture;
use crate::SeededEntropy;

/// Limit of sends of one request, after which a store counts as broken. Through a proxy that loses
/// half of the replies, a few are enough.
pub(crate) const MAX_ATTEMPTS: u32 = 200;

pub(crate) const LEASE: Duration = Duration::from_secs(3);
pub(crate) const LONG: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) struct Bench<'a, F: StoreFixture> {
    fixture: &'a F,
    pub(crate) store: Arc<F::Store>,
    entropy: SeededEntropy,
    /// Number of calls of `reap` so far, and of those that failed.
    reaps: AtomicU32,
    failed_reaps: AtomicU32,
}

impl<'a, F: StoreFixture> Bench<'a, F> {
    pub(crate) async fn open(fixture: &'a F) -> Self {
        Self {
            fixture,
            store: fixture.open().await,
            entropy: SeededEntropy::new(1),
            reaps: AtomicU32::new(0),
            failed_reaps: AtomicU32::new(0),
        }
    }

    /// Returns the same helpers with another store of the fixture.
    pub(crate) fn with(self, store: Arc<F::Store>) -> Self {
        Self { store, ..self }
    }

    pub(crate) fn key(&self) -> OperationId {
        let mut bytes = [0; 32];
        bytes.chunks_mut(8).for_each(|chunk| {
            chunk.copy_from_slice(&self.entropy.next().to_be_bytes());
        });
        OperationId::from_bytes(bytes)
    }

    pub(crate) fn write_id(&self) -> WriteId {
        WriteId::fresh(&self.entropy).unwrap()
    }

    pub(crate) fn lease_id(&self) -> LeaseId {
        LeaseId::fresh(&self.entropy).unwrap()
    }

    pub(crate) fn entry_id(&self) -> EntryId {
        EntryId::fresh(&self.entropy).unwrap()
    }

    pub(crate) fn bytes(&self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.entropy.next() as u8).collect()
    }

    pub(crate) fn below(&self, bound: u64) -> u64 {
        self.entropy.below(bound)
    }

    /// Returns the draft of a first execution: lease [`LEASE`], retention [`LONG`].
    pub(crate) fn draft(&self) -> Draft {
        let lease_id = self.lease_id();
        let terms = Terms { lease: LEASE, retention: LONG, on_unknown: OnUnknown::Reexecute };
        let record = Record {
            scheme: FingerprintScheme::new("suite/1").unwrap(),
            fingerprint: Fingerprint::from_bytes([7; 32]),
            lease_id,
            generation: lease_id,
            attempt: 1,
            terms,
            checkpoint: None,
            notes: hapax_core::Notes::default(),
            extensions: hapax_core::Extensions::default(),
            state: RecordState::InFlight,
        };
        Draft { record, stamp: Stamp::NextFence, lease: LEASE, keep: Some(LONG) }
    }

    /// Returns the draft of its completion with `outcome`.
    pub(crate) fn done(&self, of: &Draft, outcome: &[u8]) -> Draft {
        let outcome = Outcome::new("suite/1", outcome.to_vec());
        Draft {
            record: Record { state: RecordState::Done(outcome), ..of.record.clone() },
            stamp: Stamp::Keep,
            lease: Duration::ZERO,
            keep: Some(LONG),
        }
    }

    pub(crate) fn swap(&self, key: OperationId, expected: Option<WriteId>, draft: Draft) -> Swap {
        Swap { id: key, expected, write_id: self.write_id(), draft }
    }

    pub(crate) async fn send(&self, swap: &Swap) -> Swapped {
        send(&*self.store, swap).await
    }

    /// Sends a swap that must be stored; returns its stamps.
    pub(crate) async fn stored(&self, swap: &Swap) -> Stamped {
        match self.send(swap).await {
            Swapped::Stored(stamped) => stamped,
            Swapped::Conflict(seen) => panic!("{:?} met a conflict: {seen:?}", swap.write_id),
        }
    }

    /// Sends a swap that must be a conflict; returns the snapshot.
    pub(crate) async fn refused(&self, swap: &Swap) -> Snapshot {
        match self.send(swap).await {
            Swapped::Stored(_) => panic!("{:?} was stored on {:?}", swap.write_id, swap.expected),
            Swapped::Conflict(seen) => seen,
        }
    }

    /// Writes `draft` under a new key; returns key and stored record.
    pub(crate) async fn put(&self, draft: Draft) -> (OperationId, StoredRecord) {
        let key = self.key();
        self.stored(&self.swap(key, None, draft)).await;
        (key, self.record(&key).await)
    }

    /// Writes `draft` under a new key; returns key and write id, without a load: the record may
    /// expire soon.
    pub(crate) async fn put_unseen(&self, draft: Draft) -> (OperationId, WriteId) {
        let swap = self.swap(self.key(), None, draft);
        self.stored(&swap).await;
        (swap.id, swap.write_id)
    }

    pub(crate) async fn load(&self, key: &OperationId) -> Snapshot {
        load(&*self.store, key).await
    }

    pub(crate) async fn record(&self, key: &OperationId) -> StoredRecord {
        self.load(key).await.stored.expect("the record was written and is not due")
    }

    /// Calls `reap` until it succeeds; returns its result.
    pub(crate) async fn reap(&self, limit: u32) -> Reaped {
        let limit = NonZeroU32::new(limit).unwrap();
        let mut last = None;
        for _ in 0..MAX_ATTEMPTS {
            self.reaps.fetch_add(1, Ordering::Relaxed);
            match self.store.reap(limit).await {
                Ok(reaped) => {
                    assert!(reaped.removed <= limit.get(), "reaped more than it may: {reaped:?}");
                    return reaped;
                }
                Err(error) => last = Some(error),
            }
            self.failed_reaps.fetch_add(1, Ordering::Relaxed);
            pause().await;
        }
        panic!("{MAX_ATTEMPTS} calls of reap failed: {last:?}")
    }

    pub(crate) fn reaps(&self) -> u32 {
        self.reaps.load(Ordering::Relaxed)
    }

    /// Returns whether a call of `reap` failed: it may be in progress yet, concurrent with later
    /// ones.
    pub(crate) fn reaps_failed(&self) -> bool {
        self.failed_reaps.load(Ordering::Relaxed) > 0
    }

    /// Calls `reap` until no record is due.
    pub(crate) async fn reap_all(&self) {
        for _ in 0..MAX_ATTEMPTS {
            if !self.reap(100).await.more {
                return;
            }
        }
        panic!("reap returned `more` {MAX_ATTEMPTS} times in a row");
    }

    /// Returns whether reaping removes a record that is due. That may take a moment if the store
    /// expires records automatically, or if an earlier call may be in progress.
    pub(crate) async fn reaps_away(&self, key: &OperationId) -> bool {
        for _ in 0..MAX_ATTEMPTS {
            self.reap_all().await;
            let gone = self.load(key).await.stored.is_none();
            if gone || !(F::REAPS_AUTOMATICALLY || self.reaps_failed()) {
                return gone;
            }
            pause().await;
        }
        false
    }

    pub(crate) async fn pass(&self, by: Duration) {
        self.fixture.pass(&self.store, by).await;
    }

    pub(crate) const fn fixture(&self) -> &F {
        self.fixture
    }
}

/// Sends a swap as the engine does: again, unchanged, until the reply is definite.
pub(crate) async fn send(store: &dyn Store, swap: &Swap) -> Swapped {
    let mut last = None;
    for _ in 0..MAX_ATTEMPTS {
        match store.swap(swap.clone()).await {
            Ok(swapped) => return swapped,
            Err(error) => last = Some(readable(error)),
        }
        pause().await;
    }
    panic!("{MAX_ATTEMPTS} sends of a swap failed: {last:?}")
}

pub(crate) async fn load(store: &dyn Store, key: &OperationId) -> Snapshot {
    let mut last = None;
    for _ in 0..MAX_ATTEMPTS {
        match store.load(key).await {
            Ok(seen) => return seen,
            Err(error) => last = Some(readable(error)),
        }
        pause().await;
    }
    panic!("{MAX_ATTEMPTS} loads failed: {last:?}")
}

pub(crate) fn readable(error: StoreError) -> StoreError {
    match error {
        StoreError::Corrupt(source) => panic!("the store cannot read its own writes: {source}"),
        other => other,
    }
}

/// Waits a moment, in which a store can reconnect.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}
