//! Rules of consumers: an inbox in claim mode over the source, with records in memory.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_core::{HookTiming, Idempotency, MemoryStore, Verdict};
use hapax_messages::{
    Attempts, Consumer, ConsumerLimits, ConsumerMonitor, Delivery, Inbox, InboxBuilder, Message,
    MessageExecution, MessageFailure, MessageHandler, MessageSource, SourceError, SourceLimits,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::BrokerFixture;
use super::bench::{Bench, TIMEOUT, id_of, ids, payload};
use crate::SeededEntropy;
use crate::messages::MemoryDeadLetters;

const MESSAGES: u32 = 200;

/// Unacknowledged messages that a consumer may have.
const MOST_UNACKNOWLEDGED: usize = 32;

/// A pause that ends while a rule waits.
const SHORT: Duration = Duration::from_millis(100);

/// Every id has one effect, although producers publish messages twice, acknowledgements are lost,
/// connections end, and the broker is killed.
pub async fn each_id_has_one_effect<F: BrokerFixture>() {
    let mut bench = Bench::<F>::start().await;
    let world = World::default();
    let processes = [process(&bench, &world, 5).await, process(&bench, &world, 7).await];
    let entropy = SeededEntropy::new(1);
    let mut repeated = 0;
    for (number, id) in ids(MESSAGES).enumerate() {
        bench.send(&id).await;
        // Some at once, and some much later.
        for earlier in [number as u64, entropy.below(number as u64 + 1)] {
            if entropy.below(6) == 0 {
                let id = format!("m-{earlier}");
                let mut again = bench.message(&id, payload(&id));
                again.broker_id = Some(format!("{id} again {number}"));
                bench.publish(&again).await;
                repeated += 1;
            }
        }
        match number {
            // A member that joins its group late finds messages which may have been delivered before. Those
            // from here on are delivered for the first time.
            30 | 75 | 105 | 150 => world.reaches(number + 1).await,
            60 | 120 => bench.broker.cut(),
            90 => {
                bench.broker.kill().await;
                bench.broker.restart().await;
            }
            _ => {}
        }
    }
    bench.acknowledged(&world).await;
    let stats = processes.each_ref().map(|process| process.monitor.stats());
    let duplicates: u64 = stats.iter().map(|stats| stats.duplicates).sum();
    let lost = world.lost.load(Ordering::SeqCst);
    for process in processes {
        process.stop().await;
    }
    assert_eq!(world.effects(), ids(MESSAGES).map(|id| (id, 1)).collect());
    assert_eq!(world.letters.list().len(), 0, "dead letters");
    eprintln!("{repeated} repetitions, {lost} lost acknowledgements, {duplicates} duplicates");
    assert!(repeated > 20 && lost > 10 && duplicates > 20, "too few faults");
}

/// A message whose handler wants a pause that is longer than the broker waits for an acknowledgement is handled again
/// after the pause, and not before: it is held, or delayed.
pub async fn a_message_that_waits_for_its_next_attempt_is_not_handled_before<F: BrokerFixture>() {
    // On a slow machine a message may not be held in time.
    for _ in 0..5 {
        if waits::<F>().await {
            return;
        }
    }
    panic!("the message was delivered again, five times");
}

async fn waits<F: BrokerFixture>() -> bool {
    let bench = Bench::<F>::start().await;
    let world = World::default();
    let pause = F::ACK_TIMEOUT.map_or(Duration::from_secs(1), |timeout| timeout * 2);
    let begun: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let (times, of_handler) = (Arc::clone(&begun), world.clone());
    let handler = move |message: MessageExecution| {
        times.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
        let attempt = message.attempt();
        if attempt > 1 {
            of_handler.effect(&message);
        }
        async move {
            match attempt {
                1 => Err(MessageFailure::retry_after(pause, "later")),
                _ => Ok(()),
            }
        }
    };
    let process = Process::start(bench.broker.source().await, &world, handler);
    bench.send("later").await;
    bench.acknowledged(&world).await;
    let stats = process.monitor.stats();
    process.stop().await;
    assert_eq!(world.effects(), BTreeMap::from([("later".to_owned(), 1)]));
    let begun = begun.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert_eq!(begun.len(), 2, "attempts");
    assert!(begun[1] - begun[0] >= pause, "{:?} instead of {pause:?}", begun[1] - begun[0]);
    stats.received == 1 + stats.delayed
}

/// Messages that fail, more than a consumer may have, keep no other message from being handled while they wait, if the
/// source takes messages back.
pub async fn messages_that_fail_keep_no_other_from_being_handled<F: BrokerFixture>() {
    const OTHERS: u32 = 20;
    let bench = Bench::<F>::start().await;
    let source = bench.broker.source().await;
    if source.limits().delays_from.is_none() {
        eprintln!("the source takes no message back");
        return;
    }
    let world = World::default();
    let failed: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    let (of_handler, of_failed) = (world.clone(), Arc::clone(&failed));
    let handler = move |message: MessageExecution| {
        let (id, attempt) = (message.id().to_string(), message.attempt());
        let fails = id.starts_with("failing");
        if fails {
            of_failed.lock().unwrap_or_else(PoisonError::into_inner).insert(id, attempt);
        } else {
            of_handler.effect(&message);
        }
        // Longer than the rule waits.
        let pause = TIMEOUT * 10;
        std::future::ready(match fails {
            true => Err(MessageFailure::retry_after(pause, "always")),
            false => Ok(()),
        })
    };
    for number in 0..3 * MOST_UNACKNOWLEDGED {
        bench.send(&format!("failing-{number}")).await;
    }
    let process = Process::start(source, &world, handler);
    for id in ids(OTHERS) {
        bench.send(&id).await;
    }
    world.reaches(OTHERS as usize).await;
    let stats = process.monitor.stats();
    process.stop().await;
    assert_eq!(world.effects(), ids(OTHERS).map(|id| (id, 1)).collect());
    let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert!(failed.values().all(|attempt| *attempt == 1), "before their pauses: {failed:?}");
    assert!(stats.delayed > 0 && stats.full_limit.is_none(), "{stats:?}");
    assert_eq!(world.letters.list().len(), 0, "dead letters");
}

/// A message that fails and later ones of its order key, more than a consumer may have, keep no other key from being
/// handled, if the source delays in order; those of the key are handled once it has succeeded, in their order.
pub async fn an_order_key_that_waits_keeps_no_other_key_from_being_handled<F: BrokerFixture>() {
    order_keys::<F>(false).await;
}

/// The same of a message that stays with the consumer from its first attempt on, since its record does not have what another
/// delivery needs: its handler has saved a checkpoint, its outcome is unknown, and the hook cannot say.
pub async fn an_order_key_whose_message_stays_keeps_no_other_key_from_being_handled<
    F: BrokerFixture,
>() {
    order_keys::<F>(true).await;
}

async fn order_keys<F: BrokerFixture>(stays: bool) {
    const OTHERS: u32 = 20;
    let bench = Bench::<F>::start().await;
    let source = bench.broker.source().await;
    if !source.limits().delays_in_order || !source.limits().has_order_keys {
        eprintln!("the source takes no message with an order key back");
        return;
    }
    let world = World::default();
    let (succeeds, handled) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<_>>>::default());
    let (of_handler, of_test) = (world.clone(), (Arc::clone(&succeeds), Arc::clone(&handled)));
    let handler = move |message: MessageExecution| {
        let (succeeds, handled) = &of_test;
        let id = message.id().to_string();
        let fails = id == "waiting-0" && !succeeds.load(Ordering::SeqCst);
        let record = (id, message.attempt(), fails);
        handled.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        if !fails {
            of_handler.effect(&message);
        }
        async move {
            match (fails, stays) {
                (true, true) => {
                    message.lease().save("begun".into()).await.map_err(MessageFailure::retry)?;
                    Err(MessageFailure::unknown("no answer"))
                }
                (true, false) => Err(MessageFailure::retry_after(SHORT, "not yet")),
                (false, _) => Ok(()),
            }
        }
    };
    let of_hook = Arc::clone(&succeeds);
    let hook = move |_| {
        std::future::ready(match of_hook.load(Ordering::SeqCst) {
            true => Verdict::DidNotHappen,
            false => Verdict::CannotSay,
        })
    };
    let options = |inbox: InboxBuilder| match stays {
        true => {
            let timing = HookTiming { after: Duration::ZERO, timeout: TIMEOUT };
            let max = NonZeroU32::MAX;
            let attempts =
                Attempts { max, first_pause: SHORT, longest_pause: SHORT, ..Attempts::default() };
            inbox.ordered().attempts(attempts).reconcile_with(timing, hook)
        }
        false => inbox.ordered(),
    };
    let send = async |id: &str, key: &str| {
        let mut message = bench.message(id, payload(id));
        message.key = Some(key.to_owned());
        bench.publish(&message).await;
    };
    let waiting = (0..3 * MOST_UNACKNOWLEDGED).map(|number| format!("waiting-{number}"));
    for id in waiting.clone() {
        send(&id, "waiting").await;
    }
    let process = Process::with(source, &world, handler, options);
    for id in ids(OTHERS) {
        send(&id, &format!("of {id}")).await;
    }
    world.reaches(OTHERS as usize).await;
    assert_eq!(world.effects(), ids(OTHERS).map(|id| (id, 1)).collect());
    succeeds.store(true, Ordering::SeqCst);
    bench.acknowledged(&world).await;
    process.stop().await;
    let handled = handled.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let failures = handled.iter().filter(|(.., fails)| *fails).map(|(_, attempt, _)| *attempt);
    let failures: Vec<_> = failures.collect();
    let count = u32::try_from(failures.len()).unwrap();
    assert_eq!(failures, (1..=count).collect::<Vec<_>>(), "each attempt is counted, once");
    let of_key = handled.iter().filter(|(id, _, fails)| id.starts_with("waiting") && !*fails);
    let of_key: Vec<_> = of_key.map(|(id, attempt, _)| (id.clone(), *attempt)).collect();
    let expected = waiting.map(|id| if id == "waiting-0" { (id, count + 1) } else { (id, 1) });
    assert_eq!(of_key, expected.collect::<Vec<_>>());
    assert_eq!(world.letters.list().len(), 0, "dead letters");
}

