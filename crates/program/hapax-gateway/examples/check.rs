//! The check of a configuration, without a start: every error of it, and the findings about its store
//! and its reconcile URLs.
//!
//!     cargo run -p hapax-gateway --example check -- file:./hapax.db http://127.0.0.1:3000

use hapax_gateway::{Config, Gateway, StoreOpener};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let store = words.next().ok_or("expected the URL of a store")?;
    let upstream = words.next().ok_or("expected the URL of a service")?;
    let mut config = Config::new(upstream.parse()?);
    config.store = store.parse()?;
    config.check()?;
    for finding in StoreOpener::new(config.store.clone()).diagnose().await? {
        println!("{finding}");
    }
    for finding in Gateway::probe(&config).await? {
        println!("{finding}");
    }
    Ok(())
}
