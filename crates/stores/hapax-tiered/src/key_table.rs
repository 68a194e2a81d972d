//! What this process knows of keys, so that the cache never contradicts what it told anybody.
//!
//! The authority answers in an order that everybody can agree on. An answer from the cache must fit
//! into it: whoever was answered before a call began must not have seen something newer. All ways
//! to the authority pass here, so this can be told:
//!
//! 1. Every call on a key holds a place in its row while it is under way. Whatever it learns that
//!    may contradict the cache is noted in the row *before* it returns.
//! 2. What is noted while something may be in the cache makes the key be *avoided* until every
//!    entry that may be there is over. It is removed as well, but nothing rests on that: a put may
//!    be under way, and a cache may not answer.
//! 3. A note ends the *epoch* of the row. Calls that began in an epoch that ended meanwhile cannot
//!    tell whether what they saw is older or newer than the note: they put nothing. (A claim that
//!    found an entry before the note may still be answered with it: it began before whoever noted
//!    returned, so it comes first.)
//! 4. A claim that was sent to the authority and not answered is *in doubt*: its copy must reach
//!    the authority, which alone can say that it was stored. While there is a doubt nothing is
//!    taken from the cache for that key.
//!
//! Other processes do not note here, and what they put into a cache that is shared may be there for
//! longer than what this one knows of. What they change is seen everywhere when the entries are
//! over, and that is the promise: a finished record changes only when an operator releases it, and
//! for as long as an entry lives after that, one process may tell the old answer after another, or
//! itself, has told a new one.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::{OperationId, WriteId};
use tokio::time::Instant;

const SHARDS: usize = 64;

/// Rows that are kept in all for what is in the cache; beyond, nothing is put there.
const MOST_CACHED: usize = 262_144;

/// Doubts in all; beyond, claims are refused. The engine holds far fewer.
const MAX_PENDING_CLAIMS: usize = 65_536;

#[derive(Debug)]
pub(crate) struct KeyTable {
    shards: Vec<Mutex<Shard>>,
    pending_claims: AtomicUsize,
}

#[derive(Debug, Default)]
struct Shard {
    rows: HashMap<OperationId, Row>,
    /// When rows that are kept for what is in the cache are to be looked at again, each once.
    over: VecDeque<(Instant, OperationId)>,
}

#[derive(Debug, Default)]
struct Row {
    /// Calls under way.
    calls: usize,
    epoch: u64,
    /// Puts under way.
    puts: usize,
    /// Which finished record is in the cache, put by us or found there, and until when.
    cached: Option<(WriteId, Instant)>,
    /// Nothing is taken from the cache before.
    avoid: Option<Instant>,
    pending_claims: Vec<WriteId>,
    /// Whether it is among those to be looked at again.
    queued: bool,
}

/// A call under way; its place is given up when dropped.
#[derive(Debug)]
pub(crate) struct KeyCall {
    keys: Arc<KeyTable>,
    key: OperationId,
    epoch: u64,
}

/// What is to be done about a finished record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum CacheAction {
    /// Put it into the cache; then [`KeyCall::put_ended`] must follow.
    Put,
    /// Remove what is in the cache.
    Remove,
    /// Nothing.
    Leave,
}

impl KeyTable {
    pub(crate) fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { shards, pending_claims: AtomicUsize::new(0) }
    }

    /// Begins a call.
    pub(crate) fn enter(self: &Arc<Self>, key: OperationId) -> KeyCall {
        let mut shard = self.shard(&key);
        shard.sweep();
        let row = shard.rows.entry(key).or_default();
        row.calls += 1;
        KeyCall { keys: Arc::clone(self), key, epoch: row.epoch }
    }

    fn shard(&self, key: &OperationId) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[usize::from(key.as_bytes()[1]) % SHARDS];
        // Nothing panics while it is held; and rows stay whole if something did.
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_room_for_pending(&self) -> bool {
        self.pending_claims.load(Ordering::Relaxed) < MAX_PENDING_CLAIMS
    }
}

impl KeyCall {
    pub(crate) const fn key(&self) -> &OperationId {
        &self.key
    }

    /// Whether the cache may be asked at all.
    pub(crate) fn may_ask(&self) -> bool {
        self.with(|row| row.pending_claims.is_empty() && !row.avoids())
    }

    /// Whether `tag`, found in the cache and good until `until`, may be given as an answer. If so
    /// it counts as cached from here on.
    pub(crate) fn may_answer(&self, write_id: WriteId, until: Instant) -> bool {
        self.with_shard(|shard| {
            let room = shard.has_room();
            let row = shard.rows.entry(self.key).or_default();
            let fits = match row.cached {
                Some((cached, _)) => cached == write_id,
                None => room,
            };
            let may = fits && row.pending_claims.is_empty() && !row.avoids();
            if may {
                row.cache(write_id, until);
                shard.look_again(self.key);
            }
            may
        })
    }

    /// This call wrote the cell, or saw it unfinished. Whether something is to be removed from the
    /// cache, so that other processes do not find it.
    pub(crate) fn note(&self) -> bool {
        self.with_shard(|shard| shard.note(self.key))
    }

