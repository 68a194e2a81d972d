//! A program that pays an invoice with reqwest-middleware. Killed and started again, it pays once.
//!
//!     cargo run -p hapax-client --features file,reqwest-middleware --example middleware -- payments.journal http://127.0.0.1:8080

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use hapax_client::{Client, Journal, Operation, Server};
use reqwest_middleware::ClientBuilder;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [journal, origin] = arguments.as_slice() else {
        return Err("expected JOURNAL and ORIGIN".into());
    };
    println!("{}", pay(Path::new(journal), origin).await?);
    Ok(())
}

pub(crate) async fn pay(journal: &Path, origin: &str) -> Result<String, Box<dyn Error>> {
    let journal = Journal::file_within(journal, Duration::from_secs(10)).await?;
    let client =
        Client::open(journal).server(origin, Server::hapax().retention(DAY)).build().await?;
    // Further middlewares that are for operations too, such as tracing, stand before the client.
    let http = ClientBuilder::new(reqwest::Client::new()).with(client.clone()).build();

    // No operation: reqwest sends it.
    let rate = http.get(format!("{origin}/rate")).send().await?.text().await?;
    let payment = http.post(format!("{origin}/payments")).body("1999 cents");
    // The name is the same in the next run.
    let paid = payment.with_extension(Operation::new("invoice/17")).send().await?;
    let line = format!("{}: {} at {rate}", paid.status(), paid.text().await?);
    client.close(Duration::from_secs(10)).await;
    Ok(line)
}
