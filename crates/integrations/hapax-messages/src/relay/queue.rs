//! The messages that a relay has in memory, in order within each order key.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use tokio::time::Instant;

use crate::outbox::{OutboxMessage, OutboxPosition};

/// Number of buffered messages of an order key from which on no more of them are polled.
const FULL: usize = 64;

/// A message and the number of times that it was sent.
type Counted = (OutboxMessage, u32);

#[derive(Debug, Default)]
pub(super) struct Queue {
    keeps_order: bool,
    /// All buffered messages, with their bytes: waiting, in flight, or published and not deleted
    /// yet.
    known: HashMap<OutboxPosition, usize>,
    bytes: usize,
    ready: VecDeque<Counted>,
    /// Order keys with a buffered message that is not published.
    keys: HashMap<String, OrderKey>,
    /// Messages that are sent again at a time.
    paused: BTreeMap<(Instant, OutboxPosition), Counted>,
    rotation: usize,
}

/// The messages of one order key.
#[derive(Debug)]
struct OrderKey {
    /// The one that is ready, in flight or paused.
    head: OutboxPosition,
    behind: VecDeque<OutboxMessage>,
}

impl Queue {
    pub(super) fn new(keeps_order: bool) -> Self {
        Self { keeps_order, ..Self::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns the bytes of the buffered messages.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the positions of the buffered messages.
    pub(super) fn known(&self) -> Vec<OutboxPosition> {
        self.known.keys().copied().collect()
    }

    /// Returns the order keys of which enough messages, or `bytes` of them, are buffered.
    pub(super) fn full_keys(&self, bytes: usize) -> Vec<String> {
        let is_full = |key: &OrderKey| {
            let waiting = key.behind.iter().map(OutboxMessage::bytes).sum::<usize>();
            key.behind.len() >= FULL || waiting >= bytes
        };
        let full = self.keys.iter().filter(|(_, key)| is_full(key));
        full.map(|(key, _)| key.clone()).collect()
    }

    /// Returns the shards, each time with another one first, so that none is always last in a page.
    pub(super) fn rotated(&mut self, mut shards: Vec<OutboxPosition>) -> Vec<OutboxPosition> {
        if !shards.is_empty() {
            self.rotation = (self.rotation + 1) % shards.len();
            shards.rotate_left(self.rotation);
        }
        shards
    }

    /// Adds a message that was polled. Returns whether it is new here.
    ///
    /// A key's messages arrive in the order of their ids: a page has all that are below its last
    /// one, except those that are buffered.
    pub(super) fn add(&mut self, message: OutboxMessage) -> bool {
        if self.known.contains_key(&message.position) {
            return false;
        }
        self.known.insert(message.position, message.bytes());
        self.bytes += message.bytes();
        match message.message.key.as_ref().filter(|_| !self.keeps_order) {
            Some(key) => match self.keys.get_mut(key) {
                Some(key) => key.behind.push_back(message),
                None => {
                    let head = message.position;
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
            // A shard that was lost and claimed again leaves duplicates, of which one was
            // published.
            if self.is_next(&next.0) {
                return Some(next);
            }
        }
    }

    fn is_next(&self, message: &OutboxMessage) -> bool {
        match message.message.key.as_ref().filter(|_| !self.keeps_order) {
            Some(key) => self.keys.get(key).is_some_and(|key| key.head == message.position),
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
        let Some(key) = self.keys.get_mut(name).filter(|key| key.head == message.position) else {
            return;
        };
        match key.behind.pop_front() {
            Some(next) => {
                key.head = next.position;
                self.ready.push_back((next, 1));
            }
            None => drop(self.keys.remove(name)),
        }
    }

    /// Notes that a published message was deleted.
    pub(super) fn removed(&mut self, position: OutboxPosition) {
        let bytes = self.known.remove(&position).unwrap_or_default();
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Schedules the next attempt of a message for the time `at`.
    pub(super) fn failed(&mut self, message: OutboxMessage, attempt: u32, at: Instant) {
        // Its shard may have been lost meanwhile.
        if self.known.contains_key(&message.position) {
            self.paused.insert((at, message.position), (message, attempt.saturating_add(1)));
        }
    }

    /// Removes a message that became a dead letter, and the later ones of its order key.
    pub(super) fn parked(&mut self, message: &OutboxMessage) {
        self.removed(message.position);
        // The message may have been sent twice, and published the other time: then it is not the head
        // of its key, and the later messages stay.
        let Some(name) = message.message.key.as_ref().filter(|_| self.is_next(message)) else {
            return;
        };
        for behind in self.keys.remove(name).into_iter().flat_map(|key| key.behind) {
            self.removed(behind.position);
        }
    }

    /// Removes the messages of other shards that are not in flight.
    pub(super) fn keep_only(&mut self, shards: &HashSet<u16>) {
        let is_kept = |message: &OutboxMessage| shards.contains(&message.position.shard);
        if self.known.keys().all(|position| shards.contains(&position.shard)) {
            return;
        }
        self.ready.retain(|(message, _)| is_kept(message));
        self.paused.retain(|_, (message, _)| is_kept(message));
        // A key belongs to one shard.
        self.keys.retain(|_, key| shards.contains(&key.head.shard));
        self.known.retain(|position, _| shards.contains(&position.shard));
        self.bytes = self.known.values().sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::MessageId;
    use crate::sink::OutgoingMessage;

    fn message(id: u64) -> OutboxMessage {
        let message_id = MessageId::new(format!("m-{id}")).unwrap();
        let mut message = OutgoingMessage::new("orders", message_id, "payload");
        message.key = Some("k".to_owned());
        let position = OutboxPosition { shard: 1, id };
        OutboxMessage { position, message, age: std::time::Duration::ZERO, unpublishable: None }
    }

    /// Returns the id of the next message to send.
    fn next(queue: &mut Queue) -> Option<u64> {
        queue.next().map(|(message, _)| message.position.id)
    }

    #[tokio::test(start_paused = true)]
    async fn a_rejected_copy_of_a_published_message_leaves_the_later_ones() {
        for is_sent in [false, true] {
            let mut queue = Queue::new(false);
            queue.add(message(1));
            assert_eq!(next(&mut queue), Some(1));
            // The shard is lost and claimed again while the copy is in flight.
            queue.keep_only(&HashSet::new());
            (1..=3).for_each(|id| assert!(queue.add(message(id))));
            assert_eq!(next(&mut queue), Some(1));
            queue.published(&message(1));
            queue.removed(message(1).position);
            if is_sent {
                assert_eq!(next(&mut queue), Some(2));
            }
            queue.parked(&message(1));
            if !is_sent {
                assert_eq!(next(&mut queue), Some(2));
            }
            assert_eq!(next(&mut queue), None, "one message of a key is in flight");
            queue.published(&message(2));
            assert_eq!(next(&mut queue), Some(3));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_those_of_the_buffered_messages() {
        let mut queue = Queue::new(false);
        let each = message(1).bytes();
        (1..=5).for_each(|id| assert!(queue.add(message(id))));
        assert!(!queue.add(message(5)));
        assert_eq!(queue.bytes(), 5 * each);
        assert_eq!(queue.full_keys(4 * each), ["k"]);
        assert!(queue.full_keys(4 * each + 1).is_empty());
        queue.removed(message(1).position);
        queue.removed(message(1).position);
        assert_eq!(queue.bytes(), 4 * each);
        queue.keep_only(&HashSet::new());
        assert_eq!((queue.bytes(), queue.len()), (0, 0));
        (1..=5).for_each(|id| assert!(queue.add(message(id))));
        queue.parked(&message(1));
        assert_eq!((queue.bytes(), queue.len()), (0, 0));
    }
}
