//! The service to which messages are posted.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{Backoff, Fingerprint, SystemEntropy};
use hapax_messages::{
    Attempts, MessageExecution, MessageFailure, MessageHandler, MessageId, MessageSink as _,
    OutgoingMessage, PublishError,
};
use hapax_webhooks::{UnexpectedResponse, WebhookSink};
use http::StatusCode;
use tokio::time::Instant;

use super::headers::{self, HeaderWarnings};
use crate::exit::with_causes;
use crate::messages::destination;

/// Time between two warnings about a service that accepts nothing.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Attempts with a status of [`DeploymentStatus`] after which a message becomes a dead letter, once the service has accepted one.
const REJECTED_ATTEMPTS: u32 = 10;

/// Time after the first attempt with such a status, after which a message becomes a dead letter although the service has
/// accepted none, if `--attempts` attempts were made: its status may be the message's own, and it may be the first one in
/// its order.
const WITHDRAWN: Duration = Duration::from_secs(2 * 60 * 60);

/// Most messages whose attempts are counted. With more of them the counts begin again. Those that another process has handled
/// stay until then.
const COUNTED: usize = 65_536;

/// A service, as the handler of messages. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Service {
    shared: Arc<ServiceState>,
}

#[derive(Debug)]
struct ServiceState {
    sink: WebhookSink,
    /// For the log: without a query, which may have a secret.
    url: String,
    max_body: NonZeroUsize,
    attempts: Attempts,
    health: Mutex<Health>,
    header_warnings: HeaderWarnings,
}

/// Known state of the service.
#[derive(Debug, Default)]
struct Health {
    /// Whether it has accepted a message.
    has_accepted: bool,
    /// The last status of a [`DeploymentStatus`], since it last accepted a message.
    status: Option<DeploymentStatus>,
    /// Attempts of messages with such a status, by hashes of their ids: ids may be long.
    rejected: HashMap<Fingerprint, RejectedAttempts>,
    /// First of the attempts that failed, since it last accepted a message.
    failing_since: Option<Instant>,
    warned_at: Option<Instant>,
}

/// Attempts of a message with a [`DeploymentStatus`], of this process.
#[derive(Debug)]
struct RejectedAttempts {
    first_at: Instant,
    /// Those before the service accepted a message.
    withdrawn: u32,
    /// Those after it.
    retried: u32,
}

/// A status that says that requests do not reach what handles them: path, method, credentials or media type are wrong.
/// Every message gets it after a mistake in a deployment, so that before the service has accepted one a message becomes a
/// dead letter only after [`WITHDRAWN`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DeploymentStatus(StatusCode);

impl DeploymentStatus {
    fn of(cause: &(dyn std::error::Error + 'static)) -> Option<Self> {
        Self::of_status(cause.downcast_ref::<UnexpectedResponse>()?.status())
    }

    fn of_status(status: StatusCode) -> Option<Self> {
        matches!(status.as_u16(), 401 | 403..=406 | 415).then_some(Self(status))
    }

    /// Returns what an operator checks.
    fn advice(self) -> &'static str {
        match self.0.as_u16() {
            401 | 403 => {
                "check --signing-secret-file, and which credentials the service, or a proxy in front of it, requires"
            }
            404 => "check the path and the host of --to",
            405 => "check the path of --to, and that it accepts POST",
            _ => {
                "check which content types the service accepts and produces: that of a message is its header \
                 content-type, else application/json or application/octet-stream"
            }
        }
    }
}

