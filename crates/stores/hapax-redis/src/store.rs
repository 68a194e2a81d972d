//! The store.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use hapax_core::store::parts::{Admission, ExpectedIdentity};
use hapax_core::store::{
    BoxFuture, Capabilities, Cursor, Page, Reaped, ScanStep, Snapshot, Stamp, StoredRecord, Swap,
    Swapped, Visitor,
};
use hapax_core::{
    Entropy, Inspect, KeyRing, Notify, OnUnknown, OperationId, RecordState, Sealer, Secret, Store,
    StoreError, Timestamp,
};
use redis::Value;

use crate::admission::RequestLimit;
use crate::error::{RedisConnectError, RedisStoreError, RequestFailure};
use crate::identity::{Call, OpenIdentity, RequiredStore};
use crate::key_names::KeyNames;
use crate::link::ConnectionHandle;
use crate::notify::Watchers;
use crate::options::RedisOptions;
use crate::reconnect::Reconnector;
use crate::record::{self, ReplyError, micros};
use crate::scan;
use crate::schedule::RedisSchedule;
use crate::script::Lua;
use crate::secret::SecretCheck;

/// A store on a Redis or Valkey server, for any number of processes.
///
/// Dropping it closes its connection.
pub struct RedisStore {
    pub(crate) link: ConnectionHandle,
    pub(crate) names: KeyNames,
    watchers: Arc<Watchers>,
    pub(crate) sealer: Sealer,
    ring: Option<KeyRing>,
    pub(crate) entropy: Arc<dyn Entropy>,
    pub(crate) limit: RequestLimit,
    swap: Lua,
    load: Lua,
    pub(crate) identity: Lua,
    pub(crate) known: ExpectedIdentity,
    pub(crate) schedule: RedisSchedule,
    counters: Counters,
    /// Whether new keys may be claimed.
    pub(crate) make: bool,
}

/// Counters of a store since it was connected, and its current load.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RedisStats {
    /// Swaps that were answered, conflicts included.
    pub swaps: u64,
    /// Conflicts among them.
    pub conflicts: u64,
    /// Loads that were answered.
    pub loads: u64,
    /// Swaps whose answer was lost.
    pub lost: u64,
    /// Requests that were rejected or never sent: by the server, for lack of a connection, or at a
    /// limit.
    pub rejected: u64,
    /// Connections made; a cluster counts as one.
    pub connections: u64,
    /// Requests that wait for an answer now.
    pub waiting: usize,
    /// Keys that have waiters in this process now.
    pub awaited: usize,
}

#[derive(Debug, Default)]
struct Counters {
    swaps: AtomicU64,
    conflicts: AtomicU64,
    loads: AtomicU64,
    lost: AtomicU64,
    rejected: AtomicU64,
}

