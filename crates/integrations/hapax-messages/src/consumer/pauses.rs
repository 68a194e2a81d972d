//! Waits of a message: for its turn, for handlers, and for its next attempt.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::sleep;

use super::key_queues::KeyTurn;
use super::{ConsumerState, CountedRetry, acquire_all, until_ended};
use crate::inbox::HoldCause;
use crate::source::Delivery;

impl ConsumerState {
    /// Waits for the messages before one with an order key. Returns false if it is dropped, or was returned to the source.
    pub(super) async fn takes_turn(
        &self,
        delivery: &Arc<dyn Delivery>,
        turn: &mut KeyTurn,
        draining: &mut watch::Receiver<bool>,
    ) -> bool {
        let _behind = self.waits.begin_behind();
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => return false,
            () = turn.wait() => {}
        }
        // The message before it may have been dropped by the drain, or returned to the source. Then this one is, before it
        // gives its turn to the next one.
        !*draining.borrow() && !delivery.return_behind_delayed()
    }

    /// Returns a handler's permit; for a suspect those of all handlers, so that it is alone. A message that was tried
    /// before also needs one of its share.
    pub(super) async fn permits(
        &self,
        is_suspect: bool,
        is_retry: bool,
    ) -> Option<(Option<OwnedSemaphorePermit>, OwnedSemaphorePermit)> {
        // In this order always, so that none that has a handler waits for the share.
        let share = match is_retry {
            true => Some(self.waits.share().await?),
            false => None,
        };
        let handler = match is_suspect {
            false => Arc::clone(&self.handlers).acquire_owned().await.ok(),
            true => acquire_all(&self.handlers, self.limits.handlers, self.inbox.consumer()).await,
        };
        Some((share, handler?))
    }

    /// Pauses before the next attempt of a message. Returns false if it is dropped, or was returned to the source. Otherwise
    /// `retry` counts it, and the source has those that wait for its `turn`, if it takes them back.
    pub(super) async fn pause_before<'a>(
        &'a self,
        delivery: &Arc<dyn Delivery>,
        (pause, cause): (Duration, HoldCause),
        may_delay: bool,
        retry: &mut Option<CountedRetry<'a>>,
        turn: &mut Option<KeyTurn>,
        draining: &mut watch::Receiver<bool>,
    ) -> bool {
        let is_outage = matches!(cause, HoldCause::Store | HoldCause::NoId);
        if !is_outage {
            retry.get_or_insert_with(|| self.waits.begin_retry(&**delivery));
        }
        if may_delay
            && self.waits.delay(delivery, pause, self.inbox.consumer(), &self.counters).await
        {
            return false;
        }
        if !is_outage
            && turn.is_some()
            && let Some(key) = &delivery.message().key
            && delivery.keep_followers()
        {
            // Their turns come now, in which they return. The new turn is not awaited: the source delivers none of them
            // before the acknowledgement.
            *turn = Some(self.key_queues.append(key));
        }
        let _waiting = (!is_outage).then(|| self.waits.begin());
        // The record has what the next owner needs, which waits for the end of this delivery. A message without an id
        // has none.
        let may_end = matches!(cause, HoldCause::Retry | HoldCause::InFlight | HoldCause::NoId);
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => false,
            () = until_ended(&**delivery), if may_end => false,
            () = sleep(pause) => true,
        }
    }
}
