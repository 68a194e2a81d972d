//! Fingerprint and outcome in the record of a message.

use hapax_core::{Fingerprint, FingerprintScheme, OperationRequest, Outcome};

use super::process::Finish;
use crate::message::Message;

/// Name of the format of outcomes.
const FORMAT: &str = "message/1";

/// The request of a message: its payload is the fingerprint.
pub(super) struct MessageRequest<'a>(pub(super) &'a Message);

impl OperationRequest for MessageRequest<'_> {
    #[allow(clippy::unreachable, reason = "the name is far shorter than the limit")]
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new(FORMAT).unwrap_or_else(|_| unreachable!("the name is short"))
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (scheme.as_str() == FORMAT)
            .then(|| Fingerprint::builder("hapax 1 message").field(&self.0.payload).finish())
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
