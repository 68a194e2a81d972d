//! The cache trait, and a cache in memory. A cache may lose its entries at any time.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::OperationId;
use hapax_core::store::BoxFuture;
use tokio::time::Instant;

/// Reasons why a cache gave no answer. The store treats them as a miss.
pub type CacheError = Box<dyn Error + Send + Sync>;

/// A map from operation id to bytes, each entry with a time to live. It may lose anything at any
/// time; nothing is decided by its content.
pub trait Cache: fmt::Debug + Send + Sync + 'static {
    /// Returns the entry of `key`, unless it has expired or was lost.
    fn get<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Option<Bytes>, CacheError>>;

    /// Puts `entry` under `key` for `ttl`, and replaces the previous entry.
    fn put<'a>(
        &'a self,
        key: &'a OperationId,
        entry: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), CacheError>>;

    /// Removes the entry of `key`.
    fn remove<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<(), CacheError>>;
}

/// A cache in this process, of bounded size: when it is full, the oldest entries are removed first.
pub struct MemoryCache {
    capacity: usize,
    shards: Vec<Mutex<Shard>>,
}

#[derive(Default)]
struct Shard {
    entries: HashMap<OperationId, Entry>,
    /// Keys in the order in which they were put, with their numbers. A number that was replaced or
    /// removed stays here until it reaches the front.
    order: VecDeque<(u64, OperationId)>,
    bytes: usize,
    puts: u64,
}

struct Entry {
    number: u64,
    until: Instant,
    bytes: Bytes,
}

impl MemoryCache {
    const SHARDS: usize = 16;

    /// Approximate memory of an entry apart from its bytes: its slots in the map and in the order.
    const OVERHEAD: usize = 200;

    /// Creates an empty cache of at most about `capacity` bytes.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let shards = (0..Self::SHARDS).map(|_| Mutex::default()).collect();
        Self { capacity: capacity / Self::SHARDS, shards }
    }

    /// Returns the approximate number of bytes in use.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).bytes).sum()
    }

    fn shard(&self, key: &OperationId) -> MutexGuard<'_, Shard> {
        lock(&self.shards[usize::from(key.as_bytes()[0]) % Self::SHARDS])
    }
}

impl Default for MemoryCache {
    /// A cache of 64 MiB.
    fn default() -> Self {
        Self::new(64 << 20)
    }
}

// Every future completes in its first poll.
impl Cache for MemoryCache {
    fn get<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Option<Bytes>, CacheError>> {
        Box::pin(async move {
            let shard = self.shard(key);
            let entry = shard.entries.get(key).filter(|entry| Instant::now() < entry.until);
            Ok(entry.map(|entry| entry.bytes.clone()))
        })
    }

    fn put<'a>(
        &'a self,
        key: &'a OperationId,
        entry: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move {
            let mut shard = self.shard(key);
            shard.forget(key);
            let size = entry.len() + Self::OVERHEAD;
            if size <= self.capacity {
                shard.make_room(self.capacity - size);
                shard.put(*key, entry, Instant::now() + ttl);
            }
            Ok(())
        })
    }

    fn remove<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move {
            self.shard(key).forget(key);
            Ok(())
        })
    }
}

impl fmt::Debug for MemoryCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryCache").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl Shard {
    fn put(&mut self, key: OperationId, bytes: Bytes, until: Instant) {
        self.puts += 1;
        self.bytes += bytes.len() + MemoryCache::OVERHEAD;
        self.order.push_back((self.puts, key));
        self.entries.insert(key, Entry { number: self.puts, until, bytes });
        // A key that is put again and again must not fill the order.
        if self.order.len() > 2 * self.entries.len() + 64 {
            let entries = &self.entries;
            self.order.retain(|(number, key)| {
                entries.get(key).is_some_and(|entry| entry.number == *number)
            });
        }
    }

    fn forget(&mut self, key: &OperationId) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= entry.bytes.len() + MemoryCache::OVERHEAD;
        }
    }

    /// Removes expired entries and the oldest ones until at most `left` bytes are in use.
    fn make_room(&mut self, left: usize) {
        let now = Instant::now();
        while let Some((number, key)) = self.order.front().copied() {
            let entry = self.entries.get(&key).filter(|entry| entry.number == number);
            match entry {
                // Replaced or removed since.
                None => {}
                Some(entry) if self.bytes <= left && now < entry.until => return,
                Some(_) => self.forget(&key),
            }
            self.order.pop_front();
        }
    }
}

/// Locks a shard. A poisoned lock is used: the counts change together, in one step.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(feature = "redis")]
impl Cache for hapax_redis::RedisCache {
    fn get<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Option<Bytes>, CacheError>> {
        Box::pin(async move { Ok(Self::get(self, key).await?) })
    }

    fn put<'a>(
        &'a self,
        key: &'a OperationId,
        entry: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move { Ok(Self::put(self, key, &entry, ttl).await?) })
    }

    fn remove<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move { Ok(Self::remove(self, key).await?) })
    }
}
