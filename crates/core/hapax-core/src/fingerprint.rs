//! Fingerprints: hashes that distinguish a retry from another request under the same key.

mod canonical_json;
mod pointers;
#[cfg(feature = "serde")]
mod value;

use std::fmt;
use std::sync::Arc;

pub use canonical_json::{
    CanonicalJsonError, canonicalize, canonicalize_except, canonicalize_only,
};
pub use pointers::{JsonPointers, PointerError};
#[cfg(feature = "serde")]
pub use value::{CanonicalValueError, canonicalize_value};

/// A hash of a request. Equal requests have equal fingerprints.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Begins a fingerprint in `domain`. Two domains never give the same fingerprint.
    #[must_use]
    pub fn builder(domain: &'static str) -> FingerprintBuilder {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 fingerprint");
        field(&mut hasher, domain.as_bytes());
        FingerprintBuilder { hasher }
    }

    /// Returns the hash as stores write it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Creates the fingerprint that a store read.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Hashes this fingerprint under a secret key. A request has little entropy, for instance in a
    /// card number: an unkeyed hash of it reveals the number to a search of all numbers.
    #[cfg(feature = "tokio")]
    pub(crate) fn keyed(&self, key: &[u8; 32]) -> Self {
        Self(*blake3::keyed_hash(key, &self.0).as_bytes())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A fingerprint that is being computed. Every field is length-prefixed, so that no two lists of
/// fields give the same bytes.
///
/// ```
/// use hapax_core::Fingerprint;
/// let one = Fingerprint::builder("example").field(b"ab").field(b"c").finish();
/// let two = Fingerprint::builder("example").field(b"a").field(b"bc").finish();
/// assert_ne!(one, two);
/// ```
#[derive(Clone, Debug)]
pub struct FingerprintBuilder {
    hasher: blake3::Hasher,
}

impl FingerprintBuilder {
    /// Adds a field.
    pub fn field(&mut self, bytes: &[u8]) -> &mut Self {
        field(&mut self.hasher, bytes);
        self
    }

    /// Returns the fingerprint of the fields so far.
    #[must_use]
    pub fn finish(&self) -> Fingerprint {
        Fingerprint(*self.hasher.finalize().as_bytes())
    }
}

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_be_bytes());
    hasher.update(bytes);
}

/// The name of the computation of a fingerprint, with its options, such as `http/1;body=canonical`.
///
/// It is stored with the record, and a retry is hashed by the record's scheme. So a changed
/// configuration never makes a retry look like another request.
///
/// An engine whose records a [`Secret`](crate::Secret) names stores `keyed/1;` before the name, and a keyed hash
/// of the fingerprint. Earlier records, from before it had a secret, keep their scheme, and retries
/// of them are compared unkeyed.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FingerprintScheme(Arc<str>);

impl FingerprintScheme {
    /// The longest name that is stored, in bytes. Names of requests are at least eight bytes
    /// shorter.
    pub const MAX_LEN: usize = 4096;

    /// The prefix of schemes whose fingerprints are keyed.
    const KEYED: &str = "keyed/1;";

    /// Creates a scheme.
    ///
    /// # Errors
    /// [`SchemeTooLong`] if the keyed name would have more than [`FingerprintScheme::MAX_LEN`]
    /// bytes.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, SchemeTooLong> {
        let name = name.into();
        let prefix = if name.starts_with(Self::KEYED) { 0 } else { Self::KEYED.len() };
        if name.len() + prefix > Self::MAX_LEN { Err(SchemeTooLong) } else { Ok(Self(name)) }
    }

    /// Returns the name that the request gave, without the prefix of keyed fingerprints.
    #[must_use]
    pub fn of_request(&self) -> &str {
        self.0.strip_prefix(Self::KEYED).unwrap_or(&self.0)
    }

    /// Returns whether the record is that of a saga, whose checkpoint is its step log. Such schemes
    /// begin with `saga/`.
    #[must_use]
    pub fn is_saga(&self) -> bool {
        self.of_request().starts_with("saga/")
    }

    /// Returns this scheme with keyed fingerprints.
    #[cfg(feature = "tokio")]
    pub(crate) fn keyed(&self) -> Self {
        Self(format!("{}{}", Self::KEYED, self.0).into())
    }

    /// Returns the scheme whose fingerprints this one keys; `None` if it keys none.
    #[cfg(feature = "tokio")]
    pub(crate) fn unkeyed(&self) -> Option<Self> {
        self.0.strip_prefix(Self::KEYED).map(|name| Self(name.into()))
    }

    /// Creates one of our own schemes, whose name is short.
    #[cfg(feature = "function")]
    pub(crate) fn known(name: &'static str) -> Self {
        Self(name.into())
    }

    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of a scheme is longer than [`FingerprintScheme::MAX_LEN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the fingerprint scheme has more than 4088 bytes: choose fewer headers or pointers")]
pub struct SchemeTooLong;
