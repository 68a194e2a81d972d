//! Writes about the call of a hook without a retry.

use bytes::Bytes;

use super::{Next, WriteExchange, WriteResult};
use crate::entropy::{Entropy, EntropyError};
use crate::machine::{Announcement, Event, Verdict};
use crate::record::WriteId;
use crate::scope::OperationId;
use crate::store::Snapshot;

impl WriteExchange {
    /// Begins the announcement of a call of a hook, without a retry, on a snapshot that was loaded.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn announce(
        key: OperationId,
        seen: Snapshot,
        announcement: Announcement,
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<WriteResult>), EntropyError> {
        Self::start(key, seen, Event::Announce(announcement), entropy)
    }

    /// Begins the conclusion of that call: `announced` is the write id of the announcement, and `seen` its record. A
    /// release has `note` as its decision.
    ///
    /// # Errors
    /// [`EntropyError`]; nothing was sent.
    pub fn conclude(
        key: OperationId,
        seen: Snapshot,
        announced: WriteId,
        (verdict, note): (Verdict, Option<Bytes>),
        entropy: &dyn Entropy,
    ) -> Result<(Self, Next<WriteResult>), EntropyError> {
        Self::start(key, seen, Event::Conclude { announced, verdict, note }, entropy)
    }
}
