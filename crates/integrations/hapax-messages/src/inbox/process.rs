//! The way of one message: claim, handler, record. The acknowledgement follows in the consumer.
//!
//! 1. A dead letter is stored before the record says that the message is parked, and the record
//!    before the message is acknowledged. After a crash in between, the redelivered message stores
//!    the same letter again.
//! 2. Each result other than [`Disposition::Finished`] leaves the message unacknowledged. It is
//!    processed again by this process after a pause, or by another one once the broker delivers it
//!    there.
//! 3. A letter of a message that turns out to be handled is removed: an owner that lost its lease may
//!    have stored it. Before a handler begins, and before a letter is stored after it, the lease is
//!    checked.
//! 4. A future that is dropped leaves a claim that lapses, as a crash does. The consumer drops it
//!    only if a shutdown takes longer than its limit.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::transaction::{Execution, ExecutionEnd, ExecutionResult};
use hapax_core::{
    Claim, ClaimError, Fingerprint, FingerprintScheme, FinishError, Lease, LeaseHandle,
    OperationRequest, Outcome, Reconciliation, Timestamp, Verdict,
};

use super::{InboxState, MessageReconcileCall, TooOld, UnknownRule};
use crate::dead_letter::{DeadLetter, DeadLetterReason, identify};
use crate::handler::{HandledMessage, MessageFailure, MessageHandler, describe};
use crate::id::MessageId;
use crate::message::Message;
use crate::source::Delivery;

/// Name of the format of outcomes.
const FORMAT: &str = "message/1";

/// Pause before a message whose duplicate is in flight is claimed again.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Pause before a message is processed again after an error of the store or of dead letters.
const AFTER_OUTAGE: Duration = Duration::from_secs(1);

/// Result of processing a message.
#[derive(Debug)]
pub(crate) enum Disposition {
    /// The message is acknowledged.
    Finished(Finish),
    /// The message is processed again after a pause.
    Held(Duration, HoldCause),
    /// The last owner of the message died: it is processed again, while no other message is.
    Suspect,
}

/// Reasons for an acknowledgement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Finish {
    Handled,
    Duplicate,
    Parked(DeadLetterReason),
}

/// Reasons to hold a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HoldCause {
    /// A duplicate is in flight.
    InFlight,
    /// The handler failed.
    Retry,
    /// Whether the message was handled is unknown, or cannot be read from its record.
    Unknown,
    /// The store is unavailable.
    Store,
    /// The dead letter was not stored.
    DeadLetters,
}

/// State of a delivery that is kept while it is held.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) first_at: Timestamp,
    attempts: u32,
    last_error: Option<String>,
    /// The letter to store. The handler does not run again meanwhile.
    parking: Option<Parking>,
    /// The letter that was stored before the record said so.
    letter: Option<[u8; 32]>,
    /// The last attempt that ended in this process. A takeover of it follows an unknown outcome or an
    /// outage, not a death.
    ended: Option<u32>,
    /// Calls of the hook in which it could not say, since it last could.
    undecided: u32,
}

impl Progress {
    pub(crate) fn new(first_at: Timestamp) -> Self {
        Self { first_at, ..Self::default() }
    }
}

/// A dead letter that is to be stored.
#[derive(Clone, Debug)]
struct Parking {
    reason: DeadLetterReason,
    attempts: u32,
    error: String,
}

/// The request of a message: its payload is the fingerprint.
struct MessageRequest<'a>(&'a Message);

impl OperationRequest for MessageRequest<'_> {
    #[allow(clippy::unreachable, reason = "the name is far shorter than the limit")]
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new(FORMAT).unwrap_or_else(|_| unreachable!("the name is short"))
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (scheme.as_str() == FORMAT)
            .then(|| Fingerprint::builder("hapax 1 message").field(&self.0.payload).finish())
    }
}

/// Beginning of the outcome of a message that is a dead letter.
const PARKED: &str = "parked: ";

fn outcome(finish: Finish) -> Outcome {
    match finish {
        Finish::Handled | Finish::Duplicate => Outcome::new(FORMAT, "handled"),
        Finish::Parked(reason) => Outcome::new(FORMAT, format!("{PARKED}{reason}")),
    }
}

