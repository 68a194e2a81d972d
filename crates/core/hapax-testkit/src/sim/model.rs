//! The facts that the ledger is made of.

use hapax_core::{LeaseId, OnUnknown};

/// A broken promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromiseViolation {
    /// Which promise.
    pub promise: &'static str,
    /// How it was broken.
    pub what: &'static str,
}

pub(super) type Checked = Result<(), PromiseViolation>;

pub(super) const fn ensure(holds: bool, promise: &'static str, what: &'static str) -> Checked {
    if holds { Ok(()) } else { Err(PromiseViolation { promise, what }) }
}

/// Never.
pub(super) const NEVER: u64 = u64::MAX;

/// Where a key stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Absent,
    Held,
    Unknown,
    Done,
    Released,
}

/// What is true of a key. Times are the store's clock, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyModel {
    pub(super) phase: Phase,
    /// The last execution that was let in; an index.
    pub(super) execution: u32,
    pub(super) generation: u32,
    /// The strictest policy of the executions of this life.
    pub(super) strict: OnUnknown,
    pub(super) request: u8,
    /// Until when its owner holds it, or whoever asks about it.
    pub(super) lease_until: u64,
    pub(super) reconciling: bool,
    pub(super) keep_until: u64,
    /// Lease and retention as agreed.
    pub(super) lease: u64,
    pub(super) retention: u64,
    pub(super) attempts: u32,
    pub(super) checkpoint: Option<u16>,
    pub(super) outcome: u16,
    /// What an owner saw that gave up.
    pub(super) glimpse: Option<u16>,
    /// Counts the writes.
    pub(super) version: u32,
    /// The clock at its latest since the last write: a step back does not undo a lapse.
    pub(super) latest: u64,
    /// The clock when this was seen.
    pub(super) clock: u64,
    pub(super) highest_fence: u64,
    /// A second copy of an old swap brought an old tag back, after a purge. Other old swaps that
    /// expect that tag may land now: on nobody's work.
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
        attempts: 0,
        checkpoint: None,
        outcome: 0,
        glimpse: None,
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

    /// Nobody is known to have it.
    pub(super) const fn vacant(&self) -> bool {
        matches!(self.phase, Phase::Absent | Phase::Released)
    }
}

/// An execution that was let in: a claim that landed.
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
    /// Whether its claimer was told so, and when that lapses unless renewed.
    pub(super) told: bool,
    pub(super) effect: Effect,
    /// Landed after its claimer had been answered otherwise.
    pub(super) stray: bool,
    /// Let go without a word, as in a crash.
    pub(super) dropped: bool,
    /// The process in which it is under way.
    pub(super) running: Option<u8>,
}

/// How far the effect of an execution got in the system downstream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    None,
    Sent,
    Applied,
    Rejected,
}

/// What a verdict said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SimVerdict {
    Happened(u16),
    DidNotHappen,
    CannotSay,
}

/// What a swap is for, as its sender sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SwapPurpose {
    Execute {
        /// As the first of a life.
        anew: bool,
        attempt: u32,
        /// Because a hook said, about this version, that it did not happen.
        asked: Option<u32>,
    },
    /// To extend a claim of one's own that landed.
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
        glimpse: Option<u16>,
    },
    Release,
    Operator {
        fence: u64,
        force: bool,
        forget: bool,
        outcome: Option<u16>,
    },
}

/// Who wrote, and on what terms.
#[derive(Clone, Copy, Debug)]
pub(super) struct SwapSender {
    pub(super) exchange: u32,
    /// The process that wrote.
    pub(super) process: u8,
    /// Whose execution it is, for what holders do.
    pub(super) execution: u32,
    pub(super) request: u8,
    pub(super) policy: OnUnknown,
    pub(super) lease: u64,
    pub(super) retention: u64,
    /// A copy of this very swap was written before.
    pub(super) again: bool,
}