    /// This call saw the cell finished, with `tag`, to be cached until `until`.
    pub(crate) fn saw_finished(&self, write_id: WriteId, until: Instant) -> CacheAction {
        self.with_shard(|shard| {
            let room = shard.has_room();
            let row = shard.rows.entry(self.key).or_default();
            // Somebody learnt something meanwhile, and it may be newer, or older.
            let unclear = row.epoch != self.epoch;
            if unclear || row.cached.is_some_and(|(cached, _)| cached != write_id) {
                return if shard.note(self.key) { CacheAction::Remove } else { CacheAction::Leave };
            }
            // What was there may have been lost: it is put again. One put at a time.
            if row.puts > 0 || row.avoids() || !room {
                return CacheAction::Leave;
            }
            row.puts += 1;
            row.cache(write_id, until);
            shard.look_again(self.key);
            CacheAction::Put
        })
    }

    /// The put that [`CacheAction::Put`] asked for has ended, however it did.
    pub(crate) fn put_ended(&self) {
        self.with(|row| row.puts -= 1);
    }

    /// Takes nothing from the cache for this key before `until`.
    pub(crate) fn avoid(&self, until: Instant) {
        self.with_shard(|shard| {
            let row = shard.rows.entry(self.key).or_default();
            row.avoid = row.avoid.max(Some(until));
            shard.look_again(self.key);
        });
    }

    /// Whether a claim may be sent: there is room to remember it should it not be answered, or it
    /// is remembered already.
    pub(crate) fn may_send(&self, write_id: WriteId) -> bool {
        self.keys.has_room_for_pending() || self.with(|row| row.pending_claims.contains(&write_id))
    }

    /// A claim was sent and not answered.
    pub(crate) fn mark_pending(&self, write_id: WriteId) {
        let new = self.with(|row| {
            let new = !row.pending_claims.contains(&write_id);
            if new {
                row.pending_claims.push(write_id);
            }
            new
        });
        self.keys.pending_claims.fetch_add(usize::from(new), Ordering::Relaxed);
    }

    /// The authority has said what became of a claim.
    pub(crate) fn settle(&self, write_id: WriteId) {
        let settled = self.with(|row| {
            let before = row.pending_claims.len();
            row.pending_claims.retain(|doubt| *doubt != write_id);
            before - row.pending_claims.len()
        });
        self.keys.pending_claims.fetch_sub(settled, Ordering::Relaxed);
    }

    fn with<T>(&self, act: impl FnOnce(&mut Row) -> T) -> T {
        self.with_shard(|shard| act(shard.rows.entry(self.key).or_default()))
    }

    fn with_shard<T>(&self, act: impl FnOnce(&mut Shard) -> T) -> T {
        act(&mut self.keys.shard(&self.key))
    }
}

impl Drop for KeyCall {
    fn drop(&mut self) {
        self.with_shard(|shard| {
            if let Some(row) = shard.rows.get_mut(&self.key) {
                row.calls -= 1;
                if row.is_over() {
                    shard.rows.remove(&self.key);
                }
            }
        });
    }
}

impl Shard {
    fn note(&mut self, key: OperationId) -> bool {
        let row = self.rows.entry(key).or_default();
        row.epoch += 1;
        let Some((_, until)) = row.cached.take() else { return false };
        row.avoid = row.avoid.max(Some(until));
        self.look_again(key);
        true
    }

    fn has_room(&self) -> bool {
        self.over.len() < MOST_CACHED / SHARDS
    }

    /// Puts a row among those to be looked at again, when nothing is to be known of it any more.
    fn look_again(&mut self, key: OperationId) {
        let Some(row) = self.rows.get_mut(&key) else { return };
        if let Some(at) = row.needed_until()
            && !row.queued
        {
            row.queued = true;
            self.over.push_back((at, key));
        }
    }

    /// Forgets rows of which nothing is left to know. A few at a time: as many may be added.
    fn sweep(&mut self) {
        for _ in 0..4 {
            let Some((at, key)) = self.over.front().copied() else { return };
            if Instant::now() < at {
                return;
            }
            self.over.pop_front();
            let Some(row) = self.rows.get_mut(&key) else { continue };
            row.queued = false;
            if row.is_over() {
                self.rows.remove(&key);
            } else {
                // Needed longer than was known when it was put here; or by a call, which then
                // sees to it.
                self.look_again(key);
            }
        }
    }
}

impl Row {
    fn cache(&mut self, write_id: WriteId, until: Instant) {
        let until = self.cached.map_or(until, |(_, before)| before.max(until));
        self.cached = Some((write_id, until));
    }

    fn avoids(&self) -> bool {
        self.avoid.is_some_and(|until| Instant::now() < until)
    }

    /// Until when it must be kept for what is in the cache; `None` if for nothing.
    fn needed_until(&self) -> Option<Instant> {
        let cached = self.cached.map(|(_, until)| until);
        cached.max(self.avoid).filter(|until| Instant::now() < *until)
    }

    fn is_over(&self) -> bool {
        self.calls == 0
            && self.puts == 0
            && self.pending_claims.is_empty()
            && self.needed_until().is_none()
    }
}
