//! A model of a store and its schedule, and the network to it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use hapax_core::schedule::EntryKey;
use hapax_core::store::{Draft, Snapshot, Stamp, Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{FencingToken, Fingerprint, OperationId, Timestamp};

use super::bugs::Bug;
use super::checks;
use super::flows::Input;
use super::plan::{MS, SECOND, TIMEOUT};
use super::world::{Slot, W, World};

/// The note of an entry.
#[derive(Debug)]
pub(crate) struct Note {
    /// Position of the saga in the schedule.
    pub(crate) saga: usize,
    pub(crate) input: Input,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) transactional: bool,
    /// Version of the definition: the queue of the entry.
    pub(crate) version: u32,
}

impl Note {
    pub(crate) fn of_version(self: Rc<Self>, version: u32) -> Rc<Self> {
        let Self { saga, fingerprint, transactional, .. } = *self;
        match self.version == version {
            true => self,
            false => Rc::new(Self {
                saga,
                input: self.input.clone(),
                fingerprint,
                transactional,
                version,
            }),
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: EntryKey,
    pub(crate) due: Timestamp,
    pub(crate) note: Rc<Note>,
}

/// Records and entries.
#[derive(Default)]
pub(crate) struct ModelStore {
    /// The store's clock minus the time of the simulation.
    pub(crate) offset: u64,
    /// Number of its openings: a request to an earlier one never arrives.
    openings: u32,
    pub(crate) records: BTreeMap<OperationId, StoredRecord>,
    pub(crate) entries: BTreeMap<EntryKey, Entry>,
}

/// Begin of the store's clock.
const EPOCH: u64 = 1_790_000_000 * SECOND;

impl World {
    /// Returns the time of the store's clock.
    pub(crate) fn store_now(&self) -> Timestamp {
        Timestamp::from_micros(EPOCH + self.now() + self.store.borrow().offset)
    }

    pub(crate) fn load(&self, id: &OperationId) -> Snapshot {
        Snapshot { now: self.store_now(), stored: self.store.borrow().records.get(id).cloned() }
    }

    pub(crate) fn swap(self: &Rc<Self>, swap: &Swap) -> Swapped {
        let now = self.store_now();
        let found = self.store.borrow().records.get(&swap.id).cloned();
        let stamped = |stored: &StoredRecord| Stamped {
            now,
            fence: stored.fence,
            lease_until: stored.lease_until,
        };
        if let Some(stored) = &found
            && stored.write_id == swap.write_id
        {
            return Swapped::Stored(stamped(stored));
        }
        if found.as_ref().map(|stored| stored.write_id) != swap.expected {
            return Swapped::Conflict(Snapshot { now, stored: found });
        }
        let Draft { record, stamp, lease, keep } = swap.draft.clone();
        let last = found.as_ref().map(|stored| stored.fence);
        let stored = StoredRecord {
            write_id: swap.write_id,
            fence: match (stamp, last) {
                (Stamp::Keep, Some(last)) => last,
                (Stamp::Keep | Stamp::NextFence, last) => FencingToken::next(last, now),
            },
            lease_until: now.after(lease),
            keep_until: keep.map(|keep| now.after(keep)),
            record,
        };
        let swapped = Swapped::Stored(stamped(&stored));
        self.store.borrow_mut().records.insert(swap.id, stored.clone());
        checks::written(self, &swap.id, found.as_ref(), &stored);
        swapped
    }

    fn insert(&self, key: EntryKey, due_in: Duration, note: &Rc<Note>) {
        let due = self.store_now().after(due_in);
        let entry = Entry { key, due, note: Rc::clone(note) };
        let mut store = self.store.borrow_mut();
        let others = store.entries.range(all(key.operation)).count();
        if others > 0 && !store.entries.contains_key(&key) {
            self.count("late entry of another start");
        }
        store.entries.entry(key).or_insert(entry);
    }

    fn due(&self, limit: usize, node: usize) -> (Vec<Entry>, Option<Duration>) {
        let now = self.store_now();
        let store = self.store.borrow();
        let (mut entries, others): (Vec<_>, Vec<_>) =
            store.entries.values().partition(|entry| self.has_version(node, entry.note.version));
        if others.iter().any(|entry| entry.due <= now) {
            self.count("entry of another version left");
        }
        entries.sort_by_key(|entry| (entry.due, entry.key));
        let count = entries.iter().take(limit).take_while(|entry| entry.due <= now).count();
        let next = entries.get(count).map(|entry| entry.due.since(now));
        (entries[..count].iter().copied().cloned().collect(), next)
    }

    fn postpone(&self, key: EntryKey, expected: Option<Timestamp>, due_in: Duration) -> bool {
        let due = self.store_now().after(due_in);
        let mut store = self.store.borrow_mut();
        match store.entries.get_mut(&key) {
            Some(entry) if expected.is_none_or(|expected| expected == entry.due) => {
                entry.due = due;
                true
            }
            _ => false,
        }
    }

    fn remove(&self, key: EntryKey) {
        let mut store = self.store.borrow_mut();
        if self.has(Bug::RemovesByOperation) {
            store.entries.retain(|it, _| it.operation != key.operation);
        } else {
            store.entries.remove(&key);
        }
        drop(store);
        checks::removed(self, &key.operation);
    }

    /// Removes the records that have expired.
    pub(crate) fn reap(&self) {
        let now = self.store_now();
        let is_due = |stored: &StoredRecord| {
            stored.keep_until.is_some_and(|until| until.after(stored.record.terms.lease) <= now)
        };
        let mut store = self.store.borrow_mut();
        let before = store.records.len();
        store.records.retain(|_, stored| !is_due(stored));
        let count = before - store.records.len();
        drop(store);
        (0..count).for_each(|_| self.count("record reaped"));
    }

    /// Lets every lease lapse, as a store in a file does when it opens: its only process has ended.
    pub(crate) fn reopen(self: &Rc<Self>) {
        for node in 0..self.plan.nodes {
            self.crash(node);
        }
        let now = self.store_now();
        let mut store = self.store.borrow_mut();
        store.openings += 1;
        for stored in store.records.values_mut() {
            stored.lease_until = stored.lease_until.min(now);
        }
    }
}

pub(crate) fn all(operation: OperationId) -> std::ops::RangeInclusive<EntryKey> {
    let key = |id| EntryKey { operation, id: hapax_core::EntryId::from_bytes(id) };
    key([0; 16])..=key([255; 16])
}

/// Sends a request to the store, and waits for its reply. `None`: it may have been applied, or may
/// yet be.
pub(crate) async fn ask<T: 'static>(
    w: &W,
    node: usize,
    request: impl Fn(&W) -> T + 'static,
) -> Option<T> {
    ask_late(w, node, w.plan.delay, request).await
}

async fn ask_late<T: 'static>(
    w: &W,
    node: usize,
    delayed: u64,
    request: impl Fn(&W) -> T + 'static,
) -> Option<T> {
    w.point(node).await;
    let slot = Slot::default();
    let request = Rc::new(request);
    let mut copies = vec![latency(w)];
    let has_outage = w.plan.outage.is_some_and(|(from, to)| (from..to).contains(&w.now()));
    if has_outage || w.fault(w.plan.lose) {
        w.count("request lost");
        copies.clear();
    } else if w.fault(delayed) {
        w.count("request delayed");
        copies = vec![long(w)];
    }
    if !has_outage && w.fault(w.plan.repeat) {
        w.count("request repeated");
        copies.push(long(w));
    }
    let openings = w.store.borrow().openings;
    for span in copies {
        let (slot, request) = (slot.clone(), Rc::clone(&request));
        w.after(span, move |w| {
            if w.store.borrow().openings != openings {
                return;
            }
            let reply = RefCell::new(Some(request(w)));
            if w.fault(w.plan.lose) {
                return w.count("reply lost");
            }
            let span = if w.fault(w.plan.delay) { long(w) } else { latency(w) };
            w.after(span, move |w| {
                if let Some(reply) = reply.take() {
                    w.fill(&slot, reply);
                }
            });
        });
    }
    w.receive(&slot, w.now() + TIMEOUT).await
}

