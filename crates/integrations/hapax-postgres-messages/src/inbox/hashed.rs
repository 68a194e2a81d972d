//! Hashes of ids and payloads, and what the tables know of them.

use hapax_messages::{BatchError, EntryState, Message, MessageId};
use hapax_postgres_data::SqlValue;

use super::errors::other_rows;
use super::name::ConsumerName;
use crate::hashes::payload_digest;

/// Hashes of ids, and digests of payloads: parameters of `hapax_inbox_insert`.
pub(super) struct HashedIds(Vec<(String, String)>);

impl HashedIds {
    /// Hashes the ids and payloads of messages of a consumer.
    pub(super) fn of<'a, 'b>(
        consumer: &ConsumerName,
        messages: impl Iterator<Item = (&'a MessageId, &'b Message)>,
    ) -> Self {
        Self(messages.map(|(id, it)| (consumer.hash(id), payload_digest(it))).collect())
    }

    /// Returns both as parameters.
    pub(super) fn columns(&self) -> [Vec<Option<&str>>; 2] {
        let keys = self.0.iter().map(|(key, _)| Some(key.as_str()));
        [keys.collect(), self.0.iter().map(|(_, digest)| Some(digest.as_str())).collect()]
    }

    /// Parses the result of `hapax_inbox_insert`, a state for each id.
    pub(super) fn states(&self, codes: Option<SqlValue>) -> Result<Vec<EntryState>, BatchError> {
        let codes = codes.and_then(SqlValue::text).ok_or_else(other_rows)?;
        let states: Option<Vec<_>> = codes.chars().map(entry_state).collect();
        states.filter(|states| states.len() == self.0.len()).ok_or_else(other_rows)
    }
}

/// Returns the state that a code of `hapax_inbox_insert` stands for.
const fn entry_state(code: char) -> Option<EntryState> {
    match code {
        'n' => Some(EntryState::New),
        'd' => Some(EntryState::Duplicate),
        'm' => Some(EntryState::Mismatch),
        _ => None,
    }
}
