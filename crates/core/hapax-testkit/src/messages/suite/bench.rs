use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use hapax_messages::{
    Delivery, IdRules, MessageId, MessageSink, MessageSource, OutgoingMessage, PublishError,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::BrokerFixture;

/// Timeout of what a broker or an adapter must do; longer than a busy machine needs.
pub(super) const TIMEOUT: Duration = Duration::from_secs(150);

/// Interval at which the broker's figures are read.
const EVERY: Duration = Duration::from_millis(20);

/// Messages that one call receives.
pub(super) const MOST: NonZeroUsize = NonZeroUsize::new(10).unwrap();

/// Times that a message is delivered again before a rule says that another one is not.
const ROUNDS: u32 = 3;

/// A broker with a sink.
pub(super) struct Bench<F: BrokerFixture> {
    pub(super) broker: F,
    pub(super) sink: F::Sink,
}

impl<F: BrokerFixture> Bench<F> {
    pub(super) async fn start() -> Self {
        let broker = F::start().await;
        let sink = broker.sink().await;
        Self { broker, sink }
    }

    pub(super) fn message(&self, id: &str, payload: impl Into<Vec<u8>>) -> OutgoingMessage {
        let id = MessageId::new(id).expect("a valid id");
        OutgoingMessage::new(self.broker.destination(), id, payload.into())
    }

    /// Publishes a message whose payload is made of its id.
    pub(super) async fn send(&self, id: &str) {
        self.publish(&self.message(id, payload(id))).await;
    }

    /// Publishes a message, again until it is confirmed.
    pub(super) async fn publish(&self, message: &OutgoingMessage) {
        let confirmed = async {
            while let Err(error) = self.sink.publish(message).await {
                assert!(matches!(error, PublishError::NotAcknowledged { .. }), "{error}");
                sleep(EVERY).await;
            }
        };
        timeout(TIMEOUT, confirmed).await.expect("the message is confirmed");
    }

    /// Receives from a new source.
    pub(super) async fn receiver(&self) -> Receiver {
        Receiver::new([Arc::new(self.broker.source().await) as Arc<dyn MessageSource>])
    }

    /// Waits until every message is acknowledged, and acknowledges those that are received.
    pub(super) async fn acknowledge_rest(&self, receiver: &mut Receiver) {
        let acknowledged = async {
            while self.broker.unacknowledged().await > 0 {
                tokio::select! {
                    delivery = receiver.next() => drop(delivery.acknowledge().await),
                    () = sleep(EVERY) => {}
                }
            }
        };
        timeout(TIMEOUT, acknowledged).await.expect("every message is acknowledged");
    }

    /// Checks that only the message `id` is delivered, until it was delivered several times and each
    /// other one would have been delivered too. Then acknowledges it.
    pub(super) async fn only(&self, receiver: &mut Receiver, id: &str) {
        let mut rounds = Rounds::<F>::begin();
        loop {
            let delivery = receiver.next().await;
            assert_eq!(id_of(&*delivery), id, "it was acknowledged, and is delivered again");
            if rounds.next_is_last() {
                delivery.acknowledge().await.expect("the broker is there");
                return self.acknowledge_rest(receiver).await;
            }
        }
    }
}

/// Redeliveries of a message, by which a rule knows that the broker's timeout has passed.
pub(super) struct Rounds<F> {
    begun: Instant,
    count: u32,
    fixture: std::marker::PhantomData<F>,
}

impl<F: BrokerFixture> Rounds<F> {
    pub(super) fn begin() -> Self {
        Self { begun: Instant::now(), count: 0, fixture: std::marker::PhantomData }
    }

    /// Counts a delivery. Returns whether there were enough, over a time that is long enough.
    pub(super) fn next_is_last(&mut self) -> bool {
        self.count += 1;
        let timeouts = F::ACK_TIMEOUT.unwrap_or_default() * ROUNDS;
        self.count > ROUNDS && self.begun.elapsed() > timeouts
    }
}

/// Receives from sources in the background, so that no call of `receive` is dropped.
pub(super) struct Receiver {
    received: mpsc::Receiver<Arc<dyn Delivery>>,
    _tasks: JoinSet<()>,
}

impl Receiver {
    pub(super) fn new(sources: impl IntoIterator<Item = Arc<dyn MessageSource>>) -> Self {
        let (sender, received) = mpsc::channel(1);
        let mut tasks = JoinSet::new();
        for source in sources {
            let sender = sender.clone();
            tasks.spawn(async move {
                loop {
                    // An error is found by the timeout of what is expected.
                    let Ok(received) = source.receive(MOST).await else {
                        sleep(EVERY).await;
                        continue;
                    };
                    for delivery in received {
                        if sender.send(delivery).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
        Self { received, _tasks: tasks }
    }

    /// Returns the next delivery.
    pub(super) async fn next(&mut self) -> Arc<dyn Delivery> {
        let next = timeout(TIMEOUT, self.received.recv()).await;
        next.expect("a message is delivered").expect("the tasks run")
    }

    /// Returns the next delivery of a message. Drops those of others before it.
    pub(super) async fn take(&mut self, id: &str) -> Arc<dyn Delivery> {
        let taken = async {
            loop {
                let delivery = self.next().await;
                if id_of(&*delivery) == id {
                    return delivery;
                }
            }
        };
        timeout(TIMEOUT, taken).await.unwrap_or_else(|_| panic!("{id} is delivered"))
    }

    /// Receives and acknowledges messages until all of `ids` were received. Returns the number of
    /// deliveries of each.
    pub(super) async fn collect(
        &mut self,
        ids: impl IntoIterator<Item = String>,
    ) -> BTreeMap<String, u32> {
        let mut times: BTreeMap<_, _> = ids.into_iter().map(|id| (id, 0)).collect();
        while times.values().any(|times| *times == 0) {
            let delivery = self.next().await;
            let id = id_of(&*delivery);
            assert_eq!(delivery.message().payload, payload(&id), "the payload of {id}");
            *times.get_mut(&id).unwrap_or_else(|| panic!("{id} was not published")) += 1;
            // If it fails, the message is delivered again.
            let _ = delivery.acknowledge().await;
        }
        times
    }
}

/// Returns the id of a message, as a consumer finds it.
pub(super) fn id_of(delivery: &dyn Delivery) -> String {
    IdRules::default().id(delivery.message()).expect("a message has its id").as_str().to_owned()
}

pub(super) fn payload(id: &str) -> Vec<u8> {
    format!("payload of {id}").into_bytes()
}

pub(super) fn ids(count: u32) -> impl Iterator<Item = String> + Clone {
    (0..count).map(|number| format!("m-{number}"))
}