fn latency(w: &World) -> u64 {
    MS / 2 + w.dice.below(w.plan.latency)
}

fn long(w: &World) -> u64 {
    match w.dice.below(3) {
        0 => w.dice.below(2 * SECOND),
        1 => w.dice.below(60 * SECOND),
        _ => w.dice.below(900 * SECOND),
    }
}

pub(crate) async fn swap(w: &W, node: usize, swap: &Swap) -> Option<Swapped> {
    let swap = swap.clone();
    ask(w, node, move |w| w.swap(&swap)).await
}

pub(crate) async fn load(w: &W, node: usize, id: OperationId) -> Option<Snapshot> {
    ask(w, node, move |w| w.load(&id)).await
}

pub(crate) async fn insert(w: &W, node: usize, key: EntryKey, lease: u64, note: &Rc<Note>) -> bool {
    let note = Rc::clone(note);
    for _ in 0..3 {
        let note = Rc::clone(&note);
        let span = Duration::from_micros(lease);
        let delayed = w.plan.delay.max(w.plan.late_inserts);
        let inserted = ask_late(w, node, delayed, move |w| w.insert(key, span, &note));
        if inserted.await.is_some() {
            return true;
        }
    }
    false
}

/// Returns whether an entry exists; `None` without a reply.
pub(crate) async fn has_entry(w: &W, node: usize, key: EntryKey) -> Option<bool> {
    ask(w, node, move |w| w.store.borrow().entries.contains_key(&key)).await
}

pub(crate) async fn due(w: &W, node: usize) -> Option<(Vec<Entry>, Option<Duration>)> {
    ask(w, node, move |w| w.due(4, node)).await
}

pub(crate) async fn postpone(
    w: &W,
    node: usize,
    key: EntryKey,
    expected: Option<Timestamp>,
    due_in: Duration,
) -> Option<bool> {
    ask(w, node, move |w| w.postpone(key, expected, due_in)).await
}

pub(crate) async fn remove(w: &W, node: usize, key: EntryKey) {
    for _ in 0..3 {
        if ask(w, node, move |w| w.remove(key)).await.is_some() {
            return;
        }
    }
}

/// Inserts an entry in a transaction that has just committed.
pub(crate) fn insert_now(w: &W, key: EntryKey, note: &Rc<Note>) {
    w.insert(key, Duration::ZERO, note);
}
