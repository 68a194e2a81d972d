//! A claim and its replay, over two openings of one file.
//!
//!     cargo run -p hapax-file --example open

use hapax_core::{Idempotency, NaturalKey};
use hapax_file::{FileOptions, FileStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("orders.db");
    let key = (NaturalKey::order("customer-1", "cart-9"), "3 apples");
    for opening in 1..=2 {
        let store = std::sync::Arc::new(FileStore::open(FileOptions::new(&path))?);
        let engine = Idempotency::builder(store.clone()).build()?;
        let order = || async { Ok::<_, std::io::Error>("order 17".to_owned()) };
        let receipt = engine.at_most_once(&key, order).await?;
        println!("opening {opening}: {}, replayed: {}", receipt.value, receipt.replayed);
        engine.drain().await;
        store.close().await;
    }
    Ok(())
}
