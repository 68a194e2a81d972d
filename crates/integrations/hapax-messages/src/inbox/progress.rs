//! State of a message between its attempts in this process.

use hapax_core::Timestamp;

use super::disposition::HoldCause;
use super::ended::EndedAttempt;
use crate::dead_letter::DeadLetterReason;

/// State of a delivery that is kept while it is held.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) first_at: Timestamp,
    pub(super) attempts: u32,
    pub(super) last_error: Option<String>,
    /// The dead letter to store. The handler does not run again meanwhile.
    pub(super) parking: Option<Parking>,
    /// The dead letter that was stored before the record said so.
    pub(super) dead_letter: Option<[u8; 32]>,
    /// The last attempt that ended in this process; 0 if none did. A takeover of it follows an unknown
    /// outcome or an outage, not a death.
    pub(super) ended: u32,
    /// The claim of a suspect that was withdrawn until no other message is handled.
    pub(super) withdrawn: Option<EndedAttempt>,
    /// Calls of the hook in which it could not say, since it last could.
    pub(super) undecided: u32,
    /// Whether an attempt has ended, and the record does not say so: another delivery would count it as a crash.
    pub(super) is_unnoted: bool,
    /// Whether the last claim was a takeover, or one that was withdrawn before.
    pub(super) is_takeover: bool,
}

impl Progress {
    pub(crate) fn new(first_at: Timestamp) -> Self {
        Self { first_at, ..Self::default() }
    }

    /// Returns whether the record of a message that is held has what another delivery of it needs. Otherwise a dead
    /// letter, the number of the last attempt that ended, or a count of hook calls is only in this process.
    pub(crate) fn is_recorded(&self, cause: HoldCause) -> bool {
        matches!(cause, HoldCause::Retry | HoldCause::InFlight)
            && !self.is_unnoted
            && self.parking.is_none()
            && self.dead_letter.is_none()
            && self.undecided == 0
            && self.withdrawn.is_none_or(|it| !it.is_after(self.ended))
    }
}

/// A dead letter that is to be stored.
#[derive(Clone, Debug)]
pub(super) struct Parking {
    pub(super) reason: DeadLetterReason,
    pub(super) attempts: u32,
    pub(super) error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_with_state_that_only_this_process_has_is_not_recorded() {
        let parking =
            Parking { reason: DeadLetterReason::Rejected, attempts: 1, error: "no".to_owned() };
        let only_here = [
            Progress { is_unnoted: true, ..Progress::default() },
            Progress { parking: Some(parking), ..Progress::default() },
            Progress { dead_letter: Some([1; 32]), ..Progress::default() },
            Progress { undecided: 1, ..Progress::default() },
        ];
        for cause in [HoldCause::Retry, HoldCause::InFlight] {
            assert!(Progress::default().is_recorded(cause), "{cause:?}");
            for progress in &only_here {
                assert!(!progress.is_recorded(cause), "{cause:?}: {progress:?}");
            }
        }
        for cause in [HoldCause::Unknown, HoldCause::Store, HoldCause::DeadLetters, HoldCause::NoId]
        {
            assert!(!Progress::default().is_recorded(cause), "{cause:?}");
        }
    }
}
