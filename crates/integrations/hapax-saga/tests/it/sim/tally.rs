//! Counts of faults and events: a run asserts that each happened.

use std::collections::BTreeMap;

/// The counts of a number of schedules.
#[derive(Clone, Default, Debug)]
pub(crate) struct Tally {
    counts: BTreeMap<&'static str, u64>,
}

/// Faults of which every run needs some.
pub(crate) const FAULTS: &[&str] = &[
    "request lost",
    "request delayed",
    "request repeated",
    "reply lost",
    "crash",
    "shutdown",
    "freeze",
    "freeze past the lease",
    "freeze after the look at the lease",
    "freeze in a call",
    "clock step",
    "all leases lapsed",
    "record reaped",
    "call not sent",
    "call rejected",
    "call late",
    "call failed",
    "call fenced",
    "reply of a call lost",
    "undo failed",
    "step panicked",
    "result too large",
    "signal to an earlier saga",
    "process upgraded",
    "result unreadable",
    "transaction not begun",
    "COMMIT without a reply",
    "flow changed",
    "start parked",
    "start withdrawn",
    "start without reply",
    "start of another input",
    "late entry of another start",
];

/// Events of which every run needs some.
pub(crate) const EVENTS: &[&str] = &[
    "saga done",
    "saga undone",
    "saga accepted",
    "duplicate accepted",
    "transactional start",
    "start takes over",
    "entry inserted again",
    "adopted",
    "entry replaced",
    "foreign entry removed",
    "parked",
    "second look woke",
    "poll woke",
    "sender woke",
    "sender saw it run",
    "sender saw it adopted",
    "signal received",
    "signal missed",
    "cancelled",
    "renewed",
    "lease lapsed before a call",
    "run dropped",
    "retry",
    "skip",
    "abort",
    "resolve: happened",
    "resolve: did not happen",
    "stuck: exhausted",
    "stuck: crashed",
    "stuck: unknown",
    "stuck: key expired",
    "stuck: diverged",
    "stuck: too large",
    "stuck: unreadable",
    "rows committed",
    "signal rejected",
    "next saga under a key",
    "entry of another version left",
    "start of another version withdrawn",
    "transaction rolled back",
    "reconciled: happened",
    "reconciled: did not happen",
    "reconciled: cannot say",
    "undo of an unknown step",
];

impl Tally {
    pub(crate) fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (what, count) in &other.counts {
            *self.counts.entry(what).or_default() += count;
        }
    }

    pub(crate) fn of(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or_default()
    }
}