impl Counters {
    fn answered(&self, answer: &Result<Swapped, StoreError>) {
        let counter = match answer {
            Ok(swapped) => {
                if matches!(swapped, Swapped::Conflict(_)) {
                    count(&self.conflicts);
                }
                &self.swaps
            }
            Err(StoreError::Ambiguous(_)) => &self.lost,
            Err(_) => &self.rejected,
        };
        count(counter);
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl RedisStore {
    /// Connects, and checks whether the server can give the store's guarantees. From then on a task
    /// on the caller's runtime maintains the connection: when it breaks, it is replaced.
    ///
    /// # Errors
    /// [`RedisConnectError`]; [`RedisConnectError::Unfit`] where the server evicts, is a replica or
    /// too old.
    pub async fn connect(options: RedisOptions) -> Result<Self, RedisConnectError> {
        let url = options.target()?;
        let sealer = options.sealer();
        let names = KeyNames::new(&options.prefix);
        let watchers = Arc::new(Watchers::default());
        let entropy = Arc::clone(&options.entropy);
        let limit = RequestLimit::new(options.queue);
        let ring = options.ring.clone();
        let known = ExpectedIdentity::new(options.identity.clone());
        let (make, secret_check) = (options.make, Some(SecretCheck::new(&options, &names)));
        let server = format!("{url}, prefix {}", options.prefix);
        let opening = OpenIdentity { must_exist: options.must_exist, server };
        let link = ConnectionHandle::open(Reconnector::new(
            url,
            options,
            names.clone(),
            &watchers,
            secret_check,
        ));
        let link = link.await?;
        let (swap, load, identity) = (Lua::swap(), Lua::load(), Lua::identity());
        let (counters, schedule) = (Counters::default(), RedisSchedule::new(&names));
        let store = Self {
            link,
            names,
            watchers,
            sealer,
            ring,
            entropy,
            limit,
            swap,
            load,
            identity,
            known,
            schedule,
            counters,
            make,
        };
        store.probe().await?;
        store.open_identity(&opening).await?;
        Ok(store)
    }

    /// Returns the secret that names keys.
    #[must_use]
    pub fn secret(&self) -> Option<&Secret> {
        self.ring.as_ref().and_then(KeyRing::naming)
    }

    /// Returns the counters and the current load.
    #[must_use]
    pub fn stats(&self) -> RedisStats {
        let Counters { swaps, conflicts, loads, lost, rejected } = &self.counters;
        let [swaps, conflicts, loads, lost, rejected] = [swaps, conflicts, loads, lost, rejected]
            .map(|counter| counter.load(Ordering::Relaxed));
        RedisStats {
            swaps,
            conflicts,
            loads,
            lost,
            rejected,
            connections: self.link.connections(),
            waiting: self.limit.inside(),
            awaited: self.watchers.len(),
        }
    }

    /// Calls both scripts on a key without a value, and changes nothing: missing permissions are
    /// detected now.
    async fn probe(&self) -> Result<(), RedisConnectError> {
        let nowhere = self.names.name(&UNUSED_ID);
        let swap: [&[u8]; 8] = [b"probe", b"no such tag", b"0", b"0", b"", b"0", b"0", b""];
        for (script, arguments) in [(&self.swap, &swap[..]), (&self.load, &[])] {
            match self.run(script, &[&nowhere], arguments).await {
                Ok(_) | Err(RequestFailure::Foreign) => {}
                Err(RequestFailure::Nothing(error) | RequestFailure::Unknown(error)) => {
                    return Err(self.refused(error));
                }
            }
        }
        Ok(())
    }

    pub(crate) fn refused(&self, error: RedisStoreError) -> RedisConnectError {
        match error {
            RedisStoreError::Redis(source) => RedisConnectError::of("EVALSHA", source),
            _ => RedisConnectError::TimedOut(self.link.timeout()),
        }
    }

    /// Calls a script by its hash, and by its text if the server does not have it and so did
    /// nothing.
    pub(crate) async fn run(
        &self,
        script: &Lua,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<Value, RequestFailure> {
        let by_name = self.link.send(&script.by_name(keys, arguments)).await;
        if !by_name.as_ref().is_err_and(RequestFailure::is_unknown_script) {
            return by_name;
        }
        self.link.send(&script.by_text(keys, arguments)).await
    }

    /// Returns the identity of the store in which this process claims, for
    /// [`RedisOptions::identity`] of later processes; `None` if there is none yet.
    #[must_use]
    pub fn known_identity(&self) -> Option<String> {
        self.known.expected()
    }

    /// Returns whether the store was emptied or replaced, and no operator confirmed it.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.known.is_replaced()
    }

    /// Accepts the store as it is, for every process that uses it: operations of the previous store
    /// may execute again.
    ///
    /// # Errors
    /// [`StoreError`]; the store is not confirmed, or it is unknown whether it is.
    pub async fn confirm(&self) -> Result<(), StoreError> {
        let confirmed = self.recognise(&self.new_identity(), true).await;
        confirmed.map_err(RequestFailure::of_write)?;
        Ok(())
    }

    async fn swap_cell(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let Swap { id: key, expected, write_id, draft } = swap;
        if expected.is_none() && !self.make {
            return Err(StoreError::unavailable(RedisStoreError::ReadOnly));
        }
        let sealed = self
            .sealer
            .seal(&key, write_id, &draft.record, &*self.entropy)
            .map_err(StoreError::unavailable)?;
        let admission = Admission::of(expected.as_ref());
        // Counted until the answer has arrived or the caller is dropped.
        let _inside = self.limit.enter(sealed.len(), admission)?;
        let flag = |set: bool| if set { b"1".as_slice() } else { b"0" };
        let (lease, grace) = (micros(draft.lease), micros(draft.record.terms.lease));
        let keep = draft.keep.map(micros).unwrap_or_default();
        let name = self.names.name(&key);
        let required = match (&expected, draft.record.terms.on_unknown) {
            (Some(_), _) => RequiredStore::Any,
            (None, OnUnknown::Reexecute) => RequiredStore::Logged,
            (None, _) => RequiredStore::Known,
        };
        let arguments: [&[u8]; 8] = [
            write_id.as_bytes(),
            expected.as_ref().map_or(&[], |write_id| write_id.as_bytes()),
            flag(draft.stamp == Stamp::NextFence),
            lease.as_bytes(),
            keep.as_bytes(),
            grace.as_bytes(),
            // Waiters need no notification of renewals.
            flag(draft.record.state != RecordState::InFlight),
            &sealed,
        ];
        let call = Call { script: &self.swap, keys: &[&name], arguments: &arguments };
        let answer = self.run_on(required, call, write_id.as_bytes()).await;
        let answer = answer.map_err(RequestFailure::of_write)?;
        record::swapped((&key, write_id), answer, &self.sealer).map_err(|answer| match answer {
            ReplyError::Damaged(error) => error,
            ReplyError::Unreadable => StoreError::ambiguous(RedisStoreError::Unreadable),
        })
    }

    async fn load_cell(&self, key: &OperationId) -> Result<Snapshot, StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let name = self.names.name(key);
        let answer = self.run(&self.load, &[&name], &[]).await;
        let answer = answer.map_err(RequestFailure::of_read)?;
        record::loaded((key, &name), answer, &self.sealer).map_err(ReplyError::into_read_error)
    }

    /// Loads a record, also an expired one that is not removed yet. Cheaper for the server than a
    /// script.
    async fn get_cell(&self, key: &OperationId) -> Result<Option<StoredRecord>, StoreError> {
        let _inside = self.limit.enter(0, Admission::Any)?;
        let mut get = redis::cmd("GET");
        get.arg(self.names.name(key));
        let answer = self.link.send(&get).await.map_err(RequestFailure::of_read)?;
        record::got(key, &answer, &self.sealer).map_err(ReplyError::into_read_error)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("link", &self.link)
            .field("names", &self.names)
            .field("stats", &self.stats())
            .field("sealer", &self.sealer)
            .finish_non_exhaustive()
    }
}

// Cancellation: a future that is dropped releases its permit. A script that it sent may still be
// executed, as a whole; a command that it did not send yet is not.
impl Store for RedisStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let answer = self.swap_cell(swap).await;
            self.counters.answered(&answer);
            answer
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            let answer = self.load_cell(key).await;
            count(if answer.is_ok() { &self.counters.loads } else { &self.counters.rejected });
            answer
        })
    }

    /// Does nothing: the server removes expired records itself.
    fn reap(&self, _limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async { Ok(Reaped::default()) })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            secrets: self.ring.as_ref(),
            notify: Some(self),
            shared: true,
            schedule: Some(self),
        }
    }
}

