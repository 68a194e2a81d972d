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

use hapax_core::store::parts::{ExpectedIdentity, Recognition};

/// Number of characters of an identity.
const LENGTH: usize = 32;

/// Compares an identity as it is stored, empty for none and with a final `+` if it is confirmed, with
/// the expected one. Returns whether claims may continue.
pub(crate) fn is_expected(known: &ExpectedIdentity, stored: &str) -> bool {
    let (found, is_confirmed) = match stored.strip_suffix('+') {
        Some(found) => (found, true),
        None => (stored, false),
    };
    let found = Some(found).filter(|found| !found.is_empty());
    match known.recognise(found, is_confirmed) {
        Recognition::Expected | Recognition::Confirmed => true,
        Recognition::Replaced { is_new } => {
            if is_new {
                tracing::error!(
                    "the store was emptied or replaced: operations whose records were lost execute \
                     again under reexecute; under block and reconcile new keys are rejected until an operator \
                     runs `hapax store confirm`"
                );
            }
            false
        }
    }
}

/// Creates an identity from 16 random bytes.
pub(crate) fn identity(random: [u8; LENGTH / 2]) -> String {
    format!("{:032x}", u128::from_be_bytes(random))
}
