//! The sink: messages of an outbox are published as webhooks.

mod answer;
mod config;
mod request;

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

use self::answer::Answer;
pub use self::config::{WebhookSinkBuilder, WebhookSinkError};
use crate::secret::SigningSecrets;

/// Bytes of a response's body that are read. The rest of a longer one is ignored.
const MAX_ANSWER: usize = 64 * 1024;

/// Publishes each message as a POST request to one URL, in the form of Standard Webhooks.
///
/// | header | value |
/// | --- | --- |
/// | `webhook-id` | the message's id; a hash of it, if it has other characters than visible ASCII without full stop, or more than 255 |
/// | `webhook-timestamp` | the time of this attempt, in seconds since 1970 |
/// | `webhook-signature` | one `v1,` and base64 for each secret; none without a secret |
/// | `idempotency-key` | `webhook-id`, quoted as a Structured Field, so that a Hapax layer or gateway in front of the endpoint executes it once |
/// | `message-id`, `message-destination`, `message-order-key` | those of the message, percent-encoded except for visible ASCII |
/// | `content-type` and others | the headers of the message, except those that concern a connection |
///
/// The response decides about the message:
///
/// | response | the message |
/// | --- | --- |
/// | 2xx | is acknowledged |
/// | another status, redirects too | is published again, not before `Retry-After` |
/// | none in time, or one that breaks off | is published again |
/// | 413, 415, 422, 431 | is rejected for good |
///
/// Each message under way has a connection, which is reused afterwards: limit their number by
/// [`RelayLimits::in_flight`](hapax_messages::RelayLimits::in_flight). Dropping the future of a message
/// closes its connection.
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
    upstream: Upstream,
    target: PathAndQuery,
    secrets: Option<SigningSecrets>,
    timeout: Duration,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for WebhookSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Path and query may be secret.
        f.debug_struct("WebhookSink")
            .field("authority", self.upstream.authority())
            .field("secrets", &self.secrets)
            .finish_non_exhaustive()
    }
}

impl WebhookSink {
    /// Begins a sink of this URL: `http://` or `https://`, a host, and optionally port, path and query.
    pub fn builder(url: impl Into<String>) -> WebhookSinkBuilder {
        WebhookSinkBuilder::new(url.into())
    }

    async fn send(&self, message: &OutgoingMessage) -> Result<(), PublishError> {
        let request = self.request(message)?;
        let exchange = async {
            let response = self.upstream.send(request).await?;
            let (parts, body) = response.into_parts();
            let text = read(body).await?;
            Ok::<_, BodyError>(Response::from_parts(parts, text))
        };
        // Boxed: the state of a connection is large.
        let answered = tokio::time::timeout(self.timeout, Box::pin(exchange)).await;
        let response = match answered {
            Ok(answered) => answered.map_err(PublishError::not_acknowledged)?,
            Err(_) => {
                let text = format!("expected a response within {:?}, found none yet", self.timeout);
                return Err(PublishError::not_acknowledged(text));
            }
        };
        match Answer::of(response.status()) {
            Answer::Accepted => Ok(()),
            Answer::Rejected => Err(PublishError::rejected(answer::describe(&response))),
            Answer::Later => Err(PublishError::NotAcknowledged {
                source: answer::describe(&response).into(),
                retry_after: answer::retry_after(response.headers(), self.clock.now()),
            }),
        }
    }
}

/// Reads a body, up to the limit.
async fn read(mut body: ReceivedBody) -> Result<Bytes, BodyError> {
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            text.extend_from_slice(&data);
        }
        if text.len() >= MAX_ANSWER {
            break;
        }
    }
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
