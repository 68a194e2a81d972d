//! The idempotency key: the caller's name for one operation.

mod composite;
mod make;
mod natural;
mod time;

use std::fmt;
use std::str::FromStr;

pub use composite::{BucketError, CompositeKey};
pub use make::{KeyMaker, MakeKeyError};
pub use natural::{KeyPart, NaturalKey};

/// An idempotency key: 1 to 255 characters of printable ASCII.
///
/// The client creates it before the first attempt, and stores it until the outcome is known:
///
/// | key | a retry has the same one if | risk |
/// | --- | --- | --- |
/// | `Key::uuid_v4`, `uuid_v7`, `ulid` | the client stored it | a client that loses it |
/// | [`NaturalKey`] | its business identifiers are the same | two operations with the same ones |
/// | `Key::of_payload` | its payload is the same | two operations with equal payloads |
/// | [`Key::composite`] | the request is made in the same or the next time window | retries across a boundary |
///
/// Keys are compared as decoded text. `Debug` does not show a key, because it may be a guessable
/// name of an operation; [`Key::as_str`] does.
///
/// ```
/// use hapax_core::Key;
/// let key: Key = "8e03978e-40d5-43dd-bc93-6894a57f9324".parse()?;
/// assert_eq!(format!("{key:?}"), "Key(36 characters)");
/// assert!("".parse::<Key>().is_err());
/// # Ok::<(), hapax_core::KeyError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Box<str>);

impl Key {
    /// The longest key, in characters.
    pub const MAX_LEN: usize = 255;

    /// Parses a decoded key.
    ///
    /// # Errors
    /// [`KeyError`] names the fault.
    pub fn new(text: impl AsRef<str>) -> Result<Self, KeyError> {
        let text = text.as_ref();
        if text.is_empty() {
            return Err(KeyError::Empty);
        }
        if let Some(position) = text.bytes().position(|byte| !(0x20..=0x7e).contains(&byte)) {
            return Err(KeyError::NotPrintable { position });
        }
        if text.len() > Self::MAX_LEN {
            return Err(KeyError::TooLong { length: text.len() });
        }
        Ok(Self(text.into()))
    }

    /// Returns the hash as a key.
    pub(crate) fn hash(hasher: &blake3::Hasher) -> Self {
        Self(hasher.finalize().to_hex().as_str().into())
    }

    /// Returns the key as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Self::new(text)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} characters)", self.0.len())
    }
}

/// Errors of parsing a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The text has no characters.
    #[error("expected an idempotency key of 1 to 255 characters, found an empty one")]
    Empty,
    /// The text has more than [`Key::MAX_LEN`] characters.
    #[error("expected an idempotency key of at most 255 characters, found {length}")]
    TooLong {
        /// The number of characters.
        length: usize,
    },
    /// The text has a control character or one outside ASCII.
    #[error(
        "expected printable ASCII in an idempotency key, found another byte at position {position}"
    )]
    NotPrintable {
        /// The position of the byte, from 0.
        position: usize,
    },
}
