//! The service to which messages are posted.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Backoff, SystemEntropy};
use hapax_messages::{
    Attempts, MessageExecution, MessageFailure, MessageHandler, MessageSink as _, OutgoingMessage,
    PublishError,
};
use hapax_webhooks::WebhookSink;
use tokio::time::Instant;

use crate::exit::with_causes;
use crate::messages::destination;

/// Time between two warnings about a service that accepts nothing.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Prefixes of the attributes of a CloudEvent in the bindings of brokers.
const CLOUD_EVENTS: [&str; 3] = ["cloudEvents:", "cloudEvents_", "ce_"];

/// A service, as the handler of messages. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Service {
    shared: Arc<ServiceState>,
}

#[derive(Debug)]
struct ServiceState {
    sink: WebhookSink,
    max_body: NonZeroUsize,
    backoff: Backoff,
    failing: Mutex<Failing>,
}

/// Attempts without an answer, or with the answer to try again, since the service last accepted a
/// message.
#[derive(Debug, Default)]
struct Failing {
    since: Option<Instant>,
    warned_at: Option<Instant>,
}

impl Service {
    pub(super) fn new(sink: WebhookSink, max_body: NonZeroUsize, attempts: &Attempts) -> Self {
        let backoff = Backoff::new(attempts.first_pause, attempts.longest_pause);
        let failing = Mutex::default();
        Self { shared: Arc::new(ServiceState { sink, max_body, backoff, failing }) }
    }

    /// Returns the time since the first attempt that failed, if none was accepted after it.
    pub(super) fn failing_for(&self) -> Option<Duration> {
        let failing = self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner);
        failing.since.map(|since| since.elapsed())
    }

    /// Posts a message. Dropping the future closes the connection, as a crash does: the service may
    /// have accepted the message, and its claim lapses.
    async fn post(self, execution: MessageExecution) -> Result<(), MessageFailure> {
        let (found, max) = (execution.message().payload.len(), self.shared.max_body);
        if found > max.get() {
            return Err(MessageFailure::reject(format!(
                "expected a payload of at most {max} bytes, found {found}: set a larger --max-body, and \
                 redrive the message"
            )));
        }
        match self.shared.sink.publish(&outgoing(&execution)).await {
            Ok(()) => {
                self.accepted();
                Ok(())
            }
            Err(PublishError::Rejected(cause)) => Err(MessageFailure::reject(cause)),
            Err(PublishError::NotAcknowledged { source, retry_after }) => {
                self.failed(&with_causes(&*source));
                let own = || self.shared.backoff.pause(execution.attempt(), &SystemEntropy);
                let after = retry_after.map(|after| after.max(own()));
                Err(MessageFailure::Retry { after, cause: source })
            }
            // Errors of later versions.
            Err(error) => Err(MessageFailure::retry(error)),
        }
    }

    fn accepted(&self) {
        let mut failing = self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner);
        if failing.warned_at.is_some() {
            tracing::info!("the service accepts messages again");
        }
        *failing = Failing::default();
    }

    fn failed(&self, error: &str) {
        let mut failing = self.shared.failing.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        failing.since.get_or_insert(now);
        if failing.warned_at.is_none_or(|at| now.duration_since(at) >= WARN_EVERY) {
            failing.warned_at = Some(now);
            tracing::warn!(error, "the service did not accept a message: it is posted again later");
        }
    }
}

impl MessageHandler for Service {
    fn handle(
        &self,
        execution: MessageExecution,
    ) -> BoxFuture<'static, Result<(), MessageFailure>> {
        Box::pin(self.clone().post(execution))
    }
}

/// Returns the message to post: the received one, with the id that the inbox found. The attributes of
/// a CloudEvent get their names of the HTTP binding.
fn outgoing(execution: &MessageExecution) -> OutgoingMessage {
    let (message, id) = (execution.message(), execution.id().clone());
    let mut out = OutgoingMessage::new(destination(&message.origin), id, message.payload.clone());
    out.key.clone_from(&message.key);
    out.headers =
        message.headers.iter().map(|(name, value)| (http_name(name), value.clone())).collect();
    out
}

fn http_name(name: &str) -> String {
    let attribute = CLOUD_EVENTS.iter().find_map(|prefix| name.strip_prefix(prefix));
    attribute.map_or_else(|| name.to_owned(), |attribute| format!("ce-{attribute}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_of_cloud_events_have_their_names_of_http() {
        for name in ["cloudEvents:id", "cloudEvents_id", "ce_id", "ce-id"] {
            assert_eq!(http_name(name), "ce-id");
        }
        assert_eq!(http_name("trace"), "trace");
    }
}
