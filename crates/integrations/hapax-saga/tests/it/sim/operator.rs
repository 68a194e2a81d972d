//! Decisions of operators about stuck sagas.

use hapax_saga::SagaDecision;
use hapax_saga::log::{Log, LogTime};

use super::flows::blob;

/// Returns the decision about a step of which it is known whether it happened.
pub(crate) fn resolve(effect: Option<u64>) -> SagaDecision {
    effect.map_or(SagaDecision::DidNotHappen { force: true }, |effect| {
        SagaDecision::Happened(blob(effect))
    })
}

/// Returns the word for the counts.
pub(crate) const fn word(decision: &SagaDecision) -> &'static str {
    match decision {
        SagaDecision::Retry => "retry",
        SagaDecision::Happened(_) => "resolve: happened",
        SagaDecision::DidNotHappen { .. } => "resolve: did not happen",
        SagaDecision::Skip => "skip",
        SagaDecision::Abort => "abort",
    }
}

/// Applies a decision to a log.
pub(crate) fn decide(log: &mut Log, decision: &SagaDecision, reason: &str, at: LogTime) {
    log.decide(decision, "operator", reason, at).expect("the decision applies");
}
