//! The first messages of a consumer, while none of them has an id.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::id::MessageIdError;

/// Messages after which the rules for ids count as wrong, if none of them has an id.
const MESSAGES: u64 = 10;

/// Time after the first of these messages, after which the rules count as wrong too.
const TIME: Duration = Duration::from_secs(30);

/// Pause before a held message is checked again.
pub(crate) const NO_ID_PAUSE: Duration = Duration::from_millis(500);

/// Whether a message with an id was received, and how many without one were before it.
#[derive(Debug, Default)]
pub(crate) struct FirstIds {
    state: Mutex<State>,
    /// The error of the messages, once the rules count as wrong.
    missing: watch::Sender<Option<MessageIdError>>,
}

#[derive(Debug, Default)]
struct State {
    is_found: bool,
    without: u64,
    since: Option<Instant>,
}

impl FirstIds {
    /// Notes that a message has an id.
    pub(crate) fn found(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_found = true;
    }

    /// Returns whether a message with this error is held. `is_counted` is of the message.
    pub(crate) fn holds(&self, error: &MessageIdError, is_counted: &mut bool) -> bool {
        if !matches!(error, MessageIdError::Missing { .. }) {
            return false;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_found {
            return false;
        }
        if !std::mem::replace(is_counted, true) {
            state.without += 1;
        }
        let since = *state.since.get_or_insert_with(Instant::now);
        if state.without >= MESSAGES || since.elapsed() >= TIME {
            drop(state);
            self.missing.send_replace(Some(error.clone()));
        }
        true
    }

    /// Returns the number of messages without an id, as long as none had one.
    pub(crate) fn without(&self) -> u64 {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_found { 0 } else { state.without }
    }

    /// Waits until the rules count as wrong, and returns the error of the messages. Does not end without `first_ids`.
    pub(crate) async fn until_missing(first_ids: Option<&Self>) -> MessageIdError {
        let Some(first_ids) = first_ids else { return std::future::pending().await };
        let mut missing = first_ids.missing.subscribe();
        loop {
            if let Some(error) = missing.borrow_and_update().clone() {
                return error;
            }
            if missing.changed().await.is_err() {
                // The sender is in `first_ids`.
                return std::future::pending().await;
            }
        }
    }
}
