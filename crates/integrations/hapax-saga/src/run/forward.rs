//! Decisions about steps before the compensation: try, wait, reconcile, stuck.

use std::time::Duration;

use hapax_core::{Entropy, Verdict};

use super::{AfterSave, Call, Effect, Kind, Pending, Run, StepTerms, StuckCause, TryEnd};
use crate::flow::{SIGNAL, SLEEP};
use crate::log::{
    Blob, Direction, LogTime, Parked, StepLog, StepOutcome, StuckReason, Tries, UndoEnd,
};
use crate::retry::StepRetry;

/// A decision about a step without outcome.
enum Next {
    Try,
    Wait(LogTime),
    Reconcile,
    Stuck(StuckReason),
}

impl Run {
    /// Decides about a step that the flow has requested.
    pub(super) fn forward(&mut self, at: usize, now: LogTime) -> Option<Effect> {
        let step = &self.log.steps[at];
        let terms = self.terms_of(at);
        if step.outcome.is_some() {
            // A step that must not be repeated: its result is saved before the flow continues.
            if self.unsaved && terms.is_some_and(|terms| terms.kind == Kind::Once) {
                return Some(self.save(AfterSave::Answer(at)));
            }
            self.answer(at);
            return None;
        }
        if step.name.starts_with(SLEEP) {
            return self.sleep(at, now);
        }
        if let Some(name) = step.name.strip_prefix(SIGNAL) {
            let name = name.to_owned();
            self.pending = Some(Pending::Look(at, now));
            return Some(Effect::Look(name));
        }
        let Some(terms) = terms else {
            let detail = format!(
                "expected a step of the definition, found `{}`: restore it, then `retry`, or `abort`",
                step.name
            );
            let fault = StuckCause { reason: StuckReason::NoSuchStep, detail };
            return Some(self.stuck(Some(at), Direction::Forward, fault, now));
        };
        Some(match next(step, terms, now) {
            Next::Try if terms.prepares => self.prepare(at, terms),
            Next::Try => self.begin_try(at, Direction::Forward, now),
            // What the try has replaced must survive a crash in the pause.
            Next::Wait(until) if self.replaced && until.since(now) <= self.terms.park_after => {
                self.save(AfterSave::Continue)
            }
            Next::Wait(until) => self.wait(until, now),
            Next::Reconcile => self.reconcile(at, Direction::Forward, terms),
            Next::Stuck(reason) => {
                let fault = StuckCause { reason, detail: detail(step, Direction::Forward) };
                self.stuck(Some(at), Direction::Forward, fault, now)
            }
        })
    }

    fn sleep(&mut self, at: usize, now: LogTime) -> Option<Effect> {
        let until = self.log.steps[at].forward.retry_at.unwrap_or(now);
        if until <= now {
            self.set_outcome(at, StepOutcome::Happened(Blob::default()));
            return None;
        }
        if self.unsaved && until.since(now) <= self.terms.park_after {
            // The time at which it ends must survive a crash.
            return Some(self.save(AfterSave::Continue));
        }
        Some(self.wait(until, now))
    }

    /// Continues after a look for a signal that began at the time `asked`. A signal may have arrived
    /// since, also in time.
    pub(super) fn looked(&mut self, at: usize, value: Option<Blob>, asked: LogTime) {
        let until = self.log.steps[at].forward.retry_at.unwrap_or(asked);
        match value {
            Some(value) => self.set_outcome(at, StepOutcome::Happened(value)),
            // It did not arrive in time.
            None if until <= asked => self.set_outcome(at, StepOutcome::Rejected(Blob::default())),
            None => {
                let signal = self.log.steps[at].name.strip_prefix(SIGNAL).map(str::to_owned);
                self.parking = Some(Parked { until, signal });
            }
        }
    }

    /// Begins a try: it is saved, then called.
    pub(super) fn begin_try(&mut self, at: usize, direction: Direction, now: LogTime) -> Effect {
        self.log.steps[at].tries_mut(direction).begin(now);
        self.unsaved = true;
        self.save(AfterSave::Call(at, direction))
    }

    fn prepare(&mut self, at: usize, terms: StepTerms) -> Effect {
        self.pending = Some(Pending::Prepare(at));
        let number = self.log.steps[at].forward.begun.saturating_add(1);
        let (direction, timeout) = (Direction::Forward, terms.retry.timeout);
        Effect::Prepare(Call { step: at, direction, number, timeout })
    }

