//! The store trait: all that a store supplies.
//!
//! A store is one compare-and-swap on a [`WriteId`], and a clock. It decides nothing: for all
//! stores, [`step`](crate::machine::step) decides what to write.
//!
//! 1. A swap whose write id the record already has counts as [`Swapped::Stored`]. So a swap whose
//!    reply was lost is resolved by sending *the same swap* again. A load proves nothing: the first
//!    swap may still be in progress.
//! 2. A record past its `keep_until` is still returned, with its write id, until it is reaped.
//! 3. `now`, fences and deadlines come from the store's clock, so that the clocks of callers need
//!    not agree.
//! 4. A returned future that is dropped loses the reply, and never leaves half a write.

pub mod parts;

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::record::{FencingToken, Record, WriteId};
use crate::schedule::Schedule;
use crate::scope::OperationId;
use crate::secret::{KeyRing, Secret};

/// Boxed future of the store's methods.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A record with the stamps of its store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredRecord {
    /// Name of the write that left the record like this.
    pub write_id: WriteId,
    /// Fence of its last execution.
    pub fence: FencingToken,
    /// End of the lease of its owner, or of the claim that calls the hook.
    pub lease_until: Timestamp,
    /// Time from which it counts as absent; `None` for never.
    pub keep_until: Option<Timestamp>,
    /// The record.
    pub record: Record,
}

/// A stored record, or its absence, at a time of the store's clock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// Time of the snapshot.
    pub now: Timestamp,
    /// The stored record, if there is one.
    pub stored: Option<StoredRecord>,
}

/// The fence of a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stamp {
    /// The record keeps its fence.
    Keep,
    /// The store issues the next fence: [`FencingToken::next`] of the record's, if there is a
    /// record.
    NextFence,
}

/// Content of a swap. Times are relative: the store adds its clock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Draft {
    /// The record.
    pub record: Record,
    /// The fence of the write: a new execution gets the next one.
    pub stamp: Stamp,
    /// Duration of the lease from now.
    pub lease: Duration,
    /// Time from now until the record expires; `None` for never.
    pub keep: Option<Duration>,
}

/// A conditional write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Swap {
    /// Operation id of the record.
    pub id: OperationId,
    /// Write id that the record must have; `None` if there must be no record.
    pub expected: Option<WriteId>,
    /// Write id that the record gets.
    pub write_id: WriteId,
    /// Content to write.
    pub draft: Draft,
}

/// Result of a swap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swapped {
    /// The record has the swap's write id: it was written now, or when the same swap was sent
    /// before.
    Stored(Stamped),
    /// The record has another write id than expected; this is its state.
    Conflict(Snapshot),
}

/// Stamps that the store added to a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamped {
    /// Time of the reply.
    pub now: Timestamp,
    /// Fence of the record.
    pub fence: FencingToken,
    /// End of the lease.
    pub lease_until: Timestamp,
}

/// Result of a round of reaping.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reaped {
    /// Number of records removed.
    pub removed: u32,
    /// True if more records may be due.
    pub more: bool,
}

/// A store of records. For implementors; services use `Idempotency`.
///
/// Every implementation passes `hapax_testkit::suite`.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Writes `swap.draft` if the record has the write id `swap.expected`; otherwise returns the
    /// snapshot.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] promises that this swap was not applied and never will be;
    /// [`StoreError::Ambiguous`] means that it may have been, or may yet be.
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>>;

    /// Returns the stored record once it is durable.
    ///
    /// # Errors
    /// Any [`StoreError`]; nothing was changed.
    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>>;

    /// Removes at most `limit` records whose `keep_until` passed at least one lease
    /// (`record.terms.lease`) ago.
    ///
    /// # Errors
    /// Any [`StoreError`]; records that were removed until then stay removed.
    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>>;

    /// Returns what the engine takes from the store besides records. A wrapper returns that of the
    /// store within: under another secret a retry would not find its record.
    fn capabilities(&self) -> Capabilities<'_>;
}

/// Capabilities of a store besides its records. The default: none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Capabilities<'a> {
    /// The secrets. By the one that names records, `Idempotency` derives operation ids.
    pub secrets: Option<&'a KeyRing>,
    /// Notifications of writes by other processes.
    pub notify: Option<&'a dyn Notify>,
    /// True if several processes can open the store at the same time, so that services may share it. An engine
    /// over it needs a [`Namespace`](crate::Namespace).
    pub shared: bool,
    /// The schedule that the store keeps with its records.
    pub schedule: Option<&'a dyn Schedule>,
}

impl<'a> Capabilities<'a> {
    /// Returns the secret that names records.
    #[must_use]
    pub fn naming(&self) -> Option<&'a Secret> {
        self.secrets.and_then(KeyRing::naming)
    }

    /// Returns whether the store seals what it writes, so that it may be given what not everyone who reads the
    /// store may see.
    #[must_use]
    pub fn seals(&self) -> bool {
        self.secrets.is_some_and(KeyRing::seals)
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        (**self).swap(swap)
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        (**self).load(key)
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        (**self).reap(limit)
    }

    fn capabilities(&self) -> Capabilities<'_> {
        (**self).capabilities()
    }
}

/// A store whose records operators can page through.
pub trait Inspect: Store {
    /// Returns at most `limit` records in ascending order of operation id, after `after`, expired
    /// ones included. A damaged record is an error in the page, not an error of the call.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>>;

