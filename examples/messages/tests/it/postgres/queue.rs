//! The rules of every adapter to a broker, for the queue in a table.

use std::time::Duration;

use hapax_messages_examples::table_queue::{TABLE, TableQueue};
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::messages::suite::BrokerFixture;
use hapax_testkit::servers::PostgresServer;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::time::sleep;

hapax_testkit::broker_suite!(super::queue::TableBroker);

/// A database, with a proxy before sources and sinks.
pub(super) struct TableBroker {
    server: PostgresServer,
    proxy: FaultProxy,
}

impl TableBroker {
    fn pool(&self) -> PgPool {
        let url = format!("postgres://postgres@{}/postgres", self.proxy.address());
        let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(4));
        pool.connect_lazy(&url).unwrap()
    }

    fn queue(&self) -> TableQueue {
        TableQueue::new(self.pool(), "orders", Self::ACK_TIMEOUT.unwrap())
    }

    async fn count(&self, counted: &str) -> u64 {
        let count = format!("SELECT {counted} FROM table_queue");
        loop {
            // Fails for a time after a restart.
            if let Ok(count) = self.server.try_sql("postgres", &count).await {
                return count.trim().parse().unwrap();
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

impl BrokerFixture for TableBroker {
    type Source = TableQueue;
    type Sink = TableQueue;

    const ACK_TIMEOUT: Option<Duration> = Some(Duration::from_secs(1));
    const LARGE: usize = 1 << 20;
    const TOO_LARGE: &'static [usize] = &[(1 << 20) + 1];
    const KEEPS_ORDER: bool = true;
    const MARKS_REDELIVERIES: bool = true;

    async fn start() -> Self {
        let server = PostgresServer::start().await;
        server.sql("postgres", TABLE).await;
        let proxy = FaultProxy::before(server.address(), 1).await.unwrap();
        Self { server, proxy }
    }

    async fn source(&self) -> TableQueue {
        self.queue()
    }

    async fn sink(&self) -> TableQueue {
        self.queue()
    }

    fn destination(&self) -> String {
        "orders".to_owned()
    }

    async fn unacknowledged(&self) -> u64 {
        self.count("count(*)").await
    }

    async fn deliveries(&self) -> Option<u64> {
        Some(self.count("coalesce(sum(deliveries), 0)").await)
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
