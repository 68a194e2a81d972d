//! The layer around a function, served by bare hyper.
//!
//! ```text
//! cargo run -p hapax-http --example hyper
//! curl -i 127.0.0.1:3000 -H 'Idempotency-Key: p-1' -d 100
//! ```

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::time::Duration;

use hapax_core::MemoryStore;
use hapax_http::Body;
use hapax_http::server::{IdempotencyLayer, LayerError, ScopeSource};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::{Layer, service_fn};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://{}", listener.local_addr()?);
    Ok(serve(listener, layer()?).await?)
}

pub(crate) fn layer() -> Result<IdempotencyLayer, LayerError> {
    // All callers share one scope: only right where they trust each other.
    IdempotencyLayer::builder(MemoryStore::default()).scope(ScopeSource::shared()).build()
}

pub(crate) async fn serve(listener: TcpListener, layer: IdempotencyLayer) -> io::Result<()> {
    let service = layer.layer(service_fn(charge));
    // Until it ends, new requests get 503; then the store has the outcomes.
    let mut ending = pin!(layer.drain_on_signal(Duration::from_secs(25)));
    loop {
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => accepted?,
            () = &mut ending => return Ok(()),
        };
        let service = TowerToHyperService::new(service.clone());
        tokio::spawn(async move {
            let served = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            if let Err(error) = served.await {
                eprintln!("a connection broke: {error}");
            }
        });
    }
}

async fn charge(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let answer = match request.into_body().collect().await {
        Ok(body) => format!("charged {}\n", String::from_utf8_lossy(&body.to_bytes())),
        Err(error) => format!("not charged: {error}\n"),
    };
    Ok(Response::new(Body::from(bytes::Bytes::from(answer))))
}
