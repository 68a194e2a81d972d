//! Keys that clients create.

use std::sync::Arc;
use std::time::Duration;

use super::{BucketError, CompositeKey, Key, KeyError, NaturalKey};
use crate::clock::{Clock, SystemClock};
use crate::entropy::{Entropy, EntropyError, SystemEntropy};

/// A maker of keys, with a clock and a source of randomness that tests can choose. [`Key`] has the
/// same methods with those of the operating system.
///
/// The client creates a key *before* the first attempt, and stores it until the outcome is known: a
/// key that is created anew for each attempt protects nothing. Servers create none.
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
    /// Creates a maker with this clock and this source of randomness.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        Self { clock, entropy }
    }

    /// Creates a key as [`Key::uuid_v4`] does.
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn uuid_v4(&self) -> Result<Key, EntropyError> {
        let uuid = uuid::Builder::from_random_bytes(self.random()?).into_uuid();
        Ok(Key(uuid.to_string().into()))
    }

    /// Creates a key as [`Key::uuid_v7`] does.
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn uuid_v7(&self) -> Result<Key, EntropyError> {
        let uuid = uuid::Builder::from_unix_timestamp_millis(self.millis(), &self.random()?);
        Ok(Key(uuid.into_uuid().to_string().into()))
    }

    /// Creates a key as [`Key::ulid`] does.
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn ulid(&self) -> Result<Key, EntropyError> {
        let random = u128::from_be_bytes(self.random()?);
        Ok(Key(ulid::Ulid::from_parts(self.millis(), random).to_string().into()))
    }

    /// Creates a key as [`Key::client_timestamp_random`] does.
    ///
    /// # Errors
    /// [`MakeKeyError`].
    pub fn client_timestamp_random(&self, client: &str) -> Result<Key, MakeKeyError> {
        // Checked before anything is appended: an empty name would go unnoticed.
        Key::new(client)?;
        let random = u128::from_be_bytes(self.random()?);
        Ok(Key::new(format!("{client}-{}-{random:032x}", self.millis()))?)
    }

    /// Creates a key as [`Key::composite`] does.
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
    /// Creates a random UUID (RFC 9562, section 5.4): 122 random bits. The default choice.
    ///
    /// Risk: it has no relation to the operation, so a client that loses it has to begin anew.
    /// Store it with the operation before the first attempt.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    #[cfg(feature = "keys")]
    pub fn uuid_v4() -> Result<Self, EntropyError> {
        KeyMaker::default().uuid_v4()
    }

    /// Creates a UUID that begins with the time in milliseconds (RFC 9562, section 5.7), then 74
    /// random bits: for keys in an index, in which keys of neighbouring times are neighbours.
    ///
    /// Risk: it shows when it was created. Its order is that of the client's clock, not that of
    /// events.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    #[cfg(feature = "keys")]
    pub fn uuid_v7() -> Result<Self, EntropyError> {
        KeyMaker::default().uuid_v7()
    }

    /// Creates a ULID: the time in milliseconds, then 80 random bits, in 26 characters without
    /// look-alikes.
    ///
    /// Risk: as for [`Key::uuid_v7`]. Two of one millisecond have no order. It is upper case, and
    /// compared by its characters: nothing on the way may change the case.
    ///
    /// # Errors
    /// [`EntropyError`] if there is no randomness.
    #[cfg(feature = "keys")]
    pub fn ulid() -> Result<Self, EntropyError> {
        KeyMaker::default().ulid()
    }

    /// Creates `CLIENT-MILLISECONDS-RANDOM`, with 128 random bits: for logs in which people look
    /// for the requests of a client.
    ///
    /// Risk: it shows the client's name, so `client` must be no credential. Only the random part
    /// makes it unique, so a clock that is wrong or steps back does no harm.
    ///
    /// # Errors
    /// [`MakeKeyError`]: `client` is empty, not printable ASCII, or longer than 208 characters; or
    /// there is no randomness.
    pub fn client_timestamp_random(client: &str) -> Result<Self, MakeKeyError> {
        KeyMaker::default().client_timestamp_random(client)
    }

    /// Creates the key of a payload: a hash of it, whatever the order of its maps and fields.
    ///
    /// Risk: two operations with equal payloads are one. A customer who orders the same coffee
    /// twice gets one coffee, until the retention of the first one ends. Right only if the payload
    /// has something unique: the number of an order, the time of its creation. A reader of the
    /// payload can compute the key.
    ///
    /// # Errors
    /// [`ValueError`](crate::value::ValueError): the payload cannot be encoded.
    #[cfg(feature = "serde")]
    pub fn of_payload<T: serde::Serialize + ?Sized>(
        payload: &T,
    ) -> Result<Self, crate::value::ValueError> {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 payload key");
        let written = crate::value::write(payload, usize::MAX)?;
        hasher.update(&crate::value::canonical(&written)?);
        Ok(Self::hash(&hasher))
    }

    /// Creates the key of an operation and the present time window: the same request within a
    /// minute, for instance, counts as a retry. [`CompositeKey`] has the risks.
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
    /// [`BucketError`] if `bucket` is no time window.
    pub fn composite(parts: &NaturalKey, bucket: Duration) -> Result<CompositeKey, BucketError> {
        KeyMaker::default().composite(parts, bucket)
    }
}

/// Errors of creating a key.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MakeKeyError {
    /// The key would be invalid.
    #[error(transparent)]
    NoKey(#[from] KeyError),
    /// There is no randomness.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}
