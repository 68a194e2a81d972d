//! Each test has its own server.

mod crashes;
mod delays;
mod malformed;
mod redriven;
mod sink;
mod source;
mod suite;
mod tls;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::{Idempotency, MemoryStore};
use hapax_messages::{
    Consumer, ConsumerLimits, ConsumerMonitor, Inbox, MessageExecution, MessageHandler,
};
use hapax_rabbitmq::RabbitSource;
use hapax_testkit::messages::MemoryDeadLetters;
use hapax_testkit::servers::RabbitMqServer;
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Opens a channel, on a connection of its own.
async fn channel(url: &str) -> Channel {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
    connection.create_channel().await.unwrap()
}

/// Creates a durable queue.
async fn declare(channel: &Channel, queue: &str, arguments: &[(&str, AMQPValue)]) {
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        table.insert((*name).into(), value.clone());
    }
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.into(), options, table).await.unwrap();
}

/// Sets an alarm, as a server does that is short of memory: it blocks connections that publish.
async fn set_alarm(server: &RabbitMqServer) {
    server.eval("rabbit_alarm:set_alarm({{resource_limit,memory,node()},[]}).").await;
}

async fn clear_alarm(server: &RabbitMqServer) {
    server.eval("rabbit_alarm:clear_alarm({resource_limit,memory,node()}).").await;
}

/// Waits until the server has blocked a connection.
async fn has_blocked(server: &RabbitMqServer) {
    let is_blocked = "lists:any(fun(P)->[{state,blocked}]==rabbit_reader:info(P,[state]) end,\
        rabbit_networking:connections()).";
    while server.eval(is_blocked).await != "true" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

/// Records, dead letters and effects, which all processes share.
#[derive(Clone, Default)]
struct World {
    store: Arc<MemoryStore>,
    letters: Arc<MemoryDeadLetters>,
    effects: Arc<Mutex<BTreeMap<String, u32>>>,
}

impl World {
    fn effect(&self, message: &MessageExecution) {
        let mut effects = self.effects.lock().unwrap_or_else(PoisonError::into_inner);
        *effects.entry(message.id().to_string()).or_default() += 1;
    }

    fn effects(&self) -> BTreeMap<String, u32> {
        self.effects.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A process with a consumer.
struct Process {
    consumer: JoinHandle<bool>,
    monitor: ConsumerMonitor,
    stop: oneshot::Sender<()>,
}

impl Process {
    fn start(source: RabbitSource, world: &World, handler: impl MessageHandler) -> Self {
        let engine = Idempotency::builder(Arc::clone(&world.store)).build().unwrap();
        let inbox = Inbox::builder("orders", engine)
            .reexecute()
            .lease(Duration::from_secs(3))
            .dead_letters(Arc::clone(&world.letters) as _)
            .build()
            .unwrap();
        let limits = ConsumerLimits::default();
        let consumer = Consumer::new(inbox, Arc::new(source), handler, limits).unwrap();
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel();
        let consumer = tokio::spawn(consumer.run(async {
            let _ = stopped.await;
        }));
        Self { consumer, monitor, stop }
    }

    async fn stop(self) -> bool {
        let _ = self.stop.send(());
        self.consumer.await.unwrap()
    }

    /// Ends it as a crash does: nothing is released or acknowledged, and its connection ends.
    async fn crash(self) {
        self.consumer.abort();
        assert!(self.consumer.await.unwrap_err().is_cancelled());
    }
}
