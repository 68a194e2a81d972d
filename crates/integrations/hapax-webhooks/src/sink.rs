//! The sink: messages of an outbox are published as webhooks.

mod config;
mod request;
mod response;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Clock;
use hapax_core::store::BoxFuture;
use hapax_messages::{MessageSink, OutgoingMessage, PublishError};
use hapax_proxy::{BodyError, ReceivedBody, Upstream};
use http::Response;
use http::uri::PathAndQuery;
use http_body_util::BodyExt as _;

pub use self::config::{WebhookSinkBuilder, WebhookSinkError};
use self::response::ResponseClass;
pub use self::response::{RejectedStatuses, UnexpectedResponse};
use crate::secret::SigningSecrets;

/// Publishes each message as a POST request to one URL, in the form of Standard Webhooks.
///
/// | header | value |
/// | --- | --- |
/// | `webhook-id` | the message's id; its hash, if it has a full stop, a character that is not visible ASCII, more than 255 characters, or is 64 hexadecimal digits |
/// | `webhook-timestamp` | the time of this attempt, in seconds since 1970 |
/// | `webhook-signature` | one `v1,` and base64 for each secret; none without a secret |
/// | `idempotency-key` | `webhook-id`, quoted as a Structured Field, so that a Hapax layer or gateway in front of the endpoint executes it once |
/// | `message-id`, `message-destination`, `message-order-key` | those of the message, percent-encoded except for visible ASCII |
/// | `content-type` | that of the message; without one `application/json` if the payload is a JSON object or array, else `application/octet-stream` |
/// | others | the headers of the message, except those that concern a connection, and those that [`leaves_out`](WebhookSink::leaves_out) names |
///
/// The response decides about the message:
///
/// | response | the message |
/// | --- | --- |
/// | 2xx | is acknowledged |
/// | another status, redirects too | is published again, not before `Retry-After` |
/// | none in time, or one that breaks off | is published again |
/// | 413, 422, 431, and others of [`RejectedStatuses`] | is permanently rejected |
///
/// Each message in progress has a connection, which is reused afterwards: limit their number by
/// [`RelayLimits::in_flight`](hapax_messages::RelayLimits::in_flight). Dropping the future of a
/// message closes its connection.
///
/// ```
/// use hapax_webhooks::WebhookSink;
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// # let secret = std::fs::read("/run/secrets/webhooks")?;
/// let sink = WebhookSink::builder("https://shop.example/hooks").secret(secret).build().await?;
/// # drop(sink);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct WebhookSink {
    endpoint: Upstream,
    path_and_query: PathAndQuery,
    secrets: Option<SigningSecrets>,
    timeout: Duration,
    max_response: usize,
    rejected: RejectedStatuses,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for WebhookSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Path and query may be secret.
        f.debug_struct("WebhookSink")
            .field("authority", self.endpoint.authority())
            .field("secrets", &self.secrets)
            .finish_non_exhaustive()
    }
}

impl WebhookSink {
    /// Returns a builder of a sink for this URL: `http://` or `https://`, a host, and optionally port,
    /// path and query.
    pub fn builder(url: impl Into<String>) -> WebhookSinkBuilder {
        WebhookSinkBuilder::new(url.into())
    }

    async fn send(&self, message: &OutgoingMessage) -> Result<(), PublishError> {
        let request = self.request(message)?;
        let exchange = async {
            let response = self.endpoint.send(request).await?;
            let (parts, body) = response.into_parts();
            let text = read(body, self.max_response).await?;
            Ok::<_, BodyError>(Response::from_parts(parts, text))
        };
        // Boxed: the state of a connection is large.
        let responded = tokio::time::timeout(self.timeout, Box::pin(exchange)).await;
        let response = match responded {
            Ok(response) => response.map_err(PublishError::not_acknowledged)?,
            Err(_) => {
                let text = format!("expected a response within {:?}, found none yet", self.timeout);
                return Err(PublishError::not_acknowledged(text));
            }
        };
        match ResponseClass::of(response.status(), self.rejected) {
            ResponseClass::Accepted => Ok(()),
            ResponseClass::Rejected => {
                Err(PublishError::rejected(UnexpectedResponse::new(&response)))
            }
            ResponseClass::Retryable => Err(PublishError::NotAcknowledged {
                source: UnexpectedResponse::new(&response).into(),
                retry_after: response::retry_after(response.headers(), self.clock.now()),
            }),
        }
    }
}

/// Reads a body, up to `most` bytes. The rest of a longer one is ignored.
async fn read(mut body: ReceivedBody, most: usize) -> Result<Bytes, BodyError> {
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            text.extend_from_slice(&data);
        }
        if text.len() >= most {
            break;
        }
    }
    text.truncate(most);
    Ok(text.into())
}

impl MessageSink for WebhookSink {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(self.send(message))
    }
}
