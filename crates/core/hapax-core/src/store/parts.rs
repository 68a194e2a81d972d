//! Parts of stores: the limits of a queue, and the identity of a store.

use std::sync::{PoisonError, RwLock};

use crate::record::WriteId;

/// Limits of the requests that wait in a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Number of requests.
    pub items: usize,
    /// Bytes of records in them.
    pub bytes: usize,
}

impl QueueLimits {
    /// The smallest number of requests: below it, nothing would be reserved for [`Admission::Any`].
    pub const MIN_ITEMS: usize = 8;

    /// Returns whether a request with `more` bytes may join `items` requests of `bytes` bytes. A
    /// request larger than the whole limit may join an empty queue.
    #[must_use]
    pub fn admits(&self, items: usize, bytes: usize, more: usize, admission: Admission) -> bool {
        items < admission.share(self.items)
            && (items == 0 || bytes.saturating_add(more) <= admission.share(self.bytes))
    }
}

impl Default for QueueLimits {
    /// 4,096 requests and 64 MiB.
    fn default() -> Self {
        Self { items: 4096, bytes: 64 << 20 }
    }
}

/// The part of a limit that a request may use. New keys are rejected first, so that executions under
/// way can still be recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Seven eighths.
    NewKey,
    /// The whole limit.
    Any,
}

impl Admission {
    /// Returns the admission of a swap that expects the write id `expected`.
    #[must_use]
    pub const fn of(expected: Option<&WriteId>) -> Self {
        if expected.is_none() { Self::NewKey } else { Self::Any }
    }

    /// Returns the part of `limit`.
    #[must_use]
    pub const fn share(self, limit: usize) -> usize {
        match self {
            Self::NewKey => limit - limit / 8,
            Self::Any => limit,
        }
    }
}

/// The identity of a store that claims expect: a random text, stored with the records and lost with
/// them. A store with another identity was emptied or replaced.
#[derive(Debug, Default)]
pub struct ExpectedIdentity(RwLock<Identity>);

#[derive(Debug, Default)]
struct Identity {
    expected: Option<String>,
    replaced: bool,
}

/// Result of [`ExpectedIdentity::recognise`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recognition {
    /// The store has the expected identity, or none was expected.
    Expected,
    /// The store has another identity, which an operator confirmed. It is expected from now on.
    Confirmed,
    /// The store was emptied or replaced.
    Replaced {
        /// True if that was not known before.
        is_new: bool,
    },
}

impl ExpectedIdentity {
    /// Expects `expected`; `None` expects the first identity that is found.
    #[must_use]
    pub const fn new(expected: Option<String>) -> Self {
        Self(RwLock::new(Identity { expected, replaced: false }))
    }

    /// Returns the expected identity; `None` before one was found.
    #[must_use]
    pub fn expected(&self) -> Option<String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).expected.clone()
    }

    /// Returns whether the store was found with another identity, or without one.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).replaced
    }

    /// Compares the identity that the store has with the expected one.
    pub fn recognise(&self, found: Option<&str>, is_confirmed: bool) -> Recognition {
        let mut identity = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let recognition = match (identity.expected.as_deref(), found) {
            (None, _) => Recognition::Expected,
            (expected, found) if expected == found => Recognition::Expected,
            (Some(_), Some(_)) if is_confirmed => Recognition::Confirmed,
            (Some(_), _) => {
                let is_new = !std::mem::replace(&mut identity.replaced, true);
                return Recognition::Replaced { is_new };
            }
        };
        *identity = Identity { expected: found.map(str::to_owned), replaced: false };
        recognition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_expected_until_another_one_is_confirmed() {
        let known = ExpectedIdentity::new(None);
        assert_eq!(known.recognise(None, false), Recognition::Expected);
        for _ in 0..2 {
            assert_eq!(known.recognise(Some("first"), false), Recognition::Expected);
        }
        for (at, other) in
            [(None, false), (None, true), (Some("second"), false)].into_iter().enumerate()
        {
            let replaced = Recognition::Replaced { is_new: at == 0 };
            assert_eq!(known.recognise(other.0, other.1), replaced);
            assert!(known.is_replaced());
        }
        assert_eq!(known.expected().as_deref(), Some("first"));
        assert_eq!(known.recognise(Some("second"), true), Recognition::Confirmed);
        assert!(!known.is_replaced());
        assert_eq!(known.recognise(Some("second"), false), Recognition::Expected);
        assert_eq!(known.expected().as_deref(), Some("second"));
    }

    #[test]
    fn requests_in_progress_are_admitted_where_new_keys_are_not() {
        let limits = QueueLimits { items: 16, bytes: 1_000 };
        assert!(limits.admits(13, 0, 875, Admission::NewKey));
        assert!(!limits.admits(14, 0, 0, Admission::NewKey));
        assert!(!limits.admits(1, 1, 875, Admission::NewKey));
        assert!(limits.admits(15, 1, 999, Admission::Any));
        assert!(!limits.admits(16, 0, 0, Admission::Any));
        assert!(limits.admits(0, 0, 5_000, Admission::NewKey));
    }
}
