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
    pub(super) fn found(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_found = true;
    }

    /// Returns whether a message with this error is held. `is_counted` is of the message.
    pub(super) fn holds(&self, error: &MessageIdError, is_counted: &mut bool) -> bool {
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

    /// Waits until the rules count as wrong. Returns the error of the messages.
    pub(crate) async fn until_missing(&self) -> MessageIdError {
        let mut missing = self.missing.subscribe();
        loop {
            if let Some(error) = missing.borrow_and_update().clone() {
                return error;
            }
            if missing.changed().await.is_err() {
                // The sender is in `self`.
                return std::future::pending().await;
            }
        }
    }
}
