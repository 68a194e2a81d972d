//! A program that pays an invoice with a stack of tower services around hyper's client. Killed and
//! started again, it pays once.
//!
//!     cargo run -p hapax-client --features file,tower --example layer -- payments.journal http://127.0.0.1:8080

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use hapax_client::{Client, Journal, Operation, OperationLayer, Server};
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::rt::TokioExecutor;
use tower::{ServiceBuilder, ServiceExt};

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
    let inner = HyperClient::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    // Further layers that are for operations too, such as tracing, stand before this one.
    let http = ServiceBuilder::new().layer(OperationLayer::new(client.clone())).service(inner);

    // No operation: hyper sends it.
    let rate = Request::get(format!("{origin}/rate")).body(Full::default())?;
    let rate = http.clone().oneshot(rate).await?.into_body().collect().await?.to_bytes();
    let payment = Request::post(format!("{origin}/payments"))
        // The name is the same in the next run.
        .extension(Operation::new("invoice/17"))
        .body(Full::from("1999 cents"))?;
    let paid = http.oneshot(payment).await?;
    let (status, paid) = (paid.status(), paid.into_body().collect().await?.to_bytes());
    let [paid, rate] = [&paid, &rate].map(|body| String::from_utf8_lossy(body).into_owned());
    client.close(Duration::from_secs(10)).await;
    Ok(format!("{status}: {paid} at {rate}"))
}
