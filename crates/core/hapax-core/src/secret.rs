//! The secret of keyed hashes and seals.

mod ring;

use std::fmt;

pub use ring::{KeyRing, KeyRingError};

/// 32 secret bytes from which every key of the system is derived.
///
/// Never shown by `Debug`. Without it, what was written with it is unreadable, which is an error
/// for every key concerned, never a second execution.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Creates a secret of these bytes, which must come from a random source.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Parses 64 hexadecimal digits, white space around them ignored; `None` for anything else.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text.trim()).ok().map(|hash| Self(*hash.as_bytes()))
    }

    /// Returns the secret as 64 hexadecimal digits, for its file.
    #[must_use]
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// Derives a separate key for each purpose.
    pub(crate) fn subkey(&self, purpose: &'static str) -> [u8; 32] {
        blake3::derive_key(purpose, &self.0)
    }

    /// Returns a short keyed hash of `value` for a purpose, 12 hexadecimal digits: with the secret, a
    /// value can be compared with it; the value cannot be computed from it.
    #[cfg(feature = "tokio")]
    pub(crate) fn pseudonym(&self, purpose: &'static str, value: &[u8]) -> String {
        let hash = blake3::keyed_hash(&self.subkey(purpose), value);
        hash.to_hex().chars().take(12).collect()
    }

    /// Returns an id of the secret that does not reveal it: records have the id of the one that
    /// sealed them.
    pub(crate) fn id(&self) -> [u8; 4] {
        let [a, b, c, d, ..] = self.subkey("hapax 1 secret id");
        [a, b, c, d]
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}
