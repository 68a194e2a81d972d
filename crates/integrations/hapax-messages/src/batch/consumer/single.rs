//! Messages that are handled alone: suspects, old ones, and those that failed in a batch.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Entropy, Timestamp};
use tokio::sync::OwnedSemaphorePermit;

use super::{AFTER_ERROR, BatchState, IN_FLIGHT_PAUSE};
use crate::batch::{BatchAttempt, BatchError, BatchItem, EntryState};
use crate::consumer::{CountedRetry, until_ended};
use crate::dead_letter::{BLOCKED, CRASHED, DeadLetterReason, EXHAUSTED, MISMATCH, TOO_OLD};
use crate::handler::MessageFailure;
use crate::id::{MessageId, MessageIdError};
use crate::inbox::{Finish, HoldCause, NO_ID_PAUSE};
use crate::source::Delivery;

/// Result for a message that was handled alone.
pub(super) enum Single {
    Done(Finish),
    /// Another owner has its partition, or an operator has set the position.
    Fenced,
    /// Tried again after the pause.
    RetryAfter(Duration, HoldCause),
}

/// Reason for which a message is parked and not handled.
pub(super) enum Unhandled {
    WithoutId(MessageIdError),
    /// The source cannot read it. It may have an id.
    Unreadable(Option<MessageId>, String),
}

/// State of a message that is kept while it is handled alone.
#[derive(Default)]
pub(super) struct AttemptState {
    /// The attempt that was counted, and in which the handler has not failed: it is not counted
    /// again after an outage.
    counted: Option<BatchAttempt>,
    last_error: Option<String>,
    /// Whether the database has the last error. Without it the attempt would count as a crash.
    is_noted: bool,
}

impl AttemptState {
    /// Returns whether the message may be dropped during a pause. An attempt that was counted goes on, and a
    /// failure is noted, or the attempt would count as a crash.
    pub(super) fn may_end(&self) -> bool {
        self.counted.is_none() && (self.last_error.is_none() || self.is_noted)
    }

    /// Returns whether the message may be delayed: the database has its failure. Otherwise this delivery would count as
    /// a crash.
    fn may_delay(&self) -> bool {
        self.counted.is_none() && self.is_noted
    }
}

/// A message that is tried alone after a pause.
pub(super) struct Retry {
    pub(super) item: BatchItem,
    pub(super) pause: Duration,
    pub(super) attempt_state: AttemptState,
}

impl Retry {
    /// Creates the retry of a message whose handler has not failed.
    pub(super) fn new(item: BatchItem, pause: Duration) -> Self {
        Self { item, pause, attempt_state: AttemptState::default() }
    }
}

impl BatchState {
    /// Acknowledges a message that was handled alone, or holds it. Returns the pause before the
    /// next attempt, if there is one.
    pub(super) async fn conclude(&self, item: &BatchItem, single: Single) -> Option<Duration> {
        match single {
            Single::Done(finish) => {
                self.finish(&item.delivery, finish).await;
                None
            }
            Single::Fenced => {
                item.delivery.acquire_position_again();
                None
            }
            Single::RetryAfter(pause, cause) => {
                self.counters.held(cause);
                Some(pause)
            }
        }
    }

