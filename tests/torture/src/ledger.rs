//! What happened, and whether it may have: the judge.
//!
//! 1. An answer that a client received is replayed, byte for byte, ever after.
//! 2. Nothing executes once an answer was received.
//! 3. While the gateway that began an execution lives, its key executes again only after a retryable
//!    answer.
//! 4. Under `block`, the same over all lives: no key has an effect twice, or may have.
//! 5. Under `reconcile`, no key has an effect twice.
//! 6. Fences of a key grow from execution to execution.
//! 7. `outcome-unknown` is never said after an answer, nor under `reexecute`.

use std::collections::{HashMap, HashSet};

use crate::OnUnknownPolicy;
use crate::response::UpstreamResponse;

#[cfg(test)]
mod tests;

/// More violations than this say nothing new.
const SHOWN: usize = 5;

/// Everything the upstream and the clients of one world saw.
#[derive(Debug)]
pub(crate) struct Ledger {
    policy: OnUnknownPolicy,
    /// Lives of gateways that are over.
    dead: HashSet<u64>,
    keys: HashMap<String, Log>,
    violations: Vec<String>,
    pub(crate) counts: TortureCounts,
}

/// How often what happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TortureCounts {
    /// Keys that were asked for.
    pub operations: u64,
    /// Requests that clients sent.
    pub requests: u64,
    /// Executions that the upstream began.
    pub executions: u64,
    /// Executions that took effect.
    pub effects: u64,
    /// Effects of keys that had taken effect before.
    pub duplicates: u64,
    /// Executions of a key after the first that followed no retryable answer.
    pub executed_again: u64,
    /// Of these, those whose first answer was made and never became known.
    pub answers_lost: u64,
    /// Keys a client got an answer for.
    pub answered: u64,
    /// Answers that were received again and compared.
    pub replays: u64,
    /// Keys that ended as `outcome-unknown`.
    pub unknown: u64,
    /// Times the hook said that it happened.
    pub hook_happened: u64,
    /// Times the hook said that it did not, and never will.
    pub hook_did_not: u64,
    /// Times the hook could not say.
    pub hook_cannot_say: u64,
    /// Kills of the gateway.
    pub kills: u64,
    /// Kills while the upstream was executing.
    pub kills_in_execution: u64,
    /// Kills before the gateway answered for the first time: while it opened its file.
    pub kills_in_start: u64,
}

#[derive(Debug, Default)]
struct Log {
    executions: Vec<Execution>,
    /// Fences up to this one are refused: the hook has said that they never take effect.
    refused: u64,
    answered: Option<u64>,
    /// An answer came that is not marked as a replay.
    firsthand: bool,
    unknown: bool,
}

#[derive(Debug)]
struct Execution {
    fence: u64,
    incarnation: u64,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Working,
    Effected,
    Retryable,
    Rejected,
}

/// An answer as a client got it.
#[derive(Clone, Debug)]
pub(crate) struct ClientResponse {
    pub(crate) effect: UpstreamResponse,
    /// The fence it names.
    pub(crate) fence: Option<u64>,
    /// Whether it was marked as a replay.
    pub(crate) replayed: bool,
}

impl Ledger {
    pub(crate) fn new(policy: OnUnknownPolicy) -> Self {
        let counts = TortureCounts::default();
        Self { policy, dead: HashSet::new(), keys: HashMap::new(), violations: Vec::new(), counts }
    }

    pub(crate) fn asked_for(&mut self, key: &str) {
        self.counts.operations += 1;
        self.keys.entry(key.to_owned()).or_default();
    }

    /// The upstream got a request in a gateway's life `life`.
    pub(crate) fn begin(&mut self, key: &str, fence: u64, incarnation: u64) {
        self.counts.executions += 1;
        let policy = self.policy;
        // Its gateway is dead, and its successor may have been faster.
        let dead = |incarnation: u64| self.dead.contains(&incarnation);
        let late = dead(incarnation);
        let Some(log) = self.keys.get_mut(key) else {
            return self.violation(key, "executed without having been asked for");
        };
        let mut wrong = Vec::new();
        if let Some(last) = log.executions.last() {
            let largest = log.executions.iter().map(|execution| execution.fence).max();
            if largest.is_some_and(|largest| fence <= largest) && !late {
                wrong.push(format!("fence {fence} does not follow {largest:?}"));
            }
            let clean = |execution: &Execution| execution.stage == Stage::Retryable;
            let again = !log.executions.iter().all(clean);
            if again && policy == OnUnknownPolicy::Block {
                wrong.push("executed again under block".into());
            }
            // Its own gateway's, and those of others that live, unless it comes from the past.
            let counts = |other: &&Execution| {
                other.incarnation == incarnation || !(late || dead(other.incarnation))
            };
            let mut begun = log.executions.iter().filter(counts);
            if policy != OnUnknownPolicy::Reconcile && !begun.all(clean) {
                wrong.push("executed again though the gateway lived".into());
            }
            self.counts.executed_again += u64::from(again);
            let lost = last.stage == Stage::Effected && policy == OnUnknownPolicy::Reexecute;
            self.counts.answers_lost += u64::from(lost);
        }
        if log.answered.is_some() && !late {
            wrong.push("executed after it was answered".into());
        }
        log.executions.push(Execution { fence, incarnation, stage: Stage::Working });
        for what in wrong {
            self.violation(key, &what);
        }
    }

