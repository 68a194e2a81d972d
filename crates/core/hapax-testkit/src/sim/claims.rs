//! Checks that an answer to a caller was true when the store sent its reply.

use hapax_core::OnUnknown;
use hapax_core::exchange::WriteResult;

use super::ledger::{Checked, KeyModel, Ledger, NEVER, Phase, SimVerdict, SwapPurpose, ensure};

/// Answer to a claimer, in numbers.
#[derive(Clone, Copy, Debug)]
pub(super) enum ClaimAnswer {
    Replay { outcome: u16, fence: u64, expires_in: u64 },
    InFlight { remaining: u64 },
    Mismatch,
    Unknown,
}

/// Terms of a claim.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClaimContext {
    pub(super) request: u8,
    pub(super) policy: OnUnknown,
    /// Time after a lapse from which its hook may be called, if it has one.
    pub(super) hook_after: Option<u64>,
    /// The verdict of its own hook, which the store has accepted.
    pub(super) answered: Option<SimVerdict>,
    /// Process of the claimer, and the key.
    pub(super) process: u8,
    pub(super) key: u8,
}

impl Ledger {
    /// Checks an answer to a claim.
    pub(super) fn judge_claim(
        &self,
        seen: &KeyModel,
        told: ClaimAnswer,
        asker: &ClaimContext,
    ) -> Checked {
        let kept = !seen.vacant() && !seen.expired();
        let same = kept && seen.request == asker.request;
        let unfinished = matches!(seen.phase, Phase::Held | Phase::Unknown);
        let here = unfinished && self.runs_in(seen, asker.process);
        if asker.answered.is_none()
            && seen.phase != Phase::Absent
            && let Some(redirect) = seen.redirects[usize::from(asker.request)]
            && (here || !seen.expired())
        {
            return judge_redirect(seen, redirect, told);
        }
        match (told, asker.answered) {
            (ClaimAnswer::Replay { outcome, .. }, Some(SimVerdict::Happened(said))) => {
                ensure(outcome == said, "S3", "another outcome than the hook's")
            }
            (ClaimAnswer::Replay { outcome, fence, expires_in }, _) => {
                ensure(seen.request == asker.request, "S4", "the outcome of another request")?;
                ensure(same && seen.phase == Phase::Done, "S3", "replayed what is not recorded")?;
                ensure(outcome == seen.outcome, "S3", "replayed another outcome")?;
                let denied = self.denied[usize::from(outcome)];
                ensure(!denied, "S3", "replayed an outcome reported as lost")?;
                let owner = self.executions[seen.execution as usize].fence;
                ensure(fence == owner, "replay", "replayed with another fence")?;
                let rest = seen.keep_until - seen.clock;
                ensure(expires_in == rest, "replay", "wrong time of expiry")
            }
            (ClaimAnswer::InFlight { remaining }, _) => {
                // Its own process knows of the execution even if its record has lapsed, expired or
                // been purged.
                if here {
                    return ensure(seen.request == asker.request, "S4", "in flight for another");
                }
                if seen.phase == Phase::Absent && self.busy_in(asker.key, asker.process) {
                    return Ok(());
                }
                ensure(same && seen.live(), "L1", "in flight, but it has no owner")?;
                let rest = seen.lease_until - seen.clock;
                ensure(remaining == rest, "in flight", "wrong remainder of the lease")
            }
            (ClaimAnswer::Mismatch, _) => {
                let other = seen.request != asker.request;
                ensure(
                    (kept || here) && other,
                    "mismatch",
                    "rejected its own request, or a free key",
                )
            }
            (ClaimAnswer::Unknown, Some(SimVerdict::CannotSay)) => Ok(()),
            (ClaimAnswer::Unknown, _) => judge_unknown(seen, same, asker),
        }
    }

    /// Checks an answer to an owner's write, of which a swap `landed` or not.
    pub(super) fn judge_write(
        &mut self,
        seen: &KeyModel,
        execution: u32,
        meaning: SwapPurpose,
        landed: bool,
        wrote: &WriteResult,
    ) -> Checked {
        let own = self.owns(seen, execution);
        let outcome = match meaning {
            SwapPurpose::Complete { outcome, .. } => Some(outcome),
            _ => None,
        };
        match wrote {
            WriteResult::Recorded(_) => {
                let already = own
                    && match meaning {
                        SwapPurpose::Complete { outcome, .. } => {
                            seen.phase == Phase::Done && seen.outcome == outcome
                        }
                        SwapPurpose::Release { .. }
                        | SwapPurpose::Redirect { .. }
                        | SwapPurpose::Withdraw { .. } => seen.phase == Phase::Released,
                        SwapPurpose::Abandon { .. } => seen.phase == Phase::Unknown,
                        _ => false,
                    };
                ensure(landed || already, "S3", "reported as recorded, but it is not")
            }
            // An old claim landed again on a purged key: it looks like a takeover.
            WriteResult::Lost if seen.echo && !own => Ok(()),
            WriteResult::Lost => {
                // A renewal may land and be overwritten; an outcome that landed stays.
                ensure(
                    !landed || outcome.is_none(),
                    "S3",
                    "reported as lost, but it was recorded",
                )?;
                let same_life = !seen.vacant()
                    && !seen.expired()
                    && (own || seen.generation == self.executions[execution as usize].generation);
                ensure(same_life, "owner", "reported as lost, but that is unknown")?;
                let settled = match seen.phase {
                    Phase::Done => Some(seen.outcome) != outcome,
                    Phase::Unknown => !matches!(
                        meaning,
                        SwapPurpose::Complete { .. } | SwapPurpose::Abandon { .. }
                    ),
                    _ => false,
                };
                ensure(!own || settled, "owner", "reported as lost without a takeover")?;
                if let Some(outcome) = outcome.map(usize::from) {
                    self.denied[outcome] = true;
                    ensure(!self.recorded[outcome], "S3", "reported as lost, but recorded before")?;
                }
                Ok(())
            }
            WriteResult::Gone => {
                let over = seen.vacant()
                    || seen.expired()
                    || seen.generation != self.executions[execution as usize].generation;
                ensure(over, "owner", "reported as gone, but its generation goes on")?;
                let already = own && seen.phase == Phase::Released && !seen.expired();
                let releases = matches!(
                    meaning,
                    SwapPurpose::Release { .. }
                        | SwapPurpose::Redirect { .. }
                        | SwapPurpose::Withdraw { .. }
                );
                let released = already && releases;
                ensure(!released, "owner", "reported as gone, but it is released")
            }
            WriteResult::Contended => Ok(()),
            WriteResult::NotFound
            | WriteResult::Rejected
            | WriteResult::MayExecute { .. }
            | WriteResult::Saga
            | WriteResult::Changed => ensure(false, "owner", "an owner got an operator's result"),
        }
    }

