//! Per-key state of this process, which keeps answers from the cache consistent with earlier
//! answers.
//!
//! Answers of the authority have one order. An answer from the cache must fit into that order: a
//! caller that was answered before a call began must not have seen a newer state. All calls to the
//! authority pass through this table, so the table can check this:
//!
//! 1. Every call on a key is counted in the key's row while it is in progress. Everything it learns
//!    that may contradict the cache is noted in the row *before* it returns.
//! 2. A note that is made while the cache may contain an entry makes the key *avoided* until every
//!    such entry has expired. The entry is removed too, but correctness does not depend on the
//!    removal: a put may be in progress, and the cache may not answer.
//! 3. A note ends the *epoch* of the row. A call that began in an earlier epoch cannot determine
//!    whether its result is older or newer than the note, so it puts nothing. (A claim that found
//!    an entry before the note may still be answered with it: the claim began before the noting
//!    call returned, so it is ordered first.)
//! 4. A claim that was sent to the authority and not answered is *pending*: its repetition must
//!    reach the authority, which alone can answer that it was stored. While a key has a pending
//!    claim, nothing is taken from the cache for it.
//!
//! Other processes do not note in this table, and their entries in a shared cache may exist for
//! longer than this process knows. Their changes are visible everywhere once the entries have
//! expired. The guarantee is: a finished record changes only when an operator releases it, and
//! until the entry's lifetime after that has passed, a process may give the old answer after
//! another process, or itself, has given a new one.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::{OperationId, WriteId};
use tokio::time::Instant;

const SHARDS: usize = 64;

/// Limit of rows that are retained for entries in the cache. At the limit nothing is put there.
const MOST_CACHED: usize = 262_144;

/// Limit of pending claims. At the limit claims are rejected. The engine has far fewer.
const MAX_PENDING_CLAIMS: usize = 65_536;

#[derive(Debug)]
pub(crate) struct KeyTable {
    shards: Vec<Mutex<Shard>>,
    pending_claims: AtomicUsize,
}

#[derive(Debug, Default)]
struct Shard {
    rows: HashMap<OperationId, Row>,
    /// Rows that are retained for entries in the cache, each once, by the time of their next check.
    over: VecDeque<(Instant, OperationId)>,
}

#[derive(Debug, Default)]
struct Row {
    /// Calls in progress.
    calls: usize,
    epoch: u64,
    /// Puts in progress.
    puts: usize,
    /// The finished record in the cache, put by this process or found there, and the end of its
    /// entry.
    cached: Option<(WriteId, Instant)>,
    /// Nothing is taken from the cache before this time.
    avoid: Option<Instant>,
    pending_claims: Vec<WriteId>,
    /// Whether the row is in `Shard::over`.
    queued: bool,
}

/// A call in progress. Dropping it ends the call.
#[derive(Debug)]
pub(crate) struct KeyCall {
    keys: Arc<KeyTable>,
    key: OperationId,
    epoch: u64,
}

/// The action that a finished record requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum CacheAction {
    /// Put the record into the cache. [`KeyCall::put_ended`] must follow.
    Put,
    /// Remove the entry from the cache.
    Remove,
    /// Do nothing.
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
        // Nothing panics while the lock is held, and rows would stay consistent if something did.
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

    /// Returns whether the cache may be read for this key.
    pub(crate) fn may_read_cache(&self) -> bool {
        self.with(|row| row.pending_claims.is_empty() && !row.avoids())
    }

    /// Returns whether the record `write_id`, found in the cache and usable until `until`, may be
    /// the answer. If so, the record counts as cached from now on.
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

    /// Notes that this call wrote the record, or saw it unfinished. Returns whether an entry is to
    /// be removed from the cache, so that other processes do not find it.
    pub(crate) fn note(&self) -> bool {
        self.with_shard(|shard| shard.note(self.key))
    }

    /// Notes that this call saw the finished record `write_id`, which may be cached until `until`.
    pub(crate) fn saw_finished(&self, write_id: WriteId, until: Instant) -> CacheAction {
        self.with_shard(|shard| {
            let room = shard.has_room();
            let row = shard.rows.entry(self.key).or_default();
            // Another call noted something meanwhile, which may be newer or older.
            let unclear = row.epoch != self.epoch;
            if unclear || row.cached.is_some_and(|(cached, _)| cached != write_id) {
                return if shard.note(self.key) { CacheAction::Remove } else { CacheAction::Leave };
            }
            // The entry may have been lost, so the record is put again. One put at a time.
            if row.puts > 0 || row.avoids() || !room {
                return CacheAction::Leave;
            }
            row.puts += 1;
            row.cache(write_id, until);
            shard.look_again(self.key);
            CacheAction::Put
        })
    }

    /// Ends the put that [`CacheAction::Put`] requested, whatever its result.
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

    /// Returns whether a claim may be sent: either it can be recorded as pending if it is not
    /// answered, or it is pending already.
    pub(crate) fn may_send(&self, write_id: WriteId) -> bool {
        self.keys.has_room_for_pending() || self.with(|row| row.pending_claims.contains(&write_id))
    }

    /// Records a claim that was sent and not answered.
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

    /// Removes a pending claim that the authority has answered.
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

    /// Queues a row for a check at the time from which it need not be retained for the cache.
    fn look_again(&mut self, key: OperationId) {
        let Some(row) = self.rows.get_mut(&key) else { return };
        if let Some(at) = row.needed_until()
            && !row.queued
        {
            row.queued = true;
            self.over.push_back((at, key));
        }
    }

    /// Removes rows that are no longer needed. Checks a few per call: more than can be added by
    /// one.
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
                // The row is needed for longer than was known when it was queued, or by a call,
                // whose end removes it.
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

    /// Returns until when the row must be retained for entries in the cache; `None` if it need not
    /// be.
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
