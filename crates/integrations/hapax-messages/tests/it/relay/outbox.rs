//! An outbox and a sink in memory, with faults.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{
    MessageId, MessageSink, OUTBOX_SHARDS, Outbox, OutboxError, OutboxFuture, OutboxLag,
    OutboxMessage, OutboxPage, OutboxPosition, OutboxQuery, OutboxWriters, OutgoingMessage,
    PublishError,
};
use tokio::time::{Instant, sleep};

/// Rows in memory.
#[derive(Debug, Default)]
pub(super) struct MemoryOutbox {
    state: Mutex<State>,
    last_id: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    rows: BTreeMap<OutboxPosition, (OutgoingMessage, Option<Instant>)>,
    parked: Vec<String>,
    fault: Option<Fault>,
    floors: BTreeMap<u16, u64>,
    /// Returned by a poll, and neither removed nor parked.
    buffered: BTreeMap<OutboxPosition, usize>,
    max_buffered: (usize, usize),
}

/// A fault of every call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    Fails,
    Hangs,
    /// It takes this time.
    Slow(Duration),
}

impl MemoryOutbox {
    pub(super) fn put(&self, id: &str, key: Option<&str>) {
        self.put_at(self.last_id.fetch_add(1, Ordering::SeqCst) + 1, id, key, "of the test".into());
    }

    pub(super) fn put_large(&self, id: &str, key: Option<&str>, bytes: usize) {
        let payload = vec![b'x'; bytes];
        self.put_at(self.last_id.fetch_add(1, Ordering::SeqCst) + 1, id, key, payload);
    }

    /// Writes a row with this id, as a server whose sequence fell back does.
    pub(super) fn put_at(&self, position: u64, id: &str, key: Option<&str>, payload: Vec<u8>) {
        let shard = key.map_or(position, |key| key.bytes().map(u64::from).sum());
        let shard = u16::try_from(shard % u64::from(OUTBOX_SHARDS)).unwrap();
        let position = OutboxPosition { shard, id: position };
        let mut message = OutgoingMessage::new("orders", MessageId::new(id).unwrap(), payload);
        message.key = key.map(str::to_owned);
        self.state.lock().unwrap().rows.insert(position, (message, Some(Instant::now())));
    }

    /// Sets the last id that was drawn.
    pub(super) fn draw(&self, last_id: u64) {
        self.last_id.store(last_id, Ordering::SeqCst);
    }

    pub(super) fn fault(&self, fault: Option<Fault>) {
        self.state.lock().unwrap().fault = fault;
    }

    /// Returns the ids of the messages that are left.
    pub(super) fn left(&self) -> BTreeSet<String> {
        let state = self.state.lock().unwrap();
        state.rows.values().map(|(message, _)| message.id.to_string()).collect()
    }

    pub(super) fn parked(&self) -> Vec<String> {
        self.state.lock().unwrap().parked.clone()
    }

    /// Returns the least floor of the last poll.
    pub(super) fn least_floor(&self) -> u64 {
        self.state.lock().unwrap().floors.values().min().copied().unwrap_or_default()
    }

    /// Returns the largest number of messages, and of bytes of their payloads, that the relay had.
    pub(super) fn max_buffered(&self) -> (usize, usize) {
        self.state.lock().unwrap().max_buffered
    }

    fn call<'a, T: Send + 'a>(
        &'a self,
        run: impl FnOnce(&mut State) -> T + Send + 'a,
    ) -> OutboxFuture<'a, T> {
        Box::pin(async move {
            let fault = self.state.lock().unwrap().fault;
            match fault {
                Some(Fault::Fails) => return Err(OutboxError::new("the outbox is down")),
                Some(Fault::Hangs) => std::future::pending().await,
                Some(Fault::Slow(time)) => sleep(time).await,
                None => {}
            }
            Ok(run(&mut self.state.lock().unwrap()))
        })
    }
}

