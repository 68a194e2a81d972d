//! Whose key it is, and the name under which a store keeps it.

use std::fmt;
use std::sync::Arc;

use crate::key::Key;
use crate::secret::Secret;

/// The caller's identity: a key means something only within its scope.
///
/// A scope is made of named parts, each length-prefixed, so that no two lists of parts give the
/// same scope. Its `Debug` form shows nothing of it: parts are often credentials.
///
/// ```
/// use hapax_core::Scope;
/// let one = Scope::of([("tenant", "ab"), ("user", "c")]);
/// let two = Scope::of([("tenant", "a"), ("user", "bc")]);
/// assert_ne!(one, two);
/// assert_ne!(Scope::shared(), Scope::of([("tenant", "")]));
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Scope(Arc<[u8]>);

impl Scope {
    /// One scope for every caller. Only right where all callers trust each other.
    #[must_use]
    pub fn shared() -> Self {
        Self(Arc::from([]))
    }

    /// The scope made of `parts`, each a name and a value, in their order.
    #[must_use]
    pub fn of<N: AsRef<[u8]>, V: AsRef<[u8]>>(parts: impl IntoIterator<Item = (N, V)>) -> Self {
        let mut bytes = Vec::new();
        for (name, value) in parts {
            push(&mut bytes, name.as_ref());
            push(&mut bytes, value.as_ref());
        }
        Self(bytes.into())
    }

    /// This scope within which `part` is a further one: a consumer's name, an operation's.
    #[must_use]
    pub fn within(&self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let mut bytes = self.0.to_vec();
        push(&mut bytes, name.as_ref());
        push(&mut bytes, value.as_ref());
        Self(bytes.into())
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scope(..)")
    }
}

fn push(bytes: &mut Vec<u8>, field: &[u8]) {
    bytes.extend_from_slice(&(field.len() as u64).to_be_bytes());
    bytes.extend_from_slice(field);
}

/// The name of a record in a store: a hash of scope and key, keyed where there is a secret.
///
/// Nothing of scope or key can be read from it; with a secret, nothing can be guessed either.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId([u8; 32]);

impl OperationId {
    /// The name of `key` within `scope`: BLAKE3, in keyed mode where there is a secret.
    #[must_use]
    pub fn derive(secret: Option<&Secret>, scope: &Scope, key: &Key) -> Self {
        let mut hasher = match secret {
            Some(secret) => blake3::Hasher::new_keyed(&secret.subkey("hapax 1 store key")),
            None => blake3::Hasher::new_derive_key("hapax 1 store key, no secret"),
        };
        hasher.update(&(scope.0.len() as u64).to_be_bytes());
        hasher.update(&scope.0);
        hasher.update(key.as_str().as_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// The key under which the work on this record calls systems downstream: a hash of this name,
    /// which does not tell it.
    #[must_use]
    pub fn downstream(&self) -> Key {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 downstream key");
        hasher.update(&self.0);
        Key::hash(&hasher)
    }

    /// The name as stores write it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A name read back from a store.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads 64 hexadecimal digits, as `Display` writes them; `None` for anything else.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(|hash| Self(*hash.as_bytes()))
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
