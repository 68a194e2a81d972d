//! The seam: what every store supplies, and all it supplies.
//!
//! A store is one compare-and-swap on a [`WriteId`], and a clock. It decides nothing: what to write
//! is decided by [`step`](crate::machine::step), once, for all stores.
//!
//! 1. A swap whose tag the cell already bears counts as [`Swapped::Stored`]. So a swap whose
//!    reply was lost is resolved by sending *the same swap* again. Loading the cell instead
//!    proves nothing: the first copy may still be on its way.
//! 2. A cell whose `keep_until` has passed is still returned, with its tag, until it is reaped.
//! 3. `now`, fences and deadlines come from the store's clock, so that the clocks of its callers
//!    need not agree.
//! 4. Dropping a returned future abandons the reply, never half a write.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::record::{FencingToken, Record, WriteId};
use crate::scope::OperationId;
use crate::secret::Secret;

/// A boxed future, as the store's methods return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a store holds under one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredRecord {
    /// Names the write that left it like this.
    pub write_id: WriteId,
    /// The fencing token of its last execution.
    pub fence: FencingToken,
    /// Until when its owner, or whoever is asking about it, holds it.
    pub lease_until: Timestamp,
    /// From when on it counts as absent; `None` for never.
    pub keep_until: Option<Timestamp>,
    /// What is remembered.
    pub record: Record,
}

/// A cell as a store saw it, and when.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The store's clock at that moment.
    pub now: Timestamp,
    /// What it held, if anything.
    pub stored: Option<StoredRecord>,
}

/// Whether a write issues a fencing token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stamp {
    /// The cell keeps its fence.
    Keep,
    /// The store issues the next one: [`FencingToken::next`] of the cell's, if there is a cell.
    NextFence,
}

/// What to write. Times are relative: the store adds its own clock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Draft {
    /// What is to be remembered.
    pub record: Record,
    /// Whether it is a new execution.
    pub stamp: Stamp,
    /// How long the lease lasts from now.
    pub lease: Duration,
    /// How long to keep it from now; `None` for ever.
    pub keep: Option<Duration>,
}

/// A conditional write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Swap {
    /// Which cell.
    pub id: OperationId,
    /// The tag the cell must bear; `None`: there must be no cell.
    pub expected: Option<WriteId>,
    /// The tag it will bear.
    pub write_id: WriteId,
    /// What to write.
    pub draft: Draft,
}

/// What became of a swap.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swapped {
    /// The cell bears the swap's tag: it was written now, or by an earlier copy of the same swap.
    Stored(Stamped),
    /// The cell bears another tag than expected; this is the truth.
    Conflict(Snapshot),
}

/// What the store stamped on a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamped {
    /// The store's clock when it answered.
    pub now: Timestamp,
    /// The cell's fence.
    pub fence: FencingToken,
    /// Until when the lease lasts.
    pub lease_until: Timestamp,
}

/// What a round of reaping did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reaped {
    /// Cells removed.
    pub removed: u32,
    /// Whether there may be more that are due.
    pub more: bool,
}

/// A place where cells are kept. For implementors; callers use `Idempotency`.
///
/// Every implementation passes `hapax_testkit::suite`.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Writes `swap.draft` if the cell bears `swap.expected`, or answers what it found.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] promises that this copy of the swap was not applied and never
    /// will be; [`StoreError::Ambiguous`] that it may have been, or may yet be.
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>>;

    /// What the cell holds, durably.
    ///
    /// # Errors
    /// Any [`StoreError`]; nothing was changed.
    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>>;

    /// Removes at most `limit` cells whose `keep_until` passed at least one lease
    /// (`record.terms.lease`) ago.
    ///
    /// # Errors
    /// Any [`StoreError`]; what was removed until then stays removed.
    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>>;

    /// Returns what the engine takes from the store besides records. A wrapper returns that of the
    /// store within: under another secret a retry would not find its record.
    fn capabilities(&self) -> Capabilities<'_>;
}

/// Capabilities of a store besides its records. The default: none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Capabilities<'a> {
    /// The secret that names records: `Idempotency` derives operation ids with it.
    pub secret: Option<&'a Secret>,
    /// Notifications of writes by other processes.
    pub notify: Option<&'a dyn Notify>,
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

