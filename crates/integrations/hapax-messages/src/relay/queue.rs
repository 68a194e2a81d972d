//! The messages that a relay has in hand, in the order of their keys.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use tokio::time::Instant;

use crate::outbox::{OutboxMessage, OutboxPlace};

/// Messages of one order key in hand from which on no more are polled.
const FULL: usize = 64;

/// A message and the number of times that it was sent.
type Counted = (OutboxMessage, u32);

#[derive(Debug, Default)]
pub(super) struct Queue {
    keeps_order: bool,
    /// All in hand: waiting, in flight, or published and not deleted yet.
    known: HashSet<OutboxPlace>,
    ready: VecDeque<Counted>,
    /// Order keys with a message in hand that is not published.
    keys: HashMap<String, OrderKey>,
    /// Messages that are sent again at a time.
    paused: BTreeMap<(Instant, OutboxPlace), Counted>,
    rotation: usize,
}

/// The messages of one order key.
#[derive(Debug)]
struct OrderKey {
    /// The one that is ready, in flight or paused.
    head: OutboxPlace,
    behind: VecDeque<OutboxMessage>,
}

impl Queue {
    pub(super) fn new(keeps_order: bool) -> Self {
        Self { keeps_order, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns the order keys of which enough messages are in hand.
    pub(super) fn full_keys(&self) -> Vec<String> {
        let full = self.keys.iter().filter(|(_, key)| key.behind.len() >= FULL);
        full.map(|(key, _)| key.clone()).collect()
    }

    /// Returns the shards, each time with another one first, so that none is always last in a page.
    pub(super) fn rotated(&mut self, mut shards: Vec<OutboxPlace>) -> Vec<OutboxPlace> {
        if !shards.is_empty() {
            self.rotation = (self.rotation + 1) % shards.len();
            shards.rotate_left(self.rotation);
        }
        shards
    }

    /// Adds a message that was polled. Returns whether it is new here.
    ///
    /// A key's messages arrive in the order of their ids: a page has all that are below its last one,
    /// except those in hand.
    pub(super) fn add(&mut self, message: OutboxMessage) -> bool {
        if !self.known.insert(message.place) {
            return false;
        }
        match message.message.key.as_ref().filter(|_| !self.keeps_order) {
            Some(key) => match self.keys.get_mut(key) {
                Some(key) => key.behind.push_back(message),
                None => {
                    let head = message.place;
                    self.keys.insert(key.clone(), OrderKey { head, behind: VecDeque::new() });
                    self.ready.push_back((message, 1));
                }
            },
            None => self.ready.push_back((message, 1)),
        }
        true
    }

    /// Returns the next message to send, and the number of the attempt.
    pub(super) fn next(&mut self) -> Option<Counted> {
        let now = Instant::now();
        loop {
            let next = match self.paused.first_entry() {
                Some(first) if first.key().0 <= now => first.remove(),
                _ => self.ready.pop_front()?,
            };
            // A shard that was lost and claimed again leaves copies, one of which was published.
            if self.is_next(&next.0) {
                return Some(next);
            }
        }
    }

    fn is_next(&self, message: &OutboxMessage) -> bool {
        match message.message.key.as_ref().filter(|_| !self.keeps_order) {
            Some(key) => self.keys.get(key).is_some_and(|key| key.head == message.place),
            None => true,
        }
    }

    /// Returns the time at which the next paused message is to be sent.
    pub(super) fn due(&self) -> Option<Instant> {
        self.paused.keys().next().map(|(at, _)| *at)
    }

    /// Notes that a message was published: the next one of its key is ready.
    pub(super) fn published(&mut self, message: &OutboxMessage) {
        let Some(name) = message.message.key.as_ref().filter(|_| !self.keeps_order) else { return };
        let Some(key) = self.keys.get_mut(name).filter(|key| key.head == message.place) else {
            return;
        };
        match key.behind.pop_front() {
            Some(next) => {
                key.head = next.place;
                self.ready.push_back((next, 1));
            }
            None => drop(self.keys.remove(name)),
        }
    }

    /// Notes that a published message was deleted.
    pub(super) fn removed(&mut self, place: OutboxPlace) {
        self.known.remove(&place);
    }

    /// Sends a message again at a time.
    pub(super) fn failed(&mut self, message: OutboxMessage, attempt: u32, at: Instant) {
        // Its shard may have been lost meanwhile.
        if self.known.contains(&message.place) {
            self.paused.insert((at, message.place), (message, attempt.saturating_add(1)));
        }
    }

    /// Forgets a message that is a dead letter, and those behind it.
    pub(super) fn parked(&mut self, message: &OutboxMessage) {
        self.known.remove(&message.place);
        let removed = message.message.key.as_ref().and_then(|key| self.keys.remove(key));
        for behind in removed.into_iter().flat_map(|key| key.behind) {
            self.known.remove(&behind.place);
        }
    }

    /// Forgets the messages of other shards that are not in flight.
    pub(super) fn keep_only(&mut self, shards: &HashSet<u16>) {
        let is_kept = |message: &OutboxMessage| shards.contains(&message.place.shard);
        if self.known.iter().all(|place| shards.contains(&place.shard)) {
            return;
        }
        self.ready.retain(|(message, _)| is_kept(message));
        self.paused.retain(|_, (message, _)| is_kept(message));
        // A key belongs to one shard.
        self.keys.retain(|_, key| shards.contains(&key.head.shard));
        self.known.retain(|place| shards.contains(&place.shard));
    }
}
