use std::fmt;
use std::ops::{AddAssign, Index};

macro_rules! counts {
    ($(#[$doc:meta])* $name:ident: $($(#[$of:meta])* $count:ident = $words:literal,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name {
            $($(#[$of])* $count,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$count,)*];

            /// Returns a name for the report.
            #[must_use]
            pub const fn words(self) -> &'static str {
                match self {
                    $(Self::$count => $words,)*
                }
            }
        }
    };
}

counts! {
    /// Faults that are injected. A run asserts that each happened often.
    Fault:
    /// A request never reaches the store.
    RequestLost = "requests lost",
    /// A reply never reaches its process.
    ReplyLost = "replies lost",
    /// A request arrives after its sender gave up waiting.
    RequestDelayed = "requests delayed",
    /// A reply arrives after its receiver gave up waiting.
    ReplyDelayed = "replies delayed",
    /// A request arrives twice.
    RequestRepeated = "requests repeated",
    /// A reply arrives twice.
    ReplyRepeated = "replies repeated",
    /// The store answers that it is unavailable.
    Unavailable = "requests rejected by the store",
    /// A load gets no reply.
    LoadFailed = "loads failed",
    /// A process crashes and starts anew.
    Crash = "crashes",
    /// A process pauses for longer than a lease.
    PausePastLease = "pauses past a lease",
    /// A process pauses for longer than any retention.
    PausePastRetention = "pauses past every retention",
    /// Records that were due are removed.
    Purge = "purges",
    /// The store's clock jumps forward past a lease.
    ClockForward = "clock steps forward",
    /// The store's clock jumps back.
    ClockBack = "clock steps back",
    /// An operator decides that an operation happened.
    OperatorHappened = "operators: happened",
    /// An operator decides that an operation did not happen.
    OperatorDidNot = "operators: did not happen",
    /// An operator uses force although the lease is live.
    OperatorForced = "operators: forced",
    /// A claim finds a record with another policy.
    MixedPolicies = "claims on another policy",
    /// A claim is given up while it is unknown whether it landed.
    ClaimGivenUp = "claims given up unknown",
    /// A completion is deferred while its process continues.
    CompletionDeferred = "deferred completions",
    /// A renewal is given up while it is unknown whether it landed.
    RenewalGivenUp = "renewals given up unknown",
    /// A lease is dropped without a write.
    Dropped = "leases dropped",
    /// An effect reaches the system downstream after its sender's lease.
    EffectDelayed = "effects delayed",
    /// The hook's verdict comes after the timeout.
    AnswerDelayed = "verdicts delayed",
}

counts! {
    /// Results of requests. A run asserts that the simulation reaches each of them.
    Event:
    /// Swaps stored.
    Stored = "swaps stored",
    /// Swaps that were a conflict.
    Conflict = "swaps in conflict",
    /// Claims that may execute.
    Execute = "claims: execute",
    /// Executions after another of the same generation.
    Takeover = "takeovers",
    /// Claims answered with an outcome.
    Replay = "claims: replay",
    /// Claims of a redirected request, answered with its redirect.
    RedirectReplay = "claims: redirect",
    /// Claims that found a live lease.
    InFlight = "claims: in flight",
    /// Claims of another request.
    Mismatch = "claims: mismatch",
    /// Claims that must not execute again.
    Unknown = "claims: unknown",
    /// Claims hashed again.
    Rehash = "claims: hashed again",
    /// Claims that called the hook.
    Ask = "claims: reconcile",
    /// Exchanges that gave up.
    Contended = "exchanges contended",
    /// Verdicts that it happened.
    VerdictHappened = "hook: happened",
    /// Verdicts that it did not happen.
    VerdictDidNotHappen = "hook: did not happen",
    /// Verdicts that the hook cannot say.
    VerdictCannotSay = "hook: cannot say",
    /// Renewals recorded.
    Renewed = "renewals recorded",
    /// Ends of executions recorded.
    Recorded = "ends recorded",
    /// Redirects recorded.
    Redirected = "redirects recorded",
    /// Owners that were superseded.
    Lost = "owners: lost",
    /// Owners whose record is gone.
    Gone = "owners: gone",
    /// Claims that landed after they were given up, and were released.
    Released = "claims landed late, released",
    /// Operators' decisions that were rejected or came too late.
    OperatorRejected = "operators: rejected",
    /// Operators' decisions that were rejected, as the request may still execute.
    OperatorEarly = "operators: too early",
    /// Calls of the hook without a retry.
    Called = "reconcilers: called",
    /// Calls without a retry that were rejected, as the request may still execute or another call was just now.
    CalledEarly = "reconcilers: too early",
    /// Calls without a retry about a record that has changed, or that none is made about.
    NotCalled = "reconcilers: not called",
    /// Operations that happened, by a verdict without a retry.
    SettledHappened = "reconcilers: happened",
    /// Operations that did not happen, by a verdict without a retry.
    SettledDidNot = "reconcilers: did not happen",
    /// Operations that stay unknown after a call without a retry.
    NotSettled = "reconcilers: cannot say",
    /// Verdicts without a retry about a record that changed meanwhile.
    SettledLate = "reconcilers: changed meanwhile",
    /// Effects downstream.
    Effect = "effects",
    /// Effects that a fence rejected.
    EffectRejected = "effects rejected by their fence",
    /// Copies of a claim that landed on a purged key.
    Stray = "copies of old claims on purged keys",
}

/// Counts of faults and events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally {
    /// Schedules counted.
    pub schedules: u64,
    faults: [u64; Fault::ALL.len()],
    events: [u64; Event::ALL.len()],
}

impl Default for Tally {
    fn default() -> Self {
        Self { schedules: 0, faults: [0; Fault::ALL.len()], events: [0; Event::ALL.len()] }
    }
}

impl Tally {
    pub(super) const fn fault(&mut self, fault: Fault) {
        self.faults[fault as usize] += 1;
    }

    pub(super) const fn event(&mut self, event: Event) {
        self.events[event as usize] += 1;
    }

    /// Returns the rarest fault, and its count.
    #[must_use]
    pub fn rarest(&self) -> (Fault, u64) {
        let count = |fault: &Fault| self[*fault];
        let rarest = Fault::ALL.iter().copied().min_by_key(count).unwrap_or(Fault::RequestLost);
        (rarest, self[rarest])
    }
}

impl Index<Fault> for Tally {
    type Output = u64;

    fn index(&self, fault: Fault) -> &u64 {
        &self.faults[fault as usize]
    }
}

impl Index<Event> for Tally {
    type Output = u64;

    fn index(&self, event: Event) -> &u64 {
        &self.events[event as usize]
    }
}

impl AddAssign<&Self> for Tally {
    fn add_assign(&mut self, other: &Self) {
        self.schedules += other.schedules;
        self.faults.iter_mut().zip(&other.faults).for_each(|(sum, more)| *sum += more);
        self.events.iter_mut().zip(&other.events).for_each(|(sum, more)| *sum += more);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:>12}  schedules", self.schedules)?;
        writeln!(f, "faults")?;
        for fault in Fault::ALL {
            writeln!(f, "{:>12}  {}", self[*fault], fault.words())?;
        }
        writeln!(f, "events")?;
        for event in Event::ALL {
            writeln!(f, "{:>12}  {}", self[*event], event.words())?;
        }
        Ok(())
    }
}
