//! Ids of sagas in lists.

use std::fmt;

use hapax_core::schedule::EntryKey;
use hapax_core::{EntryId, OperationId, WriteId};
use hapax_saga::UnacceptedStart;

use crate::keys::is_id_prefix;

/// Id of a saga in a list: its operation id. That of a rejected start is followed by a hyphen and the id
/// of its entry, since its key belongs to another saga.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SagaId {
    /// The operation.
    pub operation: OperationId,
    /// The entry of a rejected start.
    pub entry: Option<EntryId>,
}

impl SagaId {
    /// Parses an id: 64 hexadecimal digits, of a rejected start with a hyphen and 32 further ones.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let Some((operation, entry)) = text.split_once('-') else {
            return Some(Self { operation: OperationId::from_hex(text)?, entry: None });
        };
        let entry = EntryId::from_bytes(*super::parse_write_id(entry)?.as_bytes());
        Some(Self { operation: OperationId::from_hex(operation)?, entry: Some(entry) })
    }

    /// Returns whether a text may be the first digits of an id: 8 hexadecimal digits or more, and not a
    /// whole operation id.
    #[must_use]
    pub fn is_prefix(text: &str) -> bool {
        is_id_prefix(text)
    }

    /// Returns the id of a rejected start.
    pub(super) const fn of_rejected(key: EntryKey) -> Self {
        Self { operation: key.operation, entry: Some(key.id) }
    }
}

impl From<OperationId> for SagaId {
    fn from(operation: OperationId) -> Self {
        Self { operation, entry: None }
    }
}

impl fmt::Display for SagaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.entry {
            None => write!(f, "{}", self.operation),
            Some(entry) => write!(f, "{}-{}", self.operation, crate::hex(entry.as_bytes())),
        }
    }
}

/// Returns what a decision about a start names in place of a write id: the id of its entry, which never
/// changes.
pub(super) fn seen(start: &UnacceptedStart) -> WriteId {
    WriteId::from_bytes(*start.key.id.as_bytes())
}
