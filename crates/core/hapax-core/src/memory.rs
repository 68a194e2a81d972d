//! The reference store: in memory, for tests and for a single process whose records may end with
//! it.
//!
//! Bounded. It never removes a record early: a record beyond the limits is rejected as
//! [`StoreError::Unavailable`].

mod schedule;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::mem::size_of;
use std::num::NonZeroU32;
use std::ops::Bound;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::schedule::Entries;
use crate::clock::{Clock, SystemClock, Timestamp};
use crate::record::{FencingToken, Record, RecordState};
use crate::scope::OperationId;
use crate::secret::{KeyRing, Secret};
use crate::store::{
    BoxFuture, Capabilities, Draft, Inspect, Page, Reaped, Snapshot, Stamp, Stamped, Store,
    StoreError, StoredRecord, Swap, Swapped,
};

/// Limits of a [`MemoryStore`]. Beyond either of them new keys are rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryCapacity {
    /// The number of records.
    pub records: usize,
    /// Bytes, as far as they can be counted. New keys are rejected at seven eighths of them, so
    /// that executions in progress can still be recorded.
    pub bytes: usize,
}

impl Default for MemoryCapacity {
    /// Returns a million records and 256 MiB: about a day of ten requests a second with small
    /// responses.
    fn default() -> Self {
        Self { records: 1_000_000, bytes: 256 << 20 }
    }
}

/// Rejection of a swap because the [`MemoryStore`] has no capacity left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the memory store is full")]
pub struct MemoryFull;

/// Number of shards. The first bits of an operation id select its shard, so that shards in order
/// have their ids in order.
const SHARDS: usize = 64;

/// Number of records that are removed under one lock, so that reaping does not delay claims.
const REAP_CHUNK: u32 = 64;

/// A store in the memory of its process, which ends with it.
///
/// Tests model a restart of the process in front of it by a clone of its `Arc`.
pub struct MemoryStore {
    clock: Arc<dyn Clock>,
    capacity: MemoryCapacity,
    secrets: Option<KeyRing>,
    records: AtomicUsize,
    bytes: AtomicUsize,
    shards: [Mutex<Shard>; SHARDS],
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Shard {
    records: BTreeMap<OperationId, StoredRecord>,
    /// The time from which each record may be reaped, without those that never expire.
    due: BTreeSet<(Timestamp, OperationId)>,
}

impl MemoryStore {
    /// Returns an empty store that reads `clock`.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, capacity: MemoryCapacity) -> Self {
        Self {
            clock,
            capacity,
            secrets: None,
            records: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            shards: std::array::from_fn(|_| Mutex::default()),
            entries: Mutex::default(),
        }
    }

    /// Names records by `secret`. Without one, operation ids can be guessed from keys and callers,
    /// which matters little for records that never leave the process.
    #[must_use]
    pub fn secret(self, secret: Secret) -> Self {
        self.key_ring(KeyRing::new(secret))
    }

    /// Names records by the secret of the ring that names. Nothing is sealed in memory, but the engine keeps what
    /// it keeps in a store that seals.
    #[must_use]
    pub fn key_ring(mut self, ring: KeyRing) -> Self {
        self.secrets = Some(ring);
        self
    }

    /// Returns the number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.load(Ordering::Relaxed)
    }

    /// Returns whether there are no records.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn swap_now(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let mut shard = self.shard(&swap.id);
        let now = self.clock.now();
        let found = shard.records.get(&swap.id);
        if let Some(stored) = found
            && stored.write_id == swap.write_id
        {
            return Ok(Swapped::Stored(stamped(now, stored)));
        }
        if found.map(|stored| stored.write_id) != swap.expected {
            return Ok(Swapped::Conflict(Snapshot { now, stored: found.cloned() }));
        }
        let old = found.map(size);
        let key = swap.id;
        let stored = write(now, found.map(|stored| stored.fence), swap);
        self.reserve(old, size(&stored))?;
        let stamped = stamped(now, &stored);
        shard.put(key, stored);
        Ok(Swapped::Stored(stamped))
    }

    fn load_now(&self, key: &OperationId) -> Snapshot {
        let shard = self.shard(key);
        Snapshot { now: self.clock.now(), stored: shard.records.get(key).cloned() }
    }

    fn reap_now(&self, limit: NonZeroU32) -> Reaped {
        let mut left = limit.get();
        for shard in &self.shards {
            loop {
                let chunk = left.min(REAP_CHUNK);
                let mut shard = lock(shard);
                let removed = shard.reap(self.clock.now(), chunk, |stored| self.unreserve(stored));
                left -= removed;
                if left == 0 {
                    return Reaped { removed: limit.get(), more: true };
                }
                if removed < chunk {
                    break;
                }
            }
        }
        Reaped { removed: limit.get() - left, more: false }
    }

    fn page_now(&self, after: Option<OperationId>, limit: NonZeroU32) -> Page {
        let limit = limit.get() as usize;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut records = Vec::new();
        for shard in &self.shards[after.as_ref().map_or(0, index)..] {
            for (key, stored) in lock(shard).records.range((from, Bound::Unbounded)) {
                if records.len() == limit {
                    return Page { now: self.clock.now(), records, more: true };
                }
                records.push((*key, Ok(stored.clone())));
            }
        }
        Page { now: self.clock.now(), records, more: false }
    }

    fn shard(&self, key: &OperationId) -> MutexGuard<'_, Shard> {
        lock(&self.shards[index(key)])
    }

    /// Reserves capacity for `new` bytes that replace `old`. A smaller record always fits.
    fn reserve(&self, old: Option<usize>, new: usize) -> Result<(), StoreError> {
        let full = || StoreError::unavailable(MemoryFull);
        let Some(old) = old else {
            add(&self.records, 1, self.capacity.records).ok_or_else(full)?;
            let limit = self.capacity.bytes - self.capacity.bytes / 8;
            return add(&self.bytes, new, limit).ok_or_else(|| {
                self.records.fetch_sub(1, Ordering::Relaxed);
                full()
            });
        };
        if new <= old {
            self.bytes.fetch_sub(old - new, Ordering::Relaxed);
            return Ok(());
        }
        add(&self.bytes, new - old, self.capacity.bytes).ok_or_else(full)
    }

    fn unreserve(&self, stored: &StoredRecord) {
        self.records.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(size(stored), Ordering::Relaxed);
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock), MemoryCapacity::default())
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("records", &self.records)
            .field("bytes", &self.bytes)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

