//! Facts of which the ledger consists.

use hapax_core::{LeaseId, OnUnknown};

/// A broken promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromiseViolation {
    /// Name of the promise.
    pub promise: &'static str,
    /// Description of how it was broken.
    pub what: &'static str,
}

pub(super) type Checked = Result<(), PromiseViolation>;

pub(super) const fn ensure(holds: bool, promise: &'static str, what: &'static str) -> Checked {
    if holds { Ok(()) } else { Err(PromiseViolation { promise, what }) }
}

/// A time that never comes.
pub(super) const NEVER: u64 = u64::MAX;

/// Time by which clocks and frozen processes may exceed a settle time.
const MARGIN: u64 = 30_000_000;

/// The outcome by which each request is redirected.
pub(super) type Redirects = [Option<u16>; 2];

/// State of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Absent,
    Held,
    Unknown,
    Done,
    Released,
}

/// Facts about a key. Times are those of the store's clock, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyModel {
    pub(super) phase: Phase,
    /// Index of the last execution that was admitted.
    pub(super) execution: u32,
    pub(super) generation: u32,
    /// The strictest policy of the executions of this generation.
    pub(super) strict: OnUnknown,
    pub(super) request: u8,
    /// End of the owner's lease, or of the reconcile request in progress.
    pub(super) lease_until: u64,
    pub(super) reconciling: bool,
    pub(super) keep_until: u64,
    /// Lease and retention of the terms.
    pub(super) lease: u64,
    pub(super) retention: u64,
    /// The longest settle time of the executions of this generation.
    pub(super) settle: Option<u64>,
    /// When the last execution lapsed or was abandoned.
    pub(super) ended: u64,
    /// True if it lapsed.
    pub(super) lapsed: bool,
    pub(super) attempts: u32,
    pub(super) checkpoint: Option<u16>,
    pub(super) outcome: u16,
    /// Outcome that an owner saw before it abandoned the operation.
    pub(super) seen_outcome: Option<u16>,
    /// Outcomes of the redirects, by request.
    pub(super) redirects: Redirects,
    /// Number of writes.
    pub(super) version: u32,
    /// Latest time of the clock since the last write: a step back does not undo a lapse.
    pub(super) latest: u64,
    /// Time of the clock when these facts were read.
    pub(super) clock: u64,
    pub(super) highest_fence: u64,
    /// True after a copy of an old swap restored an old write id on a purged key. Other old swaps
    /// that expect that write id can then land too, without an execution.
    pub(super) echo: bool,
}

impl Default for KeyModel {
    fn default() -> Self {
        Self::ABSENT
    }
}

impl KeyModel {
    pub(super) const ABSENT: Self = Self {
        phase: Phase::Absent,
        execution: 0,
        generation: 0,
        strict: OnUnknown::Reexecute,
        request: 0,
        lease_until: 0,
        reconciling: false,
        keep_until: NEVER,
        lease: 0,
        retention: 0,
        settle: None,
        ended: 0,
        lapsed: false,
        attempts: 0,
        checkpoint: None,
        outcome: 0,
        seen_outcome: None,
        redirects: [None; 2],
        version: 0,
        latest: 0,
        clock: 0,
        highest_fence: 0,
        echo: false,
    };

    pub(super) const fn expired(&self) -> bool {
        self.clock >= self.keep_until
    }

    pub(super) const fn was_expired(&self) -> bool {
        self.latest >= self.keep_until
    }

    pub(super) const fn live(&self) -> bool {
        matches!(self.phase, Phase::Held) && self.clock < self.lease_until
    }

    pub(super) const fn was_lapsed(&self) -> bool {
        self.latest >= self.lease_until
    }

    /// Returns the time until which the request of the last execution may still execute; zero if it is over.
    pub(super) fn may_execute_until(&self) -> u64 {
        match self.sent_until() {
            0 => 0,
            until => until + MARGIN,
        }
    }

