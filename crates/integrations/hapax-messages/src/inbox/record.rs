//! Fingerprint and outcome in the record of a message.

use hapax_core::store::StoredRecord;
use hapax_core::{
    Fingerprint, FingerprintScheme, OperationRequest, Outcome, RecordState, SETTLE_MARGIN,
    Timestamp,
};

use super::disposition::Finish;
use crate::dead_letter::DeadLetterReason;
use crate::message::Message;

/// Name of the format of outcomes.
const FORMAT: &str = "message/1";

/// The request of a message, by the fingerprint of its payload.
#[derive(Debug)]
pub(super) struct MessageRequest(Fingerprint);

impl MessageRequest {
    pub(super) fn new(message: &Message) -> Self {
        Self(Fingerprint::builder("hapax 1 message").field(&message.payload).finish())
    }
}

impl OperationRequest for MessageRequest {
    #[allow(clippy::unreachable, reason = "the name is far shorter than the limit")]
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new(FORMAT).unwrap_or_else(|_| unreachable!("the name is short"))
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (scheme.as_str() == FORMAT).then_some(self.0)
    }
}

/// Beginning of the outcome of a message that is a dead letter.
const PARKED: &str = "parked: ";

pub(super) fn outcome(finish: Finish) -> Outcome {
    match finish {
        Finish::Handled | Finish::Duplicate => Outcome::new(FORMAT, "handled"),
        Finish::Parked(reason) => Outcome::new(FORMAT, format!("{PARKED}{reason}")),
    }
}

pub(super) fn is_parked(outcome: &Outcome) -> bool {
    outcome.format() == FORMAT && outcome.bytes().starts_with(PARKED.as_bytes())
}

pub(super) fn may_execute_until(stored: &StoredRecord) -> Option<Timestamp> {
    let RecordState::Done(end) = &stored.record.state else {
        return hapax_core::may_execute_until(stored);
    };
    let is_parked = |reason| *end == outcome(Finish::Parked(reason));
    // Its attempts ended without a response, or with their processes; the record, afterwards. One that was
    // parked behind another message may have been tried before that.
    let has_failed = is_parked(DeadLetterReason::Attempts)
        || stored.record.attempt > 1 && is_parked(DeadLetterReason::Blocked);
    if !has_failed {
        return None;
    }
    let settle = stored.record.extensions.settle()?;
    Some(stored.lease_until.after(settle.saturating_add(SETTLE_MARGIN)))
}
