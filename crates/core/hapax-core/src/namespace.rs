//! Namespaces: names of the services that share a store.

mod schedule;

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use self::schedule::NamespacedSchedule;
use crate::schedule::{QueueName, QueueNameError};

/// First character of the queues of a namespace.
const MARK: char = '@';

/// Beginning of the names of consumers of a namespace.
const CONSUMER_MARK: &str = "namespace:";

/// The name of a service among those that share a store. It is a part of every operation id and of every queue
/// of the schedule, so that two namespaces have no record and no saga in common.
///
/// A name has 1 to 32 characters, each an ASCII letter, a digit, `-`, `_` or `.`. The default is the empty
/// name: its operation ids are those of records that were written without a namespace.
///
/// ```
/// use hapax_core::{Key, Namespace, OperationId, Scope};
/// let (scope, key) = (Scope::shared(), Key::new("order-17")?);
/// let id = |namespace: &str| OperationId::derive(None, &namespace.parse().unwrap(), &scope, &key);
/// assert_ne!(id("orders"), id("invoices"));
/// assert!("two words".parse::<Namespace>().is_err());
/// # Ok::<(), hapax_core::KeyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Namespace(Option<Arc<str>>);

impl Namespace {
    /// The greatest length, in characters.
    pub const MAX_LEN: usize = 32;

    /// Creates the namespace; an empty name gives the default.
    ///
    /// # Errors
    /// [`NamespaceError`].
    pub fn new(name: impl AsRef<str>) -> Result<Self, NamespaceError> {
        let name = name.as_ref();
        if name.is_empty() {
            return Ok(Self::default());
        }
        if name.len() > Self::MAX_LEN {
            return Err(NamespaceError::Length { found: name.len() });
        }
        let allowed = |char: &char| char.is_ascii_alphanumeric() || "-_.".contains(*char);
        match name.chars().find(|char| !allowed(char)) {
            Some(found) => Err(NamespaceError::Character { found }),
            None => Ok(Self(Some(name.into()))),
        }
    }

    /// Returns the name; empty for the default.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }

    /// Returns whether it is the default.
    #[must_use]
    pub const fn is_default(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the name of a queue of this namespace as the schedule of the store has it.
    ///
    /// # Errors
    /// [`QueueNameError`] if it is too long with the namespace before it.
    pub fn queue(&self, queue: &QueueName) -> Result<QueueName, QueueNameError> {
        match &self.0 {
            None => Ok(queue.clone()),
            Some(name) => QueueName::new(format!("{MARK}{name}/{queue}")),
        }
    }

    /// Returns the name within this namespace of a queue that the schedule of the store has; `None` if it
    /// belongs to another namespace.
    #[must_use]
    pub fn local_queue(&self, queue: &QueueName) -> Option<QueueName> {
        match &self.0 {
            None => (!queue.as_str().starts_with(MARK)).then(|| queue.clone()),
            Some(name) => {
                let rest = queue.as_str().strip_prefix(MARK)?.strip_prefix(&**name)?;
                QueueName::new(rest.strip_prefix('/')?).ok()
            }
        }
    }

    /// Returns the name of a consumer of this namespace as rows of a database have it, beside those of other
    /// namespaces: `namespace:NAMESPACE/CONSUMER`, or the bare name in the default one.
    #[must_use]
    pub fn stored_consumer<'a>(&self, consumer: &'a str) -> Cow<'a, str> {
        match &self.0 {
            None => consumer.into(),
            Some(name) => format!("{CONSUMER_MARK}{name}/{consumer}").into(),
        }
    }

    /// Returns the namespace and the name within it of a consumer that rows of a database have.
    #[must_use]
    pub fn of_stored_consumer(stored: &str) -> (Self, &str) {
        let rest = stored.strip_prefix(CONSUMER_MARK).and_then(|rest| rest.split_once('/'));
        let named = rest.and_then(|(name, consumer)| Some((Self::new(name).ok()?, consumer)));
        named.filter(|(namespace, _)| !namespace.is_default()).unwrap_or((Self::default(), stored))
    }
}

impl FromStr for Namespace {
    type Err = NamespaceError;

    fn from_str(name: &str) -> Result<Self, NamespaceError> {
        Self::new(name)
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// Errors of a [`Namespace`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// The name is too long.
    #[error(
        "expected a namespace of at most {} characters, found {found}: shorten it",
        Namespace::MAX_LEN
    )]
    Length {
        /// The length, in bytes.
        found: usize,
    },
    /// A character is not allowed.
    #[error(
        "expected a namespace of ASCII letters, digits, `-`, `_` and `.`, found {found:?}: replace it"
    )]
    Character {
        /// The first such character.
        found: char,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_consumer_has_its_namespace_and_the_name_within_it() {
        let invoices = Namespace::new("invoices").unwrap();
        assert_eq!(invoices.stored_consumer("a/b"), "namespace:invoices/a/b");
        assert_eq!(Namespace::default().stored_consumer("a/b"), "a/b");
        let found = Namespace::of_stored_consumer("namespace:invoices/a/b");
        assert_eq!(found, (invoices, "a/b"));
        for plain in ["a/b", "@scope/b", "namespace:/b", "namespace:two words/b", "namespace:b"] {
            assert_eq!(Namespace::of_stored_consumer(plain), (Namespace::default(), plain));
        }
    }
}