    /// Takes a step of a walk over the undecided records, those that are unknown or whose lease
    /// lapsed, in the order that costs the store least. It reads about `limit` records, and may
    /// visit others than undecided ones. The walk begins at `Cursor::default()`, continues at the
    /// cursor that a step returns, and ends without one.
    ///
    /// A record that stays undecided and is not written from the beginning of the walk to its end
    /// is visited at least once.
    ///
    /// # Errors
    /// Any [`StoreError`]; some records of the step may have been visited.
    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        scan_by_pages(self, from, limit, visit)
    }

    /// Takes a step of a walk over all records, as [`scan`](Self::scan) does over the undecided ones. With
    /// `since` it need not visit those whose [fencing token](StoredRecord::fence) was issued longer ago
    /// than that; a store may visit them.
    ///
    /// A record that exists and is not written from the beginning of the walk to its end is visited at
    /// least once. [`reap`](Store::reap) too may write records, of those that it does not remove.
    ///
    /// # Errors
    /// Any [`StoreError`]; some records of the step may have been visited.
    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        _since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        scan_by_pages(self, from, limit, visit)
    }
}

impl<S: Inspect + ?Sized> Inspect for Arc<S> {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        (**self).page(after, limit)
    }

    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        (**self).scan(from, limit, visit)
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        since: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        (**self).scan_all(from, limit, since, visit)
    }
}

/// Takes a step of a walk as [`Inspect::scan`] does, in order of operation id, and visits every record.
pub fn scan_by_pages<'a, S: Inspect + ?Sized>(
    store: &'a S,
    from: Cursor,
    limit: NonZeroU32,
    visit: Visitor<'a>,
) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
    Box::pin(async move {
        let after = <[u8; 32]>::try_from(from.as_bytes()).ok().map(OperationId::from_bytes);
        let Page { now, records, more } = store.page(after, limit).await?;
        let next = match records.last() {
            _ if !more => None,
            Some((key, _)) => Some(Cursor::new(*key.as_bytes())),
            None => Some(from),
        };
        for (key, stored) in &records {
            visit(key, stored, now);
        }
        Ok(ScanStep { now, next })
    })
}

/// Function that a walk calls with each record and the store's clock.
pub type Visitor<'a> =
    &'a mut (dyn FnMut(&OperationId, &Result<StoredRecord, StoreError>, Timestamp) + Send + 'a);

/// Notifications that a record was written, by any process, so that waiters need not wait for their
/// next poll.
///
/// A notification is a hint: it may be false, late or missing. Waiters therefore poll as well, and
/// decide only by a record that [`Store::load`] returned.
pub trait Notify: fmt::Debug + Send + Sync + 'static {
    /// Resolves when the record may have been written since the call, not since the first poll.
    /// Dropping the future ends the subscription.
    fn written<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, ()>;
}

/// A store whose records can commit together with a caller's writes, in one transaction of the
/// database that both share.
pub trait Transactional<Tx: ?Sized>: Store {
    /// Writes `swap.draft` as part of `tx` if the record has the write id `swap.expected`, which is
    /// never `None`: claims commit on their own. The record is stored once `tx` has committed, and
    /// only then.
    ///
    /// It has to be the last statement before COMMIT, because it locks the row. It takes part in
    /// the whole transaction: within a savepoint, which could be rolled back alone, it is an error.
    ///
    /// Unless the result is [`Swapped::Stored`], `tx` can only be rolled back, which the store
    /// ensures. A record that already has `swap.write_id` is a conflict here: the transaction that
    /// wrote it has committed, and the writes of this one would be made twice.
    ///
    /// # Errors
    /// Any [`StoreError`]; `tx` must be rolled back, also if the future is dropped before it
    /// resolves.
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Tx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>>;
}

/// A page of records.
#[derive(Debug)]
pub struct Page {
    /// Time of the page.
    pub now: Timestamp,
    /// Operation ids and their records.
    pub records: Vec<(OperationId, Result<StoredRecord, StoreError>)>,
    /// True if there are records after the last one.
    pub more: bool,
}

/// Position in a walk over the records of a store, in its own encoding; by default the beginning.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cursor(Vec<u8>);

impl Cursor {
    /// Returns the position that these bytes encode for the store.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// Returns the encoding; empty for the beginning.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A step of a walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScanStep {
    /// Time of the step.
    pub now: Timestamp,
    /// Position at which the walk continues; `None` at its end.
    pub next: Option<Cursor>,
}

type Source = Box<dyn Error + Send + Sync>;

/// Errors of a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The call did not happen and will not.
    #[error("the store is unavailable and nothing was written: retry when it returns")]
    Unavailable(#[source] Source),
    /// The swap may have happened, or may yet: send the same swap again.
    #[error(
        "the store gave no definite answer: the write may have been applied; send the same swap again"
    )]
    Ambiguous(#[source] Source),
    /// The stored bytes are damaged, or another secret sealed them.
    #[error(
        "the stored record is damaged, or another secret sealed it: run `hapax doctor`, and compare the secrets of all processes"
    )]
    Corrupt(#[source] Source),
}

impl StoreError {
    /// Returns [`StoreError::Unavailable`] because of `source`.
    pub fn unavailable(source: impl Into<Source>) -> Self {
        Self::Unavailable(source.into())
    }

    /// Returns [`StoreError::Ambiguous`] because of `source`.
    pub fn ambiguous(source: impl Into<Source>) -> Self {
        Self::Ambiguous(source.into())
    }

    /// Returns [`StoreError::Corrupt`] because of `source`.
    pub fn corrupt(source: impl Into<Source>) -> Self {
        Self::Corrupt(source.into())
    }
}
