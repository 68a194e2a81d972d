//! Scopes of keys, and operation ids.

use std::fmt;
use std::sync::Arc;

use crate::key::Key;
use crate::namespace::Namespace;
use crate::secret::Secret;

/// The caller's identity: a key names an operation only within its scope.
///
/// A scope consists of named parts, each length-prefixed, so that no two lists of parts give the
/// same scope. Its `Debug` form shows none of them: parts are often credentials.
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
    /// Returns one scope for every caller. Only right if all callers trust each other.
    #[must_use]
    pub fn shared() -> Self {
        Self(Arc::from([]))
    }

    /// Creates the scope of `parts`, each a name and a value, in their order.
    #[must_use]
    pub fn of<N: AsRef<[u8]>, V: AsRef<[u8]>>(parts: impl IntoIterator<Item = (N, V)>) -> Self {
        // Most scopes are one header, whose value is a token.
        let mut bytes = Vec::with_capacity(128);
        for (name, value) in parts {
            push(&mut bytes, name.as_ref());
            push(&mut bytes, value.as_ref());
        }
        Self(bytes.into())
    }

    /// Returns this scope with a further part, such as the name of a consumer or of a function.
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

/// The id of an operation, which names its record: a hash of namespace, scope and key, keyed if there is a
/// secret.
///
/// It reveals nothing of scope or key; with a secret, not even to guesses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId([u8; 32]);

impl OperationId {
    /// Computes the id of `key` within `scope` and `namespace`: BLAKE3, in keyed mode if there is a secret.
    ///
    /// Ids of the default namespace are hashed in a domain of their own, without a namespace.
    #[must_use]
    pub fn derive(
        secret: Option<&Secret>,
        namespace: &Namespace,
        scope: &Scope,
        key: &Key,
    ) -> Self {
        let (keyed, unkeyed) = match namespace.is_default() {
            true => ("hapax 1 store key", "hapax 1 store key, no secret"),
            false => ("hapax 2 store key", "hapax 2 store key, no secret"),
        };
        let mut hasher = match secret {
            Some(secret) => blake3::Hasher::new_keyed(&secret.subkey(keyed)),
            None => blake3::Hasher::new_derive_key(unkeyed),
        };
        if !namespace.is_default() {
            hasher.update(&(namespace.as_str().len() as u64).to_be_bytes());
            hasher.update(namespace.as_str().as_bytes());
        }
        hasher.update(&(scope.0.len() as u64).to_be_bytes());
        hasher.update(&scope.0);
        hasher.update(key.as_str().as_bytes());
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the idempotency key with which the operation calls downstream systems: a hash of
    /// this id.
    #[must_use]
    pub fn downstream(&self) -> Key {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 downstream key");
        hasher.update(&self.0);
        Key::hash(&hasher)
    }

    /// Returns the id as stores write it.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Creates the id that a store read.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Parses 64 hexadecimal digits, as `Display` writes them; `None` for anything else.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(|hash| Self(*hash.as_bytes()))
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