    /// Takes the value that was prepared for a try, which begins with it, or the end of a try that
    /// is not called.
    pub(super) fn prepared(
        &mut self,
        at: usize,
        prepared: Result<Blob, TryEnd>,
        now: LogTime,
        entropy: &dyn Entropy,
    ) {
        let limit = self.terms.max_value;
        let step = &mut self.log.steps[at];
        let prepared = match prepared {
            Ok(value) if value.0.len() > limit => {
                let advice = "nothing was called: prepare a reference to the data, then `retry`";
                Err(TryEnd::Faulted(too_large(&step.name, limit, &value, advice)))
            }
            prepared => prepared,
        };
        let tries = &mut step.forward;
        match prepared {
            Ok(value) => {
                tries.prepared = Some(value);
                self.prepared = Some(at);
            }
            Err(end) => {
                // Counted like a try that was not sent, but it never began: the last call is an
                // earlier one.
                let last = tries.last;
                tries.begun = tries.begun.saturating_add(1);
                tries.since.get_or_insert(now);
                self.called(at, end, now, entropy);
                self.log.steps[at].forward.last = last;
            }
        }
    }

    pub(super) fn reconcile(
        &mut self,
        at: usize,
        direction: Direction,
        terms: StepTerms,
    ) -> Effect {
        self.pending = Some(Pending::Reconcile(at, direction));
        let number = self.log.steps[at].forward.begun;
        Effect::Reconcile(Call { step: at, direction, number, timeout: terms.retry.timeout })
    }

    /// Takes the end of a try.
    pub(super) fn called(&mut self, at: usize, end: TryEnd, now: LogTime, entropy: &dyn Entropy) {
        self.unsaved = true;
        self.log.crashes = 0;
        let limit = self.terms.max_value;
        let backoff = self.terms_of(at).map(|terms| terms.retry.backoff);
        let step = &mut self.log.steps[at];
        let tries = &mut step.forward;
        // The save before the call may have taken long, and the process may have been frozen since:
        // the call is known to have been made until now.
        tries.last = Some(now);
        let (error, may_have_arrived, after) = match end {
            TryEnd::Happened(value) if value.0.len() > limit => {
                // It happened, so it is not tried again.
                tries.unknown();
                let fault = too_large(&step.name, limit, &value, "`resolve` it with a shorter one");
                self.fault = Some((at, Direction::Forward, fault));
                return;
            }
            TryEnd::Rejected(error) if error.0.len() > limit => {
                tries.not_sent();
                let rejected =
                    "it was rejected, and has no effect: shorten the error, then `retry`";
                let fault = too_large(&step.name, limit, &error, rejected);
                self.fault = Some((at, Direction::Forward, fault));
                return;
            }
            TryEnd::Happened(value) => {
                tries.unknown();
                self.set_outcome(at, StepOutcome::Happened(value));
                return;
            }
            TryEnd::Rejected(error) => {
                tries.not_sent();
                self.set_outcome(at, StepOutcome::Rejected(error));
                return;
            }
            TryEnd::Faulted(fault) => {
                tries.not_sent();
                self.fault = Some((at, Direction::Forward, fault));
                return;
            }
            TryEnd::Lost(fault) => {
                tries.unknown();
                self.fault = Some((at, Direction::Forward, fault));
                return;
            }
            TryEnd::Postponed(after, error) => {
                tries.not_sent();
                tries.begun = tries.begun.saturating_sub(1);
                (tries.error, tries.retry_at) = (Some(error), Some(now.after(after)));
                return;
            }
            TryEnd::NotSent(error) => (error, false, Duration::ZERO),
            TryEnd::Unknown(error) => (error, true, Duration::ZERO),
            TryEnd::RetryAfter(after, error) => (error, true, after),
        };
        if may_have_arrived {
            tries.unknown()
        } else {
            tries.not_sent()
        }
        tries.error = Some(error);
        let pause = backoff.map(|backoff| backoff.pause(tries.begun, entropy));
        tries.retry_at = pause.map(|pause| now.after(after.saturating_add(pause)));
    }

