//! The first messages of a consumer, while none of them has an id.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::dead_letter::identify;
use crate::id::{IdRules, MessageIdError};
use crate::message::Message;

/// Messages after which the rules for ids count as wrong, if none of them has an id.
const MESSAGES: u64 = 10;

/// Time after the first of these messages, after which fewer of them are parked.
const TIME: Duration = Duration::from_secs(30);

/// Pause before a held message is checked again.
pub(crate) const NO_ID_PAUSE: Duration = Duration::from_millis(500);

/// Whether a message with an id was received, and how many without one were before it.
#[derive(Debug, Default)]
pub(crate) struct FirstIds {
    state: Mutex<State>,
    /// Notified when the rules count as wrong.
    missing: Notify,
}

#[derive(Debug, Default)]
struct State {
    is_found: bool,
    without: u64,
    since: Option<Instant>,
    is_warned: bool,
    /// The error of the messages, while the rules count as wrong.
    missing: Option<MessageIdError>,
}

impl FirstIds {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes messages that were received together, before any of them is processed: one behind others may be the first
    /// that has an id, and wait for them.
    pub(crate) fn received<'a>(
        &self,
        consumer: &str,
        rules: &IdRules,
        messages: impl Iterator<Item = &'a Message>,
    ) {
        let mut state = self.state();
        if state.is_found {
            return;
        }
        let mut missing = None;
        for message in messages {
            match identify(consumer, rules, message) {
                Ok((_, None)) => {
                    (state.is_found, state.missing) = (true, None);
                    return;
                }
                // The id of a redriven message may be of its dead letter.
                Ok((_, Some(_))) => {}
                Err(error @ MessageIdError::Missing { .. }) => {
                    state.without += 1;
                    missing = Some(error);
                }
                Err(_) => {}
            }
        }
        if missing.is_some() {
            state.since.get_or_insert_with(Instant::now);
            if state.without >= MESSAGES {
                state.missing = missing;
                drop(state);
                self.missing.notify_waiters();
            }
        }
    }

    /// Returns whether a message with this error is held. Logs a warning before the first one is parked while none has an
    /// id.
    pub(crate) fn holds(&self, error: &MessageIdError) -> bool {
        if !matches!(error, MessageIdError::Missing { .. }) {
            return false;
        }
        let mut state = self.state();
        if state.is_found {
            return false;
        }
        let since = *state.since.get_or_insert_with(Instant::now);
        if state.without >= MESSAGES || since.elapsed() < TIME {
            return true;
        }
        if !std::mem::replace(&mut state.is_warned, true) {
            let without_id = state.without;
            tracing::warn!(
                without_id,
                %error,
                "none of the messages so far has an id: they become dead letters; check the rules for ids (--id of \
                 hapax consume)"
            );
        }
        false
    }

    /// Returns the number of messages without an id, as long as none had one.
    pub(crate) fn without(&self) -> u64 {
        let state = self.state();
        if state.is_found { 0 } else { state.without }
    }

    /// Waits until the rules count as wrong, and returns the error of the messages. Does not end without `first_ids`.
    pub(crate) async fn until_missing(first_ids: Option<&Self>) -> MessageIdError {
        let Some(first_ids) = first_ids else { return std::future::pending().await };
        loop {
            // Before the state is read: a notification in between ends the wait.
            let missing = first_ids.missing.notified();
            if let Some(error) = first_ids.state().missing.clone() {
                return error;
            }
            missing.await;
        }
    }
}
