//! The rules of every adapter to a broker.

use std::time::Duration;

use async_nats::jetstream::{Context, consumer::PullConsumer, stream};
use hapax_nats::{NatsSink, NatsSource};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::messages::suite::BrokerFixture;
use hapax_testkit::servers::NatsServer;

hapax_testkit::broker_suite!(super::suite::Nats);

/// Size of a message with its headers that the stream takes; the server takes 1 MiB.
const STREAM_LIMIT: usize = 1_000_000;

/// A server, with a proxy before sources and sinks.
struct Nats {
    server: NatsServer,
    proxy: FaultProxy,
    context: Context,
}

impl Nats {
    /// Returns a context on a connection of its own, through the proxy.
    async fn connect(&self) -> Context {
        let address = self.proxy.address();
        hapax_nats::jetstream(&format!("nats://{address}")).await.unwrap()
    }

    async fn try_unacknowledged(&self) -> Result<u64, async_nats::Error> {
        let stream = self.context.get_stream("ORDERS").await?;
        let mut consumer: PullConsumer = stream.get_consumer("test").await?;
        let info = consumer.info().await?;
        Ok(info.num_pending + u64::try_from(info.num_ack_pending)?)
    }
}

impl BrokerFixture for Nats {
    type Source = NatsSource;
    type Sink = NatsSink;

    const ACK_TIMEOUT: Option<Duration> = Some(Duration::from_secs(2));
    const LARGE: usize = 990_000;
    const TOO_LARGE: &'static [usize] = &[STREAM_LIMIT, 2 << 20];
    // With an order key a source has one message at a time, of which `source` has the tests.
    const KEEPS_ORDER: bool = false;
    const MARKS_REDELIVERIES: bool = true;

    async fn start() -> Self {
        let server = NatsServer::start().await;
        let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
        let context = hapax_nats::jetstream(&server.url()).await.unwrap();
        let config = stream::Config {
            name: "ORDERS".to_owned(),
            subjects: vec!["orders.>".to_owned()],
            max_message_size: i32::try_from(STREAM_LIMIT).unwrap(),
            ..stream::Config::default()
        };
        context.create_stream(config).await.unwrap();
        let nats = Self { server, proxy, context };
        // Creates the consumer, of which figures are read.
        nats.source().await;
        nats
    }

    async fn source(&self) -> NatsSource {
        let builder = NatsSource::builder(self.connect().await, "ORDERS", "test");
        builder.ack_wait(Self::ACK_TIMEOUT.unwrap()).start().await.unwrap()
    }

    async fn sink(&self) -> NatsSink {
        NatsSink::new(self.connect().await)
    }

    fn destination(&self) -> String {
        "orders.created".to_owned()
    }

    async fn unacknowledged(&self) -> u64 {
        loop {
            // Fails for a time after a restart.
            if let Ok(count) = self.try_unacknowledged().await {
                return count;
            }
        }
    }

    async fn deliveries(&self) -> Option<u64> {
        let stream = self.context.get_stream("ORDERS").await.unwrap();
        let mut consumer: PullConsumer = stream.get_consumer("test").await.unwrap();
        Some(consumer.info().await.unwrap().delivered.consumer_sequence)
    }

    fn cut(&self) {
        self.proxy.cut();
    }

    fn freeze(&self) {
        self.server.pause();
    }

    fn thaw(&self) {
        self.server.resume();
    }

    async fn kill(&mut self) {
        self.server.kill().await;
    }

    async fn restart(&mut self) {
        self.server.restart().await;
    }
}
