//! Names of records on the server.

use std::sync::Arc;

use hapax_core::OperationId;

/// A prefix, to which a name adds the operation id in hexadecimal digits.
#[derive(Clone, Debug)]
pub(crate) struct KeyNames(Arc<str>);

impl KeyNames {
    pub(crate) fn new(prefix: &str) -> Self {
        Self(prefix.into())
    }

    pub(crate) fn name(&self, key: &OperationId) -> String {
        format!("{}{key}", self.0)
    }

    /// Returns the name of the secret's mark. No record has it: it is no hexadecimal number.
    pub(crate) fn secret(&self) -> String {
        format!("{}secret", self.0)
    }

    /// Returns the name of the store's identity. No record has it either.
    pub(crate) fn identity(&self) -> String {
        format!("{}identity", self.0)
    }

    /// Returns the beginning of the names of a slot of the schedule. A cluster has all of them on
    /// one node, because of the tag in braces.
    pub(crate) fn schedule(&self, slot: usize) -> String {
        format!("{}schedule:{{{slot}}}:", self.0)
    }

    /// Returns the operation id in a name; `None` if it is no record's.
    pub(crate) fn key(&self, name: &[u8]) -> Option<OperationId> {
        let digits = name.strip_prefix(self.0.as_bytes())?;
        // Only one spelling is accepted.
        let lower = digits.iter().all(|digit| !digit.is_ascii_uppercase());
        lower.then(|| OperationId::from_hex(std::str::from_utf8(digits).ok()?)).flatten()
    }

    /// Returns the pattern that all names match.
    pub(crate) fn pattern(&self) -> String {
        format!("{}*", self.0)
    }
}
