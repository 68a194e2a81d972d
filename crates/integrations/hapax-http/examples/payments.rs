//! An axum service: two payment requests with one key, one charge.
//!
//! ```text
//! cargo run -p hapax-http --example payments
//! curl -i 127.0.0.1:3000/payments -H 'Authorization: Bearer me' -H 'Idempotency-Key: p-1' -d 100
//! ```

use std::future::Future;
use std::io;
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Router};
use hapax_core::MemoryStore;
use hapax_http::classify::OutcomeClass;
use hapax_http::server::{ExecutionHandle, IdempotencyLayer, LayerError};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}/payments, until Ctrl-C", listener.local_addr()?);
    let end = async { drop(tokio::signal::ctrl_c().await) };
    Ok(serve(listener, layer()?, end).await?)
}

/// Keys are required. By default a request that may have taken effect never runs again by itself.
pub(crate) fn layer() -> Result<IdempotencyLayer, LayerError> {
    // In memory, for the example: a service has `hapax-file`, or a store on a server.
    IdempotencyLayer::builder(MemoryStore::default()).require_key().build()
}

/// How long connections may take to close, once all that is in hand is recorded.
const CLOSING: Duration = Duration::from_secs(2);

/// Serves until `end`, and then until what is in hand is recorded and its clients have their answers.
pub(crate) async fn serve(
    listener: TcpListener,
    layer: IdempotencyLayer,
    end: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let app = Router::new().route("/payments", post(pay)).layer(layer.clone());
    let (closing, closes) = oneshot::channel();
    let ending = async move {
        end.await;
        let drained = layer.drain(Duration::from_secs(25)).await;
        println!(
            "{} requests were cut off, {} outcomes are not in the store",
            drained.cut_off, drained.deferred
        );
        drop(closing);
    };
    let late = async move {
        let _ = closes.await as Result<(), _>;
        tokio::time::sleep(CLOSING).await;
    };
    // A client that says half a request, or reads no answer, would keep the server for ever.
    tokio::select! {
        served = axum::serve(listener, app).with_graceful_shutdown(ending) => served,
        () = late => Ok(()),
    }
}

async fn pay(
    Extension(execution): Extension<ExecutionHandle>,
    amount: String,
) -> (StatusCode, String) {
    let Ok(amount) = amount.trim().parse::<u64>() else {
        return (StatusCode::BAD_REQUEST, "an amount in cents\n".into());
    };
    // The bank is told the fence, and refuses whatever comes with a smaller one than it has seen.
    let (charge, busy) = bank(amount, execution.fence().to_string()).await;
    if busy {
        // Nothing happened: the key is free again, whatever the status says.
        execution.outcome(OutcomeClass::Retryable);
    }
    (StatusCode::CREATED, charge)
}

async fn bank(amount: u64, fence: String) -> (String, bool) {
    (format!("charged {amount} under {fence}\n"), amount == 0)
}
