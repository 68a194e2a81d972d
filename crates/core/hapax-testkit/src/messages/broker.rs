use std::collections::{HashMap, HashSet, VecDeque};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{
    Delivery, Message, MessageSink, MessageSource, OutgoingMessage, PublishError, SourceError,
    SourceLimits,
};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

/// A broker with one queue, in memory. A message that is dropped without an acknowledgement is
/// delivered again, before those that were not delivered yet.
#[derive(Clone, Debug, Default)]
pub struct MemoryBroker {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
    is_down: AtomicBool,
    loses_acknowledgements: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<(u64, Arc<Message>, bool)>,
    /// Each with the time at which it was delivered or held.
    delivered: HashMap<u64, (Arc<Message>, Instant)>,
    ack_wait: Option<Duration>,
    delays_from: Option<Duration>,
    delays_in_order: bool,
    /// Number of messages that were delayed, until their pauses end.
    delayed: usize,
    /// The messages that were ever delayed.
    ever_delayed: HashSet<u64>,
    /// The first message of each order key that was delayed or keeps its followers, until it is acknowledged; then the
    /// next one that was not delivered.
    blocked: HashMap<String, u64>,
    next: u64,
    /// Changes in a restart: deliveries of before have no effect any more.
    connection_number: u64,
    deliveries: u64,
    acknowledgements: u64,
    holds: u64,
}

impl MemoryBroker {
    /// Size of the largest payload, in bytes.
    pub const MAX_PAYLOAD: usize = 1 << 20;

    /// Header of a message that the broker cannot read, with the reason.
    pub const UNREADABLE: &str = "hapax-testkit-unreadable";

    /// Adds a message to the queue.
    pub fn send(&self, message: Message) {
        let mut state = self.shared.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.push_back((number, Arc::new(message), false));
        drop(state);
        self.shared.changed.notify_waiters();
    }

    /// Returns the number of messages that are not acknowledged.
    #[must_use]
    pub fn backlog(&self) -> usize {
        let state = self.shared.lock();
        state.unacknowledged()
    }

    /// Returns the number of deliveries so far.
    #[must_use]
    pub fn deliveries(&self) -> u64 {
        self.shared.lock().deliveries
    }

    /// Returns the number of acknowledgements so far.
    #[must_use]
    pub fn acknowledgements(&self) -> u64 {
        self.shared.lock().acknowledgements
    }

    /// Returns the number of times that a delivery was held.
    #[must_use]
    pub fn holds(&self) -> u64 {
        self.shared.lock().holds
    }

    /// Delivers a message again that was neither acknowledged nor held for `ack_wait`.
    pub fn set_ack_wait(&self, ack_wait: Duration) {
        self.shared.lock().ack_wait = Some(ack_wait);
    }

    /// Takes back messages that are to be delivered after a pause of at least `pause`.
    pub fn set_delays_from(&self, pause: Duration) {
        self.shared.lock().delays_from = Some(pause);
    }

    /// Takes back messages with order keys too, and delivers none behind them.
    pub fn set_delays_in_order(&self) {
        self.shared.lock().delays_in_order = true;
    }

    /// Makes the broker unreachable, or reachable again.
    pub fn set_down(&self, is_down: bool) {
        self.shared.is_down.store(is_down, Ordering::SeqCst);
        self.shared.changed.notify_waiters();
    }

    /// Makes acknowledgements fail without an effect, or succeed again.
    pub fn lose_acknowledgements(&self, loses: bool) {
        self.shared.loses_acknowledgements.store(loses, Ordering::SeqCst);
    }

    /// Delivers all unacknowledged messages again, as after a restart of broker or consumer.
    pub fn redeliver(&self) {
        let mut state = self.shared.lock();
        state.connection_number += 1;
        let mut delivered: Vec<_> = state.delivered.drain().collect();
        delivered.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        for (number, (message, _)) in delivered {
            state.waiting.push_front((number, message, true));
        }
        drop(state);
        self.shared.changed.notify_waiters();
    }

