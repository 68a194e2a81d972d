//! The rules of every adapter to a broker, on a classic queue.

use std::time::Duration;

use hapax_rabbitmq::{RabbitOrderKey, RabbitSink, RabbitSource};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::messages::suite::BrokerFixture;
use hapax_testkit::servers::{RabbitMqServer, RabbitMqServerOptions};

use super::{channel, declare};

hapax_testkit::broker_suite!(super::suite::Rabbit);

/// Size of a message that the server takes.
const LIMIT: usize = 1 << 20;

const QUEUE: &str = "orders";

/// A server, with a proxy before sources and sinks.
struct Rabbit {
    server: RabbitMqServer,
    proxy: FaultProxy,
}

impl Rabbit {
    fn url(&self) -> String {
        RabbitMqServer::url_at(self.proxy.address())
    }
}

impl BrokerFixture for Rabbit {
    type Source = RabbitSource;
    type Sink = RabbitSink;

    const ACK_TIMEOUT: Option<Duration> = None;
    const LARGE: usize = LIMIT;
    const TOO_LARGE: &'static [usize] = &[LIMIT + 1, 3 << 20];
    const KEEPS_ORDER: bool = true;
    const MARKS_REDELIVERIES: bool = true;

    async fn start() -> Self {
        let options =
            RabbitMqServerOptions { max_message_size: LIMIT, ..RabbitMqServerOptions::default() };
        let server = RabbitMqServer::with(options).await;
        declare(&channel(&server.url()).await, QUEUE, &[]).await;
        let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
        Self { server, proxy }
    }

    async fn source(&self) -> RabbitSource {
        let order_key = RabbitOrderKey::Header("message-order-key".to_owned());
        let builder = RabbitSource::builder(self.url(), QUEUE).order_key(order_key);
        builder.delay_from(Some(Duration::from_secs(2))).start().await.unwrap()
    }

    async fn sink(&self) -> RabbitSink {
        RabbitSink::builder(&self.url()).unwrap().connect().await.unwrap()
    }

    fn destination(&self) -> String {
        QUEUE.to_owned()
    }

    async fn unacknowledged(&self) -> u64 {
        self.server.messages(QUEUE).await
    }

    async fn deliveries(&self) -> Option<u64> {
        None
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
