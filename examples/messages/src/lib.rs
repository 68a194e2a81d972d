//! Parts that the examples share, and an adapter to a broker.

pub mod table_queue;

use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// An error that ends a program.
pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A client of a service over HTTP.
#[derive(Clone, Debug)]
pub struct Api {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
}

impl Api {
    /// Creates a client of the service at `url`.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), url: url.into() }
    }

    /// Posts `body` to `path` with an idempotency key. Returns the status.
    ///
    /// # Errors
    /// The error of the client: the service may have received the request.
    pub async fn post(&self, path: &str, key: &str, body: Bytes) -> Result<u16, AnyError> {
        let request = Request::post(format!("{}{path}", self.url)).header("idempotency-key", key);
        let response = self.client.request(request.body(Full::new(body))?).await?;
        Ok(response.status().as_u16())
    }

    /// Gets `path`. Returns the status.
    ///
    /// # Errors
    /// The error of the client.
    pub async fn get(&self, path: &str) -> Result<u16, AnyError> {
        let request = Request::get(format!("{}{path}", self.url)).body(Full::default())?;
        let response = self.client.request(request).await?;
        let status = response.status().as_u16();
        response.into_body().collect().await?;
        Ok(status)
    }
}

/// Waits for SIGTERM or Ctrl-C.
pub async fn shutdown() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

/// Returns the argument at `place`, from 1.
///
/// # Errors
/// An error that names the argument.
pub fn argument(place: usize, name: &str) -> Result<String, AnyError> {
    std::env::args().nth(place).ok_or_else(|| format!("expected {name} as argument {place}").into())
}

#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../docs/messages.md")]
    mod messages {}
}