impl Inspect for RedisStore {
    /// Walks over every key of the server's database, because keys have no order there.
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            let found = scan::keys(&self.link, &self.names, after, limit).await?;
            let (mut records, mut now) = (Vec::new(), self.load_cell(&UNUSED_ID).await?.now);
            let mut bytes = 0;
            for key in &found.keys {
                if bytes >= PAGE_BYTES {
                    return Ok(Page { now, records, more: true });
                }
                match self.load_cell(key).await {
                    // Removed since it was found.
                    Ok(Snapshot { stored: None, .. }) => {}
                    Ok(Snapshot { now: later, stored: Some(stored) }) => {
                        now = now.max(later);
                        bytes += weight(&stored);
                        records.push((*key, Ok(stored)));
                    }
                    Err(error @ StoreError::Corrupt(_)) => records.push((*key, Err(error))),
                    Err(error) => return Err(error),
                }
            }
            Ok(Page { now, records, more: found.more })
        })
    }

    /// Takes one step of `SCAN`, so that a whole walk costs the server one visit per key. Visits every
    /// record.
    fn scan<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        Box::pin(async move {
            let step = scan::step(&self.link, &self.names, &from, limit).await?;
            let now = self.load_cell(&UNUSED_ID).await?.now;
            // Many small ones at a time, so that a slow network does not make the walk long; few large
            // ones, so that memory is bounded.
            let most = self.limit.part(MOST_AT_ONCE).max(FEWEST_AT_ONCE);
            let (mut left, mut at_once) = (&step.keys[..], FEWEST_AT_ONCE);
            while !left.is_empty() {
                let (keys, rest) = left.split_at(at_once.min(left.len()));
                let mut bytes = 0;
                let gets = keys.iter().map(|key| async move { (key, self.get_cell(key).await) });
                for (key, found) in join_all(gets).await {
                    bytes += found.iter().flatten().map(weight).sum::<usize>();
                    match found {
                        Ok(Some(stored)) if is_lapsed(&stored, now) => {
                            // The lease is by the clock of the record's own node, which may be
                            // another one.
                            if let Snapshot { now, stored: Some(stored) } =
                                self.load_cell(key).await?
                            {
                                visit(key, &Ok(stored), now);
                            }
                        }
                        Ok(Some(stored)) => visit(key, &Ok(stored), now),
                        // Removed since it was found.
                        Ok(None) => {}
                        Err(error @ StoreError::Corrupt(_)) => visit(key, &Err(error), now),
                        Err(error) => return Err(error),
                    }
                }
                left = rest;
                at_once = match bytes <= SMALL_BYTES {
                    true => (2 * at_once).min(most),
                    false => FEWEST_AT_ONCE,
                };
            }
            Ok(ScanStep { now, next: step.next })
        })
    }

    fn scan_all<'a>(
        &'a self,
        from: Cursor,
        limit: NonZeroU32,
        _: Option<Duration>,
        visit: Visitor<'a>,
    ) -> BoxFuture<'a, Result<ScanStep, StoreError>> {
        self.scan(from, limit, visit)
    }
}

