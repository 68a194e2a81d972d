//! Executions of one key and request for two callers.
//!
//! A token that is renewed between two tries is another caller under a scope that is the token: both tries execute. The
//! records of two callers have nothing in common, so that only this process, and only for a time, can notice it.
//!
//! 1. An array has the caller of each of the last executions, by a hash of its route, key and fingerprint. Another
//!    caller under the same hash is counted. Equal keys of two callers who do not know each other are counted too.
//! 2. The count is approximate: a later execution may replace an entry, and other processes have their own.
//! 3. The hashes have a random key, and neither keys nor callers can be read from them.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::{Fingerprint, Key, OperationId};

/// Executions that are remembered, 32 KiB in all; a power of two.
const ENTRIES: usize = 4096;

/// The last executions of a layer, of all routes.
#[derive(Debug, Default)]
pub(super) struct RecentExecutions {
    hasher: RandomState,
    /// Half of the hash of the request, and of the hash of its caller. It is zero for an entry that is free.
    entries: OnceLock<Box<[AtomicU64]>>,
}

impl RecentExecutions {
    /// Notes an execution. Returns whether the last one of the same route, key and request was of another caller.
    ///
    /// `operation` is the id of key and caller.
    pub(super) fn note(
        &self,
        route: &str,
        key: &Key,
        fingerprint: &Fingerprint,
        operation: OperationId,
    ) -> bool {
        let entries =
            self.entries.get_or_init(|| (0..ENTRIES).map(|_| AtomicU64::new(0)).collect());
        let request = self.hasher.hash_one((route, key.as_str(), fingerprint));
        let caller = self.hasher.hash_one(operation) >> 32 | 1;
        let Some(entry) = entries.get(request as usize % ENTRIES) else { return false };
        let now = request >> 32 << 32 | caller;
        let before = entry.swap(now, Ordering::Relaxed);
        // The lower half is never zero.
        before != 0 && before >> 32 == now >> 32 && before != now
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::{Namespace, Scope};

    use super::*;

    #[test]
    fn the_same_key_and_request_of_another_caller_is_noticed() {
        let recent = RecentExecutions::default();
        let note = |route: &str, key: &str, body: &str, caller: &str| {
            let key = Key::new(key).unwrap();
            let scope = Scope::of([("authorization", caller)]);
            let id = OperationId::derive(None, &Namespace::default(), &scope, &key);
            let mut fingerprint = Fingerprint::builder("test");
            fingerprint.field(body.as_bytes());
            recent.note(route, &key, &fingerprint.finish(), id)
        };
        assert!(!note("pay", "k", "x", "a"));
        // The same caller executes again after its key was released.
        assert!(!note("pay", "k", "x", "a"));
        assert!(note("pay", "k", "x", "b"));
        assert!(!note("pay", "k", "x", "b"));
        assert!(note("pay", "k", "x", "a"));
        for (route, key, body) in [("refund", "k", "x"), ("pay", "l", "x"), ("pay", "k", "y")] {
            assert!(!note(route, key, body, "c"), "{route} {key} {body}");
        }
        // Later ones take the places of earlier ones.
        for key in 0..20 * ENTRIES {
            note("pay", &key.to_string(), "", "a");
        }
        assert!(!note("pay", "k", "x", "d"));
    }
}
