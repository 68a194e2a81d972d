//! The name under which the tables have a consumer.

use hapax_core::Namespace;
use hapax_messages::MessageId;

use crate::hashes::IdHasher;

/// Name of a consumer within its namespace, and the one that rows of the tables have.
#[derive(Clone, Debug)]
pub(super) struct ConsumerName {
    name: String,
    stored: String,
    hasher: IdHasher,
}

impl ConsumerName {
    pub(super) fn new(namespace: &Namespace, name: String) -> Self {
        let stored = namespace.stored_consumer(&name).into_owned();
        Self { hasher: IdHasher::new(&stored), name, stored }
    }

    /// Returns the same consumer within a namespace.
    pub(super) fn within(&self, namespace: &Namespace) -> Self {
        Self::new(namespace, self.name.clone())
    }

    /// Returns the name that rows of the tables have.
    pub(super) fn stored(&self) -> &str {
        &self.stored
    }

    /// Hashes the id of a message.
    pub(super) fn hash(&self, id: &MessageId) -> String {
        self.hasher.hash(id)
    }

    /// Rejects a name without a namespace that a consumer of a namespace has too.
    pub(super) fn check(&self) -> Result<(), String> {
        let (namespace, name) = Namespace::of_stored_consumer(&self.stored);
        if name == self.name {
            return Ok(());
        }
        Err(format!(
            "expected a consumer name that does not begin with `namespace:` and the name of a namespace, found \
             {}: call PgInbox::namespace with {namespace}, and name the consumer {name}; it has the same rows",
            self.name
        ))
    }
}
