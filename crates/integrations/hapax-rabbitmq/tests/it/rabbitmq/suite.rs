//! The rules of every adapter to a broker, on a classic queue.

use std::time::Duration;

use hapax_rabbitmq::{RabbitOrderKey, RabbitSink, RabbitSource};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::messages::suite::BrokerFixture;
use hapax_testkit::servers::{RabbitMqServer, RabbitMqServerOptions};

use super::{channel, declare};

hapax_testkit::broker_suite!(super::suite::Rabbit);

/// Rules of messages without an order, which go to delay queues.
mod delays {
    use super::Rabbit;

    type Unordered = Rabbit<false>;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn messages_that_fail_keep_no_other_from_being_handled() {
        hapax_testkit::messages::suite::messages_that_fail_keep_no_other_from_being_handled::<
            Unordered,
        >()
        .await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn each_id_has_one_effect() {
        hapax_testkit::messages::suite::each_id_has_one_effect::<Unordered>().await;
    }
}

/// Size of a message that the server takes.
const LIMIT: usize = 1 << 20;

const QUEUE: &str = "orders";

/// A server, with a proxy before sources and sinks, and whether messages have order keys.
struct Rabbit<const IS_ORDERED: bool = true> {
    server: RabbitMqServer,
    proxy: FaultProxy,
}

impl<const IS_ORDERED: bool> Rabbit<IS_ORDERED> {
    fn url(&self) -> String {
        RabbitMqServer::url_at(self.proxy.address())
    }
}

impl<const IS_ORDERED: bool> BrokerFixture for Rabbit<IS_ORDERED> {
    type Source = RabbitSource;
    type Sink = RabbitSink;

    const ACK_TIMEOUT: Option<Duration> = None;
    const LARGE: usize = LIMIT;
    const TOO_LARGE: &'static [usize] = &[LIMIT + 1, 3 << 20];
    const KEEPS_ORDER: bool = IS_ORDERED;
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
        let order_key = match IS_ORDERED {
            true => RabbitOrderKey::Header("message-order-key".to_owned()),
            false => RabbitOrderKey::None,
        };
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
        self.server.messages_of_all_queues().await.unwrap_or(u64::MAX)
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
