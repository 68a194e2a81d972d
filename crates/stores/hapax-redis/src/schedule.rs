//! The schedule: sorted sets of entries by time, in 16 slots.
//!
//! `schedule/common.lua` has the keys of a slot. A change is one script on the slot of its entry;
//! polling calls one script for each slot, all in one pipeline, and merges the answers. The clock
//! of an entry is that of its slot's server.

mod reply;

use std::num::NonZeroU32;
use std::time::Duration;

use futures_util::future::join_all;
use hapax_core::schedule::{
    DueEntries, EntryKey, EntryPage, NewEntry, QueueName, QueueStatus, Schedule,
};
use hapax_core::store::BoxFuture;
use hapax_core::store::parts::Admission;
use hapax_core::{StoreError, Timestamp};
use redis::Value;

use self::reply::{DueReply, EntriesReply, member, status};
use crate::error::{RedisStoreError, RequestFailure};
use crate::identity::{Call, RequiredStore};
use crate::key_names::KeyNames;
use crate::record::{ReplyError, bytes, micros};
use crate::script::Lua;
use crate::store::RedisStore;

/// Number of slots. The first bits of an operation id select its slot, so that slots in order have
/// their operation ids in order.
const SLOTS: usize = 16;

/// Limit of entries that one call returns, which are all in memory.
const MOST: u32 = 10_000;

/// Size of notes after which an answer ends early, in bytes, over all slots.
const NOTE_BYTES: usize = 8 << 20;

/// The scripts, and the names of the keys.
pub(crate) struct RedisSchedule {
    slots: Vec<Slot>,
    insert: Lua,
    postpone: Lua,
    remove: Lua,
    due: Lua,
    entries: Lua,
    queues: Lua,
}

/// The names of a slot's keys.
struct Slot {
    entries: String,
    order: String,
    queues: String,
    /// The beginning of the names of its sorted sets by time.
    due: String,
}

macro_rules! script {
    ($file:literal) => {
        Lua::new(concat!(include_str!("schedule/common.lua"), include_str!($file)))
    };
}

impl RedisSchedule {
    pub(crate) fn new(names: &KeyNames) -> Self {
        let slot = |number| {
            let slot = names.schedule(number);
            Slot {
                entries: format!("{slot}entries"),
                order: format!("{slot}order"),
                queues: format!("{slot}queues"),
                due: format!("{slot}due:"),
            }
        };
        Self {
            slots: (0..SLOTS).map(slot).collect(),
            insert: script!("schedule/insert.lua"),
            postpone: script!("schedule/postpone.lua"),
            remove: script!("schedule/remove.lua"),
            due: script!("schedule/due.lua"),
            entries: script!("schedule/entries.lua"),
            queues: script!("schedule/queues.lua"),
        }
    }

    fn slot(&self, key: &EntryKey) -> &Slot {
        &self.slots[number(key)]
    }
}

/// Returns the number of the slot of `key`.
fn number(key: &EntryKey) -> usize {
    usize::from(key.operation.as_bytes()[0]) * SLOTS / 256
}

impl Slot {
    fn due(&self, queue: &QueueName) -> String {
        format!("{}{queue}", self.due)
    }
}

impl RedisStore {
    async fn insert_entry(&self, entry: NewEntry) -> Result<(), StoreError> {
        if !self.make {
            return Err(StoreError::unavailable(RedisStoreError::ReadOnly));
        }
        let NewEntry { key, queue, due_in, note } = entry;
        let sealed = self.sealer.seal_note(&key, &note, &*self.entropy);
        let sealed = sealed.map_err(StoreError::unavailable)?;
        let _inside = self.limit.enter(sealed.len(), Admission::NewKey)?;
        let slot = self.schedule.slot(&key);
        let (member, due_in, due) = (member(&key), micros(due_in), slot.due(&queue));
        let keys = [&slot.entries[..], &slot.order, &slot.queues, &due];
        let arguments: [&[u8]; 4] =
            [&member, queue.as_str().as_bytes(), due_in.as_bytes(), &sealed];
        let call = Call { script: &self.schedule.insert, keys: &keys, arguments: &arguments };
        let answer = self.run_on(RequiredStore::Known, call, &member).await;
        done(&member, answer).map(drop)
    }

    async fn postpone_entry(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> Result<bool, StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let slot = self.schedule.slot(&key);
        let (member, due_in) = (member(&key), micros(due_in));
        let expected = expected.map(|due| due.as_micros().to_string()).unwrap_or_default();
        let arguments: [&[u8]; 4] =
            [&member, slot.due.as_bytes(), expected.as_bytes(), due_in.as_bytes()];
        let answer = self.run(&self.schedule.postpone, &[&slot.entries], &arguments).await;
        done(&member, answer)
    }

