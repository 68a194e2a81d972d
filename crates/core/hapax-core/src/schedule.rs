//! The schedule: the durable list of operations that are unfinished, by the time at which each is
//! due. A second trait for implementors of stores, because records have no order in time.
//!
//! 1. An entry has a key, which is an operation id and a random [`EntryId`], a queue, the time at
//!    which it is due, and a note, which is written once.
//! 2. Every method may be called again with the same arguments: after
//!    [`StoreError::Ambiguous`] that is how its result is determined. A copy of a call that was given
//!    up may be applied later. A late insert leaves an entry for an operation that has ended, a late
//!    removal finds its own entry or none, and a late [`postpone`](Schedule::postpone) finds a due time that it
//!    does not expect. One without an expected time changes the due time whenever it arrives: callers use it to
//!    make an entry due, and for times at which a late change does no harm.
//! 3. An entry is not atomic with its record. Callers insert it before the operation counts as
//!    accepted, and remove it after the record is done. So an entry may exist without need; it is never
//!    missing while an accepted operation is unfinished.
//! 4. Times come from the store's clock, as those of records.
//! 5. A returned future that is dropped loses the reply, and never leaves half a write.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::record::EntryId;
use crate::scope::OperationId;
use crate::store::{BoxFuture, StoreError};

/// The longest note, in bytes: 2 MiB.
pub const MAX_NOTE: usize = 2 << 20;

/// A schedule. For implementors; it is part of a store, see
/// [`Capabilities`](crate::store::Capabilities).
///
/// Every implementation passes `hapax_testkit::schedule`.
pub trait Schedule: fmt::Debug + Send + Sync + 'static {
    /// Inserts an entry. An entry with its key stays as it is.
    ///
    /// # Errors
    /// Any [`StoreError`]: after [`StoreError::Unavailable`] the entry was not inserted and never
    /// will be.
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Returns at most `limit` entries of `queues` that are due, earliest first, and the time until
    /// the next one.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>>;

    /// Makes an entry due `due_in` from now, which may be earlier or later than before. With `expected`
    /// it does so only if the entry is due at that time. Returns whether it was done.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>>;

    /// Removes an entry, if it exists.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Returns at most `limit` entries in ascending order of key, after `after`.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>>;

    /// Returns the queues that have entries, in order of name. May read every entry.
    ///
    /// # Errors
    /// Any [`StoreError`].
    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>>;
}

/// A schedule whose entries can be inserted together with a caller's writes, in one transaction of
/// the database that both share.
pub trait TransactionalSchedule<Tx: ?Sized>: Schedule {
    /// Inserts an entry as part of `tx`: it exists once `tx` has committed, and only then.
    ///
    /// # Errors
    /// Any [`StoreError`]; `tx` can then only be rolled back.
    fn insert_in<'a>(
        &'a self,
        tx: &'a mut Tx,
        entry: NewEntry,
    ) -> BoxFuture<'a, Result<(), StoreError>>;
}

/// Key of an entry. Several entries may have one operation id: each belongs to one insertion.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EntryKey {
    /// The operation.
    pub operation: OperationId,
    /// Random id of the insertion.
    pub id: EntryId,
}

/// An entry to insert. Its `Debug` form does not show the note.
#[derive(Clone, PartialEq, Eq)]
pub struct NewEntry {
    /// Its key.
    pub key: EntryKey,
    /// Its queue.
    pub queue: QueueName,
    /// Time from now at which it is due.
    pub due_in: Duration,
    /// Its note, at most [`MAX_NOTE`] bytes. The store seals it.
    pub note: Bytes,
}

/// An entry of a schedule. Its `Debug` form does not show the note.
#[derive(Clone, PartialEq, Eq)]
pub struct ScheduleEntry {
    /// Its key.
    pub key: EntryKey,
    /// Its queue.
    pub queue: QueueName,
    /// Time at which it is due.
    pub due: Timestamp,
    /// Its note.
    pub note: Bytes,
}

/// Result of [`Schedule::due`].
#[derive(Debug)]
pub struct DueEntries {
    /// Time of the reply.
    pub now: Timestamp,
    /// The entries; one whose note is damaged is an error here, not of the call.
    pub entries: Vec<(EntryKey, Result<ScheduleEntry, StoreError>)>,
    /// Time until a further entry of the queues is due; zero if there are more than were returned,
    /// `None` without a further entry.
    pub next_in: Option<Duration>,
}

/// A page of entries.
#[derive(Debug)]
pub struct EntryPage {
    /// Time of the page.
    pub now: Timestamp,
    /// The entries.
    pub entries: Vec<(EntryKey, Result<ScheduleEntry, StoreError>)>,
    /// True if there are entries after the last one.
    pub more: bool,
    /// Entries of other namespaces that the page leaves out: the last one, and their number. `None`
    /// in the page of a store itself.
    pub others: Option<(EntryKey, u32)>,
}

impl EntryPage {
    /// Creates the page of a store.
    #[must_use]
    pub const fn new(
        now: Timestamp,
        entries: Vec<(EntryKey, Result<ScheduleEntry, StoreError>)>,
        more: bool,
    ) -> Self {
        Self { now, entries, more, others: None }
    }

    /// Returns the key after which the next page begins; `None` after the last page. A page that leaves out
    /// entries may have none of its own before that.
    #[must_use]
    pub fn next(&self) -> Option<EntryKey> {
        let last = self.entries.last().map(|(key, _)| *key);
        last.max(self.others.map(|(key, _)| key)).filter(|_| self.more)
    }
}

/// The entries of a queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueStatus {
    /// The queue.
    pub queue: QueueName,
    /// Number of its entries.
    pub entries: u64,
    /// Time for which its first entry has been due; zero if none is.
    pub overdue: Duration,
}

impl fmt::Debug for NewEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewEntry")
            .field("key", &self.key)
            .field("queue", &self.queue)
            .field("due_in", &self.due_in)
            .field("note_bytes", &self.note.len())
            .finish()
    }
}

impl fmt::Debug for ScheduleEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScheduleEntry")
            .field("key", &self.key)
            .field("queue", &self.queue)
            .field("due", &self.due)
            .field("note_bytes", &self.note.len())
            .finish()
    }
}

/// Name of a queue: 1 to 192 characters, each visible ASCII.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueName(Arc<str>);

impl QueueName {
    /// The greatest length, in characters.
    pub const MAX_LEN: usize = 192;

    /// Creates the name.
    ///
    /// # Errors
    /// [`QueueNameError`].
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, QueueNameError> {
        let name = name.into();
        if name.is_empty() || name.len() > Self::MAX_LEN {
            return Err(QueueNameError::Length { found: name.len() });
        }
        match name.chars().find(|char| !char.is_ascii_graphic()) {
            Some(found) => Err(QueueNameError::Character { found }),
            None => Ok(Self(name)),
        }
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Errors of a [`QueueName`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueNameError {
    /// The length is out of range.
    #[error(
        "expected a queue name of 1 to {} characters, found {found}: shorten it",
        QueueName::MAX_LEN
    )]
    Length {
        /// The length, in bytes.
        found: usize,
    },
    /// A character is not allowed.
    #[error(
        "expected a queue name of visible ASCII characters, found {found:?}: use letters, digits, `-` and `.`"
    )]
    Character {
        /// The first such character.
        found: char,
    },
}

impl<S: Schedule + ?Sized> Schedule for Arc<S> {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        (**self).insert(entry)
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        (**self).due(queues, limit)
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        (**self).postpone(key, expected, due_in)
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        (**self).remove(key)
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        (**self).entries(after, limit)
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        (**self).queues()
    }
}
