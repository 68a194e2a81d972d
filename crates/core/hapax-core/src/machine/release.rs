//! Releases: ends of executions that did not happen here, with or without a redirect.

use std::time::Duration;

use super::{ClaimEvent, Step, keep_unfinished};
use crate::fingerprint::{Fingerprint, FingerprintScheme};
use crate::record::{OnUnknown, Outcome, Record, RecordState, Redirect};
use crate::store::{Draft, Stamp};

/// Returns the fingerprint of the request by this scheme, if it has been computed.
pub(super) fn fingerprint_by<'a>(
    scheme: &FingerprintScheme,
    event: &ClaimEvent<'a>,
) -> Option<&'a Fingerprint> {
    if scheme == event.scheme {
        return Some(event.fingerprint);
    }
    let rehashed = event.rehashed.iter().find(|(rehashed, _)| rehashed == scheme);
    rehashed.map(|(_, fingerprint)| fingerprint)
}

/// Returns the replay of the redirect of this request, or the scheme by which one has to be compared;
/// `None` if the request was not redirected.
pub(super) fn redirect_of(record: &Record, event: &ClaimEvent<'_>) -> Option<Step> {
    record.extensions.redirects().into_iter().find_map(|redirect| {
        match fingerprint_by(&redirect.scheme, event) {
            None => Some(Step::Rehash(redirect.scheme)),
            Some(fingerprint) => {
                (*fingerprint == redirect.fingerprint).then_some(Step::Replay(redirect.outcome))
            }
        }
    })
}

/// Returns the released record with a redirect of its request.
pub(super) fn redirected(record: &Record, outcome: &Outcome, keep: Duration) -> Draft {
    let Record { scheme, fingerprint, .. } = record;
    let outcome = outcome.clone();
    let redirect = Redirect { scheme: scheme.clone(), fingerprint: *fingerprint, outcome };
    let mut record = record.clone();
    record.extensions.add_redirect(redirect);
    released(&record, keep)
}

/// Returns the released record.
pub(super) fn released(record: &Record, keep: Duration) -> Draft {
    // A redirect that expires before its request is retried would be a mismatch with the request that
    // executed elsewhere.
    let redirects = record.extensions.has_redirects().then_some(record.terms.retention);
    let keep = keep.max(redirects.unwrap_or_default());
    Draft {
        record: Record { checkpoint: None, state: RecordState::Released, ..record.clone() },
        stamp: Stamp::Keep,
        lease: Duration::ZERO,
        keep: Some(record.terms.lease.max(keep)),
    }
}

/// Returns the record as it was before a claim that has executed nothing.
pub(super) fn withdrawn(record: &Record, keep: Duration) -> Draft {
    let record = Record { attempt: record.attempt.saturating_sub(1), ..record.clone() };
    // Under `Reconcile` a hook has decided about the earlier owner; under `Block` there is no
    // takeover.
    if record.is_takeover() && record.terms.on_unknown == OnUnknown::Reexecute {
        // The earlier owner crashed, and nothing that happened since changes that.
        let keep = keep_unfinished(&record.terms);
        return Draft { record, stamp: Stamp::Keep, lease: Duration::ZERO, keep };
    }
    released(&record, keep)
}
