//! The ledger of everything that happened, and the judge of it.
//!
//! 1. A response that a client received is replayed for ever, byte for byte.
//! 2. No execution begins after a client received a response.
//! 3. While the gateway that began an execution runs, its key executes again only after a retryable
//!    response, except under `reconcile`.
//! 4. Under `block`, rule 3 holds across all incarnations: a key executes again only after a
//!    retryable response, so that it cannot take effect twice.
//! 5. Under `reconcile`, no key takes effect twice.
//! 6. Fences of a key grow with each execution.
//! 7. No `outcome-unknown` follows a response; none occurs under `reexecute`.

use std::collections::{HashMap, HashSet};

use crate::OnUnknownPolicy;
use crate::response::UpstreamResponse;

#[cfg(test)]
mod tests;

/// Limit of violations that are shown.
const SHOWN: usize = 5;

/// Everything that the upstream and the clients of one world observed.
#[derive(Debug)]
pub(crate) struct Ledger {
    policy: OnUnknownPolicy,
    /// Incarnations of gateways that have ended.
    dead: HashSet<u64>,
    keys: HashMap<String, Log>,
    violations: Vec<String>,
    pub(crate) counts: TortureCounts,
}

/// Counts of events in one world.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TortureCounts {
    /// Keys that were requested.
    pub operations: u64,
    /// Requests that clients sent.
    pub requests: u64,
    /// Executions that the upstream began.
    pub executions: u64,
    /// Executions that took effect.
    pub effects: u64,
    /// Effects of keys that had taken effect before.
    pub duplicates: u64,
    /// Executions of a key that have an earlier execution without a retryable response.
    pub executed_again: u64,
    /// Executions under `reexecute` that follow one that took effect: its response was lost.
    pub answers_lost: u64,
    /// Keys for which a client received a response.
    pub answered: u64,
    /// Responses that were received again and compared.
    pub replays: u64,
    /// Keys that ended as `outcome-unknown`.
    pub unknown: u64,
    /// Calls of the hook that returned "it happened".
    pub hook_happened: u64,
    /// Calls of the hook that returned "it did not happen, and never will".
    pub hook_did_not: u64,
    /// Calls of the hook that returned "cannot say".
    pub hook_cannot_say: u64,
    /// Kills of the gateway.
    pub kills: u64,
    /// Kills while the upstream was executing.
    pub kills_in_execution: u64,
    /// Kills before the gateway listened: it was starting or opening its file.
    pub kills_in_start: u64,
}

#[derive(Debug, Default)]
struct Log {
    executions: Vec<Execution>,
    /// Largest fence that the hook has excluded: executions up to it never take effect.
    refused: u64,
    answered: Option<u64>,
    /// True once a response arrived that is not marked as a replay.
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

/// A response as a client received it.
#[derive(Clone, Debug)]
pub(crate) struct ClientResponse {
    pub(crate) effect: UpstreamResponse,
    /// The fence that the response names.
    pub(crate) fence: Option<u64>,
    /// True if the response is marked as a replay.
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

    /// Records that the upstream received a request from the gateway's incarnation `incarnation`.
    pub(crate) fn begin(&mut self, key: &str, fence: u64, incarnation: u64) {
        self.counts.executions += 1;
        let policy = self.policy;
        // A late request: its gateway has ended, and a successor may have executed the key already.
        let dead = |incarnation: u64| self.dead.contains(&incarnation);
        let late = dead(incarnation);
        let Some(log) = self.keys.get_mut(key) else {
            return self.violation(key, "executed, but no client requested it");
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
            // Executions that rule 3 concerns: those of the same gateway, and those of other
            // gateways that still run, unless this request is late.
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

    /// Records that the upstream is about to take effect; returns false if the hook has excluded
    /// it.
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

    /// Records that the upstream did nothing and answers that a retry may execute.
    pub(crate) fn decline(&mut self, key: &str, fence: u64) {
        if let Some(log) = self.keys.get_mut(key) {
            set(log, fence, Stage::Retryable);
        }
    }

    /// Answers the hook: returns the fence that took effect. Otherwise returns `None`, and no
    /// execution up to `fence` will ever take effect.
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

    /// Records that a client received a final response.
    pub(crate) fn answer(&mut self, key: &str, answer: &ClientResponse) {
        let Some(log) = self.keys.get_mut(key) else { return };
        let mut wrong = Vec::new();
        match answer.fence {
            None => wrong.push("answered without an execution".into()),
            Some(fence) => {
                if answer.effect != UpstreamResponse::of(key, fence) {
                    wrong.push(format!("the response of fence {fence} is changed"));
                }
                let made = |one: &Execution| one.fence == fence && one.stage == Stage::Effected;
                if !log.executions.iter().any(made) {
                    wrong.push(format!("got the response of fence {fence}, which took no effect"));
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
        // Of duplicates that were sent at once, the replay may arrive first.
        if !answer.replayed && std::mem::replace(&mut log.firsthand, true) {
            wrong.push("answered twice, and neither is marked as a replay".into());
        }
        for what in wrong {
            self.violation(key, &what);
        }
    }

    /// Records that a client received `outcome-unknown`. `answered` is true if any client had
    /// received a response to the key before this request.
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

    /// Returns whether a client received a response to the key, which must then be replayed for
    /// ever.
    pub(crate) fn is_answered(&self, key: &str) -> bool {
        self.keys.get(key).is_some_and(|log| log.answered.is_some())
    }

    /// Returns the keys that have a response, and the keys that are unknown.
    pub(crate) fn settled(&self) -> (Vec<String>, Vec<String>) {
        let having = |is: fn(&Log) -> bool| {
            let keys = self.keys.iter().filter(|(_, log)| is(log));
            keys.map(|(key, _)| key.clone()).collect()
        };
        (having(|log| log.answered.is_some()), having(|log| log.unknown))
    }

    /// Records a kill of the gateway's incarnation `incarnation`.
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

    /// Returns the counts, and takes the violations; call it once.
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