fn is_lapsed(stored: &StoredRecord, now: Timestamp) -> bool {
    matches!(stored.record.state, RecordState::InFlight) && stored.lease_until <= now
}

impl Notify for RedisStore {
    fn written<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, ()> {
        // Registered before this returns, not only when the future is polled.
        let watching = self.watchers.watch(*key);
        Box::pin(watching.written())
    }
}

/// Numbers of records that a step of a walk loads concurrently: at least, and at most where the last
/// ones had no more than so many bytes.
const FEWEST_AT_ONCE: usize = 8;
const MOST_AT_ONCE: usize = 64;
const SMALL_BYTES: usize = 256 << 10;

/// Size of outcomes and checkpoints at which a page ends early, in bytes.
const PAGE_BYTES: usize = 8 << 20;

fn weight(stored: &StoredRecord) -> usize {
    let outcome = match &stored.record.state {
        RecordState::Done(outcome) | RecordState::Unknown { seen: Some(outcome), .. } => {
            outcome.bytes().len()
        }
        RecordState::InFlight | RecordState::Released | RecordState::Unknown { seen: None, .. } => {
            0
        }
    };
    outcome + stored.record.checkpoint.as_ref().map_or(0, Bytes::len)
}

/// An operation id that no scope and key have, but for one chance in 2²⁵⁶: to load the server's
/// time.
const UNUSED_ID: OperationId = OperationId::from_bytes([0; 32]);
