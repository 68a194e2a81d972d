//! The order keys whose messages wait behind a dead letter.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::dead_letter::{DeadLetterError, DeadLetters};

/// Time after which the keys are read again: another process may have parked a message, or an
/// operator may have redriven one.
const REFRESH: Duration = Duration::from_secs(1);

/// The blocked keys of a consumer, as of at most a second ago and this process's own letters.
#[derive(Debug)]
pub(crate) struct BlockedKeys {
    dead_letters: Arc<dyn DeadLetters>,
    known: Mutex<Option<(Instant, HashSet<String>)>>,
}

impl BlockedKeys {
    pub(crate) fn new(dead_letters: Arc<dyn DeadLetters>) -> Self {
        Self { dead_letters, known: Mutex::new(None) }
    }

    /// Returns whether a letter of `consumer` has this order key. The future may be dropped: the next
    /// call reads again.
    pub(crate) async fn contains(
        &self,
        consumer: &str,
        key: &str,
    ) -> Result<bool, DeadLetterError> {
        let mut known = self.known.lock().await;
        if let Some((read_at, keys)) = &*known
            && read_at.elapsed() < REFRESH
        {
            return Ok(keys.contains(key));
        }
        let read_at = Instant::now();
        let keys = self.dead_letters.blocked_keys(consumer).await?;
        let found = keys.contains(key);
        *known = Some((read_at, keys));
        Ok(found)
    }

    /// Notes that a message with this key was parked here.
    pub(crate) async fn add(&self, key: &str) {
        if let Some((_, keys)) = &mut *self.known.lock().await {
            keys.insert(key.to_owned());
        }
    }
}
