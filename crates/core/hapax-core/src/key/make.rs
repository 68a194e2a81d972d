//! Keys made by clients.

use std::sync::Arc;
use std::time::Duration;

use super::{BucketError, CompositeKey, Key, KeyError, NaturalKey};
use crate::clock::{Clock, SystemClock};
use crate::entropy::{Entropy, EntropyError, SystemEntropy};

/// Makes keys, by a clock and dice that tests can choose. [`Key`] has the same with those of the
/// operating system.
///
/// A key is made by whoever asks, *before* the first attempt, and kept until the outcome is known: one
/// that is made anew for each attempt protects nothing. Servers make none.
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
    /// A maker that reads this clock and rolls these dice.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, entropy: Arc<dyn Entropy>) -> Self {
        Self { clock, entropy }
    }

    /// As [`Key::uuid_v4`].
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn uuid_v4(&self) -> Result<Key, EntropyError> {
        let uuid = uuid::Builder::from_random_bytes(self.random()?).into_uuid();
        Ok(Key(uuid.to_string().into()))
    }

    /// As [`Key::uuid_v7`].
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn uuid_v7(&self) -> Result<Key, EntropyError> {
        let uuid = uuid::Builder::from_unix_timestamp_millis(self.millis(), &self.random()?);
        Ok(Key(uuid.into_uuid().to_string().into()))
    }

    /// As [`Key::ulid`].
    ///
    /// # Errors
    /// [`EntropyError`].
    #[cfg(feature = "keys")]
    pub fn ulid(&self) -> Result<Key, EntropyError> {
        let random = u128::from_be_bytes(self.random()?);
        Ok(Key(ulid::Ulid::from_parts(self.millis(), random).to_string().into()))
    }

    /// As [`Key::client_timestamp_random`].
    ///
    /// # Errors
    /// [`MakeKeyError`].
    pub fn client_timestamp_random(&self, client: &str) -> Result<Key, MakeKeyError> {
        // Before what is added to it: an empty one would go unnoticed.
        Key::new(client)?;
        let random = u128::from_be_bytes(self.random()?);
        Ok(Key::new(format!("{client}-{}-{random:032x}", self.millis()))?)
    }

    /// As [`Key::composite`].
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
    /// A random UUID (RFC 9562, section 5.4): 122 random bits. What to use where nothing speaks for
    /// another.
    ///
    /// Risk: it says nothing about the operation, so that whoever loses it can only ask anew. Keep it
    /// with the operation before the first attempt.
    ///
    /// # Errors
    /// [`EntropyError`] when there is no randomness to be had.
    #[cfg(feature = "keys")]
    pub fn uuid_v4() -> Result<Self, EntropyError> {
        KeyMaker::default().uuid_v4()
    }

    /// A UUID that begins with the time in milliseconds (RFC 9562, section 5.7), then 74 random bits:
    /// for those who keep keys in an index, in which neighbours in time are neighbours.
    ///
    /// Risk: it tells everybody who sees it when it was made. Its order is that of the client's
    /// clock, and says nothing about the order of what happened.
    ///
    /// # Errors
    /// [`EntropyError`] when there is no randomness to be had.
    #[cfg(feature = "keys")]
    pub fn uuid_v7() -> Result<Self, EntropyError> {
        KeyMaker::default().uuid_v7()
    }

    /// A ULID: the time in milliseconds, then 80 random bits, in 26 characters without look-alikes.
    ///
    /// Risk: as [`Key::uuid_v7`]. Two of one millisecond have no order. It is upper case, and compared
    /// by its characters: do not let anything on the way change the case.
    ///
    /// # Errors
    /// [`EntropyError`] when there is no randomness to be had.
    #[cfg(feature = "keys")]
    pub fn ulid() -> Result<Self, EntropyError> {
        KeyMaker::default().ulid()
    }

    /// `CLIENT-MILLISECONDS-RANDOM`, with 128 random bits: for logs in which people look for what a
    /// client did and when.
    ///
    /// Risk: it names the client to everybody who sees the key, so that `client` must be no
    /// credential. What makes it unique is the random part alone: a clock that is wrong or steps back
    /// does no harm.
    ///
    /// # Errors
    /// [`MakeKeyError`]: `client` is empty, not printable ASCII, or longer than 208 characters; or
    /// there is no randomness to be had.
    pub fn client_timestamp_random(client: &str) -> Result<Self, MakeKeyError> {
        KeyMaker::default().client_timestamp_random(client)
    }

    /// The key of what is asked: a hash of it, whatever the order of its maps and fields.
    ///
    /// Risk: two operations that are legitimately equal are one. Who orders the same coffee twice
    /// gets one coffee, until the first one's retention ends. Right only where the payload has
    /// something that is there once: an order's number, the moment it was made. And who knows the
    /// payload can guess the key.
    ///
    /// # Errors
    /// [`ValueError`](crate::value::ValueError): it cannot be written.
    #[cfg(feature = "serde")]
    pub fn of_payload<T: serde::Serialize + ?Sized>(
        payload: &T,
    ) -> Result<Self, crate::value::ValueError> {
        let mut hasher = blake3::Hasher::new_derive_key("hapax 1 payload key");
        let written = crate::value::write(payload, usize::MAX)?;
        hasher.update(&crate::value::canonical(&written)?);
        Ok(Self::hash(&hasher))
    }

    /// The key of an operation and the stretch of time that it is now: who asks the same within a
    /// minute, say, is taken to retry. [`CompositeKey`] tells the risks.
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
    /// [`BucketError`] if `bucket` is no stretch of time.
    pub fn composite(parts: &NaturalKey, bucket: Duration) -> Result<CompositeKey, BucketError> {
        KeyMaker::default().composite(parts, bucket)
    }
}

/// Why no key was made.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MakeKeyError {
    /// It would be none.
    #[error(transparent)]
    NoKey(#[from] KeyError),
    /// There was no randomness.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}