// Each future does all its work in one poll: dropped before that poll it has done nothing, dropped
// after it everything.
impl Store for MemoryStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move { self.swap_now(swap) })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move { Ok(self.load_now(key)) })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move { Ok(self.reap_now(limit)) })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            secrets: self.secrets.as_ref(),
            notify: None,
            shared: false,
            schedule: Some(self),
        }
    }
}

impl Inspect for MemoryStore {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move { Ok(self.page_now(after, limit)) })
    }
}

impl Shard {
    fn put(&mut self, key: OperationId, stored: StoredRecord) {
        let after = reapable_from(&stored);
        self.due.extend(after.map(|due| (due, key)));
        if let Some(before) = self.records.insert(key, stored)
            && let Some(due) = reapable_from(&before)
            && after != Some(due)
        {
            self.due.remove(&(due, key));
        }
    }

    fn reap(&mut self, now: Timestamp, limit: u32, removing: impl Fn(&StoredRecord)) -> u32 {
        let mut removed = 0;
        while removed < limit
            && let Some((due, key)) = self.due.first().copied()
            && due <= now
        {
            self.due.remove(&(due, key));
            if let Some(stored) = self.records.remove(&key) {
                removing(&stored);
            }
            removed += 1;
        }
        removed
    }
}

/// Locks a shard. A panic under the lock leaves a whole map: each change of it is the last
/// operation.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn index(key: &OperationId) -> usize {
    usize::from(key.as_bytes()[0]) * SHARDS / 256
}

fn write(now: Timestamp, last: Option<FencingToken>, swap: Swap) -> StoredRecord {
    let Draft { record, stamp, lease, keep } = swap.draft;
    StoredRecord {
        write_id: swap.write_id,
        fence: match (stamp, last) {
            (Stamp::Keep, Some(last)) => last,
            (Stamp::Keep | Stamp::NextFence, last) => FencingToken::next(last, now),
        },
        lease_until: now.after(lease),
        keep_until: keep.map(|keep| now.after(keep)),
        record,
    }
}

const fn stamped(now: Timestamp, stored: &StoredRecord) -> Stamped {
    Stamped { now, fence: stored.fence, lease_until: stored.lease_until }
}

fn reapable_from(stored: &StoredRecord) -> Option<Timestamp> {
    stored.keep_until.map(|until| until.after(stored.record.terms.lease))
}

/// Returns the size of a stored record with its key, its entry in the order of reaping, and its
/// data on the heap.
fn size(stored: &StoredRecord) -> usize {
    let Record { scheme, checkpoint, notes, state, .. } = &stored.record;
    let length = |bytes: &Option<bytes::Bytes>| bytes.as_ref().map_or(0, bytes::Bytes::len);
    let outcome = match state {
        RecordState::Done(outcome) | RecordState::Unknown { seen: Some(outcome), .. } => {
            outcome.bytes().len() + outcome.format().len()
        }
        RecordState::InFlight | RecordState::Released | RecordState::Unknown { seen: None, .. } => {
            0
        }
    };
    2 * size_of::<(Timestamp, OperationId)>()
        + size_of::<StoredRecord>()
        + scheme.as_str().len()
        + length(checkpoint)
        + length(&notes.description)
        + length(&notes.decision)
        + outcome
}

fn add(counter: &AtomicUsize, more: usize, limit: usize) -> Option<()> {
    let fit = |now: usize| now.checked_add(more).filter(|sum| *sum <= limit);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fit).ok().map(drop)
}
