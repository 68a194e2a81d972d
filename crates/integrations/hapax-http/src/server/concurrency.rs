//! How many keys of a caller are in flight.
//!
//! 1. Counted are keys, not requests: copies of one that is in flight take nothing. A key is
//!    counted from just before its claim until its outcome is recorded or held back, whether or not
//!    its client is still there.
//! 2. At its limit, a caller's further keys are refused before the store is asked. That includes
//!    those whose outcomes are kept: whether there is one is what the store would have to be asked,
//!    and sparing it a flood is what this is for. The refusal says when to come again, and then the
//!    outcome is given.
//! 3. It counts in this process. Several processes allow as many times as much.
//!
//! There is an entry for each key in flight and none for others, so that what this takes is bounded
//! by [`MOST`], and by whatever bounds the requests that are in hand.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

/// The most keys that are counted in all: at about 100 bytes each, 10 MiB. Beyond it nobody with a
/// limit gets another one.
const MOST: usize = 100_000;

/// Shared by all routes of a layer.
#[derive(Debug, Default)]
pub(super) struct ConcurrencyLimits {
    /// Names would take memory as clients like. What they are hashed with is unknown to clients, so
    /// that nobody can make himself another's twin.
    hasher: RandomState,
    taken: Mutex<KeysInFlight>,
}

#[derive(Debug, Default)]
struct KeysInFlight {
    callers: HashMap<u64, HashMap<u64, u32>>,
    keys: usize,
}

/// A key's place; given up when dropped.
#[derive(Debug)]
pub(super) struct ConcurrencyPermit {
    concurrency: Arc<ConcurrencyLimits>,
    caller: u64,
    key: u64,
}

impl ConcurrencyLimits {
    /// A place for `key` of `caller`, one of at most `limit`.
    pub(super) fn enter(
        self: &Arc<Self>,
        caller: impl Hash,
        key: impl Hash,
        limit: NonZeroU32,
    ) -> Option<ConcurrencyPermit> {
        let (caller, key) = (self.hasher.hash_one(caller), self.hasher.hash_one(key));
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = taken.keys >= MOST;
        let keys = taken.callers.entry(caller).or_default();
        let is_new = !keys.contains_key(&key);
        if is_new && (full || keys.len() >= limit.get() as usize) {
            if keys.is_empty() {
                taken.callers.remove(&caller);
            }
            return None;
        }
        *keys.entry(key).or_default() += 1;
        taken.keys += usize::from(is_new);
        drop(taken);
        Some(ConcurrencyPermit { concurrency: Arc::clone(self), caller, key })
    }
}

impl Drop for ConcurrencyPermit {
    fn drop(&mut self) {
        let mut taken = self.concurrency.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(keys) = taken.callers.get_mut(&self.caller) else { return };
        let Some(copies) = keys.get_mut(&self.key) else { return };
        *copies -= 1;
        if *copies > 0 {
            return;
        }
        keys.remove(&self.key);
        if keys.is_empty() {
            taken.callers.remove(&self.caller);
        }
        taken.keys -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

    #[test]
    fn keys_count_and_copies_do_not() {
        let concurrency = Arc::new(ConcurrencyLimits::default());
        let enter = |caller: &str, key: &str| concurrency.enter(caller, key, TWO);
        let first = enter("a", "1").unwrap();
        let copy = enter("a", "1").unwrap();
        let second = enter("a", "2").unwrap();
        assert!(enter("a", "3").is_none());
        assert!(enter("b", "3").is_some());
        drop(first);
        assert!(enter("a", "3").is_none(), "a copy still holds it");
        drop(copy);
        assert!(enter("a", "3").is_some());
        drop(second);
        let taken = concurrency.taken.lock().unwrap();
        assert!(taken.callers.is_empty() && taken.keys == 0, "{taken:?}");
    }

    #[test]
    fn what_is_counted_is_bounded() {
        let concurrency = Arc::new(ConcurrencyLimits::default());
        let places: Vec<_> =
            (0..MOST).map(|caller| concurrency.enter(caller, "k", TWO).unwrap()).collect();
        assert!(concurrency.enter(MOST, "k", TWO).is_none());
        assert!(concurrency.enter(0_usize, "k", TWO).is_some(), "a copy takes nothing more");
        drop(places);
        assert!(concurrency.taken.lock().unwrap().callers.is_empty());
    }
}
