//! The client as a middleware of reqwest-middleware.

use async_trait::async_trait;
use http::Extensions;
use reqwest::{Request, Response};
use reqwest_middleware::{Error, Middleware, Next, Result};

use crate::adapter::Operation;
use crate::client::Client;
use crate::error::{RequestError, SendError};

/// A request with the extension [`Operation`] is [executed](Client::execute) by this client. Other
/// requests pass untouched, or are rejected by a [strict](crate::ClientBuilder::strict) client.
///
/// The client sends operations itself, so middlewares after it in the stack are not called for them.
/// Middlewares before it receive one request and one response. A retry there that sends an operation again, in
/// time or after a crash, gets its stored response, so it is of no use, and nothing is sent twice. A
/// middleware there that adds another header to each try makes another request of it, which is
/// [rejected](SendError::Reused).
#[async_trait]
impl Middleware for Client {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> Result<Response> {
        match extensions.get::<Operation>().cloned() {
            Some(operation) => self.execute(operation, request).await.map_err(Error::middleware),
            None if self.is_strict() => {
                Err(Error::middleware(SendError::from(RequestError::NoName)))
            }
            None => next.run(request, extensions).await,
        }
    }
}
