//! Adapters: requests of other libraries as operations.
//!
//! An adapter only converts. The client sends with its own connections: they count the bytes that were
//! sent, follow no redirect and retry nothing, and [`Client::resume`] needs no other library.

#[cfg(feature = "reqwest-middleware")]
mod middleware;
#[cfg(feature = "reqwest")]
mod reqwest;
#[cfg(feature = "tower")]
pub(crate) mod tower;

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};

use crate::client::Client;
use crate::error::SendError;
use crate::response::ClientResponse;

/// The operation that a request of another library is: its name and its times. An extension of the
/// request, for `reqwest-middleware` and `tower`. A request without one is no operation.
///
/// The name identifies the operation across copies of the request: a retry layer outside of the client that
/// sends a copy gets the response of the same operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "nothing is sent before a request has it"]
pub struct Operation {
    name: String,
    within: Option<Duration>,
    wait: Option<Duration>,
}

impl Operation {
    /// Names an operation, as [`OutgoingRequest::operation`](crate::OutgoingRequest::operation) does.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), within: None, wait: None }
    }

    /// Sets the time within which the operation is tried, from its first try. Default: that of the
    /// client.
    pub const fn within(mut self, within: Duration) -> Self {
        self.within = Some(within);
        self
    }

    /// Sets the time for which the caller waits. The operation continues after that. Default 30 s.
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// Sends a request as this operation. `wait` is that of the request, if its library has one.
    async fn send(
        self,
        client: &Client,
        (method, url): (Method, String),
        headers: &HeaderMap,
        body: Bytes,
        wait: Option<Duration>,
    ) -> Result<ClientResponse, SendError> {
        let mut request = client.request(method, url).operation(self.name).body(body);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let Some(within) = self.within {
            request = request.within(within);
        }
        if let Some(wait) = self.wait.or(wait) {
            request = request.wait(wait);
        }
        Ok(request.send().await?.response)
    }
}

impl From<&str> for Operation {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

impl From<String> for Operation {
    fn from(name: String) -> Self {
        Self::new(name)
    }
}