/// A consumer that shuts down while messages are received, in progress and waiting leaves them to the
/// next one, and each has one effect.
pub async fn a_shutdown_loses_no_message<F: BrokerFixture>() {
    let bench = Bench::<F>::start().await;
    let world = World::default();
    for id in ids(MESSAGES) {
        bench.send(&id).await;
    }
    let mut shutdowns = 0;
    while world.effects().len() < MESSAGES as usize {
        let process = process(&bench, &world, u64::MAX).await;
        let enough = world.effects().len() + 40;
        world.reaches(enough.min(MESSAGES as usize)).await;
        process.stop().await;
        shutdowns += 1;
    }
    let process = process(&bench, &world, u64::MAX).await;
    bench.acknowledged(&world).await;
    process.stop().await;
    assert_eq!(world.effects(), ids(MESSAGES).map(|id| (id, 1)).collect());
    assert!(shutdowns > 2, "{shutdowns} shutdowns");
}

/// Records, dead letters and effects, which all processes share.
#[derive(Clone, Default)]
struct World {
    store: Arc<MemoryStore>,
    letters: Arc<MemoryDeadLetters>,
    effects: Arc<Mutex<BTreeMap<String, u32>>>,
    lost: Arc<AtomicU64>,
}

impl World {
    fn effect(&self, message: &MessageExecution) {
        let mut effects = self.effects.lock().unwrap_or_else(PoisonError::into_inner);
        *effects.entry(message.id().to_string()).or_default() += 1;
    }

