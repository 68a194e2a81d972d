//! Claims in a quarantine.

use std::time::Duration;

use super::draft::{again, first, keep_unfinished};
use super::{ClaimEvent, HookTiming, Standing, Step, standing};
use crate::clock::Timestamp;
use crate::record::{OnUnknown, RecordState};
use crate::store::{Snapshot, StoredRecord};

/// Time by which a key may have been made later than now, since the clocks of clients differ. A later time is none:
/// the key only looks like one with a time.
const CLOCKS_DIFFER: Duration = Duration::from_secs(300);

/// Time until a claim may find out whether there is a quarantine.
const UNREAD: Duration = Duration::from_secs(1);

/// The quarantine of a claim: the store may have lost the records of keys that were made before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClaimQuarantine {
    /// Its start, by the store's clock. All records that may be lost are older. [`Timestamp::MAX`] if it is not known
    /// whether there is one.
    pub since: Timestamp,
    /// Its end; [`Timestamp::MAX`] if it is not known.
    pub until: Timestamp,
    /// The time at which the client made the key, if the key contains it.
    pub made_at: Option<Timestamp>,
}

impl ClaimQuarantine {
    /// Returns whether the store may have lost a record of the operation, of which it has this one or none.
    #[must_use]
    pub fn may_lack_record(&self, seen: &Snapshot) -> bool {
        match standing(seen) {
            Standing::Absent => self.may_lack(seen.now, None),
            Standing::Released(stored) => self.may_lack(seen.now, Some(stored)),
            Standing::Live(_)
            | Standing::Lapsed(_)
            | Standing::Unknown(..)
            | Standing::Done(..) => false,
        }
    }

    /// Returns the time from `now` to its end, or in which it may be found out whether there is one.
    pub(crate) fn remaining(&self, now: Timestamp) -> Duration {
        match self.until {
            Timestamp::MAX => UNREAD,
            until => until.since(now),
        }
    }

    fn may_lack(&self, now: Timestamp, released: Option<&StoredRecord>) -> bool {
        let is_later = |made: Timestamp| self.since < made && made <= now.after(CLOCKS_DIFFER);
        let is_new = self.made_at.is_some_and(is_later)
            || released.is_some_and(|stored| {
                stored.fence.issued_at() < self.since && self.since <= stored.lease_until
            });
        now < self.until && !is_new
    }
}

/// Returns the time from which the hook may be called about a record that is older than the quarantine of its
/// operation: a later execution under `lease`, whose record may be lost, may have sent a request just before the start.
/// `now` if that cannot be.
pub(super) fn after_lost_requests(
    now: Timestamp,
    stored: &StoredRecord,
    quarantine: Option<ClaimQuarantine>,
    lease: Duration,
    hook: HookTiming,
) -> Timestamp {
    let is_older = |it: &ClaimQuarantine| stored.fence.issued_at() < it.since;
    match quarantine.filter(is_older).map(|it| it.since) {
        None => now,
        // It is not known whether one has begun.
        Some(Timestamp::MAX) => now.after(UNREAD),
        Some(since) => since.after(lease).after(hook.after),
    }
}

/// Returns the step of a claim that finds no record, or a released one, in a quarantine; `None` if it executes.
///
/// A record that was released before the start counts as absent: the execution that followed may be lost. One that
/// was claimed before and released afterwards, by its owner or an operator, is as it was left. One that was claimed
/// afterwards may be that of a claim which was withdrawn because of the quarantine.
///
/// Under `Reconcile` the hook is called once the requests of an execution that began before the quarantine have
/// ended. The record that announces the call is that of an operation whose outcome is unknown.
pub(super) fn quarantined(
    now: Timestamp,
    released: Option<&StoredRecord>,
    event: &ClaimEvent<'_>,
) -> Option<Step> {
    let quarantine = event.quarantine.filter(|quarantine| quarantine.may_lack(now, released))?;
    let remaining = quarantine.remaining(now);
    let hook = event.hook.filter(|_| event.terms.on_unknown == OnUnknown::Reconcile);
    let Some(hook) = hook else { return Some(Step::Quarantined { remaining }) };
    let from = quarantine.since.after(event.terms.lease).after(hook.after);
    if now < from || !event.may_reconcile {
        let remaining = remaining.min(from.since(now).max(hook.timeout));
        return Some(Step::Quarantined { remaining });
    }
    let mut draft = match released {
        Some(stored) => again(stored, event),
        None => first(event, 1),
    };
    draft.record.state = RecordState::Unknown { seen: None, reconciling: true };
    draft.lease = hook.timeout;
    draft.keep = keep_unfinished(&event.terms).map(|keep| keep.saturating_add(hook.timeout));
    Some(Step::Reconcile(draft))
}
