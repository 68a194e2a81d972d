//! A cache in front of a durable store: retries are answered without asking the authority.
//!
//! 1. The authority decides. The cache holds finished records only, which do not change until
//!    their retention ends, and is asked by claims only: for a replay of the same request.
//! 2. An entry is used for [`TieredOptions::cache_ttl`] (60 s), and for a quarter of what was left of the
//!    retention, at most. Its age is told by the authority's clock, so that a cache that keeps
//!    entries for too long, or puts an old one back, changes nothing.
//! 3. With [`TieredOptions::secret`] entries are sealed: bound to the store key, the record and what
//!    stands beside it. Without one, whoever can write to the cache can make up answers.
//! 4. A cache that does not answer is left alone; nothing depends on it but speed.
//!
//! **What an operator must know:** a finished record that is released may still be replayed for
//! `cache_ttl`, by processes other than the one that released it. After that the key runs again.
//!
//! The cache is in this process ([`MemoryCache`]), or shared by all of them (`RedisCache` of
//! `hapax-redis`, feature `redis`), or whatever implements [`Cache`].
//!
//! ```
//! use std::sync::Arc;
//! use hapax_core::{Idempotency, MemoryStore};
//! use hapax_tiered::{MemoryCache, Tiered};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! # let authority = MemoryStore::default();
//! // In earnest the authority is a file, or Postgres.
//! let store = Tiered::new(Arc::new(authority), Arc::new(MemoryCache::default()));
//! let idempotency = Idempotency::builder(Arc::new(store.clone())).build()?;
//! assert_eq!(store.stats().hits, 0);
//! # drop(idempotency);
//! # }
//! ```
//!
//! # Which pair
//!
//! | authority | cache | for |
//! | --- | --- | --- |
//! | Postgres | Redis | many processes; a retry is answered wherever it arrives |
//! | Postgres | memory | many processes; a retry that arrives where the first one did |
//! | a file | memory | one process with many retries: it saves the read, and what sealing costs twice |
//!
//! The Redis may evict and need not persist: it is asked for nothing that the authority cannot say.
//! All processes should be given the same secret, or none; what another one sealed is a miss.
//!
//! # When the cache fails
//!
//! | what happens | what follows |
//! | --- | --- |
//! | it does not answer | each claim waits [`TieredOptions::cache_timeout`] (100 ms) at most, then asks the authority; the cache is left alone for a second |
//! | it forgets, evicts, is emptied | misses |
//! | it keeps too long, or puts old entries back | nothing: an entry says when it was seen |
//! | it is written to by others | with a secret: misses. Without: whatever they like is replayed |
//! | it is shared with another authority's processes | nothing, if both said [`TieredOptions::authority`]; else answers of the one may be replayed by the other |
//! | a removal is lost | in this process nothing; others replay until the entry is over |
//! | the authority's clock steps back | what was seen before is a miss, until the clock is there again |
//!
//! No execution begins, or is taken for owned, because of what is in the cache.
//!
//! # What it is not
//!
//! A first request costs what it costs at the authority, and one look into the cache more. This is
//! for traffic with many retries, and for authorities that are far away. It makes nothing durable
//! that was not.

mod cache;
mod clock;
mod entry;
mod key_table;
mod options;
mod tiered;

pub use cache::{Cache, CacheError, MemoryCache};
pub use options::TieredOptions;
pub use tiered::{Tiered, TieredError, TieredStats};
