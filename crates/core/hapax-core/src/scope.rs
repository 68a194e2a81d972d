//! Scopes of keys, and operation ids.

use std::fmt;
use std::sync::Arc;

use crate::key::Key;
use crate::secret::Secret;

/// The identity of a caller, within which its keys are unique.
///
/// A scope consists of named parts. Each is length-prefixed, so that two different lists of parts
/// never give the same scope. `Debug` shows no part: parts are often credentials.
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
    /// Returns the scope that all callers share. Use it only if all callers trust each other.
    #[must_use]
    pub fn shared() -> Self {
        Self(Arc::from([]))
    }

    /// Returns the scope of `parts`, each a name and a value, in their order.
    #[must_use]
    pub fn of<N: AsRef<[u8]>, V: AsRef<[u8]>>(parts: impl IntoIterator<Item = (N, V)>) -> Self {
        let mut bytes = Vec::new();
        for (name, value) in parts {
            push(&mut bytes, name.as_ref());
            push(&mut bytes, value.as_ref());
        }
        Self(bytes.into())
    }

    /// Returns this scope with one more part, such as the name of a consumer or of an operation.
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

/// The id of an operation, which names its record in a store: a hash of scope and key, keyed if
/// there is a secret.
///
/// Scope and key cannot be read from it. With a secret, they cannot be guessed either.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId([u8; 32]);

impl OperationId {
    /// Returns the id of `key` within `scope`: BLAKE3, in keyed mode if there is a secret.
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

    /// Returns the key that an execution of this operation uses towards systems downstream: a hash
    /// of this id, which does not reveal it.
    #[must_use]
    pub fn downstream(&self) -> Key {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 downstream key");
        hasher.update(&self.0);
        Key::hash(&hasher)
    }

    /// Returns the bytes as stores write them.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads an id back from a store.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads 64 hexadecimal digits, as `Display` writes them; returns `None` for any other text.
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
