//! The connection of a source to its consumer, which is replaced if its client has ended.
//!
//! At a message that it cannot parse, async-nats 0.51 ends the connection, and opens another one. At a carriage return
//! within the value of a header the task of the client panics, and the client takes no commands any more.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Subject;
use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::stream::Stream;
use async_nats::jetstream::{AckKind, Context};
use futures_util::FutureExt as _;
use hapax_messages::SourceError;
use tokio::time::{sleep, timeout};

use crate::connector::NatsConnector;
use crate::source;

/// Time for the server to answer a request.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which a pull checks whether its connection has ended.
const CHECK_EVERY: Duration = Duration::from_millis(100);

/// Returns the error of a request of a source without a reply.
pub(crate) fn no_reply(within: Duration) -> SourceError {
    SourceError::new(no_reply_text(within))
}

pub(crate) fn no_reply_text(within: Duration) -> String {
    format!(
        "expected a reply of the NATS server within {within:?}, found none: check that it runs and can \
         be reached"
    )
}

/// A client with its stream and consumer.
pub(crate) struct Connected {
    pub(crate) context: Context,
    pub(crate) stream: Stream,
    pub(crate) consumer: PullConsumer,
    /// Connections of the client before this value was created.
    connects: u64,
}

impl Connected {
    pub(crate) fn new(context: Context, stream: Stream, consumer: PullConsumer) -> Self {
        let connects = connects(&context);
        Self { context, stream, consumer, connects }
    }

    /// Connects again, to the same stream and a consumer that a source may have.
    async fn open_again(
        &self,
        connector: &NatsConnector,
        is_ordered: bool,
    ) -> Result<Self, async_nats::Error> {
        let info = self.consumer.cached_info();
        let (name, context) = (&*info.stream_name, connector.connect().await?);
        let stream = context.get_stream(name).await?;
        let (created, expected) = (stream.cached_info().created, self.stream.cached_info().created);
        if created != expected {
            return Err(format!(
                "expected the stream {name} that was created at {expected}, found another one, created at {created}: \
                 give the connector the domain of the context, or start the process again if the stream was created \
                 again"
            )
            .into());
        }
        let consumer: PullConsumer = stream.get_consumer(&info.name).await?;
        source::check(&info.name, &consumer.cached_info().config, is_ordered)?;
        Ok(Self::new(context, stream, consumer))
    }

    /// Returns how often the connection has ended and was opened again.
    fn ends(&self) -> u64 {
        connects(&self.context).saturating_sub(self.connects)
    }

    /// Returns whether the task of the client has ended: nothing takes commands.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.context.client().flush().now_or_never(), Some(Err(_)))
    }
}

fn connects(context: &Context) -> u64 {
    context.client().statistics().connects.load(Ordering::Relaxed)
}

/// The connection of a source.
pub(crate) struct Link {
    connector: Option<NatsConnector>,
    /// Whether messages have order keys.
    is_ordered: bool,
    state: Mutex<LinkState>,
}

struct LinkState {
    current: Arc<Connected>,
    /// Ends of the connections of clients before.
    earlier_ends: u64,
}

impl Link {
    pub(crate) fn new(
        connected: Connected,
        connector: Option<NatsConnector>,
        is_ordered: bool,
    ) -> Self {
        let state = LinkState { current: Arc::new(connected), earlier_ends: 0 };
        Self { connector, is_ordered, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the client, which may have ended.
    pub(crate) fn current(&self) -> Arc<Connected> {
        Arc::clone(&self.state().current)
    }

    /// Returns how often the connection has ended.
    pub(crate) fn ends(&self) -> u64 {
        let state = self.state();
        state.earlier_ends + state.current.ends()
    }

    /// Waits until the connection has ended more often than `ends`.
    pub(crate) async fn until_ended(&self, ends: u64) {
        while self.ends() == ends {
            sleep(CHECK_EVERY).await;
        }
    }

    /// Returns the client, or a new one if it has ended.
    pub(crate) async fn connected(&self) -> Result<Arc<Connected>, SourceError> {
        let current = self.current();
        if !current.is_dead() {
            return Ok(current);
        }
        let Some(connector) = &self.connector else {
            return Err(SourceError::new(
                "expected a NATS client, found one whose task has ended, as after a header with a carriage return: \
                 build the source with `NatsSourceBuilder::connector`, or start the process again",
            ));
        };
        let opening = current.open_again(connector, self.is_ordered);
        let opened = timeout(TIMEOUT * 2, opening).await.map_err(|_| no_reply(TIMEOUT * 2))?;
        let opened = Arc::new(opened.map_err(SourceError::new)?);
        let mut state = self.state();
        // Another call may have replaced it.
        if Arc::ptr_eq(&state.current, &current) {
            state.earlier_ends += current.ends() + 1;
            state.current = opened;
        }
        Ok(Arc::clone(&state.current))
    }

    /// Sends an acknowledgement, and waits for the confirmation of the server.
    pub(crate) async fn confirm(&self, to: &Subject, kind: AckKind) -> Result<(), SourceError> {
        let client = self.current().context.client();
        let confirmed = timeout(TIMEOUT, client.request(to.clone(), kind.into())).await;
        confirmed.map_err(|_| no_reply(TIMEOUT))?.map(drop).map_err(SourceError::new)
    }

    /// Extends the time within which a message is not delivered again.
    pub(crate) async fn hold(&self, to: &Subject) -> Result<(), SourceError> {
        // Never a negative acknowledgement: the server counts those as deliveries.
        self.send(to, AckKind::Progress).await
    }

    /// Sends an acknowledgement without a confirmation.
    pub(crate) async fn send(&self, to: &Subject, kind: AckKind) -> Result<(), SourceError> {
        let client = self.current().context.client();
        let sent = timeout(TIMEOUT, client.publish(to.clone(), kind.into())).await;
        sent.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)
    }
}
