//! Fingerprints: digests that distinguish a retry from another request with the same key.

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

/// The digest of a request. Equal fingerprints: the same request.
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

    /// Returns the bytes as stores write them.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads a fingerprint back from a store.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Hashes this fingerprint under a secret key. A request has few secret values, such as a card
    /// number: they could be found from an unkeyed hash by trying all of them.
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

/// A fingerprint under construction. Each field is length-prefixed, so that two different lists of
/// fields never give the same bytes.
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
    #[must_use]
    pub fn field(mut self, bytes: &[u8]) -> Self {
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

/// The name of the method that computed a fingerprint, with its options, such as
/// `http/1;body=canonical`.
///
/// It is stored with the record, and a retry is hashed by the record's scheme. So a changed
/// configuration never makes a retry look like another request.
///
/// An engine with a [`Secret`](crate::Secret) stores `keyed/1;` before the name of the request's
/// scheme, and a keyed hash of its fingerprint. Records from before the secret was set keep their
/// scheme, and their retries are compared unkeyed.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FingerprintScheme(Arc<str>);

impl FingerprintScheme {
    /// The longest name that is stored, in bytes. For the scheme of a request it is eight bytes
    /// less.
    pub const MAX_LEN: usize = 4096;

    /// The prefix of a scheme whose fingerprints are keyed.
    const KEYED: &str = "keyed/1;";

    /// Returns the scheme of this name.
    ///
    /// # Errors
    /// [`SchemeTooLong`] if it would have more than [`FingerprintScheme::MAX_LEN`] bytes once it is
    /// keyed.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self, SchemeTooLong> {
        let name = name.into();
        let prefix = if name.starts_with(Self::KEYED) { 0 } else { Self::KEYED.len() };
        if name.len() + prefix > Self::MAX_LEN { Err(SchemeTooLong) } else { Ok(Self(name)) }
    }

    /// Returns the name of the request's scheme, without the prefix of keyed fingerprints.
    #[must_use]
    pub fn of_request(&self) -> &str {
        self.0.strip_prefix(Self::KEYED).unwrap_or(&self.0)
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

    /// Returns a scheme of this crate, whose name is short.
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

/// Error for a scheme whose name is longer than [`FingerprintScheme::MAX_LEN`] allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the fingerprint scheme has more than 4088 bytes: choose fewer headers or pointers")]
pub struct SchemeTooLong;
