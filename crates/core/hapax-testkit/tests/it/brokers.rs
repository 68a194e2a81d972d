//! The broker in memory passes the suite of adapters, which finds adapters that break its rules.

mod bugs;
mod planted;

use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::messages::suite::BrokerFixture;

mod suite {
    hapax_testkit::broker_suite!(super::Memory);
}

struct Memory(MemoryBroker);

impl BrokerFixture for Memory {
    type Source = MemoryBroker;
    type Sink = MemoryBroker;

    const ACK_TIMEOUT: Option<std::time::Duration> = None;
    const LARGE: usize = MemoryBroker::MAX_PAYLOAD;
    const TOO_LARGE: &'static [usize] = &[MemoryBroker::MAX_PAYLOAD + 1];
    const KEEPS_ORDER: bool = true;
    const MARKS_REDELIVERIES: bool = true;

    async fn start() -> Self {
        let broker = MemoryBroker::default();
        broker.set_delays_from(std::time::Duration::ZERO);
        broker.set_delays_in_order();
        Self(broker)
    }

    async fn source(&self) -> MemoryBroker {
        self.0.clone()
    }

    async fn sink(&self) -> MemoryBroker {
        self.0.clone()
    }

    fn destination(&self) -> String {
        "orders".to_owned()
    }

    async fn unacknowledged(&self) -> u64 {
        self.0.backlog() as u64
    }

    async fn deliveries(&self) -> Option<u64> {
        Some(self.0.deliveries())
    }

    fn cut(&self) {
        self.0.redeliver();
    }

    fn freeze(&self) {
        self.0.set_down(true);
    }

    fn thaw(&self) {
        self.0.set_down(false);
    }

    async fn kill(&mut self) {
        self.0.set_down(true);
        self.0.redeliver();
    }

    async fn restart(&mut self) {
        self.0.set_down(false);
    }
}
