//! Tests of messages: a broker and dead letters in memory, and the rules of adapters to brokers.

mod broker;
pub mod suite;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hapax_core::store::BoxFuture;
use hapax_messages::{DeadLetter, DeadLetterError, DeadLetters};

pub use self::broker::MemoryBroker;

/// Dead letters in memory, which can be made to fail.
#[derive(Debug, Default)]
pub struct MemoryDeadLetters {
    letters: Mutex<BTreeMap<[u8; 32], DeadLetter>>,
    fails: AtomicBool,
}

impl MemoryDeadLetters {
    /// Returns the letters, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<DeadLetter> {
        let mut letters: Vec<_> = self.lock().values().cloned().collect();
        letters.sort_by_key(|letter| letter.last_at);
        letters
    }

    /// Makes each call fail, or succeed again.
    pub fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<[u8; 32], DeadLetter>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), DeadLetterError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(DeadLetterError::new("the test makes dead letters fail"));
        }
        Ok(())
    }
}

impl DeadLetters for MemoryDeadLetters {
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            self.lock().entry(letter.id).or_insert_with(|| letter.clone());
            Ok(())
        })
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            self.lock().remove(id);
            Ok(())
        })
    }

    fn lists_order_keys(&self) -> bool {
        true
    }

    fn blocked_keys<'a>(
        &'a self,
        consumer: &'a str,
    ) -> BoxFuture<'a, Result<HashSet<String>, DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            let letters = self.lock();
            let of_consumer = letters.values().filter(|letter| letter.consumer == consumer);
            Ok(of_consumer.filter_map(|letter| letter.message.key.clone()).collect())
        })
    }
}
