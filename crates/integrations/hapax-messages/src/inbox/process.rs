//! Processing of one message: claim, handler, record. The consumer acknowledges it afterwards.
//!
//! 1. A dead letter is stored before the record says that the message is parked, and the record
//!    before the message is acknowledged. After a crash in between, the redelivered message of an
//!    ordered inbox is parked with the dead letter that it has. Without the order, which costs no
//!    query, it is executed again, if attempts are left, and may store the same dead letter again.
//! 2. Each result other than [`Disposition::Finished`] leaves the message unacknowledged. It is
//!    processed again by this process after a pause, or by another one once the broker delivers it
//!    there.
//! 3. A dead letter of a message that turns out to be handled is removed: an owner that lost its
//!    lease may have stored it. Before a handler begins, and before a dead letter is stored after
//!    it, the lease is checked.
//! 4. A future that is dropped leaves a claim that lapses, as a crash does. The consumer drops it
//!    only if a shutdown takes longer than its limit.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::transaction::{Execution, ExecutionEnd, ExecutionResult};
use hapax_core::{
    Claim, ClaimError, FinishError, Lease, LeaseHandle, OperationId, OperationRequest,
    Reconciliation, Timestamp, Verdict,
};

use super::disposition::{Disposition, Finish, HoldCause};
use super::ended::EndedAttempt;
use super::first_ids::NO_ID_PAUSE;
use super::progress::{Parking, Progress};
use super::record::{MessageRequest, outcome};
use super::{Attempts, InboxState, MessageReconcileCall, OnTooOld, UnknownRule};
use crate::dead_letter::{
    BLOCKED, CRASHED, DeadLetter, DeadLetterReason, EXHAUSTED, MISMATCH, OrderKeyQuery,
    OrderKeyState, TOO_OLD, dead_letter_id, identify,
};
use crate::handler::{MessageExecution, MessageFailure, MessageHandler, describe};
use crate::id::{MessageId, MessageIdError};
use crate::message::Message;
use crate::source::Delivery;

/// Pause before a message whose duplicate is in flight is claimed again.
pub(super) const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(500);

/// Pause before a message is processed again after an error of the store or of dead letters.
pub(super) const AFTER_OUTAGE: Duration = Duration::from_secs(1);

/// Id of a message, and what its claims compare. It is computed once, while the message waits for a handler.
#[derive(Debug)]
pub(crate) struct Identity {
    id: MessageId,
    /// The dead letter from which the message was redriven.
    redriven: Option<[u8; 32]>,
    operation: OperationId,
    request: MessageRequest,
}

/// A delivery that is processed, and its id.
struct Processing<'a> {
    inbox: &'a InboxState,
    delivery: &'a Arc<dyn Delivery>,
    identity: &'a Identity,
    progress: &'a mut Progress,
}

impl InboxState {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Notes messages that were received together.
    pub(crate) fn received(&self, received: &[Arc<dyn Delivery>]) {
        if let Some(first_ids) = &self.first_ids {
            let readable = received.iter().filter(|it| it.unreadable().is_none());
            first_ids.received(&self.consumer, &self.ids, readable.map(|it| it.message()));
        }
    }

    /// Computes the identity of a message.
    pub(crate) fn identify(&self, message: &Message) -> Result<Identity, MessageIdError> {
        let (id, redriven) = identify(&self.consumer, &self.ids, message)?;
        let operation = self.engine.operation_id(&self.scope, &id.to_key());
        Ok(Identity { id, redriven, operation, request: MessageRequest::new(message) })
    }

    /// Returns whether no message is handled or acknowledged, because of a quarantine or of a register that was not
    /// written.
    pub(crate) fn is_paused(&self) -> bool {
        self.engine.quarantines().pauses()
    }

