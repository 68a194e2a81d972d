//! A cache in memory in front of a store: the replay does not reach the store.
//!
//!     cargo run -p hapax-tiered --example memory

use std::sync::Arc;

use hapax_core::{Idempotency, MemoryStore, NaturalKey};
use hapax_tiered::{MemoryCache, Tiered};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // In production the authority is a file or Postgres.
    let authority = Arc::new(MemoryStore::default());
    let store = Tiered::new(authority, Arc::new(MemoryCache::default()));
    let engine = Idempotency::builder(store.clone()).build()?;
    let key = (NaturalKey::order("customer-1", "cart-9"), "3 apples");
    for _ in 0..3 {
        let order = || async { Ok::<_, std::io::Error>("order 17".to_owned()) };
        let receipt = engine.at_most_once(&key, order).await?;
        println!("{}, replayed: {}, hits: {}", receipt.value, receipt.replayed, store.stats().hits);
    }
    engine.drain().await;
    Ok(())
}
