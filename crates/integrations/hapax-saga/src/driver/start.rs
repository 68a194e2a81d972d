//! The start of a saga: its entry and its first log are written at the same time.

use std::pin::pin;
use std::time::Duration;

use hapax_core::StoreError;
use hapax_core::store::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{Driver, RunEnd};
use crate::log::Blob;
use crate::run::{Call, TryEnd};

/// Time for which the insertion of an entry waits for a try that is being prepared, to share its commit.
const PREPARED_SOON: Duration = Duration::from_millis(10);

/// The entry of a saga that starts, to be inserted while its first log is saved.
///
/// A crash leaves one of these, with nothing called and the start not accepted, unless both are there:
/// 1. A record without a log, with or without an entry, as after a crash right after the claim.
/// 2. A log without the entry. No process finds it, until a start takes it over. That one reads that the
///    entry does not exist. A call comes after the insertion, and the entry of a log is removed only
///    after the outcome is recorded, so that nothing was called: the try of the log has not begun, also
///    of a step that must not be repeated, and no execution has crashed. It inserts the same entry again.
/// 3. Both: the try may have been called, as after any crash between a save and its call.
///
/// An owner that took over a record without a log inserts its entry first, since the owner before may have
/// been accepted with another entry: beside a log, every entry but that of the log is removed.
///
/// A later save of the same execution has [`Log::inserted`], so that a start reads the schedule only
/// if the first execution crashed in its first step. A duplicate is accepted at case 3 only. So an
/// owner whose insertion has failed must not release the record: the entry may exist, and a duplicate may
/// have been accepted. It parks the log, with the try not begun.
pub(crate) struct Starting {
    pub(crate) insert: BoxFuture<'static, Result<(), StoreError>>,
    /// Gets the end of the insertion.
    pub(crate) inserted: oneshot::Sender<Result<(), StoreError>>,
}

impl Starting {
    /// Inserts the entry. Returns whether it is inserted.
    async fn insert(self) -> bool {
        let ended = self.insert.await;
        let is_inserted = ended.is_ok();
        // A caller that has gone does not listen.
        let _ = self.inserted.send(ended);
        is_inserted
    }
}

/// Inserts the entry of a saga that starts; true if there is none to insert.
pub(super) async fn insert(starting: Option<Starting>) -> bool {
    match starting {
        Some(starting) => starting.insert().await,
        None => true,
    }
}

impl Driver {
    /// Inserts the entry of a saga that starts. Returns whether the entry is inserted.
    pub(super) async fn insert_first(&mut self) -> bool {
        let is_inserted = insert(self.starting.take()).await;
        if is_inserted {
            self.run.inserted();
        }
        is_inserted
    }

    /// Saves the log, and inserts the entry of a saga that starts. The value is the reason of a
    /// cancellation.
    pub(super) async fn save_soon(&mut self) -> Result<Option<String>, RunEnd> {
        let starting = self.starting.take();
        // The entry is encoded already, so that one follows the other into the same commit.
        let (saved, is_inserted) = tokio::join!(self.save(), insert(starting));
        let cancelled = saved.ok_or(RunEnd::Dropped)?;
        if !is_inserted {
            return Err(self.not_accepted());
        }
        self.run.inserted();
        Ok(cancelled)
    }

    /// Prepares a try. The entry of a saga that starts is inserted meanwhile if that takes long: the
    /// caller of the start waits for it.
    pub(super) async fn prepare_soon(
        &mut self,
        call: Call,
    ) -> Result<Result<Blob, TryEnd>, RunEnd> {
        let mut starting = self.starting.take();
        let (prepared, is_inserted) = {
            let mut prepare = pin!(self.prepare(call));
            match &starting {
                None => (prepare.await, true),
                Some(_) => match timeout(PREPARED_SOON, prepare.as_mut()).await {
                    Ok(prepared) => (prepared, true),
                    Err(_) => tokio::join!(prepare, insert(starting.take())),
                },
            }
        };
        self.starting = starting;
        if !is_inserted {
            return Err(self.not_accepted());
        }
        if self.starting.is_none() {
            self.run.inserted();
        }
        prepared
    }

    /// Ends a run of which nothing was called.
    fn not_accepted(&mut self) -> RunEnd {
        self.run.interrupt(self.clock.now());
        RunEnd::Parked
    }
}
