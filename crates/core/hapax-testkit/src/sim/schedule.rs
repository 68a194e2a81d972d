//! What a world is made of.

use hapax_core::OnUnknown;
use hapax_core::exchange::{ClaimExchange, Executions, Ownership, WriteExchange};
use hapax_core::store::{Swap, Swapped};

use super::ledger::{KeyModel, SwapPurpose};
use crate::SeededEntropy;

/// What happens at some time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum SimEvent {
    /// A copy of a swap reaches the store.
    Arrive {
        message: u32,
    },
    /// A store that checks and then sets does the second.
    Set {
        message: u32,
    },
    /// A reply reaches its process.
    Reply {
        exchange: u32,
        message: u32,
        reply: u32,
    },
    /// The store refuses a copy.
    Reject {
        exchange: u32,
        sends: u32,
    },
    /// A sender has waited long enough.
    Timeout {
        exchange: u32,
        message: u32,
        sends: u32,
    },
    /// A load reaches the store.
    Look {
        looker: LoadOrigin,
    },
    /// What it found reaches its process; none when the load failed.
    Looked {
        looker: LoadOrigin,
        seen: u32,
    },
    /// A worker goes on with its operation.
    Go {
        worker: u8,
        operation: u32,
        what: WorkerStep,
    },
    /// An effect reaches the system downstream.
    Effect {
        execution: u32,
    },
    /// A question reaches the hook.
    Inquire {
        exchange: u32,
    },
    /// Its answer reaches the process.
    Verdict {
        exchange: u32,
        said: u32,
    },
    Crash {
        worker: u8,
    },
    Pause {
        worker: u8,
        micros: u64,
    },
    Step {
        micros: i64,
    },
    Reap,
    Operator,
    /// An operator has made up its mind.
    Resolve {
        operator: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum LoadOrigin {
    Operator {
        operator: u32,
    },
    Waiter {
        worker: u8,
        operation: u32,
    },
    /// Only by [`Bug::ResolvesByLoading`].
    Carrier {
        exchange: u32,
        message: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum WorkerStep {
    Start,
    Renew,
    Send,
    End,
}

/// A conversation with the store.
#[derive(Debug)]
pub(super) struct SimExchange {
    pub(super) process: u8,
    pub(super) epoch: u32,
    pub(super) operation: u32,
    pub(super) key: u8,
    pub(super) message: u32,
    pub(super) sends: u32,
    /// A definite answer is still to come.
    pub(super) waiting: bool,
    /// Some copy may have landed, or may yet.
    pub(super) ambiguous: bool,
    /// Nobody waits for it any more.
    pub(super) background: bool,
    pub(super) over: bool,
    pub(super) talk: ExchangeKind,
}

#[derive(Debug)]
pub(super) enum ExchangeKind {
    Claim(SimClaim),
    Write(SimWrite),
}

#[derive(Debug)]
pub(super) struct SimClaim {
    pub(super) claiming: ClaimExchange,
    pub(super) request: u8,
    pub(super) scheme: u8,
    pub(super) policy: OnUnknown,
    pub(super) lease: u64,
    pub(super) retention: u64,
    pub(super) hook: Option<(u64, u64)>,
    /// What landed of it last.
    pub(super) execution: Option<u32>,
    /// The version that its question left, and the execution it was about.
    pub(super) asked: Option<(u32, u32)>,
}

#[derive(Debug)]
pub(super) struct SimWrite {
    pub(super) writing: WriteExchange,
    pub(super) execution: u32,
    pub(super) meaning: SwapPurpose,
    /// Some swap of it was written.
    pub(super) landed: bool,
    /// Kept until the end of an execution is written: it is under way until then.
    pub(super) ownership: Option<Ownership>,
}

/// A swap and what it is for.
#[derive(Debug)]
pub(super) struct SwapMessage {
    pub(super) swap: Swap,
    pub(super) exchange: u32,
    pub(super) meaning: SwapPurpose,
    pub(super) landed: bool,
    /// The store has answered a copy of it.
    pub(super) answered: bool,
    /// The execution that it let in.
    pub(super) execution: Option<u32>,
}

/// What the store said, and what was true then.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) swapped: Swapped,
    pub(super) truth: KeyModel,
}

#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) epoch: u32,
    /// The executions under way in this process; two workers share one.
    pub(super) executions: Executions,
    pub(super) paused_until: u64,
    pub(super) left: u32,
    pub(super) tries: u32,
    /// Counts operations: what was scheduled for an earlier one is void.
    pub(super) operation: u32,
    pub(super) key: u8,
    /// What was true when it last looked.
    pub(super) seen: KeyModel,
    pub(super) activity: Activity,
}

#[derive(Debug, Default)]
pub(super) enum Activity {
    #[default]
    Idle,
    Talking,
    Working(Box<SimExecution>),
    Over,
}

/// An execution under way.
#[derive(Debug)]
pub(super) struct SimExecution {
    pub(super) ownership: Ownership,
    pub(super) execution: u32,
    /// The claim it came of.
    pub(super) exchange: u32,
    pub(super) lease: u64,
    pub(super) renewing: Option<u32>,
    /// Its end waits for the renewal.
    pub(super) ending: bool,
    pub(super) lost: bool,
    pub(super) checkpoints: u16,
}

/// The schedule's choices.
#[derive(Debug)]
pub(super) struct Dice(pub(super) SeededEntropy);

/// Grants and tags, apart from the choices so that neither shifts the other.
#[derive(Debug)]
pub(super) struct Ids(pub(super) SeededEntropy);

impl Default for Dice {
    fn default() -> Self {
        Self(SeededEntropy::new(0))
    }
}

impl Default for Ids {
    fn default() -> Self {
        Self(SeededEntropy::new(0))
    }
}
