//! The quarantines of an engine, as a process read them from the store.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::claim::ClaimError;
use super::idempotency::{EngineState, Idempotency};
use crate::clock::Timestamp;
use crate::machine::ClaimQuarantine;
use crate::store::{Snapshot, StoreError};

/// Longest time until a rejected claim may be repeated: an operator may end a quarantine earlier.
const RETRY: Duration = Duration::from_secs(60);

/// A time after a restore of the store in which keys without a record do not execute, since the record may be lost.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Quarantine {
    /// The route whose operations it is limited to, by its name in metrics; `None` for all operations.
    pub route: Option<String>,
    /// The start, by the store's clock.
    pub since: Timestamp,
    /// The end, by the store's clock.
    pub until: Timestamp,
}

/// The quarantines of an engine, which its clones share.
///
/// The process reads them from the store and [replaces](Self::replace) them here: `StoreRegister` of `hapax-operators`
/// does. An engine for which nothing does has none. Times are those of [`time`](Self::time).
#[derive(Clone, Copy, Debug)]
pub struct Quarantines<'a>(&'a EngineState);

#[derive(Debug, Default)]
pub(super) struct QuarantineState {
    /// Each with its end by the clock of this process.
    in_force: Vec<(Quarantine, Duration)>,
    /// The time until which the quarantines count as those of the store; `None` for ever.
    valid_until: Option<Duration>,
    /// True if the last write of the register failed.
    has_failed: bool,
}

/// The quarantine of a claim, before it is known when its client made the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AppliedQuarantine {
    /// Unknown: the process has not written the register in time.
    Unread,
    InForce {
        since: Timestamp,
        until: Timestamp,
    },
}

impl Idempotency {
    /// Returns the quarantines.
    #[must_use]
    pub fn quarantines(&self) -> Quarantines<'_> {
        self.inner.quarantines()
    }
}

impl EngineState {
    pub(super) const fn quarantines(&self) -> Quarantines<'_> {
        Quarantines(self)
    }
}

