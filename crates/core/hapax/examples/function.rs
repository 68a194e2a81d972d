//! A payment that executes at most once, however often it is called.
//!
//!     cargo run -p hapax --features function --example function

use hapax::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Idempotency::builder(MemoryStore::default()).build()?;
    let key = NaturalKey::payment("order-17");
    for _ in 0..2 {
        let receipt = engine.at_most_once(&(&key, 1999), || charge(1999)).await?;
        println!("{}, replayed: {}", receipt.value, receipt.replayed);
    }
    // Another amount for the order is rejected.
    let corrected = engine.at_most_once(&(&key, 2499), || charge(2499)).await;
    println!("{}", corrected.map_or_else(|error| error.to_string(), |receipt| receipt.value));
    engine.drain().await;
    Ok(())
}

async fn charge(cents: u64) -> Result<String, std::io::Error> {
    println!("charging {cents}");
    Ok(format!("ch_{cents}"))
}
