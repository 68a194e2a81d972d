//! Drafts of executions and of their ends.

use std::time::Duration;

use bytes::Bytes;

use super::ClaimEvent;
use crate::record::{Extensions, LeaseId, Notes, OnUnknown, Outcome, Record, RecordState, Terms};
use crate::store::{Draft, Stamp, StoredRecord};

/// Returns the record of the first execution of a generation.
pub(super) fn first(event: &ClaimEvent<'_>, attempt: u32) -> Draft {
    let own = event.rehashed.first().map(|(scheme, fingerprint)| (scheme, fingerprint));
    let (scheme, fingerprint) = own.unwrap_or((event.scheme, event.fingerprint));
    let mut extensions = Extensions::default();
    extensions.set_settle(event.settle);
    extensions.set_described(described(event.lease_id, event.terms, event.description));
    Draft {
        record: Record {
            scheme: scheme.clone(),
            fingerprint: *fingerprint,
            lease_id: event.lease_id,
            generation: event.lease_id,
            attempt,
            terms: event.terms,
            checkpoint: None,
            notes: Notes { description: event.description.cloned(), decision: None },
            extensions,
            state: RecordState::InFlight,
        },
        stamp: Stamp::NextFence,
        lease: event.terms.lease,
        keep: keep_unfinished(&event.terms),
    }
}

/// Returns the record of the first execution after a release.
pub(super) fn again(released: &StoredRecord, event: &ClaimEvent<'_>) -> Draft {
    let mut draft = first(event, released.record.attempt.saturating_add(1));
    // It stays in the record, which shows by whose decision the key executes again.
    draft.record.notes.decision.clone_from(&released.record.notes.decision);
    let extensions = &mut draft.record.extensions;
    *extensions = released.record.extensions.of_key();
    extensions.set_settle(event.settle);
    extensions.set_described(described(event.lease_id, event.terms, event.description));
    draft
}

/// Returns the lease id of an execution whose description may name a hook that decides about it.
fn described(lease_id: LeaseId, terms: Terms, description: Option<&Bytes>) -> Option<LeaseId> {
    description.filter(|_| terms.on_unknown == OnUnknown::Reconcile).map(|_| lease_id)
}

/// Lease id, terms, settle time and description of a claim.
pub(super) type Claimer<'a> = (LeaseId, Terms, Option<Duration>, Option<&'a Bytes>);

/// Returns the record of a further execution in the same generation, under the stricter of both
/// terms.
pub(super) fn takeover(
    stored: &StoredRecord,
    (lease_id, terms, settle, description): Claimer<'_>,
) -> Draft {
    let mut extensions = stored.record.extensions.clone();
    // The request of the earlier owner may be on its way, too.
    extensions.set_settle(extensions.settle().max(settle));
    let terms = Terms { on_unknown: terms.on_unknown.max(stored.record.terms.on_unknown), ..terms };
    extensions.set_described(described(lease_id, terms, description));
    let notes = &stored.record.notes;
    Draft {
        record: Record {
            lease_id,
            attempt: stored.record.attempt.saturating_add(1),
            terms,
            extensions,
            notes: Notes {
                // An earlier one stays for operators. Its hook does not count: it is not described as that of this
                // execution.
                description: description.or(notes.description.as_ref()).cloned(),
                decision: notes.decision.clone(),
            },
            state: RecordState::InFlight,
            ..stored.record.clone()
        },
        stamp: Stamp::NextFence,
        lease: terms.lease,
        keep: keep_unfinished(&terms),
    }
}

pub(super) fn renewed(record: &Record, lease: Duration) -> Draft {
    Draft {
        record: Record { state: RecordState::InFlight, ..record.clone() },
        stamp: Stamp::Keep,
        lease,
        keep: keep_unfinished(&record.terms).map(|keep| keep.max(lease)),
    }
}

pub(super) fn done(record: &Record, outcome: &Outcome, retention: Option<Duration>) -> Draft {
    let terms = Terms { retention: retention.unwrap_or(record.terms.retention), ..record.terms };
    Draft {
        record: Record {
            terms,
            checkpoint: None,
            state: RecordState::Done(outcome.clone()),
            ..record.clone()
        },
        stamp: Stamp::Keep,
        lease: Duration::ZERO,
        keep: Some(terms.retention),
    }
}

pub(super) fn unknown(record: &Record, seen: Option<Outcome>) -> Draft {
    Draft {
        record: Record {
            state: RecordState::Unknown { seen, reconciling: false },
            ..record.clone()
        },
        stamp: Stamp::Keep,
        lease: Duration::ZERO,
        keep: keep_unfinished(&record.terms),
    }
}

/// Returns how long a record without an outcome is stored. Under `Block` and `Reconcile` it is
/// stored until an operator or a hook decides: once it expired, the next claim would execute
/// without a decision.
pub(super) fn keep_unfinished(terms: &Terms) -> Option<Duration> {
    (terms.on_unknown == OnUnknown::Reexecute).then_some(terms.retention)
}
