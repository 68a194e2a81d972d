//! Two processes, here two engines, that share their records in Redis.
//!
//!     cargo run -p hapax-redis --example shared -- redis://127.0.0.1

use hapax_core::{Idempotency, NaturalKey, Secret};
use hapax_redis::{RedisOptions, RedisStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("expected the URL of a Redis")?;
    let secret = Secret::new([7; 32]); // for the example: a service reads its own from a file
    let key = NaturalKey::new("example").part("process", std::process::id()).identifies_alone();
    for process in 1..=2 {
        let options = RedisOptions::new(&*url).prefix("example:").secret(secret.clone());
        let engine = Idempotency::builder(RedisStore::connect(options).await?)
            .namespace("orders")
            .build()?;
        let work = move || async move { Ok::<_, std::io::Error>(format!("process {process}")) };
        let receipt = engine.at_most_once(&key, work).await?;
        println!("executed by {}, replayed: {}", receipt.value, receipt.replayed);
    }
    Ok(())
}
