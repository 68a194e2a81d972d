//! The identity of a store: a random text stored with its records.
//!
//! A store that was emptied would execute its operations again. So each store has an identity,
//! which is lost together with its records (FLUSHALL). Processes that used the store, or were given
//! its identity ([`RedisOptions::identity`](crate::RedisOptions::identity)), then claim no new key
//! under `block` or `reconcile` until an operator confirms:
//! [`RedisStore::confirm`](crate::RedisStore::confirm) marks the present identity, and every
//! process accepts a marked one.
//!
//! A claim's script compares the identity in the same step. In a cluster it cannot, because the
//! identity is in another slot: there it is compared when the store is opened.

use std::sync::{PoisonError, RwLock};

/// Number of characters of an identity.
const LENGTH: usize = 32;

/// The identity that claims expect; `None` before one was seen.
#[derive(Debug, Default)]
pub(crate) struct ExpectedIdentity(RwLock<Identity>);

#[derive(Debug, Default)]
struct Identity {
    expected: Option<String>,
    /// Whether the store was found with another identity, or with none.
    replaced: bool,
}

impl ExpectedIdentity {
    pub(crate) fn new(expected: Option<String>) -> Self {
        Self(RwLock::new(Identity { expected, replaced: false }))
    }

    pub(crate) fn expected(&self) -> Option<String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).expected.clone()
    }

    pub(crate) fn is_replaced(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).replaced
    }

    /// Compares the identity that was found with the expected one; if none is expected, the found
    /// one is from now on. Returns whether claims may continue.
    pub(crate) fn recognise(&self, found: &str) -> bool {
        let (found, confirmed) = match found.strip_suffix('+') {
            Some(found) => (found, true),
            None => (found, false),
        };
        let mut identity = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let ours = match &identity.expected {
            None => true,
            Some(expected) => expected == found || (confirmed && !found.is_empty()),
        };
        if ours {
            let expected = (!found.is_empty()).then(|| found.to_owned());
            *identity = Identity { expected, replaced: false };
        } else if !std::mem::replace(&mut identity.replaced, true) {
            tracing::error!(
                "the store was emptied or replaced: what it held executes again under reexecute; \
                 under block and reconcile new keys are rejected until an operator runs `hapax store \
                 confirm`"
            );
        }
        ours
    }
}

/// Creates an identity from 16 random bytes.
pub(crate) fn identity(random: [u8; LENGTH / 2]) -> String {
    format!("{:032x}", u128::from_be_bytes(random))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_is_expected_until_another_one_is_confirmed() {
        let [first, second] = [1, 2].map(|byte| identity([byte; 16]));
        let known = ExpectedIdentity::new(None);
        assert!(known.recognise(""));
        assert!(known.recognise(&first) && known.recognise(&first));
        for other in ["", "+", &second] {
            assert!(!known.recognise(other) && known.is_replaced(), "{other}");
        }
        assert_eq!(known.expected(), Some(first));
        assert!(known.recognise(&format!("{second}+")) && !known.is_replaced());
        assert!(known.recognise(&second));
        assert_eq!(known.expected(), Some(second));
    }
}
