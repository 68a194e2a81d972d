//! Tests of messages: a broker and dead letters in memory, and the rules of adapters to brokers.

mod broker;
pub mod suite;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hapax_core::store::BoxFuture;
use hapax_messages::{DeadLetter, DeadLetterError, DeadLetterStore, OrderKeyQuery, OrderKeyState};

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
            match letters.iter_mut().find(|stored| stored.id == letter.id) {
                Some(stored) => {
                    (stored.reason, stored.attempts) = (letter.reason, letter.attempts);
                    stored.error.clone_from(&letter.error);
                    stored.last_at = letter.last_at;
                }
                None => letters.push(letter.clone()),
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

    fn order_key<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>> {
        Box::pin(async move {
            self.check()?;
            let letters = self.lock();
            let mut of_key = letters.iter().filter(|letter| {
                letter.consumer == query.consumer
                    && letter.message.key.as_deref() == Some(query.key)
            });
            let is_own = |letter: &&DeadLetter| letter.id == *query.dead_letter;
            if let Some(own) = of_key.clone().find(is_own).filter(|_| !query.is_redriven) {
                return Ok(OrderKeyState::Parked(own.reason));
            }
            Ok(match of_key.next() {
                Some(oldest) if !is_own(&oldest) => OrderKeyState::Blocked,
                _ => OrderKeyState::Free,
            })
        })
    }
}