impl Service {
    /// Creates the service at `url`.
    pub(super) fn new(
        sink: WebhookSink,
        url: &str,
        max_body: NonZeroUsize,
        attempts: Attempts,
    ) -> Self {
        let url = url.split(['?', '#']).next().unwrap_or_default().to_owned();
        let (health, header_warnings) = (Mutex::default(), HeaderWarnings::default());
        let state = ServiceState { sink, url, max_body, attempts, health, header_warnings };
        Self { shared: Arc::new(state) }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.shared.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time since the first attempt that failed, if none was accepted after it.
    pub(super) fn failing_for(&self) -> Option<Duration> {
        self.health().failing_since.map(|since| since.elapsed())
    }

    /// Returns why the service gets no message, if it answers with such a status and has accepted none.
    pub(super) fn deployment_error(&self) -> Option<String> {
        let health = self.health();
        let status = health.status.filter(|_| !health.has_accepted)?;
        Some(format!(
            "the service has accepted no message yet, and answers {}: {}",
            status.0,
            status.advice()
        ))
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
        match self.shared.sink.publish(&self.shared.outgoing(&execution)).await {
            Ok(()) => {
                self.accepted(execution.id());
                Ok(())
            }
            Err(PublishError::Rejected(cause)) => match DeploymentStatus::of(&*cause) {
                Some(status) => {
                    let text = with_causes(&*cause);
                    Err(match self.rejected(status, execution.id(), &text) {
                        RejectedMessage::Withdrawn(after) => {
                            MessageFailure::withdraw_after(after, cause)
                        }
                        RejectedMessage::Retried => MessageFailure::retry(cause),
                        RejectedMessage::Parked => MessageFailure::reject(cause),
                    })
                }
                None => Err(MessageFailure::reject(cause)),
            },
            Err(PublishError::NotAcknowledged { source, retry_after }) => {
                self.failed(&with_causes(&*source));
                let own = || self.shared.backoff().pause(execution.attempt(), &SystemEntropy);
                let after = retry_after.map(|after| after.max(own()));
                Err(MessageFailure::Retry { after, cause: source })
            }
            // Errors of later versions.
            Err(error) => Err(MessageFailure::retry(error)),
        }
    }

    fn accepted(&self, id: &MessageId) {
        let mut health = self.health();
        if health.warned_at.is_some() {
            tracing::info!("the service accepts messages again");
        }
        health.has_accepted = true;
        health.rejected.remove(&digest(id));
        (health.status, health.failing_since, health.warned_at) = (None, None, None);
    }

    fn failed(&self, error: &str) {
        if self.health().is_warning_due() {
            tracing::warn!(error, "the service did not accept a message: it is posted again later");
        }
    }

    /// Notes such a status for a message, and decides about the message.
    fn rejected(&self, status: DeploymentStatus, id: &MessageId, error: &str) -> RejectedMessage {
        let mut health = self.health();
        health.status = Some(status);
        if health.is_warning_due() {
            let then = match health.has_accepted {
                true => "a message becomes a dead letter after ten attempts with such a status",
                false => {
                    "before the service has accepted one, a message becomes a dead letter for it only after two \
                     hours and --attempts attempts"
                }
            };
            let (url, advice) = (&*self.shared.url, status.advice());
            let status = status.0.as_u16();
            tracing::warn!(url, status, error, "the service rejects messages: {advice}; {then}");
        }
        let digest = digest(id);
        if health.rejected.len() >= COUNTED && !health.rejected.contains_key(&digest) {
            health.rejected.clear();
        }
        let has_accepted = health.has_accepted;
        let first = || RejectedAttempts::new(Instant::now());
        let attempts = health.rejected.entry(digest).or_insert_with(first);
        if has_accepted {
            attempts.retried += 1;
            if attempts.retried < REJECTED_ATTEMPTS {
                return RejectedMessage::Retried;
            }
        } else {
            attempts.withdrawn = attempts.withdrawn.saturating_add(1);
            let is_last = attempts.withdrawn >= self.shared.attempts.max.get();
            if !is_last || attempts.first_at.elapsed() < WITHDRAWN {
                let failing = health.failing_since.map(|since| since.elapsed()).unwrap_or_default();
                return RejectedMessage::Withdrawn(self.shared.pause(failing));
            }
        }
        health.rejected.remove(&digest);
        RejectedMessage::Parked
    }
}

fn digest(id: &MessageId) -> Fingerprint {
    Fingerprint::builder("rejected-message/1").field(id.as_str().as_bytes()).finish()
}

/// Effect of a [`DeploymentStatus`] on its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RejectedMessage {
    /// Posted again after the time; the attempt does not count.
    Withdrawn(Duration),
    /// Posted again.
    Retried,
    /// Made a dead letter.
    Parked,
}

impl RejectedAttempts {
    const fn new(first_at: Instant) -> Self {
        Self { first_at, withdrawn: 0, retried: 0 }
    }
}

impl ServiceState {
    /// Returns the message to post: the received one, with the id that the inbox found.
    fn outgoing(&self, execution: &MessageExecution) -> OutgoingMessage {
        let (message, id) = (execution.message(), execution.id().clone());
        let mut out =
            OutgoingMessage::new(destination(&message.origin), id, message.payload.clone());
        out.key.clone_from(&message.key);
        out.headers = headers::of_request(&message.headers, &out, &self.header_warnings);
        out
    }

    fn backoff(&self) -> Backoff {
        Backoff::new(self.attempts.first_pause, self.attempts.longest_pause)
    }

