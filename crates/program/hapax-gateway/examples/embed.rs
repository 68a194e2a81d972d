//! A gateway within another program, on a store in memory.
//!
//!     cargo run -p hapax-gateway --example embed -- http://127.0.0.1:3000
//!     curl -i -X POST 127.0.0.1:8080/orders -H 'Authorization: Bearer me' -H 'Idempotency-Key: o-1'

use hapax_gateway::{Config, Gateway, StoreUrl};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let upstream = std::env::args().nth(1).ok_or("expected the URL of a service")?;
    let mut config = Config::new(upstream.parse()?);
    config.store = StoreUrl::Memory;
    config.admin = None;
    let gateway = Gateway::start(config).await?;
    println!("listening on {}", gateway.local_addr());
    tokio::signal::ctrl_c().await?;
    gateway.shutdown().await;
    Ok(())
}