    /// Waits until every message is acknowledged.
    pub async fn emptied(&self) {
        loop {
            let changed = self.shared.changed.notified();
            if self.backlog() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl State {
    fn unacknowledged(&self) -> usize {
        self.waiting.len() + self.delivered.len() + self.delayed
    }

    /// Adds a message that is delivered again, before later ones.
    fn restore(&mut self, number: u64, message: Arc<Message>) {
        let at = self.waiting.partition_point(|(other, ..)| *other < number);
        self.waiting.insert(at, (number, message, true));
    }

    fn follows_delayed(&self, number: u64, message: &Message) -> bool {
        let first = message.key.as_ref().and_then(|key| self.blocked.get(key));
        first.is_some_and(|first| *first < number)
    }

    /// Blocks the order key of a message.
    fn block(&mut self, number: u64, message: &Message) {
        if let Some(key) = &message.key {
            let first = self.blocked.entry(key.clone()).or_insert(number);
            *first = number.min(*first);
        }
    }

    /// Ends the block by a message that is acknowledged, or leaves it to the next one, so that none passes that one which
    /// was delivered before. Returns whether there was one.
    fn unblock(&mut self, number: u64, message: &Message) -> bool {
        let Some(key) = message.key.as_ref().filter(|key| self.blocked.get(*key) == Some(&number))
        else {
            return false;
        };
        let of_key =
            self.waiting.iter().filter(|(_, message, _)| message.key.as_ref() == Some(key));
        match of_key.map(|(number, ..)| *number).min() {
            Some(next) => self.blocked.insert(key.clone(), next),
            None => self.blocked.remove(key),
        };
        true
    }

    /// Takes the first message that follows none which was delayed.
    fn next(&mut self) -> Option<(u64, Arc<Message>, bool)> {
        let mut waiting = self.waiting.iter();
        let at =
            waiting.position(|(number, message, _)| !self.follows_delayed(*number, message))?;
        self.waiting.remove(at)
    }

    /// Takes the messages that nothing has held in time, to be delivered again.
    fn lapsed(&mut self) -> Vec<(u64, Arc<Message>, bool)> {
        let Some(ack_wait) = self.ack_wait else { return Vec::new() };
        let lapsed = self.delivered.extract_if(|_, (_, at)| at.elapsed() >= ack_wait);
        lapsed.map(|(number, (message, _))| (number, message, true)).collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), SourceError> {
        if self.is_down.load(Ordering::SeqCst) {
            return Err(SourceError::new("the broker is down"));
        }
        Ok(())
    }

    fn take(self: &Arc<Self>, max: NonZeroUsize) -> Vec<Arc<dyn Delivery>> {
        let mut state = self.lock();
        let lapsed = state.lapsed();
        state.waiting.extend(lapsed);
        let mut taken: Vec<Arc<dyn Delivery>> = Vec::new();
        while taken.len() < max.get()
            && let Some((number, message, is_redelivery)) = state.next()
        {
            state.deliveries += 1;
            state.delivered.insert(number, (Arc::clone(&message), Instant::now()));
            let (shared, connection_number) = (Arc::clone(self), state.connection_number);
            taken.push(Arc::new(MemoryDelivery {
                shared,
                connection_number,
                number,
                message,
                is_redelivery,
                is_returned: AtomicBool::new(false),
            }));
        }
        taken
    }
}

impl MessageSource for MemoryBroker {
    fn receive(
        &self,
        max: NonZeroUsize,
    ) -> BoxFuture<'_, Result<Vec<Arc<dyn Delivery>>, SourceError>> {
        Box::pin(async move {
            loop {
                let changed = self.shared.changed.notified();
                self.shared.check()?;
                let taken = self.shared.take(max);
                if !taken.is_empty() {
                    return Ok(taken);
                }
                let ack_wait = self.shared.lock().ack_wait;
                match ack_wait {
                    Some(ack_wait) => drop(timeout(ack_wait / 4, changed).await),
                    None => changed.await,
                }
            }
        })
    }

    fn limits(&self) -> SourceLimits {
        let state = self.shared.lock();
        let ack_wait = state.ack_wait.unwrap_or(Duration::from_secs(30));
        let mut limits = SourceLimits::default().hold_every(ack_wait / 3).with_order_keys();
        if let Some(pause) = state.delays_from {
            limits = limits.delays_from(pause);
        }
        if state.delays_in_order {
            limits = limits.delays_in_order();
        }
        limits
    }
}

impl MessageSink for MemoryBroker {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        Box::pin(async move {
            self.shared.check().map_err(PublishError::not_acknowledged)?;
            let (length, most) = (message.payload.len(), Self::MAX_PAYLOAD);
            if length > most {
                let text = format!("expected a payload of at most {most} bytes, found {length}");
                return Err(PublishError::rejected(text));
            }
            let mut sent = Message::new(&*message.destination, message.payload.clone())
                .with_header("message-id", message.id.as_str().to_owned());
            let further = message.headers.iter();
            let further = further.filter(|(name, _)| !name.eq_ignore_ascii_case("message-id"));
            sent.headers.extend(further.cloned());
            sent.key.clone_from(&message.key);
            self.send(sent);
            Ok(())
        })
    }
}

#[derive(Debug)]
struct MemoryDelivery {
    shared: Arc<Shared>,
    connection_number: u64,
    number: u64,
    message: Arc<Message>,
    is_redelivery: bool,
    /// Whether the broker took the message back. It may deliver it again before this is dropped.
    is_returned: AtomicBool,
}

impl Delivery for MemoryDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    fn is_redelivery(&self) -> bool {
        self.is_redelivery
    }