    /// Checks an answer to a reconciler, by the facts at the time of the record that decided.
    pub(super) fn judge_call(
        &self,
        seen: &KeyModel,
        meaning: SwapPurpose,
        landed: bool,
        wrote: &WriteResult,
    ) -> Checked {
        let gone = seen.vacant() || seen.expired();
        let owner = self.executions.get(seen.execution as usize).map(|execution| execution.fence);
        let done = seen.phase == Phase::Done;
        let right = match (meaning, wrote) {
            (_, WriteResult::Recorded(_)) => landed,
            (_, WriteResult::Contended) => true,
            (SwapPurpose::Call { .. }, WriteResult::NotFound) => gone,
            (SwapPurpose::Call { fence, .. }, WriteResult::Changed) => owner != Some(fence) || done,
            (SwapPurpose::Call { policy, .. }, WriteResult::Rejected) => {
                let both = [seen.strict, policy] == [OnUnknown::Reconcile; 2];
                seen.live() || !both || seen.checkpoint.is_some()
            }
            (SwapPurpose::Call { .. }, WriteResult::MayExecute { until }) => {
                !gone && !done && seen.clock < until.as_micros()
            }
            (SwapPurpose::Settle { asked, .. }, WriteResult::Changed) => {
                seen.phase != Phase::Unknown || seen.version != asked || seen.expired()
            }
            _ => false,
        };
        ensure(right || seen.echo, "reconcile", "a reconciler got another result than the facts")
    }

    /// Checks an answer to an operator.
    pub(super) fn judge_operator(
        &self,
        seen: &KeyModel,
        (fence, force, forget, outcome): (u64, bool, bool, Option<u16>),
        landed: bool,
        wrote: &WriteResult,
    ) -> Checked {
        let nothing = seen.vacant() || seen.expired();
        let owner = self.executions.get(seen.execution as usize).map(|execution| execution.fence);
        match wrote {
            WriteResult::Recorded(_) => {
                let already = seen.phase == Phase::Done && Some(seen.outcome) == outcome;
                ensure(landed || already, "operator", "reported as recorded, but it is not")
            }
            WriteResult::NotFound => {
                ensure(nothing, "operator", "reported as absent, but it is there")
            }
            WriteResult::Rejected => {
                let done = seen.phase == Phase::Done && !forget && outcome.is_none();
                let live = seen.live() && !force;
                ensure(live || done, "operator", "rejected for no reason")
            }
            WriteResult::MayExecute { until } => {
                let early = !nothing && seen.clock < until.as_micros();
                let right = seen.echo || until.as_micros() == seen.may_execute_until();
                ensure(
                    early && right && !force && outcome.is_none(),
                    "operator",
                    "rejected as it may still execute, but it cannot",
                )
            }
            WriteResult::Changed => {
                let done = seen.phase == Phase::Done && outcome.is_some();
                ensure(
                    owner != Some(fence) || done,
                    "operator",
                    "reported as changed, but it is not",
                )
            }
            WriteResult::Contended => Ok(()),
            WriteResult::Lost | WriteResult::Gone | WriteResult::Saga => {
                ensure(false, "operator", "an operator got an owner's result, or a saga's")
            }
        }
    }
}

/// Checks an answer to a request that was redirected: it gets the redirect, whatever the state.
fn judge_redirect(seen: &KeyModel, redirect: u16, told: ClaimAnswer) -> Checked {
    let ClaimAnswer::Replay { outcome, expires_in, .. } = told else {
        return ensure(false, "redirect", "a redirected request got another answer");
    };
    ensure(outcome == redirect, "redirect", "replayed another redirect")?;
    let rest = match seen.keep_until {
        NEVER => NEVER,
        until => until.saturating_sub(seen.clock),
    };
    ensure(expires_in == rest, "redirect", "wrong time of expiry")
}

fn judge_unknown(seen: &KeyModel, same: bool, asker: &ClaimContext) -> Checked {
    let doubt = match seen.phase {
        Phase::Held => seen.clock >= seen.lease_until,
        Phase::Unknown => true,
        _ => false,
    };
    ensure(same && doubt, "L1", "unknown, but the record is not undecided")?;
    let may_reconcile = asker.hook_after.is_some_and(|after| match seen.phase {
        Phase::Held => seen.clock >= seen.lease_until.saturating_add(after),
        _ => !seen.reconciling || seen.clock >= seen.lease_until,
    });
    match seen.strict.max(asker.policy) {
        OnUnknown::Block => Ok(()),
        OnUnknown::Reconcile => {
            ensure(!may_reconcile, "L1", "unknown, though a hook could be called")
        }
        OnUnknown::Reexecute => ensure(false, "L1", "unknown, though it may execute again"),
    }
}