    /// Processes a message. `is_alone` is true if this process handles no other message meanwhile;
    /// only then a suspect is executed.
    pub(crate) async fn process(
        &self,
        delivery: &Arc<dyn Delivery>,
        identity: &Result<Identity, MessageIdError>,
        handler: &dyn MessageHandler,
        is_alone: bool,
        progress: &mut Progress,
    ) -> Disposition {
        // Before a message is parked, too: nothing is acknowledged.
        if self.is_paused() {
            tracing::debug!(consumer = %self.consumer, "a message is held, because of a quarantine");
            return Disposition::Held(AFTER_OUTAGE, HoldCause::Store);
        }
        let identity = match identity {
            Ok(identity) => identity,
            Err(error) => {
                let (reason, text) = match delivery.unreadable() {
                    Some(text) => (DeadLetterReason::Unreadable, text.to_owned()),
                    None if self.first_ids.as_ref().is_some_and(|ids| ids.holds(error)) => {
                        return Disposition::Held(NO_ID_PAUSE, HoldCause::NoId);
                    }
                    None => (DeadLetterReason::NoId, error.to_string()),
                };
                return self.park(None, &**delivery, reason, 0, &text, progress).await;
            }
        };
        let Identity { operation, request, .. } = identity;
        let mut claim = self.engine.claim_id(*operation, request, &self.policy).await;
        let mut processing = Processing { inbox: self, delivery, identity, progress };
        while let Ok(Claim::Reconcile(reconciliation)) = claim {
            claim = processing.reconcile(reconciliation, request).await;
        }
        match claim {
            Ok(Claim::Execute(lease)) => processing.with_lease(lease, handler, is_alone).await,
            // The outcome is not in the store yet, and a crash would lose it.
            Ok(Claim::Replay(replay)) if replay.deferred => {
                Disposition::Held(AFTER_OUTAGE, HoldCause::Store)
            }
            // A message that is still parked, because its record was not released, keeps its dead
            // letter.
            Ok(Claim::Replay(replay)) if replay.outcome == outcome(Finish::Handled) => {
                processing.handled(Finish::Duplicate).await
            }
            Ok(Claim::Replay(_)) => Disposition::Finished(Finish::Duplicate),
            Ok(Claim::InFlight { remaining, .. }) => {
                let pause = remaining.clamp(Duration::from_millis(50), IN_FLIGHT_PAUSE);
                Disposition::Held(pause, HoldCause::InFlight)
            }
            Ok(Claim::Mismatch) => processing.park(DeadLetterReason::Mismatch, 0, MISMATCH).await,
            Ok(Claim::Unknown { reconcile_in: Some(pause) }) => processing.undecided(pause).await,
            Ok(Claim::Unknown { reconcile_in: None } | Claim::Reconcile(_)) => {
                let text = "expected a known outcome, found that the handler may have succeeded: look \
                            for its effect, then redrive or drop the message";
                let text =
                    processing.progress.last_error.clone().unwrap_or_else(|| text.to_owned());
                processing.park(DeadLetterReason::Unknown, processing.begun(), &text).await
            }
            Err(error) => held_by_store(&identity.id, &error),
        }
    }

    /// Stores a dead letter, with or without a lease of its message.
    async fn park(
        &self,
        id: Option<&MessageId>,
        delivery: &dyn Delivery,
        reason: DeadLetterReason,
        attempts: u32,
        error: &str,
        progress: &mut Progress,
    ) -> Disposition {
        let message = delivery.message();
        let first_at = message.published_at.unwrap_or(progress.first_at).min(progress.first_at);
        let mut dead_letter =
            DeadLetter::new(&self.consumer, id, message.clone(), reason, error, self.now())
                .native(delivery.native())
                .attempts(attempts)
                .first_at(first_at);
        if !self.is_ordered {
            // The dead letter parks no other message.
            dead_letter.message.key = None;
        }
        if let Err(error) = self.dead_letters.park(&dead_letter).await {
            let error = describe(&error);
            tracing::warn!(consumer = %self.consumer, %error, "a dead letter was not stored: its message is held");
            return Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters);
        }
        tracing::warn!(
            consumer = %self.consumer,
            dead_letter = %dead_letter.id_hex(),
            origin = %message.origin,
            %reason,
            attempts,
            "a message became a dead letter"
        );
        progress.dead_letter = Some(dead_letter.id);
        Disposition::Finished(Finish::Parked(reason))
    }
}

fn held_by_store(id: &MessageId, error: &ClaimError) -> Disposition {
    match error {
        ClaimError::UnknownScheme => {
            tracing::error!(?id, %error, "a message is held, because its record cannot be compared");
            Disposition::Held(AFTER_OUTAGE * 10, HoldCause::Unknown)
        }
        error => {
            tracing::debug!(?id, %error, "a message is held, because it could not be claimed");
            Disposition::Held(AFTER_OUTAGE, HoldCause::Store)
        }
    }
}

