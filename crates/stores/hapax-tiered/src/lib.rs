//! A cache in front of a durable store: retries are answered without a call to the authority.
//!
//! 1. The authority decides. The cache holds finished records only, which do not change until their
//!    retention ends. Only claims read it, for a replay of the same request.
//! 2. An entry is used for at most [`TieredOptions::cache_ttl`] (60 s), and for at most a quarter
//!    of the retention that was left. Its age is measured by the authority's clock, so a cache that
//!    keeps entries for too long, or restores an old one, changes nothing.
//! 3. With [`TieredOptions::secret`] entries are sealed: bound to the operation id, the record and
//!    the other fields of the entry. Without a secret, anything that can write to the cache can
//!    forge outcomes.
//! 4. A cache that does not answer is not called for a while. Only speed depends on it.
//!
//! **For operators:** a finished record that is released may still be replayed for `cache_ttl`, by
//! processes other than the one that released it. After that the key executes again.
//!
//! The cache is in this process ([`MemoryCache`]), shared by all processes (`RedisCache` of
//! `hapax-redis`, feature `redis`), or any implementation of [`Cache`].
//!
//! ```
//! use std::sync::Arc;
//! use hapax_core::{Idempotency, MemoryStore};
//! use hapax_tiered::{MemoryCache, Tiered};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let authority = MemoryStore::default();
//! // In production the authority is a file or Postgres.
//! let store = Tiered::new(Arc::new(authority), Arc::new(MemoryCache::default()));
//! let idempotency = Idempotency::builder(store.clone()).build()?;
//! assert_eq!(store.stats().hits, 0);
//! # drop(idempotency);
//! # Ok(()) }
//! ```
//!
//! # Which pair to use
//!
//! | authority | cache | for |
//! | --- | --- | --- |
//! | Postgres | Redis | many processes; a retry is answered wherever it arrives |
//! | Postgres | memory | many processes; a retry that arrives where the first one did |
//! | a file | memory | one process with many retries: it saves the read and the unsealing |
//!
//! The Redis may evict and need not persist: everything in it can be read from the authority. Give
//! all processes the same secret, or none; an entry that was sealed with another secret is a miss.
//!
//! # When the cache fails
//!
//! | event | consequence |
//! | --- | --- |
//! | it does not answer | each claim waits for at most [`TieredOptions::cache_timeout`] (100 ms), then uses the authority; the cache is not called for a second |
//! | it loses, evicts or is emptied | misses |
//! | it keeps entries too long, or restores old ones | nothing: an entry contains the time at which it was seen |
//! | others write to it | with a secret: misses. Without: any forged outcome is replayed |
//! | processes of another authority share it | nothing, if both set [`TieredOptions::authority`]; else outcomes of one authority may be replayed by the other |
//! | a removal is lost | in this process nothing; others replay until the entry ends |
//! | the authority's clock steps back | entries seen at a later time are misses until the clock has caught up |
//!
//! The content of the cache never begins an execution and never makes a caller an owner.
//!
//! # Limits
//!
//! A first request costs one read of the cache more than at the authority alone. This store is for
//! traffic with many retries, and for distant authorities. It adds no durability.

mod cache;
mod clock;
mod entry;
mod key_table;
mod options;
mod tiered;

pub use cache::{Cache, CacheError, MemoryCache};
pub use options::TieredOptions;
pub use tiered::{Tiered, TieredError, TieredStats};
