//! Connections to the server. The client's own recovery stays off: a delivery tag belongs to its
//! channel, and ends with it.

use std::time::Duration;

use hapax_messages::SourceError;
use lapin::types::ShortString;
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};
use tokio::time::{Instant, timeout};

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
    "expected a URL `amqp://USER:PASSWORD@HOST:PORT/VHOST` or `amqps://…`, found another one ({0}): \
     change it; a virtual host is percent-encoded"
)]
pub struct RabbitUrlError(String);

/// Address and credentials of a server. Its `Debug` form shows neither.
#[derive(Clone)]
pub(crate) struct Address(AMQPUri);

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Address")
    }
}

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, RabbitUrlError> {
        // The parser's texts have parts of the URL, which may be parts of the password.
        let hidden = |_| RabbitUrlError("it cannot be parsed".to_owned());
        let mut uri: AMQPUri = url.parse().map_err(hidden)?;
        uri.query.heartbeat = uri.query.heartbeat.or(Some(HEARTBEAT_S));
        Ok(Self(uri))
    }

    pub(crate) async fn connect(&self, name: &str) -> Result<Connection, lapin::Error> {
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let connecting = Connection::connect_uri(self.0.clone(), properties);
        match timeout(TIMEOUT, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(lapin::Error::from(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("the server did not accept a connection within {TIMEOUT:?}"),
            ))),
        }
    }
}

/// Awaits the server's answer to a request.
pub(crate) async fn answered<T>(
    request: impl Future<Output = Result<T, lapin::Error>>,
) -> Result<T, SourceError> {
    match timeout(TIMEOUT, request).await {
        Ok(answer) => answer.map_err(SourceError::new),
        Err(_) => Err(SourceError::new(format!(
            "expected a reply of the RabbitMQ server within {TIMEOUT:?}, found none: check that it runs \
             and can be reached"
        ))),
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
