//! A broker, a store and dead letters in memory, with a controlled clock.

use std::collections::BTreeMap;
use std::io;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::{
    Clock, DefiniteVerdict, Idempotency, MemoryCapacity, MemoryStore, Resolve, Store, Timestamp,
};
use hapax_messages::{
    Attempts, Consumer, ConsumerLimits, ConsumerMonitor, DeadLetterReason, DeadLetterStore, Inbox,
    InboxBuilder, Message, MessageExecution, MessageFailure, MessageHandler, MessageId,
};
use hapax_testkit::faults::FaultyStore;
use hapax_testkit::messages::{MemoryBroker, MemoryDeadLetters};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tracing_subscriber::fmt::MakeWriter;

pub(super) const LEASE: Duration = Duration::from_secs(30);
pub(super) const HOUR: Duration = Duration::from_secs(3600);

/// Wall-clock time that follows tokio's, which tests pause.
#[derive(Debug)]
pub(super) struct TestClock(Instant);

impl Clock for TestClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_790_000_000_000_000).after(self.0.elapsed())
    }
}

/// A broker, a store and dead letters, and any number of processes that use them.
pub(super) struct World {
    pub(super) clock: Arc<TestClock>,
    pub(super) memory: Arc<MemoryStore>,
    pub(super) broker: MemoryBroker,
    pub(super) dead_letters: Arc<MemoryDeadLetters>,
    pub(super) effects: Arc<Mutex<BTreeMap<String, u32>>>,
}

/// A process: its consumer, and its connection to the store.
pub(super) struct Process {
    pub(super) consumer: JoinHandle<bool>,
    pub(super) monitor: ConsumerMonitor,
    pub(super) engine: Idempotency,
    pub(super) store: Arc<FaultyStore<MemoryStore>>,
    pub(super) stop: oneshot::Sender<()>,
}

impl World {
    pub(super) fn new() -> Self {
        let clock = Arc::new(TestClock(Instant::now()));
        let of_store = Arc::clone(&clock) as Arc<dyn Clock>;
        Self {
            clock,
            memory: Arc::new(MemoryStore::new(of_store, MemoryCapacity::default())),
            broker: MemoryBroker::default(),
            dead_letters: Arc::default(),
            effects: Arc::default(),
        }
    }

    pub(super) fn send(&self, id: &str) {
        self.broker.send(message(id));
    }

    pub(super) fn inbox(&self, engine: Idempotency) -> InboxBuilder {
        self.named_inbox("orders", engine)
    }

    pub(super) fn named_inbox(&self, consumer: &str, engine: Idempotency) -> InboxBuilder {
        Inbox::builder(consumer, engine)
            .dead_letters(Arc::clone(&self.dead_letters) as Arc<dyn DeadLetterStore>)
            .clock(Arc::clone(&self.clock) as Arc<dyn Clock>)
            .lease(LEASE)
    }

    pub(super) fn process(
        &self,
        options: impl FnOnce(InboxBuilder) -> InboxBuilder,
        handler: impl MessageHandler,
    ) -> Process {
        let store = Arc::new(FaultyStore::new(Arc::clone(&self.memory), 1));
        let engine = Idempotency::builder(Arc::clone(&store)).build().unwrap();
        let inbox = options(self.inbox(engine.clone())).build().unwrap();
        let limits = ConsumerLimits {
            handlers: NonZeroUsize::new(8).unwrap(),
            max_unacknowledged: NonZeroUsize::new(64).unwrap(),
            ..ConsumerLimits::default()
        };
        let consumer =
            Consumer::new(inbox, Arc::new(self.broker.clone()), handler, limits).unwrap();
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel();
        let consumer = tokio::spawn(consumer.run(async {
            let _ = stopped.await;
        }));
        Process { consumer, monitor, engine, store, stop }
    }

    /// Returns a handler that counts its effects.
    pub(super) fn counting(
        &self,
    ) -> impl Fn(MessageExecution) -> std::future::Ready<Result<(), MessageFailure>> + use<> {
        let effects = Arc::clone(&self.effects);
        move |message| {
            count(&effects, &message);
            std::future::ready(Ok(()))
        }
    }

    /// Releases the record of a message, as an operator does.
    pub(super) async fn release(&self, id: &str) {
        let engine = Idempotency::builder(Arc::clone(&self.memory)).build().unwrap();
        let key = MessageId::new(id).unwrap().to_key();
        let id = engine.operation_id(&Inbox::scope("orders"), &key);
        let fence = self.memory.load(&id).await.unwrap().stored.unwrap().fence;
        let resolution = DefiniteVerdict::DidNotHappen;
        let resolve = Resolve {
            expected: fence,
            force: false,
            forget: true,
            resolution,
            note: None,
            restart: true,
        };
        engine.resolve(id, resolve).await.unwrap();
    }

    pub(super) fn effects(&self) -> BTreeMap<String, u32> {
        self.effects.lock().unwrap().clone()
    }

    /// Returns the reason, attempts and error of each dead letter, by message id.
    pub(super) fn dead_letters(&self) -> Vec<(String, DeadLetterReason, u32, String)> {
        let mut dead_letters: Vec<_> = self
            .dead_letters
            .list()
            .into_iter()
            .map(|dead_letter| {
                let id = dead_letter.message_id.map(|id| id.to_string()).unwrap_or_default();
                (id, dead_letter.reason, dead_letter.attempts, dead_letter.error)
            })
            .collect();
        dead_letters.sort();
        dead_letters
    }
}

impl Process {
    /// Ends it as a crash does: nothing is released or acknowledged.
    pub(super) async fn crash(self) {
        self.consumer.abort();
        assert!(self.consumer.await.unwrap_err().is_cancelled());
    }

    pub(super) async fn stop(self) -> bool {
        let _ = self.stop.send(());
        self.consumer.await.unwrap()
    }
}

pub(super) fn message(id: &str) -> Message {
    Message::new("memory://orders", format!("payload of {id}"))
        .with_header("message-id", id.to_owned())
}

pub(super) fn count(effects: &Mutex<BTreeMap<String, u32>>, message: &MessageExecution) {
    *effects.lock().unwrap().entry(message.id().to_string()).or_default() += 1;
}

pub(super) fn once(ids: impl IntoIterator<Item = String>) -> BTreeMap<String, u32> {
    ids.into_iter().map(|id| (id, 1)).collect()
}

pub(super) fn attempts(max: u32, longest_pause: Duration) -> Attempts {
    let max = NonZeroU32::new(max).unwrap();
    Attempts { max, first_pause: longest_pause, longest_pause, ..Attempts::default() }
}

/// Handles messages, and reports when a poison one has begun, which then never ends.
pub(super) fn poisoned(
    effects: &Arc<Mutex<BTreeMap<String, u32>>>,
    begun: &Arc<Notify>,
) -> impl MessageHandler {
    let (effects, begun) = (Arc::clone(effects), Arc::clone(begun));
    move |message: MessageExecution| {
        let (effects, begun) = (Arc::clone(&effects), Arc::clone(&begun));
        async move {
            if message.id().as_str() == "poison" {
                begun.notify_one();
                std::future::pending::<()>().await;
            }
            sleep(Duration::from_millis(100)).await;
            count(&effects, &message);
            Ok(())
        }
    }
}

/// Lines of a log.
#[derive(Clone, Default)]
pub(super) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
