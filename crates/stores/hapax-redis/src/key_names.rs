//! How cells are called.

use std::sync::Arc;

use hapax_core::OperationId;

/// A prefix, and after it the store key in hexadecimal digits.
#[derive(Clone, Debug)]
pub(crate) struct KeyNames(Arc<str>);

impl KeyNames {
    pub(crate) fn new(prefix: &str) -> Self {
        Self(prefix.into())
    }

    pub(crate) fn name(&self, key: &OperationId) -> String {
        format!("{}{key}", self.0)
    }

    /// Where the name of the secret is. No cell's: it is no hexadecimal number.
    pub(crate) fn secret(&self) -> String {
        format!("{}secret", self.0)
    }

    /// Where the identity of the store is. No cell's either.
    pub(crate) fn identity(&self) -> String {
        format!("{}identity", self.0)
    }

    /// What has such a name; `None` for a name that is not ours.
    pub(crate) fn key(&self, name: &[u8]) -> Option<OperationId> {
        let digits = name.strip_prefix(self.0.as_bytes())?;
        // One spelling only.
        let lower = digits.iter().all(|digit| !digit.is_ascii_uppercase());
        lower.then(|| OperationId::from_hex(std::str::from_utf8(digits).ok()?)).flatten()
    }

    /// The pattern that every name fits.
    pub(crate) fn pattern(&self) -> String {
        format!("{}*", self.0)
    }
}