impl Outbox for MemoryOutbox {
    fn poll<'a>(&'a self, query: OutboxQuery<'a>) -> OutboxFuture<'a, OutboxPage> {
        self.call(move |state| {
            let mut page = OutboxPage::default();
            state.floors =
                query.shards.iter().map(|position| (position.shard, position.id)).collect();
            let mut bytes = 0;
            for floor in query.shards {
                let above = OutboxPosition { id: floor.id + 1, ..*floor };
                let last = OutboxPosition { id: u64::MAX, ..*floor };
                for (position, (message, _)) in state.rows.range(above..=last) {
                    let key = message.key.as_ref();
                    if query.known.contains(position)
                        || key.is_some_and(|key| query.skipped.contains(key))
                    {
                        continue;
                    }
                    if page.messages.len() as u64 == u64::from(query.max) || bytes >= query.bytes {
                        break;
                    }
                    bytes += message.payload.len() as u64;
                    state.buffered.insert(*position, message.payload.len());
                    let message = message.clone();
                    page.messages.push(OutboxMessage {
                        position: *position,
                        message,
                        age: Duration::ZERO,
                        unpublishable: None,
                    });
                }
            }
            let (count, bytes) = &mut state.max_buffered;
            *count = state.buffered.len().max(*count);
            *bytes = state.buffered.values().sum::<usize>().max(*bytes);
            page
        })
    }

    fn remove<'a>(&'a self, positions: &'a [OutboxPosition]) -> OutboxFuture<'a, ()> {
        self.call(move |state| {
            for position in positions {
                state.rows.remove(position);
                state.buffered.remove(position);
            }
        })
    }

    fn park<'a>(&'a self, message: &'a OutboxMessage, _: &'a str, _: u32) -> OutboxFuture<'a, ()> {
        self.call(move |state| {
            state.buffered.remove(&message.position);
            if state.rows.remove(&message.position).is_some() {
                state.parked.push(message.message.id.to_string());
            }
        })
    }

    fn writers(&self) -> OutboxFuture<'_, OutboxWriters> {
        let last_id = self.last_id.load(Ordering::SeqCst);
        self.call(move |_| OutboxWriters { last_id, open: Vec::new() })
    }

    fn first_above<'a>(
        &'a self,
        shards: &'a [OutboxPosition],
    ) -> OutboxFuture<'a, Vec<OutboxPosition>> {
        self.call(move |state| {
            let least = |floor: &OutboxPosition| {
                let above = OutboxPosition { id: floor.id + 1, ..*floor };
                let last = OutboxPosition { id: u64::MAX, ..*floor };
                state.rows.range(above..=last).next().map(|(position, _)| *position)
            };
            shards.iter().filter_map(least).collect()
        })
    }

    fn lag(&self) -> OutboxFuture<'_, OutboxLag> {
        self.call(|state| {
            let oldest = state.rows.values().filter_map(|(_, at)| *at).min();
            let oldest = oldest.map(|at| at.elapsed()).unwrap_or_default();
            OutboxLag::new(oldest, state.rows.len() as u64, 0)
        })
    }
}

/// What the sink does with a message.
#[derive(Clone, Copy, Debug)]
pub(super) enum Behavior {
    Accept { after: Duration },
    Fail,
    Reject,
    Hang,
    Panic,
}

/// A sink that accepts messages, except those with another behavior.
#[derive(Debug, Default)]
pub(super) struct MemorySink {
    behaviors: Mutex<HashMap<String, Behavior>>,
    sent: Mutex<BTreeMap<String, u32>>,
    accepted: Mutex<Vec<String>>,
}

impl MemorySink {
    pub(super) fn set(&self, id: &str, behavior: Behavior) {
        self.behaviors.lock().unwrap().insert(id.to_owned(), behavior);
    }

    pub(super) fn clear(&self) {
        self.behaviors.lock().unwrap().clear();
    }

    /// Returns how often a message was sent.
    pub(super) fn sent(&self, id: &str) -> u32 {
        self.sent.lock().unwrap().get(id).copied().unwrap_or_default()
    }

    pub(super) fn accepted(&self) -> Vec<String> {
        self.accepted.lock().unwrap().clone()
    }
}

impl MessageSink for MemorySink {
    fn publish<'a>(
        &'a self,
        message: &'a OutgoingMessage,
    ) -> BoxFuture<'a, Result<(), PublishError>> {
        let id = message.id.to_string();
        *self.sent.lock().unwrap().entry(id.clone()).or_default() += 1;
        let behavior = self.behaviors.lock().unwrap().get(&id).copied();
        Box::pin(async move {
            match behavior.unwrap_or(Behavior::Accept { after: Duration::ZERO }) {
                Behavior::Accept { after } => sleep(after).await,
                Behavior::Fail => return Err(PublishError::not_acknowledged("the sink is down")),
                Behavior::Reject => return Err(PublishError::rejected("the sink rejects it")),
                Behavior::Hang => std::future::pending().await,
                Behavior::Panic => panic!("the sink panics at {id}"),
            }
            self.accepted.lock().unwrap().push(id);
            Ok(())
        })
    }
}
