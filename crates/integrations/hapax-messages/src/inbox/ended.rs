//! The last execution of a message that ended, from which crashes are counted.

use bytes::Bytes;
use hapax_core::store::Snapshot;
use hapax_core::{FinishError, Lease, LeaseHandle};

use super::InboxState;
use super::disposition::{Disposition, HoldCause};
use super::process::{AFTER_OUTAGE, IN_FLIGHT_PAUSE};
use crate::id::MessageId;

/// Beginning of the checkpoint in the record of a message.
const ENDED: &[u8] = b"message/1 ended ";

/// The last execution of a message that ended, and the crashes since.
///
/// A takeover follows an execution in which the process ended, one whose outcome is unknown, or one
/// whose end the store did not accept. The record has no number of crashes, so it gets the number of
/// the last execution that ended, as a checkpoint, which takeovers keep and a release removes:
///
/// 1. After an unknown outcome it is saved before the record says so. This costs a read and a write.
/// 2. Otherwise it is saved before the handler begins in a takeover, unless the record has it. So
///    without a checkpoint only one execution has begun since the release or the first claim. A claim
///    whose process ended before the checkpoint is not counted as a crash.
/// 3. A checkpoint that the handler has saved stays: then each execution counts as a crash if the last
///    one was, as all that is known is the number of executions.
/// 4. With a hook, a takeover that is withdrawn leaves a released record: the process remembers the
///    number until it claims again.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndedAttempt {
    /// Number of the execution with the lease.
    attempt: u32,
    /// Number of the last one that ended; `None` if the lease is no takeover.
    number: Option<u32>,
    /// Whether the record has the number, or a checkpoint of the handler.
    is_noted: bool,
    /// Executions since, in each of which the process ended or was cut off.
    pub(super) crashes: u32,
}

impl EndedAttempt {
    /// Returns whether the execution is later than `ended`.
    pub(super) const fn is_after(&self, ended: u32) -> bool {
        self.attempt > ended
    }

    /// Returns whether the lease is a takeover, or was one that this process withdrew.
    pub(super) const fn is_takeover(&self) -> bool {
        self.number.is_some()
    }
}

impl EndedAttempt {
    /// Takes the number from a lease, whose handler does not find it. `ended_here` is the last execution
    /// that ended in this process, and `withdrawn` is of the claim before, if this process withdrew it.
    pub(super) fn of(lease: &mut Lease, ended_here: u32, withdrawn: Option<Self>) -> Self {
        let attempt = lease.attempt();
        let noted = lease.checkpoint().and_then(parse);
        if noted.is_some() {
            lease.take_checkpoint();
        }
        let withdrawn = withdrawn.filter(|it| it.attempt == attempt).and_then(|it| it.number);
        if !lease.is_takeover() && withdrawn.is_none() {
            return Self { attempt, number: None, is_noted: true, crashes: 0 };
        }
        let before = attempt.saturating_sub(1);
        let is_foreign = !is_free(lease.checkpoint());
        let otherwise = if is_foreign { 0 } else { before.saturating_sub(1) };
        let number = noted.or(withdrawn).unwrap_or(otherwise).max(ended_here).min(before);
        let is_noted = is_foreign || noted == Some(number);
        Self { attempt, number: Some(number), is_noted, crashes: before - number }
    }

    /// Returns the checkpoint of a record whose last execution that ended is `attempt`.
    fn checkpoint(attempt: u32) -> Bytes {
        let mut checkpoint = ENDED.to_vec();
        checkpoint.extend(attempt.to_string().into_bytes());
        checkpoint.into()
    }

    /// Saves the number in the record unless it has it. Returns `None` if it has it then; otherwise
    /// the message is held, since a crash of this execution could not be counted.
    pub(super) async fn note(self, lease: &LeaseHandle) -> Option<Disposition> {
        let number = self.number.filter(|_| !self.is_noted)?;
        match lease.save(Self::checkpoint(number)).await {
            Ok(()) => None,
            Err(FinishError::Pending) => Some(Disposition::Held(AFTER_OUTAGE, HoldCause::Store)),
            // Another process took over.
            Err(_) => Some(Disposition::Held(IN_FLIGHT_PAUSE, HoldCause::InFlight)),
        }
    }
}

impl InboxState {
    /// Saves in the record that the execution `attempt` of the message `id` has ended, before its
    /// outcome becomes unknown. Returns false if that fails: the next claim counts a crash if another process,
    /// or another delivery, makes it. So it does if the lease has an open transaction, because nothing is saved then.
    pub(super) async fn note_ended(
        &self,
        id: &MessageId,
        lease: &LeaseHandle,
        attempt: u32,
    ) -> bool {
        let id = self.engine.operation_id(&self.scope, &id.to_key());
        let seen = self.engine.load(&id).await;
        let Ok(Snapshot { stored: Some(stored), .. }) = seen else { return false };
        is_free(stored.record.checkpoint.as_ref())
            && lease.save(EndedAttempt::checkpoint(attempt)).await.is_ok()
    }
}

/// Returns whether a record has no checkpoint of the handler.
fn is_free(checkpoint: Option<&Bytes>) -> bool {
    checkpoint.is_none_or(|checkpoint| parse(checkpoint).is_some())
}

fn parse(checkpoint: &Bytes) -> Option<u32> {
    std::str::from_utf8(checkpoint.strip_prefix(ENDED)?).ok()?.parse().ok()
}