    /// Returns the pause of a message after an attempt that does not count. It grows with the time for which the service
    /// fails, as that of counted attempts does.
    fn pause(&self, failing: Duration) -> Duration {
        let first = self.attempts.first_pause.max(Duration::from_millis(1));
        let doubled = failing.as_millis() / first.as_millis();
        self.backoff().pause(u128::BITS - doubled.leading_zeros() + 1, &SystemEntropy)
    }
}

impl Health {
    /// Notes a failed attempt. Returns whether a warning is due.
    fn is_warning_due(&mut self) -> bool {
        let now = Instant::now();
        self.failing_since.get_or_insert(now);
        let is_due = self.warned_at.is_none_or(|at| now.duration_since(at) >= WARN_EVERY);
        if is_due {
            self.warned_at = Some(now);
        }
        is_due
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

#[cfg(test)]
mod tests {
    use super::*;

    async fn service() -> Service {
        let url = "http://127.0.0.1:1/orders?token=hidden";
        let sink = WebhookSink::builder(url).build().await.unwrap();
        Service::new(sink, url, NonZeroUsize::MAX, Attempts::default())
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_a_deployment_rejects_is_parked_after_ten_tries_once_the_service_has_accepted_one()
     {
        let service = service().await;
        let [one, two] = ["m-1", "m-2"].map(|id| MessageId::new(id).unwrap());
        let status = DeploymentStatus(StatusCode::NOT_FOUND);
        for _ in 0..100 {
            let rejected = service.rejected(status, &one, "404");
            assert!(matches!(rejected, RejectedMessage::Withdrawn(_)), "{rejected:?}");
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        let reason = service.deployment_error().unwrap();
        assert!(reason.contains("404 Not Found: check the path and the host of --to"), "{reason}");
        service.accepted(&two);
        assert_eq!(service.deployment_error(), None);
        for _ in 1..REJECTED_ATTEMPTS {
            assert_eq!(service.rejected(status, &one, "404"), RejectedMessage::Retried);
        }
        assert_eq!(service.rejected(status, &two, "404"), RejectedMessage::Retried);
        assert_eq!(service.rejected(status, &one, "404"), RejectedMessage::Parked);
        assert_eq!(service.deployment_error(), None, "the service is known to accept messages");
        assert!(!service.shared.url.contains("hidden"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_is_parked_after_two_hours_and_the_attempts_although_the_service_has_accepted_none()
     {
        let service = service().await;
        let [one, two] = ["m-1", "m-2"].map(|id| MessageId::new(id).unwrap());
        let status = DeploymentStatus(StatusCode::NOT_FOUND);
        let rejected = |id| service.rejected(status, id, "404");
        assert!(matches!(rejected(&two), RejectedMessage::Withdrawn(_)));
        for _ in 0..120 {
            let rejected = rejected(&one);
            assert!(matches!(rejected, RejectedMessage::Withdrawn(_)), "{rejected:?}");
            tokio::time::advance(Duration::from_secs(60)).await;
        }
        assert_eq!(rejected(&one), RejectedMessage::Parked);
        // Two hours, and not 60 attempts.
        for _ in 2..60 {
            assert!(matches!(rejected(&two), RejectedMessage::Withdrawn(_)));
        }
        assert_eq!(rejected(&two), RejectedMessage::Parked);
        assert!(service.deployment_error().is_some(), "it is not ready");
        assert!(matches!(rejected(&one), RejectedMessage::Withdrawn(_)), "it was redriven");
    }

    #[tokio::test]
    async fn the_bound_of_a_pause_grows_with_the_time_of_failure_up_to_the_longest_one() {
        let service = service().await;
        let longest = |failing: u64| {
            let pauses = (0..200).map(|_| service.shared.pause(Duration::from_secs(failing)));
            pauses.max().unwrap_or_default()
        };
        for (failing, bound) in [(0, 1), (1, 2), (10, 16), (100, 128), (100_000, 300)] {
            let (longest, bound) = (longest(failing), Duration::from_secs(bound));
            assert!(longest <= bound && longest > bound / 2, "{failing} s: {longest:?}");
        }
    }

    #[test]
    fn statuses_about_the_deployment_are_of_the_deployment_and_those_about_the_message_are_not() {
        let is_of_deployment = |status: u16| {
            DeploymentStatus::of_status(StatusCode::from_u16(status).unwrap()).is_some()
        };
        let found: Vec<_> = (400..500).filter(|status| is_of_deployment(*status)).collect();
        assert_eq!(found, [401, 403, 404, 405, 406, 415]);
    }
}
