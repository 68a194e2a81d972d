//! Requests that wait for the writer, and their answers.

use futures_channel::oneshot;
use hapax_core::StoreError;
use hapax_core::store::Reaped;

use crate::batch::{RawSwapped, SwapJob};
use crate::record::SealedRead;
use crate::schedule::batch::{EntryChange, EntryJob};

/// A request for the writer.
#[derive(Debug)]
pub(crate) enum Job {
    Write(WriteJob),
    Reap { limit: u32, reply: oneshot::Sender<Result<Reaped, StoreError>> },
}

/// A write of a record, or of an entry of the schedule.
#[derive(Debug)]
pub(crate) enum WriteJob {
    Swap(SwapJob),
    Entry(EntryJob),
}

impl WriteJob {
    /// Sends an error as the answer. A caller that is gone gets none.
    pub(crate) fn fail(self, error: StoreError) {
        match self {
            Self::Swap(job) => drop(job.reply.send(Err(error))),
            Self::Entry(job) => drop(job.reply.send(Err(error))),
        }
    }
}

/// A write that was applied, with its answer, which is not sent yet.
#[derive(Debug)]
pub(crate) enum AppliedJob {
    Swap(SwapJob, Result<RawSwapped, StoreError>),
    Entry(EntryJob, Result<bool, StoreError>),
}

impl AppliedJob {
    /// Sends the answer. A caller that is gone gets none.
    pub(crate) fn answer(self) {
        match self {
            Self::Swap(job, answer) => drop(job.reply.send(answer)),
            Self::Entry(job, answer) => drop(job.reply.send(answer)),
        }
    }

    /// Returns whether it inserts an entry.
    pub(crate) const fn is_insertion(&self) -> bool {
        matches!(self, Self::Entry(EntryJob { change: EntryChange::Insert { .. }, .. }, _))
    }

    /// Returns the job without its answer.
    pub(crate) fn into_job(self) -> WriteJob {
        match self {
            Self::Swap(job, _) => WriteJob::Swap(job),
            Self::Entry(job, _) => WriteJob::Entry(job),
        }
    }

    /// Returns the bytes of the record that was written, and of the one that was found.
    pub(crate) fn record_bytes(&self) -> usize {
        match self {
            Self::Swap(
                job,
                Ok(RawSwapped::Conflict { stored: Some(SealedRead::Record(found)), .. }),
            ) => job.sealed.len() + found.sealed.len(),
            Self::Swap(job, _) => job.sealed.len(),
            Self::Entry(..) => 0,
        }
    }
}
