//! A cache in front of a durable store: retries are answered without asking the authority.
//!
//! 1. The authority decides. The cache holds finished records only, which do not change until
//!    their retention ends, and is asked by claims only: for a replay of the same request.
//! 2. An entry is used for [`Options::cache_ttl`] (60 s), and for a quarter of what was left of the
//!    retention, at most. Its age is told by the authority's clock, so that a cache that keeps
//!    entries for too long, or puts an old one back, changes nothing.
//! 3. With [`Options::secret`] entries are sealed: bound to the store key, the record and what
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
//! use hapax::{Idempotency, MemoryStore};
//! use hapax_tiered::{MemoryCache, Tiered};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! # let authority = MemoryStore::default();
//! // In earnest the authority is a file, or Postgres.
//! let store = Tiered::new(Arc::new(authority), Arc::new(MemoryCache::default()));
//! let idempotency = Idempotency::builder(Arc::new(store.clone())).build();
//! assert_eq!(store.stats().hits, 0);
//! # drop(idempotency);
//! # }
//! ```
//!
//! # What it is not
//!
//! A first request costs what it costs at the authority, and one look into the cache more. This is
//! for traffic with many retries, and for authorities that are far away. It makes nothing durable
//! that was not.

mod cache;
mod clock;
mod entry;
mod keys;
mod options;
mod tiered;

pub use cache::{Cache, CacheError, MemoryCache};
pub use options::Options;
pub use tiered::{Tiered, TieredError, TieredStats};