    fn unreadable(&self) -> Option<&str> {
        std::str::from_utf8(self.message.header(MemoryBroker::UNREADABLE)?).ok()
    }

    fn has_ended(&self) -> bool {
        self.shared.lock().connection_number != self.connection_number
    }

    fn acknowledge(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            self.shared.check()?;
            if self.shared.loses_acknowledgements.load(Ordering::SeqCst) {
                return Err(SourceError::new("the acknowledgement is lost"));
            }
            let mut state = self.shared.lock();
            let mut has_changed = false;
            if state.connection_number == self.connection_number
                && state.delivered.remove(&self.number).is_some()
            {
                state.acknowledgements += 1;
                has_changed =
                    state.unblock(self.number, &self.message) || state.unacknowledged() == 0;
            }
            drop(state);
            // Others await new messages.
            if has_changed {
                self.shared.changed.notify_waiters();
            }
            Ok(())
        })
    }

    fn delay(&self, pause: Duration) -> BoxFuture<'_, Result<bool, SourceError>> {
        Box::pin(async move {
            self.shared.check()?;
            {
                let mut state = self.shared.lock();
                let is_current = state.connection_number == self.connection_number;
                if !is_current || state.delays_from.is_none_or(|from| pause < from) {
                    return Ok(false);
                }
                if state.delivered.remove(&self.number).is_none() {
                    return Ok(false);
                }
                self.is_returned.store(true, Ordering::SeqCst);
                state.delayed += 1;
                state.ever_delayed.insert(self.number);
                if state.delays_in_order {
                    state.block(self.number, &self.message);
                }
            }
            let (shared, message) = (Arc::clone(&self.shared), Arc::clone(&self.message));
            let number = self.number;
            tokio::spawn(async move {
                sleep(pause).await;
                let mut state = shared.lock();
                state.delayed -= 1;
                state.restore(number, message);
                drop(state);
                shared.changed.notify_waiters();
            });
            Ok(true)
        })
    }

    fn was_delayed(&self) -> bool {
        self.shared.lock().ever_delayed.contains(&self.number)
    }

    fn return_behind_delayed(&self) -> bool {
        let mut state = self.shared.lock();
        let follows = state.connection_number == self.connection_number
            && state.follows_delayed(self.number, &self.message);
        if !follows {
            return false;
        }
        if let Some((message, _)) = state.delivered.remove(&self.number) {
            state.restore(self.number, message);
        }
        self.is_returned.store(true, Ordering::SeqCst);
        true
    }

    fn keep_followers(&self) -> bool {
        let mut state = self.shared.lock();
        let keeps = state.delays_in_order
            && state.connection_number == self.connection_number
            && state.delivered.contains_key(&self.number)
            && !self.is_returned.load(Ordering::SeqCst);
        if keeps {
            state.block(self.number, &self.message);
        }
        keeps
    }

    fn hold(&self) -> BoxFuture<'_, Result<(), SourceError>> {
        Box::pin(async move {
            self.shared.check()?;
            let mut state = self.shared.lock();
            state.holds += 1;
            if state.connection_number == self.connection_number
                && let Some((_, at)) = state.delivered.get_mut(&self.number)
            {
                *at = Instant::now();
            }
            Ok(())
        })
    }
}

impl Drop for MemoryDelivery {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.connection_number == self.connection_number
            && !self.is_returned.load(Ordering::SeqCst)
            && let Some((message, _)) = state.delivered.remove(&self.number)
        {
            state.restore(self.number, message);
            drop(state);
            self.shared.changed.notify_waiters();
        }
    }
}
