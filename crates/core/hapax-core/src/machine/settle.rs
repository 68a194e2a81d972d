//! The time after the end of an execution in which its request may still execute.

use std::time::Duration;

use crate::clock::Timestamp;
use crate::record::{Extensions, Record, RecordState};
use crate::store::StoredRecord;

/// Time after a lease and a settle time in which a request may still execute: a process that was frozen
/// goes on, and clocks differ.
pub const SETTLE_MARGIN: Duration = Duration::from_secs(30);

/// Returns the time until which the request of an undecided record may still execute; `None` if it has
/// ended, or if the record is that of a saga, whose log has the times of its steps.
///
/// It is the end of the lease, the [settle time](crate::Extensions::settle) of the record and
/// [`SETTLE_MARGIN`] later. An execution that ended by itself has ended at once, unless it had no
/// response of another system to which it sends.
#[must_use]
pub fn may_execute_until(stored: &StoredRecord) -> Option<Timestamp> {
    sent_until(stored).map(|until| until.after(SETTLE_MARGIN))
}

/// Returns the same time without [`SETTLE_MARGIN`]: until then the request may be on its way.
pub(super) fn sent_until(stored: &StoredRecord) -> Option<Timestamp> {
    let Record { scheme, lease_id, extensions, state, .. } = &stored.record;
    if scheme.is_saga() {
        return None;
    }
    let settle = extensions.settle();
    let (from, settle) = match (state, extensions.ended(*lease_id)) {
        (RecordState::InFlight, _) => (stored.lease_until, settle.unwrap_or_default()),
        (RecordState::Unknown { seen: None, .. }, Some(ended)) => {
            (ended, settle.unwrap_or_default())
        }
        (RecordState::Unknown { seen: None, .. }, None) => (stored.lease_until, settle?),
        (
            RecordState::Unknown { seen: Some(_), .. }
            | RecordState::Done(_)
            | RecordState::Released,
            _,
        ) => return None,
    };
    Some(from.after(settle))
}

/// Returns the extensions of a record about which a hook is called: the write sets a lease, that of the
/// call, and the end of the execution must stay known.
pub(super) fn with_end(stored: &StoredRecord) -> Extensions {
    let Record { lease_id, state, extensions, .. } = &stored.record;
    let (lease_id, mut extensions) = (*lease_id, extensions.clone());
    // An execution that ended by itself, and sends to no other system, is over.
    let may_go_on = *state == RecordState::InFlight || extensions.settle().is_some();
    if may_go_on && extensions.ended(lease_id).is_none() {
        extensions.set_ended(lease_id, stored.lease_until);
    }
    extensions
}
