//! The limit of a caller's keys in flight.
//!
//! 1. Keys are counted, not requests: duplicates of a key in flight need no permit. A key is
//!    counted from just before its claim until its outcome is recorded or deferred, whether or not
//!    its client is still there.
//! 2. At its limit, further keys of a caller are rejected before the store is called. That includes
//!    keys whose outcomes are stored: only the store could tell, and the limit protects it from a
//!    flood. The rejection states when to retry, and then the outcome is replayed.
//! 3. The limit is that of this process. Several processes allow as many times as much.
//!
//! There is an entry for each key in flight and none for others. The memory is bounded by [`MOST`],
//! and by any bound of the requests in progress.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hash};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

/// Largest number of keys that are counted in all: at about 100 bytes each, 10 MiB. Beyond it no
/// caller with a limit gets another permit.
const MOST: usize = 100_000;

/// Keys in flight of all callers, shared by all routes of a layer.
#[derive(Debug, Default)]
pub(super) struct ConcurrencyLimits {
    /// Names would take as much memory as clients choose. The hash has a random key, so that no
    /// client can collide with another one on purpose.
    hasher: RandomState,
    taken: Mutex<KeysInFlight>,
}

#[derive(Debug, Default)]
struct KeysInFlight {
    callers: HashMap<u64, HashMap<u64, u32>>,
    keys: usize,
}

/// A permit for a key, returned when it is dropped.
#[derive(Debug)]
pub(super) struct ConcurrencyPermit {
    concurrency: Arc<ConcurrencyLimits>,
    caller: u64,
    key: u64,
}

impl ConcurrencyLimits {
    /// Returns a permit for `key` of `caller`, who may have at most `limit` keys.
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
        let Some(duplicates) = keys.get_mut(&self.key) else { return };
        *duplicates -= 1;
        if *duplicates > 0 {
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
    fn keys_count_and_duplicates_do_not() {
        let concurrency = Arc::new(ConcurrencyLimits::default());
        let enter = |caller: &str, key: &str| concurrency.enter(caller, key, TWO);
        let first = enter("a", "1").unwrap();
        let duplicate = enter("a", "1").unwrap();
        let second = enter("a", "2").unwrap();
        assert!(enter("a", "3").is_none());
        assert!(enter("b", "3").is_some());
        drop(first);
        assert!(enter("a", "3").is_none(), "a duplicate is still in flight");
        drop(duplicate);
        assert!(enter("a", "3").is_some());
        drop(second);
        let taken = concurrency.taken.lock().unwrap();
        assert!(taken.callers.is_empty() && taken.keys == 0, "{taken:?}");
    }

    #[test]
    fn the_number_of_counted_keys_is_bounded() {
        let concurrency = Arc::new(ConcurrencyLimits::default());
        let permits: Vec<_> =
            (0..MOST).map(|caller| concurrency.enter(caller, "k", TWO).unwrap()).collect();
        assert!(concurrency.enter(MOST, "k", TWO).is_none());
        assert!(concurrency.enter(0_usize, "k", TWO).is_some(), "a duplicate needs no permit");
        drop(permits);
        assert!(concurrency.taken.lock().unwrap().callers.is_empty());
    }
}