    fn effects(&self) -> BTreeMap<String, u32> {
        self.effects.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until so many ids have an effect.
    async fn reaches(&self, count: usize) {
        let effects = async {
            while self.effects().len() < count {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(TIMEOUT, effects).await.expect("messages are handled");
    }
}

impl<F: BrokerFixture> Bench<F> {
    /// Waits until every message is acknowledged.
    async fn acknowledged(&self, world: &World) {
        let acknowledged = async {
            while self.broker.unacknowledged().await > 0 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        let acknowledged = timeout(TIMEOUT, acknowledged).await;
        acknowledged.unwrap_or_else(|_| panic!("{} messages have effects", world.effects().len()));
    }
}

/// A process with a consumer.
struct Process {
    consumer: JoinHandle<bool>,
    monitor: ConsumerMonitor,
    engine: Idempotency,
    stop: oneshot::Sender<()>,
}

/// Starts a process whose handler takes a moment. Of its deliveries, one in `loses` loses its
/// acknowledgements.
async fn process<F: BrokerFixture>(bench: &Bench<F>, world: &World, loses: u64) -> Process {
    let source = LossySource {
        source: bench.broker.source().await,
        entropy: SeededEntropy::new(loses),
        loses,
        lost: Arc::clone(&world.lost),
    };
    let of_handler = world.clone();
    let handler = move |message: MessageExecution| {
        let world = of_handler.clone();
        async move {
            sleep(Duration::from_millis(5)).await;
            world.effect(&message);
            Ok(())
        }
    };
    Process::start(source, world, handler)
}

impl Process {
    fn start(source: impl MessageSource, world: &World, handler: impl MessageHandler) -> Self {
        Self::with(source, world, handler, |inbox| inbox)
    }

    fn with(
        source: impl MessageSource,
        world: &World,
        handler: impl MessageHandler,
        options: impl FnOnce(InboxBuilder) -> InboxBuilder,
    ) -> Self {
        let engine = Idempotency::builder(Arc::clone(&world.store))
            .namespace("")
            .build()
            .expect("valid options");
        let letters = Arc::clone(&world.letters);
        let attempts =
            Attempts { max: NonZeroU32::MAX, longest_pause: TIMEOUT * 10, ..Attempts::default() };
        let inbox = Inbox::builder("orders", engine.clone())
            .reexecute()
            .lease(TIMEOUT)
            .attempts(attempts)
            .dead_letters(letters);
        let inbox = options(inbox).build().expect("valid options");
        let limits = ConsumerLimits {
            handlers: NonZeroUsize::new(16).unwrap(),
            max_unacknowledged: NonZeroUsize::new(MOST_UNACKNOWLEDGED).unwrap(),
            ..ConsumerLimits::default()
        };
        let consumer =
            Consumer::new(inbox, Arc::new(source), handler, limits).expect("valid options");
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel();
        let consumer = tokio::spawn(consumer.run(async {
            let _ = stopped.await;
        }));
        Self { consumer, monitor, engine, stop }
    }

    async fn stop(self) {
        let _ = self.stop.send(());
        let ended = timeout(TIMEOUT, self.consumer).await.expect("it ends").expect("no panic");
        assert!(ended, "messages in progress have not ended in time");
        timeout(TIMEOUT, self.engine.drain()).await.expect("it ends");
    }
}

/// A source of which some deliveries are never acknowledged.
#[derive(Debug)]
struct LossySource<S> {
    source: S,
    entropy: SeededEntropy,
    loses: u64,
    lost: Arc<AtomicU64>,
}

impl<S: MessageSource> MessageSource for LossySource<S> {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            let received = self.source.receive(max).await?;
            let deliveries = received.into_iter().map(|delivery| {
                // A redelivery is acknowledged, so that the rule ends.
                let is_first = !delivery.is_redelivery();
                let loses =
                    is_first && self.loses < u64::MAX && self.entropy.below(self.loses) == 0;
                let lost = loses.then(|| Arc::clone(&self.lost));
                Arc::new(LossyDelivery { delivery, lost }) as Arc<dyn Delivery>
            });
            Ok(deliveries.collect())
        })
    }

    fn limits(&self) -> SourceLimits {
        self.source.limits()
    }

    fn full_limit(&self) -> Option<String> {
        self.source.full_limit()
    }
}

#[derive(Debug)]
struct LossyDelivery {
    delivery: Arc<dyn Delivery>,
    lost: Option<Arc<AtomicU64>>,
}

impl Delivery for LossyDelivery {
    fn message(&self) -> &Message {
        self.delivery.message()
    }

    fn is_redelivery(&self) -> bool {
        self.delivery.is_redelivery()
    }

    fn unreadable(&self) -> Option<&str> {
        self.delivery.unreadable()
    }

    fn has_ended(&self) -> bool {
        self.delivery.has_ended()
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        match &self.lost {
            Some(lost) => {
                lost.fetch_add(1, Ordering::SeqCst);
                let id = id_of(&*self.delivery);
                Box::pin(async move { Err(SourceError::new(format!("{id}: lost by the rule"))) })
            }
            None => self.delivery.acknowledge(),
        }
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        self.delivery.hold()
    }

    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        self.delivery.delay(pause)
    }

    fn return_behind_delayed(&self) -> bool {
        self.delivery.return_behind_delayed()
    }

    fn keep_followers(&self) -> bool {
        self.delivery.keep_followers()
    }

    fn was_delayed(&self) -> bool {
        self.delivery.was_delayed()
    }
}
