//! What a world is made of.

use hapax::OnUnknown;
use hapax::exchange::{ClaimExchange, Executions, Ownership, WriteExchange};
use hapax::store::{Swap, Swapped};

use super::truth::{Meaning, Truth};
use crate::SeededEntropy;

/// What happens at some time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Happening {
    /// A copy of a swap reaches the store.
    Arrive {
        letter: u32,
    },
    /// A store that checks and then sets does the second.
    Set {
        letter: u32,
    },
    /// A reply reaches its process.
    Reply {
        conv: u32,
        letter: u32,
        reply: u32,
    },
    /// The store refuses a copy.
    Reject {
        conv: u32,
        sends: u32,
    },
    /// A sender has waited long enough.
    Timeout {
        conv: u32,
        letter: u32,
        sends: u32,
    },
    /// A load reaches the store.
    Look {
        looker: Looker,
    },
    /// What it found reaches its process; none when the load failed.
    Looked {
        looker: Looker,
        seen: u32,
    },
    /// A worker goes on with its operation.
    Go {
        worker: u8,
        operation: u32,
        what: What,
    },
    /// An effect reaches the system downstream.
    Effect {
        tenure: u32,
    },
    /// A question reaches the hook.
    Inquire {
        conv: u32,
    },
    /// Its answer reaches the process.
    Verdict {
        conv: u32,
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
pub(super) enum Looker {
    Operator {
        operator: u32,
    },
    Waiter {
        worker: u8,
        operation: u32,
    },
    /// Only by [`Bug::ResolvesByLoading`].
    Carrier {
        conv: u32,
        letter: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum What {
    Start,
    Renew,
    Send,
    End,
}

/// A conversation with the store.
#[derive(Debug)]
pub(super) struct Conv {
    pub(super) process: u8,
    pub(super) epoch: u32,
    pub(super) operation: u32,
    pub(super) key: u8,
    pub(super) letter: u32,
    pub(super) sends: u32,
    /// A definite answer is still to come.
    pub(super) waiting: bool,
    /// Some copy may have landed, or may yet.
    pub(super) ambiguous: bool,
    /// Nobody waits for it any more.
    pub(super) background: bool,
    pub(super) over: bool,
    pub(super) talk: Talk,
}

#[derive(Debug)]
pub(super) enum Talk {
    Claim(ClaimTalk),
    Write(WriteTalk),
}

#[derive(Debug)]
pub(super) struct ClaimTalk {
    pub(super) claiming: ClaimExchange,
    pub(super) request: u8,
    pub(super) scheme: u8,
    pub(super) policy: OnUnknown,
    pub(super) lease: u64,
    pub(super) retention: u64,
    pub(super) hook: Option<(u64, u64)>,
    /// What landed of it last.
    pub(super) tenure: Option<u32>,
    /// The version that its question left, and the execution it was about.
    pub(super) asked: Option<(u32, u32)>,
}

#[derive(Debug)]
pub(super) struct WriteTalk {
    pub(super) writing: WriteExchange,
    pub(super) tenure: u32,
    pub(super) meaning: Meaning,
    /// Some swap of it was written.
    pub(super) landed: bool,
    /// Kept until the end of an execution is written: it is under way until then.
    pub(super) ownership: Option<Ownership>,
}

/// A swap and what it is for.
#[derive(Debug)]
pub(super) struct Letter {
    pub(super) swap: Swap,
    pub(super) conv: u32,
    pub(super) meaning: Meaning,
    pub(super) landed: bool,
    /// The store has answered a copy of it.
    pub(super) answered: bool,
    /// The execution that it let in.
    pub(super) tenure: Option<u32>,
}

/// What the store said, and what was true then.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) swapped: Swapped,
    pub(super) truth: Truth,
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
    pub(super) seen: Truth,
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
    pub(super) tenure: u32,
    /// The claim it came of.
    pub(super) conv: u32,
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
