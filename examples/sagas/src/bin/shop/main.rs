//! A shop of three processes over HTTP. An order is a saga, which reserves an article in the stock,
//! charges the card by the payment service, and ships. If the card is declined, the reservation is
//! undone; if the article is found broken, the charge and the reservation are.
//!
//! ```text
//! createdb stock && createdb payment
//! cargo run -p hapax-sagas-examples --bin shop -- demo \
//!     postgres://me@127.0.0.1/stock postgres://me@127.0.0.1/payment /tmp/shop
//! ```
//!
//! The demo starts the processes, places orders, and kills each process (SIGKILL) in the middle of
//! sagas that go forward and of sagas that are undone. At the end it prints a table of what happened.
//! The databases must be new. By hand:
//!
//! ```text
//! shop stock 127.0.0.1:3001 postgres://me@127.0.0.1/stock
//! shop payment 127.0.0.1:3002 postgres://me@127.0.0.1/payment
//! shop order 127.0.0.1:3000 /tmp/orders.db http://127.0.0.1:3001 http://127.0.0.1:3002
//! curl -i 127.0.0.1:3000/orders -H 'Authorization: Bearer me' -H 'Idempotency-Key: o-1' \
//!     --json '{"id": "o-1", "article": "lamp", "card": "visa", "cents": 1999}'
//! ```
//!
//! `order` has the records of its sagas in a file, and nothing else. `stock` and `payment` honor the
//! keys of the saga's steps by the layer of Hapax: effect, record and response commit together.

mod demo;
mod effects;
mod order;
mod payment;
mod stock;
mod table;

use std::process::ExitCode;

use hapax_sagas_examples::{ProgramError, argument, exit};

#[tokio::main]
async fn main() -> ExitCode {
    exit(run().await)
}

async fn run() -> Result<ExitCode, ProgramError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match argument(1, "stock, payment, order or demo")?.as_str() {
        "stock" => stock::run(&argument(2, "an address")?, &argument(3, "a database")?).await?,
        "payment" => payment::run(&argument(2, "an address")?, &argument(3, "a database")?).await?,
        "order" => {
            let (address, file) = (argument(2, "an address")?, argument(3, "a file")?);
            let systems = order::Systems::new(
                &argument(4, "the URL of the stock")?,
                &argument(5, "the URL of the payment service")?,
            );
            order::run(&address, &file, systems).await?;
        }
        "demo" => {
            let databases =
                [argument(2, "a database for the stock")?, argument(3, "one for payments")?];
            let is_right = demo::run(&databases, &argument(4, "a folder")?).await?;
            return Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        other => {
            return Err(format!("expected stock, payment, order or demo, found `{other}`").into());
        }
    }
    Ok(ExitCode::SUCCESS)
}