    async fn remove_entry(&self, key: EntryKey) -> Result<(), StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let slot = self.schedule.slot(&key);
        let member = member(&key);
        let keys = [&slot.entries[..], &slot.order, &slot.queues];
        let answer = self.run(&self.schedule.remove, &keys, &[&member, slot.due.as_bytes()]).await;
        done(&member, answer).map(drop)
    }

    /// Loads the entries of all slots. If some slots of a cluster fail, returns the entries of the others;
    /// returns the error if these have none.
    async fn due_entries(
        &self,
        queues: &[QueueName],
        limit: NonZeroU32,
    ) -> Result<DueEntries, StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let mut queues: Vec<_> = queues.iter().collect();
        queues.sort_unstable();
        queues.dedup();
        let limit = limit.get().min(MOST);
        let calls = self.schedule.slots.iter().map(|slot| self.due_of(slot, &queues, limit));
        let (mut found, mut failed) = (DueReply::default(), None);
        for reply in join_all(calls).await {
            match reply {
                Ok(reply) => found.add(reply),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            Some(error) if self.link.is_one() || found.is_empty() => Err(error),
            // The other slots may have further ones.
            Some(_) => {
                let found = found.take(limit as usize, &self.sealer);
                Ok(DueEntries { next_in: Some(Duration::ZERO), ..found })
            }
            None => Ok(found.take(limit as usize, &self.sealer)),
        }
    }

    async fn due_of(
        &self,
        slot: &Slot,
        queues: &[&QueueName],
        limit: u32,
    ) -> Result<DueReply, StoreError> {
        let due: Vec<_> = queues.iter().map(|queue| slot.due(queue)).collect();
        let mut keys = vec![&slot.entries[..]];
        keys.extend(due.iter().map(String::as_str));
        let (limit, size) = (limit.to_string(), (NOTE_BYTES / SLOTS).to_string());
        let arguments = [limit.as_bytes(), size.as_bytes()];
        let answer = self.run(&self.schedule.due, &keys, &arguments).await;
        let answer = answer.map_err(RequestFailure::of_read)?;
        DueReply::read(&slot.entries, answer).map_err(ReplyError::into_read_error)
    }

    async fn page_entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> Result<EntryPage, StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let limit = limit.get().min(MOST) as usize;
        let mut page = EntryPage::new(Timestamp::from_micros(0), Vec::new(), false);
        let mut after_member = after.as_ref().map(|key| member(key).to_vec()).unwrap_or_default();
        let mut size = NOTE_BYTES;
        for slot in &self.schedule.slots[after.as_ref().map_or(0, number)..] {
            // With `left` zero the slot is read only to learn whether it has further entries.
            let left = limit - page.entries.len();
            let (left, bytes) = (left.to_string(), size.to_string());
            let arguments: [&[u8]; 4] =
                [&after_member, left.as_bytes(), bytes.as_bytes(), slot.due.as_bytes()];
            let keys = [&slot.entries[..], &slot.order];
            let answer = self.run(&self.schedule.entries, &keys, &arguments).await;
            let answer = answer.map_err(RequestFailure::of_read)?;
            let reply = EntriesReply::read(&slot.entries, answer);
            let reply = reply.map_err(ReplyError::into_read_error)?;
            page.now = page.now.max(reply.now);
            size = size.saturating_sub(reply.size());
            page.entries.extend(reply.open(&self.sealer));
            page.more = reply.more;
            if page.more {
                break;
            }
            after_member.clear();
        }
        Ok(page)
    }

    async fn queue_statuses(&self) -> Result<Vec<QueueStatus>, StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let calls = self.schedule.slots.iter().map(|slot| async move {
            let answer =
                self.run(&self.schedule.queues, &[&slot.queues], &[slot.due.as_bytes()]).await;
            let answer = answer.map_err(RequestFailure::of_read)?;
            status(&slot.queues, answer).map_err(ReplyError::into_read_error)
        });
        let mut queues: Vec<QueueStatus> = Vec::new();
        for found in join_all(calls).await {
            for status in found? {
                match queues.binary_search_by(|known| known.queue.cmp(&status.queue)) {
                    Ok(at) => {
                        let known = &mut queues[at];
                        known.entries += status.entries;
                        known.overdue = known.overdue.max(status.overdue);
                    }
                    Err(at) => queues.insert(at, status),
                }
            }
        }
        Ok(queues)
    }
}

/// Parses the answer to a change of the entry `member`: whether it was done.
fn done(member: &[u8], answer: Result<Value, RequestFailure>) -> Result<bool, StoreError> {
    let answer = answer.map_err(RequestFailure::of_write)?;
    if let Value::Array(answer) = &answer
        && let [kind, asked] = &answer[..]
        && bytes(asked) == Some(member)
    {
        match bytes(kind) {
            Some(b"S") => return Ok(true),
            Some(b"N") => return Ok(false),
            _ => {}
        }
    }
    Err(StoreError::ambiguous(RedisStoreError::Unreadable))
}

// Cancellation: as for swaps, see the store.
impl Schedule for RedisStore {
    fn insert(&self, entry: NewEntry) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.insert_entry(entry))
    }

    fn due<'a>(
        &'a self,
        queues: &'a [QueueName],
        limit: NonZeroU32,
    ) -> BoxFuture<'a, Result<DueEntries, StoreError>> {
        Box::pin(self.due_entries(queues, limit))
    }

    fn postpone(
        &self,
        key: EntryKey,
        expected: Option<Timestamp>,
        due_in: Duration,
    ) -> BoxFuture<'_, Result<bool, StoreError>> {
        Box::pin(self.postpone_entry(key, expected, due_in))
    }

    fn remove(&self, key: EntryKey) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.remove_entry(key))
    }

    fn entries(
        &self,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<EntryPage, StoreError>> {
        Box::pin(self.page_entries(after, limit))
    }

    fn queues(&self) -> BoxFuture<'_, Result<Vec<QueueStatus>, StoreError>> {
        Box::pin(self.queue_statuses())
    }
}
