//! The order of messages with the same order key.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::oneshot;

/// Number of keys from which on empty queues are removed.
const SWEEP: usize = 1024;

/// The last unacknowledged message of each order key.
#[derive(Debug, Default)]
pub(super) struct KeyQueues {
    last: Mutex<HashMap<String, oneshot::Receiver<()>>>,
}

/// Turn of a message in the queue of its order key. Dropping it admits the next message.
#[derive(Debug)]
pub(super) struct KeyTurn {
    before: Option<oneshot::Receiver<()>>,
    _after: oneshot::Sender<()>,
}

impl KeyQueues {
    /// Appends a message to the queue of `key`.
    pub(super) fn append(&self, key: &str) -> KeyTurn {
        let (after, next) = oneshot::channel();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() >= SWEEP && last.len().is_power_of_two() {
            last.retain(|_, ended| {
                matches!(ended.try_recv(), Err(oneshot::error::TryRecvError::Empty))
            });
        }
        let before = last.insert(key.to_owned(), next);
        KeyTurn { before, _after: after }
    }
}

impl KeyTurn {
    /// Waits until no earlier message is in the queue.
    pub(super) async fn wait(&mut self) {
        if let Some(before) = &mut self.before {
            // Nothing is sent: the sender is dropped.
            let _ = before.await;
            self.before = None;
        }
    }
}