/// A store whose cells operators can page through.
pub trait Inspect: Store {
    /// At most `limit` cells in ascending order of key, after `after`; the page's `now` says when.
    /// Cells past their keep are among them. A damaged cell is an error of its own, not the page's.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>>;

    /// Takes a step of a walk over the undecided cells, those that are unknown or whose lease lapsed,
    /// in the order that costs the store least. Looks at about `limit` cells, and may visit others than
    /// undecided ones. The walk begins at `Cursor::default()`, goes on at the place that a step returns,
    /// and ends where there is none.
    ///
    /// A cell that stays undecided, and that nobody writes, from the beginning of the walk to its end is
    /// visited at least once.
    ///
    /// # Errors
    /// Any [`StoreError`]; some cells of the step may have been visited.
    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        scan_by_pages(self, from, limit, visit)
    }
}

/// Takes a step of a walk as [`Inspect::scan`] does, in order of key, and visits every cell.
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

/// A function that a walk calls with each cell and the store's clock.
pub type Visitor<'a> =
    &'a mut (dyn FnMut(&OperationId, &Result<StoredRecord, StoreError>, Timestamp) + Send + 'a);

/// A store that tells when a cell was written, by whichever process: copies that wait for the
/// first then need not wait for the next look.
///
/// A hint, nothing more. It may come for nothing, late or not at all, so whoever waits looks from
/// time to time all the same; and what is true is what [`Store::load`] says afterwards.
pub trait Notify: fmt::Debug + Send + Sync + 'static {
    /// Resolves when the cell may have been written since the call, not since the first poll.
    /// Dropping the future ends the watch.
    fn written<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, ()>;
}

/// A store whose records can commit together with a caller's own writes, in one transaction of the
/// database they share.
pub trait Transactional<Tx: ?Sized>: Store {
    /// Writes `swap.draft` as part of `tx`, if the cell bears `swap.expected`, which is some tag:
    /// claims commit by themselves. The record is there once `tx` has committed, and only then.
    ///
    /// To be the last statement before COMMIT: until then the row is locked. It takes part in the
    /// transaction itself, not in a part of it that could be rolled back alone: within a savepoint
    /// it is an error.
    ///
    /// Unless it answers [`Swapped::Stored`], `tx` can only be rolled back: the store sees to it.
    /// A cell that bears `swap.tag` already is a conflict here: the transaction that wrote it has
    /// committed, and what the caller did in this one would be done twice.
    ///
    /// # Errors
    /// Any [`StoreError`]; `tx` must be rolled back. Dropped before it resolves, likewise.
    fn swap_in<'a>(
        &'a self,
        tx: &'a mut Tx,
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, StoreError>>;
}

/// A page of cells.
#[derive(Debug)]
pub struct Page {
    /// The store's clock.
    pub now: Timestamp,
    /// Keys and what they hold.
    pub records: Vec<(OperationId, Result<StoredRecord, StoreError>)>,
    /// Whether there are keys after the last one.
    pub more: bool,
}

/// A place in a walk over the cells of a store, in the store's own words; by default its beginning.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Cursor(Vec<u8>);

impl Cursor {
    /// Returns the place that these bytes name to the store.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// Returns its bytes; none for the beginning.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A step of a walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScanStep {
    /// The store's clock.
    pub now: Timestamp,
    /// The place where the walk goes on; `None` at its end.
    pub next: Option<Cursor>,
}

type Source = Box<dyn Error + Send + Sync>;

/// Why a store gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It did not happen and will not.
    #[error("the store is unavailable, nothing was written")]
    Unavailable(#[source] Source),
    /// It may have happened, or may yet: send the same swap again.
    #[error("the store gave no answer, the write may have happened")]
    Ambiguous(#[source] Source),
    /// What is stored is damaged, or not ours to read.
    #[error("the stored record cannot be read")]
    Corrupt(#[source] Source),
}

impl StoreError {
    /// [`StoreError::Unavailable`] because of `source`.
    pub fn unavailable(source: impl Into<Source>) -> Self {
        Self::Unavailable(source.into())
    }

    /// [`StoreError::Ambiguous`] because of `source`.
    pub fn ambiguous(source: impl Into<Source>) -> Self {
        Self::Ambiguous(source.into())
    }

    /// [`StoreError::Corrupt`] because of `source`.
    pub fn corrupt(source: impl Into<Source>) -> Self {
        Self::Corrupt(source.into())
    }
}