pub(super) fn is_parked(outcome: &Outcome) -> bool {
    outcome.format() == FORMAT && outcome.bytes().starts_with(PARKED.as_bytes())
}

/// A delivery that is processed, and its id.
struct Attempted<'a> {
    inbox: &'a InboxState,
    delivery: &'a Arc<dyn Delivery>,
    id: MessageId,
    /// The letter from which the message was redriven.
    redriven: Option<[u8; 32]>,
    progress: &'a mut Progress,
}

impl InboxState {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Processes a message. `is_alone` is true if no other message is under way in this process, so
    /// that a suspect may be.
    pub(crate) async fn process(
        &self,
        delivery: &Arc<dyn Delivery>,
        handler: &dyn MessageHandler,
        is_alone: bool,
        progress: &mut Progress,
    ) -> Disposition {
        let message = delivery.message();
        let (id, redriven) = match identify(&self.consumer, &self.ids, message) {
            Ok(identified) => identified,
            Err(error) => {
                let text = error.to_string();
                return self.park(None, message, DeadLetterReason::NoId, 0, &text, progress).await;
            }
        };
        let request = MessageRequest(message);
        let key = id.to_key();
        let mut claim = self.engine.claim(&self.scope, &key, &request, &self.policy).await;
        let mut attempted = Attempted { inbox: self, delivery, id, redriven, progress };
        while let Ok(Claim::Reconcile(reconciliation)) = claim {
            claim = attempted.reconcile(reconciliation, &request).await;
        }
        match claim {
            Ok(Claim::Execute(lease)) => attempted.own(lease, handler, is_alone).await,
            // The outcome is not in the store yet, and a crash would lose it.
            Ok(Claim::Replay(replay)) if replay.deferred => {
                Disposition::Held(AFTER_OUTAGE, HoldCause::Store)
            }
            // A message that is still parked, because its record was not released, keeps its letter.
            Ok(Claim::Replay(replay)) if replay.outcome == outcome(Finish::Handled) => {
                attempted.handled(Finish::Duplicate).await
            }
            Ok(Claim::Replay(_)) => Disposition::Finished(Finish::Duplicate),
            Ok(Claim::InFlight { remaining, .. }) => {
                let pause = remaining.clamp(Duration::from_millis(50), LOOK_AGAIN);
                Disposition::Held(pause, HoldCause::InFlight)
            }
            Ok(Claim::Mismatch) => {
                let text = "the id belongs to a message with another payload";
                attempted.park(DeadLetterReason::Conflict, 0, text).await
            }
            Ok(Claim::Unknown { reconcile_in: Some(pause) }) => attempted.undecided(pause).await,
            Ok(Claim::Unknown { reconcile_in: None } | Claim::Reconcile(_)) => {
                let text = "the handler may have succeeded: an operator decides";
                let text = attempted.progress.last_error.clone().unwrap_or_else(|| text.to_owned());
                attempted.park(DeadLetterReason::Unknown, attempted.progress.attempts, &text).await
            }
            Err(error) => held_by_store(&attempted.id, &error),
        }
    }

    /// Stores a dead letter of a message that this process does not own, or owns already.
    async fn park(
        &self,
        id: Option<&MessageId>,
        message: &Message,
        reason: DeadLetterReason,
        attempts: u32,
        error: &str,
        progress: &mut Progress,
    ) -> Disposition {
        let first_at = message.published_at.unwrap_or(progress.first_at).min(progress.first_at);
        let mut letter =
            DeadLetter::new(&self.consumer, id, message.clone(), reason, error, self.now())
                .attempts(attempts)
                .first_at(first_at);
        if self.blocked.is_none() {
            // The letter parks no other message.
            letter.message.key = None;
        }
        if let Err(error) = self.dead_letters.park(&letter).await {
            let error = describe(&error);
            tracing::warn!(consumer = %self.consumer, %error, "a dead letter was not stored: its message is held");
            return Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters);
        }
        tracing::warn!(
            consumer = %self.consumer,
            letter = %letter.id_hex(),
            origin = %message.origin,
            %reason,
            attempts,
            "a message is a dead letter"
        );
        progress.letter = Some(letter.id);
        if let (Some(blocked), Some(key)) = (&self.blocked, &message.key) {
            blocked.add(key).await;
        }
        Disposition::Finished(Finish::Parked(reason))
    }
}