    /// The upstream is about to take effect; `false` if it must not.
    pub(crate) fn take_effect(&mut self, key: &str, fence: u64) -> bool {
        let policy = self.policy;
        let Some(log) = self.keys.get_mut(key) else { return false };
        if fence <= log.refused {
            set(log, fence, Stage::Rejected);
            return false;
        }
        let twice = log.executions.iter().any(|execution| execution.stage == Stage::Effected);
        set(log, fence, Stage::Effected);
        self.counts.effects += 1;
        self.counts.duplicates += u64::from(twice);
        if twice && policy != OnUnknownPolicy::Reexecute {
            self.violation(key, "took effect twice");
        }
        true
    }

    /// The upstream answers that it did nothing and may be asked again.
    pub(crate) fn decline(&mut self, key: &str, fence: u64) {
        if let Some(log) = self.keys.get_mut(key) {
            set(log, fence, Stage::Retryable);
        }
    }

    /// The hook: the fence that took effect, or none, and then none up to `fence` ever will.
    pub(crate) fn reconcile(&mut self, key: &str, fence: u64) -> Option<u64> {
        let log = self.keys.get_mut(key)?;
        let mut effected = log.executions.iter().filter(|one| one.stage == Stage::Effected);
        let happened = effected.next().map(|execution| execution.fence);
        match happened {
            Some(_) => self.counts.hook_happened += 1,
            None => {
                log.refused = log.refused.max(fence);
                self.counts.hook_did_not += 1;
            }
        }
        happened
    }

    /// A client got a final answer.
    pub(crate) fn answer(&mut self, key: &str, answer: &ClientResponse) {
        let Some(log) = self.keys.get_mut(key) else { return };
        let mut wrong = Vec::new();
        match answer.fence {
            None => wrong.push("answered without an execution".into()),
            Some(fence) => {
                if answer.effect != UpstreamResponse::of(key, fence) {
                    wrong.push(format!("the answer of fence {fence} came changed"));
                }
                let made = |one: &Execution| one.fence == fence && one.stage == Stage::Effected;
                if !log.executions.iter().any(made) {
                    wrong.push(format!("answered for fence {fence}, which took no effect"));
                }
                match log.answered {
                    Some(first) if first != fence => {
                        wrong.push(format!("answered for fence {first}, then for {fence}"));
                    }
                    Some(_) => self.counts.replays += 1,
                    None => {
                        log.answered = Some(fence);
                        self.counts.answered += 1;
                    }
                }
            }
        }
        // Of copies that were sent at once, the replay may arrive first.
        if !answer.replayed && std::mem::replace(&mut log.firsthand, true) {
            wrong.push("answered twice, and neither is marked as a replay".into());
        }
        for what in wrong {
            self.violation(key, &what);
        }
    }

    /// A client was told that the outcome is unknown; `answered` says whether it, or another
    /// one, had an answer before it asked.
    pub(crate) fn unknown(&mut self, key: &str, answered: bool) {
        let policy = self.policy;
        let Some(log) = self.keys.get_mut(key) else { return };
        if policy == OnUnknownPolicy::Block && !log.unknown {
            log.unknown = true;
            self.counts.unknown += 1;
        }
        if answered {
            self.violation(key, "unknown after it was answered");
        }
        if policy == OnUnknownPolicy::Reexecute {
            self.violation(key, "unknown under reexecute");
        }
    }

    /// Whether the key was answered, and should be for ever.
    pub(crate) fn is_answered(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|log| log.answered.is_some())
    }

    /// Keys that were answered, and keys that are unknown.
    pub(crate) fn settled(&self) -> (Vec<String>, Vec<String>) {
        let having = |is: fn(&Log) -> bool| {
            let keys = self.keys.iter().filter(|(_, log)| is(log));
            keys.map(|(key, _)| key.clone()).collect()
        };
        (having(|log| log.answered.is_some()), having(|log| log.unknown))
    }

    /// A gateway was killed in its life `life`.
    pub(crate) fn killed(&mut self, incarnation: u64, was_ready: bool) {
        let working =
            |one: &Execution| one.incarnation == incarnation && one.stage == Stage::Working;
        let executing = self.keys.values().any(|log| log.executions.iter().any(working));
        self.dead.insert(incarnation);
        self.counts.kills += 1;
        self.counts.kills_in_execution += u64::from(executing);
        self.counts.kills_in_start += u64::from(!was_ready);
    }

    pub(crate) fn violation(&mut self, key: &str, what: &str) {
        if self.violations.len() < SHOWN {
            let log = self.keys.get(key).map(|log| format!("{log:?}")).unwrap_or_default();
            self.violations.push(format!("{}: {key}: {what} {log}", self.policy));
        }
    }

    /// What was counted and what was broken; to be asked once.
    pub(crate) fn verdict(&mut self) -> (TortureCounts, Vec<String>) {
        (self.counts, std::mem::take(&mut self.violations))
    }
}

fn set(log: &mut Log, fence: u64, stage: Stage) {
    let mut executions = log.executions.iter_mut().rev();
    if let Some(execution) = executions.find(|execution| execution.fence == fence) {
        execution.stage = stage;
    }
}