    /// Returns the same time without the margin.
    pub(super) fn sent_until(&self) -> u64 {
        let ended = match self.phase {
            Phase::Held => self.lease_until,
            // Its owner ended by itself, and had a response or sends no request to another system.
            Phase::Unknown if !self.lapsed && self.settle.is_none() => return 0,
            Phase::Unknown if self.seen_outcome.is_none() => self.ended,
            _ => return 0,
        };
        ended + self.settle.unwrap_or(0)
    }

    /// Returns the redirect of a request, while the record is there.
    pub(super) fn redirect(&self, request: u8) -> Option<u16> {
        self.redirects[usize::from(request)].filter(|_| !self.expired())
    }

    /// Returns whether the record has no owner and no outcome.
    pub(super) const fn vacant(&self) -> bool {
        matches!(self.phase, Phase::Absent | Phase::Released)
    }
}

/// An execution that was admitted: its claim landed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelExecution {
    pub(super) key: u8,
    pub(super) exchange: u32,
    pub(super) generation: u32,
    pub(super) lease_id: LeaseId,
    pub(super) record_life: LeaseId,
    pub(super) fence: u64,
    pub(super) attempt: u32,
    pub(super) checkpoint: Option<u16>,
    pub(super) lease: u64,
    pub(super) takeover: bool,
    /// True once its claimer was answered to execute.
    pub(super) told: bool,
    pub(super) effect: Effect,
    /// True if it landed after its claimer got another answer.
    pub(super) stray: bool,
    /// True if its lease was dropped without a write, as in a crash, or if its record is as a crash
    /// left it, because a takeover was withdrawn.
    pub(super) dropped: bool,
    /// Process in which it is in progress.
    pub(super) running: Option<u8>,
    /// The hook that its claim describes, if that may decide about it.
    pub(super) hook: Option<u8>,
}

/// Effects of a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Generation {
    pub(super) effects: u8,
    /// True if it may have only one.
    pub(super) one: bool,
    /// True once it was released because its hook denied it: it has no further effect.
    pub(super) denied: bool,
}

/// Progress of an execution's effect towards the system downstream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    None,
    Sent,
    Applied,
    Rejected,
}

/// Verdict of a hook.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SimVerdict {
    Happened(u16),
    DidNotHappen,
    CannotSay,
}

/// Purpose of a swap, as its sender intends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SwapPurpose {
    Execute {
        /// True for the first execution of a generation.
        anew: bool,
        attempt: u32,
        /// Version of the record for which a hook answered that it did not happen.
        asked: Option<u32>,
    },
    /// Extends a claim of the same sender that landed.
    Own,
    Announce {
        after: u64,
        timeout: u64,
    },
    Conclude {
        said: SimVerdict,
        asked: u32,
    },
    Renew {
        lease: u64,
    },
    Checkpoint(u16),
    Complete {
        outcome: u16,
        retention: Option<u64>,
    },
    Abandon {
        seen_outcome: Option<u16>,
    },
    Release {
        keep: u64,
    },
    Redirect {
        outcome: u16,
        keep: u64,
    },
    Withdraw {
        keep: u64,
    },
    /// A call of the hook without a retry.
    Call {
        reconciler: u32,
        fence: u64,
        policy: OnUnknown,
        after: u64,
        timeout: u64,
        pause: u64,
    },
    /// Its conclusion; `asked` is the version that the call left.
    Settle {
        said: SimVerdict,
        asked: u32,
    },
    Operator {
        fence: u64,
        force: bool,
        forget: bool,
        outcome: Option<u16>,
    },
}

/// Sender of a write, and its terms.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwapSender {
    pub(super) exchange: u32,
    /// Process of the sender.
    pub(super) process: u8,
    /// Execution of the sender, for an owner's writes.
    pub(super) execution: u32,
    pub(super) request: u8,
    pub(super) policy: OnUnknown,
    pub(super) lease: u64,
    pub(super) retention: u64,
    pub(super) settle: Option<u64>,
    /// The hook that a claim describes, if that may decide about its execution.
    pub(super) hook: Option<u8>,
    /// True if a copy of this swap was written before.
    pub(super) again: bool,
}
