//! Keys that clients make.

use std::sync::Arc;
use std::time::Duration;

use super::{BucketError, CompositeKey, Key, KeyError, NaturalKey};
use crate::clock::{Clock, SystemClock};
use crate::entropy::{Entropy, EntropyError, SystemEntropy};

/// Makes keys with a clock and a source of randomness that tests can choose. [`Key`] has the same
/// functions with those of the operating system.
///
/// A client makes a key *before* the first attempt, and stores it until the outcome is known. A key
/// that is made anew for each attempt protects nothing. Servers make no keys.
#[derive(Clone, Debug)]
pub struct KeyMaker {
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl Default for KeyMaker {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock), Arc::new(SystemEntropy))
    }
}

impl KeyMaker {
    /// Returns a maker that uses this clock and this source of randomness.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        Self { clock, entropy }
    }

    /// Makes a key as [`Key::uuid_v4`] does.
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn uuid_v4(&self) -> Result<Key, EntropyError> {
        let uuid = uuid::Builder::from_random_bytes(self.random()?).into_uuid();
        Ok(Key(uuid.to_string().into()))
    }

    /// Makes a key as [`Key::uuid_v7`] does.
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn uuid_v7(&self) -> Result<Key, EntropyError> {
        let uuid = uuid::Builder::from_unix_timestamp_millis(self.millis(), &self.random()?);
        Ok(Key(uuid.into_uuid().to_string().into()))
    }

    /// Makes a key as [`Key::ulid`] does.
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn ulid(&self) -> Result<Key, EntropyError> {
        let random = u128::from_be_bytes(self.random()?);
        Ok(Key(ulid::Ulid::from_parts(self.millis(), random).to_string().into()))
    }

    /// Makes a key as [`Key::client_timestamp_random`] does.
    ///
    /// # Errors
    /// [`MakeKeyError`].
    pub fn client_timestamp_random(&self, client: &str) -> Result<Key, MakeKeyError> {
        // Checked alone: with the rest appended, an empty name would be accepted.
        Key::new(client)?;
        let random = u128::from_be_bytes(self.random()?);
        Ok(Key::new(format!("{client}-{}-{random:032x}", self.millis()))?)
    }

    /// Makes a key as [`Key::composite`] does.
    ///
    /// # Errors
    /// [`BucketError`].
    pub fn composite(
        &self,
        parts: &NaturalKey,
        bucket: Duration,
    ) -> Result<CompositeKey, BucketError> {
        CompositeKey::at(self.clock.now(), parts, bucket)
    }

    fn random<const N: usize>(&self) -> Result<[u8; N], EntropyError> {
        let mut bytes = [0; N];
        self.entropy.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn millis(&self) -> u64 {
        self.clock.now().as_micros() / 1000
    }
}

impl Key {
    /// Makes a random UUID (RFC 9562, section 5.4) with 122 random bits. Use it unless there is a
    /// reason for another key.
    ///
    /// Risk: it does not depend on the operation, so a client that loses it can only send a new
    /// operation. Store it with the operation before the first attempt.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    #[cfg(feature = "keys")]
    pub fn uuid_v4() -> Result<Self, EntropyError> {
        KeyMaker::default().uuid_v4()
    }

    /// Makes a UUID that begins with the time in milliseconds (RFC 9562, section 5.7), followed by
    /// 74 random bits. Use it if keys are indexed: keys of nearby times are adjacent in the index.
    ///
    /// Risk: it shows when it was made. Its order is that of the client's clock, not the order of
    /// the executions.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    #[cfg(feature = "keys")]
    pub fn uuid_v7() -> Result<Self, EntropyError> {
        KeyMaker::default().uuid_v7()
    }

    /// Makes a ULID: the time in milliseconds and 80 random bits, in 26 characters that cannot be
    /// mistaken for each other.
    ///
    /// Risk: as of [`Key::uuid_v7`]. Two of the same millisecond have no order. It is upper case
    /// and compared by its characters: no system on its way may change the case.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    #[cfg(feature = "keys")]
    pub fn ulid() -> Result<Self, EntropyError> {
        KeyMaker::default().ulid()
    }

    /// Makes `CLIENT-MILLISECONDS-RANDOM` with 128 random bits. Use it if logs are searched by
    /// client and time.
    ///
    /// Risk: it shows the client to every reader of the key, so `client` must not be a credential.
    /// Only the random part makes it unique: a clock that is wrong or steps back does no harm.
    ///
    /// # Errors
    /// [`MakeKeyError`] if `client` is empty, not printable ASCII or longer than 208 characters, or
    /// if there is no randomness.
    pub fn client_timestamp_random(client: &str) -> Result<Self, MakeKeyError> {
        KeyMaker::default().client_timestamp_random(client)
    }

    /// Returns the key of a payload: its hash, which does not depend on the order of maps and
    /// fields.
    ///
    /// Risk: two operations that are equal on purpose are one. A customer who orders the same
    /// coffee twice gets one coffee, until the retention of the first order ends. Use it only if
    /// the payload has a unique part, such as an order number or the time when it was made. The key
    /// can be guessed from the payload.
    ///
    /// # Errors
    /// [`ValueError`](crate::value::ValueError) if the payload cannot be written.
    #[cfg(feature = "serde")]
    pub fn of_payload<T: serde::Serialize + ?Sized>(
        payload: &T,
    ) -> Result<Self, crate::value::ValueError> {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 payload key");
        let written = crate::value::write(payload, usize::MAX)?;
        hasher.update(&crate::value::canonical(&written)?);
        Ok(Self::hash(&hasher))
    }

    /// Returns the keys of an operation in the current and the previous time bucket: the same
    /// request within a minute, for example, counts as a retry. [`CompositeKey`] describes the
    /// risks.
    ///
    /// ```
    /// use std::time::Duration;
    /// use hapax_core::{Key, NaturalKey};
    /// let parts = NaturalKey::new("reset-password").part("user", "u-1");
    /// let key = Key::composite(&parts, Duration::from_secs(60))?;
    /// assert_ne!(key.current(), key.previous());
    /// # Ok::<(), hapax_core::BucketError>(())
    /// ```
    ///
    /// # Errors
    /// [`BucketError`] if `bucket` is too short or too long.
    pub fn composite(parts: &NaturalKey, bucket: Duration) -> Result<CompositeKey, BucketError> {
        KeyMaker::default().composite(parts, bucket)
    }
}

/// Errors of making a key.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MakeKeyError {
    /// The result is not a valid key.
    #[error(transparent)]
    NoKey(#[from] KeyError),
    /// There is no randomness.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}