fn held_by_store(id: &MessageId, error: &ClaimError) -> Disposition {
    match error {
        ClaimError::UnknownScheme => {
            tracing::error!(?id, %error, "a message is held");
            Disposition::Held(AFTER_OUTAGE * 10, HoldCause::Unknown)
        }
        error => {
            tracing::debug!(?id, %error, "a message is held");
            Disposition::Held(AFTER_OUTAGE, HoldCause::Store)
        }
    }
}

impl Attempted<'_> {
    fn message(&self) -> &Message {
        self.delivery.message()
    }

    async fn park(&mut self, reason: DeadLetterReason, attempts: u32, error: &str) -> Disposition {
        let message = self.delivery.message();
        self.inbox.park(Some(&self.id), message, reason, attempts, error, self.progress).await
    }

    /// Removes the letter of a message that is handled: it was redriven, or stored by this process
    /// after it had lost its lease.
    async fn handled(&self, finish: Finish) -> Disposition {
        let letter = self.redriven.or(self.progress.letter);
        let Some(letter) = letter else { return Disposition::Finished(finish) };
        if let Err(error) = self.inbox.dead_letters.remove(&letter).await {
            let error = describe(&error);
            tracing::warn!(consumer = %self.inbox.consumer, %error, "the letter of a handled message was not removed");
            return Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters);
        }
        Disposition::Finished(finish)
    }

    /// Decides about a message whose hook could not say, or is called after `pause`.
    async fn undecided(&mut self, pause: Duration) -> Disposition {
        let (attempts, calls) = (&self.inbox.attempts, self.progress.undecided);
        if calls >= attempts.max.get() {
            let text = "the hook cannot say whether the handler succeeded: an operator decides";
            return self.park(DeadLetterReason::Unknown, self.progress.attempts, text).await;
        }
        let backoff = match calls {
            0 => Duration::ZERO,
            calls => attempts.backoff().pause(calls, &*self.inbox.entropy),
        };
        let longest = attempts.longest_pause.max(LOOK_AGAIN);
        Disposition::Held(pause.max(backoff).clamp(LOOK_AGAIN, longest), HoldCause::Unknown)
    }

    async fn reconcile(
        &mut self,
        reconciliation: Reconciliation,
        request: &dyn OperationRequest,
    ) -> Result<Claim, ClaimError> {
        let UnknownRule::Reconcile(timing, hook) = &self.inbox.rule else {
            return reconciliation.conclude(Verdict::CannotSay, request).await;
        };
        let call = MessageReconcileCall {
            id: self.id.clone(),
            message: self.message().clone(),
            fence: reconciliation.fence(),
            attempt: reconciliation.attempt(),
        };
        // A hook that panics or takes too long cannot say either.
        let undecided = &mut self.progress.undecided;
        *undecided += 1;
        let verdict = async {
            let verdict = match hook(call).await {
                Verdict::Happened(()) => Verdict::Happened(outcome(Finish::Handled)),
                Verdict::DidNotHappen => Verdict::DidNotHappen,
                Verdict::CannotSay => return Verdict::CannotSay,
            };
            *undecided = 0;
            verdict
        };
        reconciliation.reconcile(verdict, timing.timeout, request).await
    }

    /// Executes, parks or holds a message whose lease this process has.
    async fn own(
        mut self,
        lease: Lease,
        handler: &dyn MessageHandler,
        is_alone: bool,
    ) -> Disposition {
        let ended_here = self.progress.ended.is_some_and(|ended| ended + 1 == lease.attempt());
        if lease.is_takeover() && !ended_here && !is_alone {
            // The claim is not kept while the message waits: it would count as an attempt if the
            // message before it ends this process too.
            let _ = lease.withdraw().await;
            return Disposition::Suspect;
        }
        if lease.handle().remaining().is_zero() {
            let _ = lease.withdraw().await;
            return Disposition::Held(Duration::ZERO, HoldCause::InFlight);
        }
        let attempt = lease.attempt();
        let first = attempt == 1 && !lease.is_takeover();
        let execution = match &self.inbox.transactions {
            Some(backend) => Execution::in_transactions(lease, backend.clone()),
            None => Execution::new(lease),
        };
        match execution.attempt(self.refuse(attempt, first)).await {
            // The lease may have lapsed meanwhile.
            Ok(None) if execution.lease().handle().remaining().is_zero() => {
                let held = Disposition::Held(Duration::ZERO, HoldCause::InFlight);
                self.end(execution, held).await
            }
            Ok(None) => self.execute(execution, handler).await,
            Ok(Some(parked)) => self.end(execution, parked).await,
            // A store of dead letters panicked.
            Err(_) => {
                let held = Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters);
                self.end(execution, held).await
            }
        }
    }

    /// Parks a message that is not to be executed; `None` for one that is.
    async fn refuse(&mut self, attempt: u32, first: bool) -> Option<Disposition> {
        let inbox = self.inbox;
        if let Some(Parking { reason, attempts, error }) = self.progress.parking.clone() {
            return Some(self.park(reason, attempts, &error).await);
        }
        if attempt > inbox.attempts.max.get() {
            let text = "each attempt ended with its process";
            let text = self.progress.last_error.clone().unwrap_or_else(|| text.to_owned());
            return Some(self.park(DeadLetterReason::Attempts, attempt - 1, &text).await);
        }
        let message = self.delivery.message();
        let is_redriven = self.redriven.is_some();
        if let (Some(blocked), Some(key), false) = (&inbox.blocked, &message.key, is_redriven) {
            match blocked.contains(&inbox.consumer, key).await {
                Ok(false) => {}
                Ok(true) => {
                    let text = "an earlier message with the same order key is a dead letter";
                    return Some(self.park(DeadLetterReason::Behind, attempt - 1, text).await);
                }
                Err(error) => {
                    tracing::warn!(consumer = %inbox.consumer, %error, "a message is held");
                    return Some(Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters));
                }
            }
        }
        let retention = inbox.policy.terms.retention;
        let is_old = message.age(inbox.now()) > retention;
        if first && is_old && inbox.too_old == TooOld::Reject {
            let text = "the message is older than the retention of ids: it may have been handled";
            return Some(self.park(DeadLetterReason::TooOld, 0, text).await);
        }
        None
    }

    /// Ends an execution in which the handler did not run.
    async fn end(self, execution: Execution, then: Disposition) -> Disposition {
        let end = match &then {
            Disposition::Finished(finish) => {
                ExecutionEnd::Reject { outcome: outcome(*finish), retention: None }
            }
            Disposition::Held(..) | Disposition::Suspect => ExecutionEnd::Withdraw,
        };
        recorded(execution.end(None, end).await, then)
    }

    async fn execute(
        mut self,
        mut execution: Execution,
        handler: &dyn MessageHandler,
    ) -> Disposition {
        loop {
            let run = execution.begin_run();
            let handled = HandledMessage {
                delivery: Arc::clone(self.delivery),
                id: self.id.clone(),
                lease: execution.lease().handle(),
                transaction: run.clone(),
            };
            let (attempt, lease) = (handled.attempt(), execution.lease().handle());
            self.progress.attempts = attempt;
            let ran = execution.attempt(async {
                let result = handler.handle(handled).await;
                self.conclude(result, attempt, &lease).await
            });
            let (end, then) = match ran.await {
                Ok(concluded) => concluded,
                Err(panicked) => {
                    let failure = Err(MessageFailure::unknown(panicked));
                    match execution.attempt(self.conclude(failure, attempt, &lease)).await {
                        Ok(concluded) => concluded,
                        Err(_) => {
                            (ExecutionEnd::Abandon { seen: None }, self.retried(attempt, None))
                        }
                    }
                }
            };
            let ended = execution.end(run, end).await;
            self.progress.ended = Some(attempt);
            match ended {
                ExecutionResult::Rerun(again) => execution = again,
                ExecutionResult::Exhausted => {
                    let text = "the transaction lost against others each time".to_owned();
                    self.progress.last_error = Some(text);
                    return self.retried(attempt, None);
                }
                ExecutionResult::RolledBack(source) => {
                    self.progress.last_error = Some(describe(&*source));
                    return self.retried(attempt, None);
                }
                ExecutionResult::EndedEarly(source) => {
                    let text = format!("the handler ended its transaction: {}", describe(&*source));
                    self.progress.last_error = Some(text);
                    return self.retried(attempt, None);
                }
                ExecutionResult::Kept => {
                    let text = "the handler ended, and has not dropped its transaction".to_owned();
                    self.progress.last_error = Some(text);
                    return self.retried(attempt, None);
                }
                result => {
                    return match recorded(result, then) {
                        Disposition::Finished(Finish::Handled) => {
                            self.handled(Finish::Handled).await
                        }
                        other => other,
                    };
                }
            }
        }
    }

    /// Returns the end of the execution and the disposition for a handler's result. A message that
    /// becomes a dead letter is stored here, while the lease is renewed.
    async fn conclude(
        &mut self,
        result: Result<(), MessageFailure>,
        attempt: u32,
        lease: &LeaseHandle,
    ) -> (ExecutionEnd, Disposition) {
        let Err(failure) = result else {
            let outcome = outcome(Finish::Handled);
            let end = ExecutionEnd::Complete { outcome, retention: None };
            return (end, Disposition::Finished(Finish::Handled));
        };
        let text = failure.text();
        tracing::debug!(id = ?self.id, attempt, error = %text, "a message was not handled");
        self.progress.last_error = Some(text.clone());
        if let Some(backend) = &self.inbox.transactions
            && backend.database.any_is_conflict(failure.cause())
        {
            return (ExecutionEnd::Rerun, self.retried(attempt, None));
        }
        let is_last = attempt >= self.inbox.attempts.max.get();
        let reason = match &failure {
            MessageFailure::Retry { after, .. } if !is_last => {
                return (ExecutionEnd::Release, self.retried(attempt, *after));
            }
            // The record decides about the next execution.
            MessageFailure::Unknown { .. }
                if !is_last || !matches!(self.inbox.rule, UnknownRule::Reexecute) =>
            {
                return (ExecutionEnd::Abandon { seen: None }, self.retried(attempt, None));
            }
            MessageFailure::Reject { .. } => DeadLetterReason::Rejected,
            MessageFailure::Retry { .. } | MessageFailure::Unknown { .. } => {
                DeadLetterReason::Attempts
            }
        };
        // Until the letter is stored, the next claim of this process stores it without the handler. Of
        // another process, after a crash, the next claim executes, if attempts are left.
        self.progress.parking = Some(Parking { reason, attempts: attempt, error: text.clone() });
        if lease.remaining().is_zero() {
            // Another owner may have handled the message.
            let held = Disposition::Held(LOOK_AGAIN, HoldCause::Unknown);
            return (ExecutionEnd::Release, held);
        }
        let then = self.park(reason, attempt, &text).await;
        let end = match &then {
            Disposition::Finished(finish) => {
                ExecutionEnd::Reject { outcome: outcome(*finish), retention: None }
            }
            Disposition::Held(..) | Disposition::Suspect => ExecutionEnd::Release,
        };
        (end, then)
    }

    /// Returns the pause after an attempt.
    fn retried(&self, attempt: u32, after: Option<Duration>) -> Disposition {
        let attempts = &self.inbox.attempts;
        let pause = match after {
            Some(after) => after.min(attempts.longest_pause),
            None => attempts.backoff().pause(attempt, &*self.inbox.entropy),
        };
        Disposition::Held(pause, HoldCause::Retry)
    }
}

/// Returns `then` if the end of the execution was recorded; else the message is held.
fn recorded(result: ExecutionResult, then: Disposition) -> Disposition {
    match result {
        ExecutionResult::Recorded(_) => then,
        // A release or an unknown outcome that was not written is replaced by the lapse of the lease.
        ExecutionResult::Failed(FinishError::Pending) => {
            Disposition::Held(AFTER_OUTAGE, HoldCause::Store)
        }
        // Another process took over, or the result of COMMIT is unknown: the record decides.
        ExecutionResult::Failed(_)
        | ExecutionResult::Kept
        | ExecutionResult::EndedEarly(_)
        | ExecutionResult::Unknown
        | ExecutionResult::Exhausted
        | ExecutionResult::RolledBack(_)
        | ExecutionResult::Rerun(_) => Disposition::Held(LOOK_AGAIN, HoldCause::Unknown),
    }
}
