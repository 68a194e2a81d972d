//! Options of a [`Tiered`](crate::Tiered) store.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{BufferedEntropy, Entropy, KeyRing, OperationId, Sealer, Secret};

/// Options of a [`Tiered`](crate::Tiered). Each method returns the changed options.
#[derive(Clone, Debug)]
pub struct TieredOptions {
    pub(crate) sealer: Sealer,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) longest: Duration,
    pub(crate) cache_timeout: Duration,
    authority: Option<[u8; 32]>,
}

impl TieredOptions {
    /// Names the authority, for caches that are shared with others: entries of one authority are
    /// never found by another.
    ///
    /// No two authorities may have the same name. Two databases can have the same URL, as seen from
    /// two machines, so use an identity that the database itself reports. Processes that give the
    /// same authority different names do not find each other's entries, and an operator's decision
    /// through one of them does not remove entries of the other.
    #[must_use]
    pub fn authority(mut self, name: &str) -> Self {
        self.authority = Some(blake3::derive_key("hapax 1 tiered authority", name.as_bytes()));
        self
    }

    /// Seals the entries in the cache, so that they can be neither read nor forged there. By
    /// default there is no secret.
    #[must_use]
    pub fn secret(mut self, secret: &Secret) -> Self {
        self.sealer = Sealer::keyed(secret);
        self
    }

    /// Seals the entries like [`secret`](Self::secret), with a ring of secrets that are rotated. An
    /// entry that no secret of the ring opens is a miss, and so is each that a ring without a secret that
    /// seals has written.
    #[must_use]
    pub fn key_ring(mut self, ring: &KeyRing) -> Self {
        // A cache may be writable by others, and every entry is sealed: also where the store opens records
        // from before it had a secret, an entry without a seal is forged.
        self.sealer = ring.strict_sealer();
        self
    }

    /// Sets how long a finished record may be replayed from the cache, and so for how long after an
    /// operator released it. 60 s by default; at most a quarter of the retention that is left.
    #[must_use]
    pub const fn cache_ttl(mut self, longest: Duration) -> Self {
        self.longest = longest;
        self
    }

    /// Sets how long the cache may take before the authority is used instead. 100 ms by default.
    #[must_use]
    pub const fn cache_timeout(mut self, cache_timeout: Duration) -> Self {
        self.cache_timeout = cache_timeout;
        self
    }

    /// Sets the source of nonces. By default the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }
}

impl TieredOptions {
    /// Returns the name of `key` in the cache.
    pub(crate) fn name(&self, key: &OperationId) -> OperationId {
        self.authority.as_ref().map_or(*key, |authority| {
            let mut hash = blake3::Hasher::new_keyed(authority);
            hash.update(key.as_bytes());
            OperationId::from_bytes(*hash.finalize().as_bytes())
        })
    }
}

impl Default for TieredOptions {
    fn default() -> Self {
        Self {
            sealer: Sealer::checksum(),
            entropy: Arc::new(BufferedEntropy::default()),
            longest: Duration::from_secs(60),
            cache_timeout: Duration::from_millis(100),
            authority: None,
        }
    }
}