    /// Pauses before the next attempt of a message. Returns false if the consumer drains, if the message was delayed
    /// to the source, or if the delivery has ended. Before the last two the database has what the next owner needs, which
    /// handles the message alone because it is a redelivery. In positions mode the messages behind it wait for it.
    /// Otherwise `retry` counts it.
    async fn pause_before<'a>(
        &'a self,
        item: &BatchItem,
        attempt_state: &AttemptState,
        pause: Duration,
        retry: &mut Option<CountedRetry<'a>>,
    ) -> bool {
        retry.get_or_insert_with(|| self.waits.begin_retry(&*item.delivery));
        let is_up = *self.database_is_up.borrow();
        if !self.has_positions
            && attempt_state.may_delay()
            && is_up
            && self.waits.delay(&item.delivery, pause, self.inbox.consumer(), &self.counters).await
        {
            return false;
        }
        let _waiting = is_up.then(|| self.waits.begin());
        tokio::select! {
            biased;
            () = until_ended(&*item.delivery), if attempt_state.may_end() => false,
            continues = self.pause(pause) => continues,
        }
    }

    /// Waits for all transactions, in its turn among the messages that are handled alone. Returns `None` if the consumer
    /// drains.
    async fn alone(&self) -> Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)> {
        let mut draining = self.is_draining.subscribe();
        let turn = tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => None,
            turn = self.waits.share() => turn,
        };
        Some((turn?, self.permits(true).await?))
    }

    /// Handles a message alone after a pause.
    pub(super) async fn retry(&self, Retry { item, pause, attempt_state }: Retry) {
        let mut retry = None;
        if self.pause_before(&item, &attempt_state, pause, &mut retry).await {
            self.deliver_single(item, false, attempt_state, retry).await;
        }
    }

    /// Handles a message alone until it is acknowledged, or the consumer drains. `retry` counts it, if it was tried before.
    pub(super) async fn deliver_single<'a>(
        &'a self,
        item: BatchItem,
        is_old: bool,
        mut attempt_state: AttemptState,
        mut retry: Option<CountedRetry<'a>>,
    ) {
        let first_at = self.clock.now();
        loop {
            let single = {
                let Some(_alone) = self.alone().await else { return };
                // An attempt that was counted goes on, or it would count as a crash.
                if attempt_state.counted.is_none() && item.delivery.has_ended() {
                    return;
                }
                self.single(&item, is_old, first_at, &mut attempt_state).await
            };
            let Some(pause) = self.conclude(&item, single).await else { return };
            if !self.pause_before(&item, &attempt_state, pause, &mut retry).await {
                return;
            }
        }
    }

    /// Counts an attempt and makes it.
    async fn single(
        &self,
        item: &BatchItem,
        is_old: bool,
        first_at: Timestamp,
        attempt_state: &mut AttemptState,
    ) -> Single {
        if let Err(error) = self.note(item, attempt_state).await {
            return again(&error);
        }
        let counted = match attempt_state.counted {
            Some(attempt) => Ok(attempt),
            None => {
                let counted = self.inbox.count_attempt(&item.id).await;
                self.note_database(&counted);
                counted
            }
        };
        let attempt = match counted {
            // It was handled, or its id belongs to another payload: inserting the id decides.
            Ok(BatchAttempt { number: 0, .. }) => BatchAttempt { number: 1, crashes: 0 },
            Ok(attempt) => *attempt_state.counted.insert(attempt),
            Err(error) => return again(&error),
        };
        if is_old && attempt_state.counted.is_some() {
            let (id, reason) = (Some(&item.id), DeadLetterReason::TooOld);
            return self.park(id, &item.delivery, reason, 0, TOO_OLD, first_at).await;
        }
        let BatchAttempt { number: attempt, crashes } = attempt;
        if attempt > self.attempts.max.get() || crashes >= self.attempts.max_crashes.get() {
            let unseen = if crashes > 0 { CRASHED } else { EXHAUSTED };
            let text = attempt_state.last_error.as_deref().unwrap_or(unseen);
            let (id, reason) = (Some(&item.id), DeadLetterReason::Attempts);
            return self.park(id, &item.delivery, reason, attempt - 1, text, first_at).await;
        }
        match self.apply(std::slice::from_ref(item), true).await {
            Ok(states) => match states.first() {
                Some(EntryState::New) => Single::Done(Finish::Handled),
                Some(state @ (EntryState::Mismatch | EntryState::Blocked)) => {
                    self.park_excluded(item, *state, first_at).await
                }
                Some(EntryState::Duplicate) | None => Single::Done(Finish::Duplicate),
            },
            Err(BatchError::MustPark(states)) if !states.is_empty() => {
                self.park_excluded(item, states[0], first_at).await
            }
            Err(BatchError::Handler(failure)) => {
                self.failed(item, &failure, attempt, first_at, attempt_state).await
            }
            Err(error) => again(&error),
        }
    }

    /// Parks a message whose state, which is a mismatch or blocked, excludes that it is handled.
    pub(super) async fn park_excluded(
        &self,
        item: &BatchItem,
        state: EntryState,
        first_at: Timestamp,
    ) -> Single {
        let (reason, text) = match state {
            EntryState::Blocked => (DeadLetterReason::Blocked, BLOCKED),
            _ => (DeadLetterReason::Mismatch, MISMATCH),
        };
        self.park(Some(&item.id), &item.delivery, reason, 0, text, first_at).await
    }

    /// Parks a message that is not handled, until its dead letter is stored or the consumer drains.
    pub(super) async fn park_unhandled(&self, delivery: &Arc<dyn Delivery>, unhandled: &Unhandled) {
        let is_held =
            |error: &_| self.first_ids.as_ref().is_some_and(|first_ids| first_ids.holds(error));
        loop {
            let now = self.clock.now();
            let single = match unhandled {
                Unhandled::WithoutId(error) if is_held(error) => {
                    Single::RetryAfter(NO_ID_PAUSE, HoldCause::NoId)
                }
                Unhandled::WithoutId(error) => {
                    let (reason, text) = (DeadLetterReason::NoId, error.to_string());
                    self.park(None, delivery, reason, 0, &text, now).await
                }
                Unhandled::Unreadable(id, text) => {
                    let reason = DeadLetterReason::Unreadable;
                    self.park(id.as_ref(), delivery, reason, 0, text, now).await
                }
            };
            match single {
                Single::Done(finish) => return self.finish(delivery, finish).await,
                Single::Fenced => return delivery.acquire_position_again(),
                Single::RetryAfter(pause, cause) => {
                    self.counters.held(cause);
                    tokio::select! {
                        biased;
                        () = until_ended(&**delivery) => return,
                        continues = self.pause(pause) => if !continues { return },
                    }
                }
            }
        }
    }

    /// Notes the failure of an attempt, and parks the message after the last one.
    pub(super) async fn failed(
        &self,
        item: &BatchItem,
        failure: &MessageFailure,
        attempt: u32,
        first_at: Timestamp,
        attempt_state: &mut AttemptState,
    ) -> Single {
        let text = failure.text();
        self.failures.note(self.inbox.consumer(), &item.id, attempt, failure);
        *attempt_state = AttemptState { last_error: Some(text.clone()), ..AttemptState::default() };
        let is_last = attempt >= self.attempts.max.get();
        let (reason, after) = match failure {
            MessageFailure::Reject { .. } => (Some(DeadLetterReason::Rejected), None),
            MessageFailure::Retry { .. }
            | MessageFailure::Withdraw { .. }
            | MessageFailure::Unknown { .. }
                if is_last =>
            {
                (Some(DeadLetterReason::Attempts), None)
            }
            MessageFailure::Retry { after, .. } => (None, *after),
            MessageFailure::Withdraw { after, .. } => (None, Some(*after)),
            MessageFailure::Unknown { .. } => (None, None),
        };
        if let Some(reason) = reason {
            return self
                .park(Some(&item.id), &item.delivery, reason, attempt, &text, first_at)
                .await;
        }
        if let Err(error) = self.note(item, attempt_state).await {
            return again(&error);
        }
        let pause = after.map_or_else(
            || self.attempts.backoff().pause(attempt, &self.entropy as &dyn Entropy),
            |after| after.min(self.attempts.longest_pause),
        );
        Single::RetryAfter(pause, HoldCause::Retry)
    }

    /// Notes the failure of the last attempt, unless it is noted. Without an answer it is noted again:
    /// no attempt begins before.
    async fn note(
        &self,
        item: &BatchItem,
        attempt_state: &mut AttemptState,
    ) -> Result<(), BatchError> {
        let Some(error) = attempt_state.last_error.as_ref().filter(|_| !attempt_state.is_noted)
        else {
            return Ok(());
        };
        let noted = self.inbox.note_failure(&item.id, error).await;
        self.note_database(&noted);
        noted?;
        attempt_state.is_noted = true;
        Ok(())
    }
}

pub(super) fn again(error: &BatchError) -> Single {
    match error {
        BatchError::InProgress => Single::RetryAfter(IN_FLIGHT_PAUSE, HoldCause::InFlight),
        BatchError::Handler(_) | BatchError::MustPark(_) => {
            Single::RetryAfter(AFTER_ERROR, HoldCause::Retry)
        }
        BatchError::Fenced => Single::Fenced,
        BatchError::Aborted(_) | BatchError::Unavailable(_) => {
            Single::RetryAfter(AFTER_ERROR, HoldCause::Store)
        }
    }
}
