//! Events and parts of a world.

use hapax_core::OnUnknown;
use hapax_core::exchange::{ClaimExchange, Executions, Ownership, WriteExchange};
use hapax_core::store::{Swap, Swapped};

use super::ledger::{KeyModel, SwapPurpose};
use crate::SeededEntropy;

/// An event at some time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum SimEvent {
    /// A copy of a swap reaches the store.
    Arrive {
        message: u32,
    },
    /// The second step of a store that checks and then sets.
    Set {
        message: u32,
    },
    /// A reply reaches its process.
    Reply {
        exchange: u32,
        message: u32,
        reply: u32,
    },
    /// The store rejects a copy as unavailable.
    Reject {
        exchange: u32,
        sends: u32,
    },
    /// A sender's timeout ends.
    Timeout {
        exchange: u32,
        message: u32,
        sends: u32,
    },
    /// A load reaches the store.
    Look {
        looker: LoadOrigin,
    },
    /// The result of a load reaches its process; 0 if the load failed.
    Looked {
        looker: LoadOrigin,
        seen: u32,
    },
    /// A worker continues its operation.
    Go {
        worker: u8,
        operation: u32,
        what: WorkerStep,
    },
    /// An effect reaches the system downstream.
    Effect {
        execution: u32,
    },
    /// A reconcile request reaches the hook.
    Inquire {
        exchange: u32,
    },
    /// The verdict reaches the process.
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
    /// An operator decides.
    Resolve {
        operator: u32,
    },
    /// A process lists a record, to reconcile it without a retry.
    Reconciler,
    /// The request of a reconciler reaches the hook.
    Consult {
        reconciler: u32,
    },
    /// The verdict reaches a reconciler.
    Conclude {
        reconciler: u32,
        said: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum LoadOrigin {
    Operator {
        operator: u32,
    },
    Reconciler {
        reconciler: u32,
    },
    Waiter {
        worker: u8,
        operation: u32,
    },
    /// A load that only [`Bug::ResolvesByLoading`] sends.
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

/// An exchange with the store.
#[derive(Debug)]
pub(super) struct SimExchange {
    pub(super) process: u8,
    pub(super) epoch: u32,
    pub(super) operation: u32,
    pub(super) key: u8,
    pub(super) message: u32,
    pub(super) sends: u32,
    /// True until a definite reply arrives.
    pub(super) waiting: bool,
    /// True if a copy may have landed, or may land later.
    pub(super) ambiguous: bool,
    /// True if its caller no longer waits for it.
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
    pub(super) settle: Option<u64>,
    pub(super) hook: Option<(u64, u64)>,
    /// The hook that its description names, if that may decide about its execution.
    pub(super) described: Option<u8>,
    /// The last execution to which one of its swaps was admitted.
    pub(super) execution: Option<u32>,
    /// The version that its announcement left, and the execution that it concerns.
    pub(super) asked: Option<(u32, u32)>,
}

#[derive(Debug)]
pub(super) struct SimWrite {
    pub(super) writing: WriteExchange,
    pub(super) execution: u32,
    pub(super) meaning: SwapPurpose,
    /// True once one of its swaps was written.
    pub(super) landed: bool,
    /// Ownership until the end of an execution is written: until then it is in progress.
    pub(super) ownership: Option<Ownership>,
}

/// A swap and its purpose.
#[derive(Debug)]
pub(super) struct SwapMessage {
    pub(super) swap: Swap,
    pub(super) exchange: u32,
    pub(super) meaning: SwapPurpose,
    pub(super) landed: bool,
    /// True once the store has answered a copy of it.
    pub(super) answered: bool,
    /// The execution that it admitted.
    pub(super) execution: Option<u32>,
}

/// A reply of the store, and the facts at that time.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) swapped: Swapped,
    pub(super) truth: KeyModel,
}

#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) epoch: u32,
    /// The executions in progress in this process; two workers share one process.
    pub(super) executions: Executions,
    pub(super) paused_until: u64,
    pub(super) left: u32,
    pub(super) tries: u32,
    /// Number of the operation: events that were scheduled for an earlier one are void.
    pub(super) operation: u32,
    pub(super) key: u8,
    /// Facts when it last loaded the record.
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

/// An execution in progress.
#[derive(Debug)]
pub(super) struct SimExecution {
    pub(super) ownership: Ownership,
    pub(super) execution: u32,
    /// Exchange of its claim.
    pub(super) exchange: u32,
    pub(super) lease: u64,
    pub(super) renewing: Option<u32>,
    /// True if its end waits for the renewal.
    pub(super) ending: bool,
    pub(super) lost: bool,
    pub(super) checkpoints: u16,
}

/// Random choices of the schedule.
#[derive(Debug)]
pub(super) struct Dice(pub(super) SeededEntropy);

/// Lease ids and write ids, separate from the choices so that neither shifts the other.
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
