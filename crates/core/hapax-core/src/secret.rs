//! The secret of keyed hashing and sealing.

mod ring;

use std::fmt;

pub use ring::{KeyRing, KeyRingError};

/// 32 secret bytes from which every key of the system is derived.
///
/// `Debug` does not show them. Records that were written under a lost secret cannot be read: each
/// of their keys gets an error, never a second execution.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Returns a secret of these bytes, which must come from a random source.
    #[must_use]
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads 64 hexadecimal digits, white space around them ignored; returns `None` for any other
    /// text.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text.trim()).ok().map(|hash| Self(*hash.as_bytes()))
    }

    /// Returns the secret as 64 hexadecimal digits, for its file.
    #[must_use]
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// Derives the key for one purpose. No two purposes share a key.
    pub(crate) fn subkey(&self, purpose: &'static str) -> [u8; 32] {
        blake3::derive_key(purpose, &self.0)
    }

    /// Returns a short keyed hash of `value`, 12 hexadecimal digits. With the secret it can be
    /// computed again from the value; the value cannot be found from it.
    #[cfg(feature = "tokio")]
    pub(crate) fn pseudonym(&self, value: &[u8]) -> String {
        let hash = blake3::keyed_hash(&self.subkey("hapax 1 caller"), value);
        hash.to_hex().chars().take(12).collect()
    }

    /// Returns the id of the secret, which does not reveal it. A sealed record names its secret by
    /// it.
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
