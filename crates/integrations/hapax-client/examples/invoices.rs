//! A job that pays invoices, each once, however often it is killed and started again.
//!
//!     TOKEN=secret cargo run -p hapax-client --features file --example invoices -- payments.journal http://127.0.0.1:8080

use std::error::Error;
use std::ops::RangeInclusive;
use std::time::Duration;

use hapax_client::{Client, Credentials, Journal, Server};
use serde_json::json;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [journal, origin] = arguments.as_slice() else {
        return Err("expected JOURNAL and ORIGIN, found other arguments: such as payments.journal http://127.0.0.1:8080".into());
    };
    let token = std::env::var("TOKEN")?;
    // An earlier run may still have the journal open.
    let journal = Journal::file_within(journal, Duration::from_secs(10)).await?;
    // A real job reads from its database which invoices are due.
    for line in pay_all(journal, origin, token, 1..=5).await? {
        println!("{line}");
    }
    Ok(())
}

/// Pays the invoices with these numbers.
pub(crate) async fn pay_all(
    journal: Journal,
    origin: &str,
    token: String,
    invoices: RangeInclusive<u32>,
) -> Result<Vec<String>, Box<dyn Error>> {
    let client = Client::open(journal)
        // The server keeps a key for a day. `scoped_by_account` only if it takes the account, and not the token.
        .server(origin, Server::hapax().retention(DAY))
        .credentials(move |_| std::future::ready(Credentials::bearer(&token).map_err(Into::into)))
        .build()
        .await?;
    let mut paid = Vec::new();
    for invoice in invoices {
        // The name is the same in the next run.
        let payment =
            client.post(format!("{origin}/payments")).operation(format!("invoice/{invoice}"));
        let sent = payment.json(&json!({ "invoice": invoice, "cents": 1999 }))?.send().await?;
        paid.push(format!("invoice {invoice}: {}", sent.response.status));
    }
    client.close(Duration::from_secs(10)).await;
    Ok(paid)
}
