//! Tests of messages: a broker and dead letters in memory, and the rules of adapters to brokers.

mod broker;
pub mod suite;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hapax_core::store::BoxFuture;
use hapax_messages::{DeadLetter, DeadLetterError, DeadLetterStore, OrderKeyQuery};

pub use self::broker::MemoryBroker;

/// Dead letters in memory, which can be made to fail.
#[derive(Debug, Default)]
pub struct MemoryDeadLetters {
    /// In the order in which each was first stored.
    letters: Mutex<Vec<DeadLetter>>,
    fails: AtomicBool,
}

impl MemoryDeadLetters {
    /// Returns the dead letters, oldest first.
    #[must_use]
    pub fn list(&self) -> Vec<DeadLetter> {
        self.lock().clone()
    }

    /// Makes each call fail, or succeed again.
    pub fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::SeqCst);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<DeadLetter>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), DeadLetterError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(DeadLetterError::new("the test makes dead letters fail"));
        }
        Ok(())
    }
}

impl DeadLetterStore for MemoryDeadLetters {
    fn park<'a>(&'a self, letter: &'a DeadLetter) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            let mut letters = self.lock();
            if letters.iter().all(|stored| stored.id != letter.id) {
                letters.push(letter.clone());
            }
            Ok(())
        })
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            self.lock().retain(|letter| letter.id != *id);
            Ok(())
        })
    }

    fn finds_order_keys(&self) -> bool {
        true
    }

    fn blocks<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<bool, DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            let letters = self.lock();
            let oldest = letters.iter().find(|letter| {
                letter.consumer == query.consumer
                    && letter.message.key.as_deref() == Some(query.key)
            });
            Ok(oldest.is_some_and(|oldest| Some(&oldest.id) != query.redriven))
        })
    }
}