impl Processing<'_> {
    fn message(&self) -> &Message {
        self.delivery.message()
    }

    async fn park(&mut self, reason: DeadLetterReason, attempts: u32, error: &str) -> Disposition {
        let (id, delivery) = (Some(&self.identity.id), &**self.delivery);
        self.inbox.park(id, delivery, reason, attempts, error, self.progress).await
    }

    /// Returns the number of executions of a message whose outcome is unknown, as far as this process
    /// knows: another one has begun the first, at least.
    fn begun(&self) -> u32 {
        self.progress.attempts.max(1)
    }

    /// Removes the dead letter of a message that is handled: it was redriven, or stored by this
    /// process after it had lost its lease.
    async fn handled(&self, finish: Finish) -> Disposition {
        let dead_letter = self.identity.redriven.or(self.progress.dead_letter);
        let Some(dead_letter) = dead_letter else { return Disposition::Finished(finish) };
        if let Err(error) = self.inbox.dead_letters.remove(&dead_letter).await {
            let error = describe(&error);
            tracing::warn!(consumer = %self.inbox.consumer, %error, "the dead letter of a handled message was not removed: the message is held");
            return Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters);
        }
        Disposition::Finished(finish)
    }

    /// Decides about a message whose hook could not say, or is called after `pause`.
    async fn undecided(&mut self, pause: Duration) -> Disposition {
        let (attempts, calls) = (&self.inbox.attempts, self.progress.undecided);
        if calls >= attempts.max.get() {
            let text = "expected a verdict, found a hook that cannot say whether the handler succeeded: look \
                        for its effect, then redrive or drop the message";
            return self.park(DeadLetterReason::Unknown, self.begun(), text).await;
        }
        let backoff = match calls {
            0 => Duration::ZERO,
            calls => attempts.backoff().pause(calls, &*self.inbox.entropy),
        };
        let longest = attempts.longest_pause.max(IN_FLIGHT_PAUSE);
        Disposition::Held(pause.max(backoff).clamp(IN_FLIGHT_PAUSE, longest), HoldCause::Unknown)
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
            id: self.identity.id.clone(),
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
    async fn with_lease(
        mut self,
        mut lease: Lease,
        handler: &dyn MessageHandler,
        is_alone: bool,
    ) -> Disposition {
        let Progress { ended, withdrawn, .. } = *self.progress;
        let ended = EndedAttempt::of(&mut lease, ended, withdrawn);
        self.progress.is_takeover = ended.is_takeover();
        if ended.crashes > 0 && !is_alone {
            // The claim is not kept while the message waits: it would count as an attempt if the
            // message before it ends this process too.
            self.progress.withdrawn = Some(ended);
            let _ = lease.withdraw().await;
            return Disposition::Suspect;
        }
        if lease.handle().remaining().is_zero() {
            let _ = lease.withdraw().await;
            return Disposition::Held(Duration::ZERO, HoldCause::InFlight);
        }
        let attempt = lease.attempt();
        let is_first = attempt == 1 && !lease.is_takeover();
        let execution = match &self.inbox.transactions {
            Some(backend) => Execution::in_transactions(lease, backend.clone()),
            None => Execution::new(lease),
        };
        let handle = execution.lease().handle();
        let before = async {
            match self.park_before_execution(attempt, is_first, ended.crashes).await {
                None => ended.note(&handle).await,
                parked => parked,
            }
        };
        match execution.attempt(before).await {
            // The lease may have lapsed meanwhile.
            Ok(None) if execution.lease().handle().remaining().is_zero() => {
                let held = Disposition::Held(Duration::ZERO, HoldCause::InFlight);
                self.end(execution, held).await
            }
            Ok(None) => self.execute(execution, handler).await,
            Ok(Some(parked)) => self.end(execution, parked).await,
            // The execution panicked, before the handler.
            Err(_) => {
                let held = Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters);
                self.end(execution, held).await
            }
        }
    }

    /// Parks a message that must not be executed, or holds it if that cannot be decided. Returns
    /// `None` for a message to execute.
    async fn park_before_execution(
        &mut self,
        attempt: u32,
        is_first: bool,
        crashes: u32,
    ) -> Option<Disposition> {
        let inbox = self.inbox;
        if let Some(Parking { reason, attempts, error }) = self.progress.parking.clone() {
            return Some(self.park(reason, attempts, &error).await);
        }
        if let Some(text) = self.delivery.unreadable() {
            return Some(self.park(DeadLetterReason::Unreadable, attempt - 1, text).await);
        }
        let Attempts { max, max_crashes, .. } = inbox.attempts;
        if attempt > max.get() || crashes >= max_crashes.get() {
            let unseen = if crashes > 0 { CRASHED } else { EXHAUSTED };
            let text = self.progress.last_error.clone().unwrap_or_else(|| unseen.to_owned());
            return Some(self.park(DeadLetterReason::Attempts, attempt - 1, &text).await);
        }
        let message = self.delivery.message();
        if let (true, Some(key)) = (inbox.is_ordered, &message.key) {
            // For each message, and never from memory. Without the answer that a dead letter exists,
            // which another process may have stored just now, this one is handled before it; with the
            // answer that one still exists, which is gone, this one is parked behind nothing and its
            // own dead letter blocks the key. Nothing changes between the answer and the handler, or
            // this dead letter: messages of one key, redriven ones included, are in progress one at a
            // time, or the source keeps no order.
            let (consumer, is_redriven) = (&*inbox.consumer, self.identity.redriven.is_some());
            let dead_letter = dead_letter_id(consumer, Some(&self.identity.id), message);
            let query = OrderKeyQuery { consumer, key, dead_letter: &dead_letter, is_redriven };
            match inbox.dead_letters.order_key(query).await {
                Ok(OrderKeyState::Free) => {}
                // It was parked, and its process ended before the record said so.
                Ok(OrderKeyState::Parked(reason)) => {
                    self.progress.dead_letter = Some(dead_letter);
                    return Some(Disposition::Finished(Finish::Parked(reason)));
                }
                Ok(OrderKeyState::Blocked) => {
                    let (reason, made) = (DeadLetterReason::Blocked, attempt - 1);
                    return Some(self.park(reason, made, BLOCKED).await);
                }
                Err(error) => {
                    tracing::warn!(
                        consumer = %inbox.consumer,
                        %error,
                        "a message is held, because the dead letters of its order key could not be read"
                    );
                    return Some(Disposition::Held(AFTER_OUTAGE, HoldCause::DeadLetters));
                }
            }
        }
        let retention = inbox.policy.terms.retention;
        // Of a redriven message too: a copy of it may be delivered after its id was removed.
        let is_old = message.age(inbox.now()) > retention;
        if is_first && is_old && inbox.on_too_old == OnTooOld::Park {
            return Some(self.park(DeadLetterReason::TooOld, 0, TOO_OLD).await);
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
        let result = execution.end(None, end).await;
        self.progress.is_unnoted |= is_unnoted(&result);
        recorded(result, then)
    }

    async fn execute(
        mut self,
        mut execution: Execution,
        handler: &dyn MessageHandler,
    ) -> Disposition {
        // The record has the attempts before this one: a takeover notes them, and a release ends their count.
        self.progress.is_unnoted = false;
        loop {
            let run = execution.begin_run();
            let handled = MessageExecution {
                delivery: Arc::clone(self.delivery),
                id: self.identity.id.clone(),
                lease: execution.lease().handle(),
                transaction: run.clone(),
            };
            let (attempt, lease) = (handled.attempt(), execution.lease().handle());
            self.progress.attempts = attempt;
            let ran = execution
                .attempt(async {
                    let result = handler.handle(handled).await;
                    self.conclude(result, attempt, &lease).await
                })
                .await;
            let (end, then) = match ran {
                Ok(concluded) => concluded,
                Err(panicked) => {
                    let failure = Err(MessageFailure::unknown(panicked));
                    match execution.attempt(self.conclude(failure, attempt, &lease)).await {
                        Ok(concluded) => concluded,
                        Err(_) => {
                            self.progress.is_unnoted = true;
                            (ExecutionEnd::Abandon { seen: None }, self.retried(attempt, None))
                        }
                    }
                }
            };
            let ended = execution.end(run, end).await;
            self.progress.ended = attempt;
            match ended {
                ExecutionResult::Rerun(again) => execution = again,
                ExecutionResult::Exhausted => {
                    let text = "expected the transaction to commit, found a serialization failure or a \
                                deadlock in each run: reduce the number of handlers, or the rows \
                                that they share";
                    return self.not_committed(attempt, text);
                }
                ExecutionResult::RolledBack(source) => {
                    return self.not_committed(attempt, describe(&*source));
                }
                ExecutionResult::EndedEarly(source) => {
                    let text = format!(
                        "expected an open transaction after the handler, found it ended: {}",
                        describe(&*source)
                    );
                    return self.not_committed(attempt, text);
                }
                ExecutionResult::Kept => {
                    let text = "expected that the handler drops its transaction after the last write, \
                                found it kept";
                    return self.not_committed(attempt, text);
                }
                result => {
                    self.progress.is_unnoted |= is_unnoted(&result);
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
        self.progress.last_error = Some(text.clone());
        if let Some(backend) = &self.inbox.transactions
            && backend.database.any_is_conflict(failure.cause())
        {
            tracing::debug!(id = ?self.identity.id, attempt, error = %text, "a transaction conflicted with another one");
            return (ExecutionEnd::Rerun, self.retried(attempt, None));
        }
        self.inbox.failures.note(&self.inbox.consumer, &self.identity.id, attempt, &failure);
        if let MessageFailure::Withdraw { after, .. } = failure {
            // A takeover that is withdrawn is one again for the next claim.
            self.progress.is_unnoted |= self.progress.is_takeover;
            return (ExecutionEnd::Withdraw, self.retried(attempt, Some(after)));
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
                // Under the rule `Block` the next claim parks the message, with the error.
                let is_noted = !matches!(self.inbox.rule, UnknownRule::Block)
                    && self.inbox.note_ended(&self.identity.id, lease, attempt).await;
                self.progress.is_unnoted |= !is_noted;
                return (ExecutionEnd::Abandon { seen: None }, self.retried(attempt, None));
            }
            MessageFailure::Reject { .. } => DeadLetterReason::Rejected,
            MessageFailure::Retry { .. }
            | MessageFailure::Withdraw { .. }
            | MessageFailure::Unknown { .. } => DeadLetterReason::Attempts,
        };
        // Until the dead letter is stored, the next claim of this process stores it without the
        // handler. Of another process, after a crash, the next claim executes, if attempts are
        // left.
        self.progress.parking = Some(Parking { reason, attempts: attempt, error: text.clone() });
        if lease.remaining().is_zero() {
            // Another owner may have handled the message.
            let held = Disposition::Held(IN_FLIGHT_PAUSE, HoldCause::Unknown);
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
    /// Notes that the transaction of a handler was not committed. Whether the end of the attempt was recorded is not known:
    /// the message stays in this process, with its error.
    fn not_committed(&mut self, attempt: u32, error: impl Into<String>) -> Disposition {
        let error = error.into();
        let failure = MessageFailure::unknown(error.clone());
        self.inbox.failures.note(&self.inbox.consumer, &self.identity.id, attempt, &failure);
        self.progress.last_error = Some(error);
        self.progress.is_unnoted = true;
        self.retried(attempt, None)
    }

    fn retried(&self, attempt: u32, after: Option<Duration>) -> Disposition {
        let attempts = &self.inbox.attempts;
        let pause = match after {
            Some(after) => after.min(attempts.longest_pause),
            None => attempts.backoff().pause(attempt, &*self.inbox.entropy),
        };
        Disposition::Held(pause, HoldCause::Retry)
    }
}

/// Returns whether the lease lapses although the execution has ended, so that the next claim is a takeover.
const fn is_unnoted(result: &ExecutionResult) -> bool {
    matches!(result, ExecutionResult::Unknown | ExecutionResult::Failed(_))
}

/// Returns `then` if the end of the execution was recorded; else the message is held.
fn recorded(result: ExecutionResult, then: Disposition) -> Disposition {
    match result {
        ExecutionResult::Recorded(_) => then,
        // A release or an unknown outcome that was not written is replaced by the lapse of the
        // lease.
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
        | ExecutionResult::Rerun(_) => Disposition::Held(IN_FLIGHT_PAUSE, HoldCause::Unknown),
    }
}