impl Quarantines<'_> {
    /// Returns the time since the engine was built. It goes on while the machine is suspended.
    #[must_use]
    pub fn time(&self) -> Duration {
        self.0.lease_clock.now()
    }

    /// Replaces the quarantines by those of the store, which were read just now, at the time `now` of the store's clock.
    pub fn replace(&self, quarantines: Vec<Quarantine>, now: Timestamp) {
        let read_at = self.time();
        let in_force = quarantines.into_iter().filter(|it| now < it.until);
        let with_end = |it: Quarantine| {
            let end = read_at.saturating_add(it.until.since(now));
            (it, end)
        };
        let in_force = in_force.map(with_end).collect();
        self.state().in_force = in_force;
    }

    /// Makes a quarantine of a route apply to all operations if `quarantines` has one with the same start and end and
    /// no route. Holds until the next [`replace`](Self::replace).
    pub fn widen(&self, quarantines: &[Quarantine]) {
        let mut state = self.state();
        let times = |it: &Quarantine| (it.since, it.until);
        for (quarantine, _) in &mut state.in_force {
            let is_wide = |it: &Quarantine| it.route.is_none() && times(it) == times(quarantine);
            if quarantines.iter().any(is_wide) {
                quarantine.route = None;
            }
        }
    }

    /// Sets the time until which the quarantines count as those of the store; `None` for ever, which is the default.
    /// From then on no key without a record executes, since a quarantine may have begun.
    pub fn set_valid_until(&self, until: Option<Duration>) {
        let mut state = self.state();
        (state.valid_until, state.has_failed) = (until, false);
    }

    /// Records that the register was not written. Once the time of [`set_valid_until`](Self::set_valid_until) has
    /// passed, a claim without a record fails as in an outage of the store.
    pub fn note_failure(&self) {
        self.state().has_failed = true;
    }

    /// Records that the store answers, although the register may not be written: there is no outage.
    pub fn note_answer(&self) {
        self.state().has_failed = false;
    }

    /// Ends the time until which the quarantines count as those of the store.
    pub fn expire(&self) {
        self.set_valid_until(Some(self.time()));
    }

    /// Returns the quarantines in force.
    #[must_use]
    pub fn in_force(&self) -> Vec<Quarantine> {
        let now = self.time();
        let state = self.state();
        state.in_force.iter().filter(|(_, end)| now < *end).map(|(it, _)| it.clone()).collect()
    }

    /// Returns whether consumers, sagas and relays pause: during a quarantine of all operations, and while it is not
    /// known whether there is one.
    #[must_use]
    pub fn pauses(&self) -> bool {
        let (now, state) = (self.time(), self.state());
        state.valid_until.is_some_and(|until| until <= now)
            || state.in_force.iter().any(|(it, end)| it.route.is_none() && now < *end)
    }

    /// Checks an operation that begins without a claim, as by a write in a transaction of the caller. `seen` is what
    /// the store has of it.
    ///
    /// # Errors
    /// [`ClaimError::Quarantined`]: the store may have lost its record.
    pub fn check(&self, seen: &Snapshot) -> Result<(), ClaimError> {
        let Some(quarantine) = self.of(None).map(|it| it.of_key(None)) else { return Ok(()) };
        match quarantine.may_lack_record(seen) {
            true => Err(rejected(quarantine.remaining(seen.now))),
            false => Ok(()),
        }
    }

    pub(super) fn of(&self, route: Option<&str>) -> Option<AppliedQuarantine> {
        {
            let state = self.state();
            if state.in_force.is_empty() && state.valid_until.is_none() {
                return None;
            }
        }
        let (now, state) = (self.time(), self.state());
        let is_unread = state.valid_until.is_some_and(|until| until <= now);
        let applies = |it: &Quarantine| it.route.is_none() || it.route.as_deref() == route;
        let mut applied = state.in_force.iter().filter(|(it, end)| applies(it) && now < *end);
        let Some((first, _)) = applied.next() else {
            return is_unread.then_some(AppliedQuarantine::Unread);
        };
        let (since, until) = applied.fold((first.since, first.until), |(since, until), (it, _)| {
            (since.max(it.since), until.max(it.until))
        });
        // A later one may have begun, which ends later.
        let (since, until) =
            if is_unread { (Timestamp::MAX, Timestamp::MAX) } else { (since, until) };
        Some(AppliedQuarantine::InForce { since, until })
    }

    /// Returns the error that the caller gets. With a quarantine an outage is [`ClaimError::Quarantined`], so that no
    /// route executes without a claim; without one, an unread register is an outage.
    pub(super) fn error_of(&self, route: Option<&str>, error: ClaimError) -> ClaimError {
        match (self.of(route), error) {
            (
                Some(AppliedQuarantine::InForce { .. }),
                ClaimError::Store(_) | ClaimError::Overloaded,
            ) => rejected(self.0.store_timeout),
            (Some(AppliedQuarantine::Unread), ClaimError::Quarantined { .. })
                if self.state().has_failed =>
            {
                StoreError::unavailable(
                    "expected a write of the register of the store within 10 s, found none: check the store",
                )
                .into()
            }
            (_, error) => error,
        }
    }

    /// Returns whether a quarantine began after a claim had been decided by `before`. A claim that was decided while the
    /// register was unread has executed nothing without a record, so no quarantine can have begun since that matters.
    pub(super) fn began_after(&self, before: Option<ClaimQuarantine>, route: Option<&str>) -> bool {
        let since = before.map(|before| before.since);
        match self.of(route) {
            None => false,
            Some(AppliedQuarantine::Unread) => since != Some(Timestamp::MAX),
            Some(AppliedQuarantine::InForce { since: began, .. }) => {
                since.is_none_or(|it| it < began)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, QuarantineState> {
        // Each change is one assignment.
        self.0.quarantines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AppliedQuarantine {
    /// Returns the quarantine of a claim whose client made the key at `made_at`, if that is known.
    pub(super) const fn of_key(self, made_at: Option<Timestamp>) -> ClaimQuarantine {
        match self {
            Self::InForce { since, until } => ClaimQuarantine { since, until, made_at },
            // Without an end: the exchange of the claim may see the record again at any later time, and must not find
            // that what it does not know has ended.
            Self::Unread => {
                ClaimQuarantine { since: Timestamp::MAX, until: Timestamp::MAX, made_at: None }
            }
        }
    }
}

/// Returns the error of a claim that may be repeated after `remaining`.
pub(super) fn rejected(remaining: Duration) -> ClaimError {
    ClaimError::Quarantined { retry_in: remaining.min(RETRY) }
}
