//! How a cache is used.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Entropy, KeyRing, OperationId, Sealer, Secret, SystemEntropy};

/// How a [`Tiered`](crate::Tiered) uses its cache. Each method returns it changed.
#[derive(Clone, Debug)]
pub struct TieredOptions {
    pub(crate) sealer: Sealer,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) longest: Duration,
    pub(crate) cache_timeout: Duration,
    authority: Option<[u8; 32]>,
}

impl TieredOptions {
    /// Which authority this is, for caches that are shared with others: entries of one are never
    /// found by another. No two authorities may have the same name: two databases may well have the
    /// same URL, as seen from two machines, so take what they say of themselves. Processes that
    /// give the same one different names do not find each other's entries, and an operator's
    /// decision through one of them does not reach what another has put there.
    #[must_use]
    pub fn authority(mut self, name: &str) -> Self {
        self.authority = Some(blake3::derive_key("hapax 1 tiered authority", name.as_bytes()));
        self
    }

    /// Seals what is put into the cache, so that it can be neither read nor made there. By default
    /// there is no secret.
    #[must_use]
    pub fn secret(mut self, secret: &Secret) -> Self {
        self.sealer = Sealer::keyed(secret);
        self
    }

    /// The same, with secrets of which the one that seals is replaced now and then: entries under
    /// one that does not open are misses.
    #[must_use]
    pub fn key_ring(mut self, ring: &KeyRing) -> Self {
        self.sealer = ring.sealer();
        self
    }

    /// How long a finished record may be replayed from the cache, and so how long after an
    /// operator released it. By default 60 s; at most a quarter of what is left of its retention.
    #[must_use]
    pub const fn cache_ttl(mut self, longest: Duration) -> Self {
        self.longest = longest;
        self
    }

    /// How long the cache may take before the authority is asked instead. By default 100 ms.
    #[must_use]
    pub const fn cache_timeout(mut self, cache_timeout: Duration) -> Self {
        self.cache_timeout = cache_timeout;
        self
    }

    /// Where nonces come from; by default the operating system.
    #[must_use]
    pub fn entropy(mut self, entropy: Arc<dyn Entropy>) -> Self {
        self.entropy = entropy;
        self
    }
}

impl TieredOptions {
    /// The name of `key` in the cache.
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
            entropy: Arc::new(SystemEntropy),
            longest: Duration::from_secs(60),
            cache_timeout: Duration::from_millis(100),
            authority: None,
        }
    }
}
