//! Connections to the server. The client's own recovery stays off: a delivery tag belongs to its
//! channel, and ends with it.

use std::time::Duration;

use hapax_messages::SourceError;
use lapin::options::{BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::protocol::constants::REPLY_SUCCESS;
use lapin::tcp::RustlsConnector;
use lapin::types::{FieldTable, ShortString};
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

use crate::login::RabbitLogin;
use crate::network;
use crate::settings::Settings;

/// Time for the server to answer a request.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Heartbeat that the client proposes, in seconds, if the URL has none. A server that sends nothing for
/// twice that time is lost.
const HEARTBEAT_S: u16 = 10;

/// First and longest pause between two connections.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Errors of a URL.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected a URL `amqp://USER:PASSWORD@HOST:PORT/VHOST` or `amqps://…`, found one that is invalid ({0}): \
     correct it; a virtual host is percent-encoded"
)]
pub struct RabbitUrlError(&'static str);

impl RabbitUrlError {
    pub(crate) const fn new(found: &'static str) -> Self {
        Self(found)
    }
}

/// Address and credentials of a server. Its `Debug` form shows neither.
#[derive(Clone)]
pub(crate) struct Address {
    uri: AMQPUri,
    tls: Option<RustlsConnector>,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Address")
    }
}

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, RabbitUrlError> {
        // The parser's messages contain parts of the URL, which may be parts of the password.
        let hidden = |_| RabbitUrlError("it cannot be parsed");
        let mut uri: AMQPUri = url.parse().map_err(hidden)?;
        uri.query.heartbeat = uri.query.heartbeat.or(Some(HEARTBEAT_S));
        Ok(Self { uri, tls: None })
    }

    pub(crate) fn login(mut self, login: RabbitLogin) -> Result<Self, RabbitUrlError> {
        login.apply(&mut self.uri)?;
        self.tls = login.tls;
        Ok(self)
    }

    pub(crate) async fn connect(&self, name: &str) -> Result<Connection, lapin::Error> {
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let connecting = network::connect(self.uri.clone(), self.tls.as_ref(), properties);
        match timeout(TIMEOUT, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(lapin::Error::from(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("the server did not accept a connection within {TIMEOUT:?}"),
            ))),
        }
    }
}

/// A channel with a consumer. It has a connection of its own, which ends with the channel.
pub(crate) struct ConsumerChannel {
    /// Its number among those of the source.
    pub(crate) channel_number: u64,
    pub(crate) consumer: Consumer,
    pub(crate) channel: Channel,
}

impl ConsumerChannel {
    pub(crate) async fn open(
        address: &Address,
        settings: &Settings,
        channel_number: u64,
    ) -> Result<Self, SourceError> {
        let queue = &settings.queue;
        let connection =
            address.connect(&format!("hapax {queue}")).await.map_err(SourceError::new)?;
        let channel = answered(connection.create_channel()).await?;
        let Some(name) = short(queue) else {
            return Err(SourceError::new("expected a name of a queue of at most 255 bytes"));
        };
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        answered(channel.queue_declare(name.clone(), passive, FieldTable::default())).await?;
        let prefetch = settings.prefetch.get();
        answered(channel.basic_qos(prefetch, BasicQosOptions::default())).await?;
        let consume = channel.basic_consume(
            name,
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        );
        let consumer = answered(consume).await?;
        Ok(Self { channel_number, consumer, channel })
    }
}

impl Drop for ConsumerChannel {
    /// Closes the channel before the consumer is dropped.
    ///
    /// A consumer that is dropped cancels itself. With a single active consumer, the server would then
    /// deliver later messages to the next consumer before it returns the messages of this one to the queue,
    /// which it does when the channel is closed.
    fn drop(&mut self) {
        let (consumer, channel) = (self.consumer.clone(), self.channel.clone());
        // Without a runtime the client does not send either, and the connection ends with its process.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                // On error the channel is closed already.
                let _ = answered(channel.close(REPLY_SUCCESS, "closed".into())).await;
                drop(consumer);
            });
        }
    }
}

/// Error of a request to the server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error(transparent)]
    Failed(#[from] lapin::Error),
    #[error(
        "expected a reply of the RabbitMQ server within {TIMEOUT:?}, found none: check that it runs, can \
         be reached, and has memory and disk space"
    )]
    Unanswered,
}

impl From<RequestError> for SourceError {
    fn from(error: RequestError) -> Self {
        Self::new(error)
    }
}

/// Awaits the server's answer to a request.
pub(crate) async fn answered<T>(
    request: impl Future<Output = Result<T, lapin::Error>>,
) -> Result<T, RequestError> {
    match timeout(TIMEOUT, request).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(RequestError::Unanswered),
    }
}

/// Returns a name of a queue, a routing key or the like, which AMQP limits to 255 bytes.
pub(crate) fn short(text: &str) -> Option<ShortString> {
    ShortString::try_new(text).ok()
}

/// The pause before the next connection: it doubles after each failure.
#[derive(Debug, Default)]
pub(crate) struct Reconnects {
    failures: u32,
    not_before: Option<Instant>,
}

impl Reconnects {
    /// Returns the time before which no connection is opened.
    pub(crate) fn not_before(&self) -> Option<Instant> {
        self.not_before
    }

    pub(crate) fn failed(&mut self) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(10)).min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(Instant::now() + pause);
    }

    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_url_does_not_show_its_password() {
        for url in ["amqp://u:secret@host:99999999", "http://u:secret@host", "secret"] {
            let error = Address::parse(url).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let address = Address::parse("amqp://u:secret@host/%2f").unwrap();
        assert!(!format!("{address:?}").contains("secret"));
    }

    #[test]
    fn the_pause_between_connections_has_a_bound() {
        let mut reconnects = Reconnects::default();
        assert!(reconnects.not_before().is_none());
        for _ in 0..100 {
            reconnects.failed();
        }
        let pause = reconnects.not_before().unwrap() - Instant::now();
        assert!(pause <= LONGEST_PAUSE, "{pause:?}");
        reconnects.succeeded();
        assert!(reconnects.not_before().is_none());
    }
}
