//! The order of messages with the same order key.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;

/// Number of keys from which on ended ones are removed.
const SWEEP: usize = 1024;

/// The last message of each order key that is in hand.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: Mutex<HashMap<String, oneshot::Receiver<()>>>,
}

/// The place of a message among those of its key. The next one's turn comes when it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _after: oneshot::Sender<()>,
}

impl Turns {
    /// Returns the turn after those of this key so far.
    pub(super) fn next(&self, key: &str) -> Turn {
        let (after, next) = oneshot::channel();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() >= SWEEP && last.len().is_power_of_two() {
            last.retain(|_, ended| {
                matches!(ended.try_recv(), Err(oneshot::error::TryRecvError::Empty))
            });
        }
        let before = last.insert(key.to_owned(), next);
        Turn { before, _after: after }
    }
}

impl Turn {
    /// Waits until the message before it has ended.
    pub(super) async fn comes(&mut self) {
        if let Some(before) = &mut self.before {
            // Nothing is sent: the sender is dropped.
            let _ = before.await;
            self.before = None;
        }
    }
}