    /// Takes the verdict of a reconcile function.
    pub(super) fn reconciled(
        &mut self,
        at: usize,
        direction: Direction,
        verdict: Verdict<Blob>,
        now: LogTime,
        entropy: &dyn Entropy,
    ) {
        let backoff = self.terms_of(at).map(|terms| terms.retry.backoff);
        self.unsaved = true;
        let limit = self.terms.max_value;
        let step = &mut self.log.steps[at];
        let verdict = match verdict {
            Verdict::Happened(value) if value.0.len() > limit => {
                let checked = "the reconcile function has to return a shorter one";
                step.forward.error = Some(too_large(&step.name, limit, &value, checked).detail);
                Verdict::CannotSay
            }
            verdict => verdict,
        };
        match (verdict, direction) {
            (Verdict::Happened(value), _) => self.set_outcome(at, StepOutcome::Happened(value)),
            (Verdict::DidNotHappen, Direction::Forward) => {
                // And it never will: it is as if nothing had been sent.
                step.forward.arrived = false;
                step.forward.first = None;
            }
            (Verdict::DidNotHappen, Direction::Undo) => step.undone = Some(UndoEnd::Nothing),
            (Verdict::CannotSay, _) => {
                let checks = step.forward.checks.saturating_add(1);
                step.forward.checks = checks;
                step.forward.checked.get_or_insert(now);
                step.tries_mut(direction).retry_at =
                    backoff.map(|backoff| now.after(backoff.pause(checks, entropy)));
            }
        }
    }
}

/// Returns the time from which the last try can no longer take effect.
pub(super) fn quiet_from(step: &StepLog, terms: &StepTerms, now: LogTime) -> LogTime {
    step.forward.last.unwrap_or(now).after(terms.retry.timeout).after(terms.settle)
}

fn next(step: &StepLog, terms: StepTerms, now: LogTime) -> Next {
    let tries = &step.forward;
    if let Some(until) = tries.retry_at.filter(|until| now < *until) {
        return Next::Wait(until);
    }
    let age = tries.first.map(|first| now.since(first));
    let exhausted = is_exhausted(tries, &terms.retry, now);
    let reason = match terms.kind {
        Kind::Once if tries.arrived => StuckReason::Unknown,
        Kind::Keyed { lifetime } if is_expired(age, lifetime, terms.retry.timeout) => {
            StuckReason::KeyExpired
        }
        _ if exhausted => StuckReason::Exhausted,
        _ => return Next::Try,
    };
    // Without a call that may have arrived there is nothing to determine.
    if !terms.reconciles || !tries.arrived || is_checked(tries, &terms.retry, now) {
        return Next::Stuck(reason);
    }
    let quiet = quiet_from(step, &terms, now);
    if now < quiet { Next::Wait(quiet) } else { Next::Reconcile }
}

/// Returns whether no try is left.
pub(super) fn is_exhausted(tries: &Tries, retry: &StepRetry, now: LogTime) -> bool {
    let spent = tries.since.map(|since| now.since(since));
    tries.begun >= retry.tries || spent.is_some_and(|spent| spent >= retry.span)
}

/// Returns whether the reconcile function is not asked any more. Both bounds of the tries bound its
/// calls: a number alone may be as good as none.
pub(super) fn is_checked(tries: &Tries, retry: &StepRetry, now: LogTime) -> bool {
    let spent = tries.checked.map(|checked| now.since(checked));
    tries.checks >= retry.tries || spent.is_some_and(|spent| spent >= retry.span)
}

/// Returns whether no try begins any more under a key of this age. A try may arrive until its timeout
/// has passed, which has to be before the key's lifetime ends. The tenth of the lifetime that is left out
/// in any case is for clocks that run at different rates, and for a process that is frozen between
/// this decision and the call, for less than a lease.
pub(super) fn is_expired(age: Option<Duration>, lifetime: Duration, timeout: Duration) -> bool {
    let last = lifetime.mul_f64(0.9).min(lifetime.saturating_sub(timeout));
    age.is_some_and(|age| age >= last)
}

/// Returns the fault of a value that is larger than the limit of the definition.
pub(crate) fn too_large(name: &str, limit: usize, value: &Blob, advice: &str) -> StuckCause {
    let size = value.0.len();
    let detail =
        format!("expected a value of `{name}` of at most {limit} bytes, found {size}: {advice}");
    StuckCause { reason: StuckReason::TooLarge, detail }
}

/// Returns the text for a step that is stuck.
pub(super) fn detail(step: &StepLog, direction: Direction) -> String {
    let StepLog { name, nth, .. } = step;
    let tries = step.tries(direction);
    let error = tries.error.as_deref().unwrap_or("none");
    let (word, begun) = (direction.as_str(), tries.begun);
    let plural = if begun == 1 { "try" } else { "tries" };
    format!(
        "expected `{name}` number {nth} ({word}) to succeed or to be rejected, found neither after {begun} {plural}: see the called system; last error: {error}"
    )
}
