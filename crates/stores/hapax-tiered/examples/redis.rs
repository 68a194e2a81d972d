//! A cache on Redis, shared by processes, in front of a file.
//!
//!     cargo run -p hapax-tiered --features redis --example redis -- redis://127.0.0.1

use std::sync::Arc;

use hapax_core::{Idempotency, KeyRing, NaturalKey, Secret};
use hapax_file::{FileOptions, FileStore};
use hapax_redis::{RedisCache, RedisOptions};
use hapax_tiered::{Tiered, TieredOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("expected the URL of a Redis")?;
    let folder = tempfile::tempdir()?;
    let authority = Arc::new(FileStore::open(FileOptions::new(folder.path().join("orders.db")))?);
    let cache = Arc::new(RedisCache::connect(RedisOptions::new(url)).await?);
    // Entries are sealed: another writer to the Redis cannot forge an outcome.
    let ring = KeyRing::new(Secret::new([7; 32])); // a service reads its own from a file
    let options = TieredOptions::default().authority("orders").key_ring(&ring);
    let store = Tiered::with(authority, cache, options);
    let engine = Idempotency::builder(store.clone()).namespace("orders").build()?;
    let key = (NaturalKey::order("customer-1", "cart-9"), "3 apples");
    for _ in 0..3 {
        let order = || async { Ok::<_, std::io::Error>("order 17".to_owned()) };
        let receipt = engine.at_most_once(&key, order).await?;
        println!("{}, replayed: {}, hits: {}", receipt.value, receipt.replayed, store.stats().hits);
    }
    engine.drain().await;
    Ok(())
}
