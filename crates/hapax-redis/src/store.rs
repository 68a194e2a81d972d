//! The store itself: what callers hold.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures_util::future::join_all;
use hapax::store::{
    BoxFuture, Cell, Page, Place, Reaped, Scanned, Snapshot, Stamp, Swap, Swapped, Visit,
};
use hapax::{Entropy, Inspect, Notify, Sealer, Secret, State, Store, StoreError, StoreKey};
use redis::Value;

use crate::agreement::Agreement;
use crate::cell::{self, Answer, micros};
use crate::door::{Door, Share};
use crate::error::{ConnectError, Failure, RedisStoreError};
use crate::keeper::Keeper;
use crate::link::Link;
use crate::names::Names;
use crate::options::Options;
use crate::pages;
use crate::script::Lua;
use crate::watches::Watches;

/// A store on a Redis or Valkey server, for any number of processes.
///
/// Dropping it closes its connection.
pub struct RedisStore {
    link: Link,
    names: Names,
    watches: Arc<Watches>,
    sealer: Sealer,
    secret: Option<Secret>,
    entropy: Arc<dyn Entropy>,
    door: Door,
    swap: Lua,
    load: Lua,
    counters: Counters,
    /// Whether new keys may be claimed.
    make: bool,
}

/// What a store did since it was connected, and what it holds up.
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
    /// Requests refused or never sent: the server, the connection or room was missing.
    pub refused: u64,
    /// Connections made; to a cluster, for all of it.
    pub connections: u64,
    /// Requests that wait for an answer now.
    pub waiting: usize,
    /// Keys that copies in this process wait for now.
    pub awaited: usize,
}

#[derive(Debug, Default)]
struct Counters {
    swaps: AtomicU64,
    conflicts: AtomicU64,
    loads: AtomicU64,
    lost: AtomicU64,
    refused: AtomicU64,
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
            Err(_) => &self.refused,
        };
        count(counter);
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl RedisStore {
    /// Connects, and looks whether the server can keep what a store promises. From then on the
    /// connection is kept by a task on the caller's runtime: when it breaks, it is made anew.
    ///
    /// # Errors
    /// [`ConnectError`]; [`ConnectError::Unfit`] where the server evicts, is a replica or too old.
    pub async fn connect(options: Options) -> Result<Self, ConnectError> {
        let target = options.target()?;
        let sealer = options.sealer();
        let names = Names::new(&options.prefix);
        let watches = Arc::new(Watches::default());
        let entropy = Arc::clone(&options.entropy);
        let door = Door::new(options.queue_items, options.queue_bytes);
        let secret = options.naming_secret().cloned();
        let (make, agreement) = (options.make, Some(Agreement::new(&options, &names)));
        let link = Link::open(Keeper::new(target, options, names.clone(), &watches, agreement));
        let link = link.await?;
        let (swap, load) = (Lua::swap(), Lua::load());
        let counters = Counters::default();
        let store = Self {
            link,
            names,
            watches,
            sealer,
            secret,
            entropy,
            door,
            swap,
            load,
            counters,
            make,
        };
        store.probe().await?;
        Ok(store)
    }

    /// The secret that names keys: give it to the engine.
    #[must_use]
    pub const fn secret(&self) -> Option<&Secret> {
        self.secret.as_ref()
    }

    /// What it did and what it holds up.
    #[must_use]
    pub fn stats(&self) -> RedisStats {
        let Counters { swaps, conflicts, loads, lost, refused } = &self.counters;
        let [swaps, conflicts, loads, lost, refused] =
            [swaps, conflicts, loads, lost, refused].map(|counter| counter.load(Ordering::Relaxed));
        RedisStats {
            swaps,
            conflicts,
            loads,
            lost,
            refused,
            connections: self.link.connections(),
            waiting: self.door.inside(),
            awaited: self.watches.len(),
        }
    }

    /// Runs both scripts on a key that holds nothing, and changes nothing: a user who may not run
    /// them hears it now.
    async fn probe(&self) -> Result<(), ConnectError> {
        let nowhere = self.names.name(&NOBODY);
        let swap: [&[u8]; 8] = [b"probe", b"no such tag", b"0", b"0", b"", b"0", b"0", b""];
        for (script, arguments) in [(&self.swap, &swap[..]), (&self.load, &[])] {
            match self.run(script, &nowhere, arguments).await {
                Ok(_) | Err(Failure::Foreign) => {}
                Err(Failure::Nothing(error) | Failure::Unknown(error)) => {
                    return Err(self.refused(error));
                }
            }
        }
        Ok(())
    }

    fn refused(&self, error: RedisStoreError) -> ConnectError {
        match error {
            RedisStoreError::Redis(source) => ConnectError::of("EVALSHA", source),
            _ => ConnectError::TimedOut(self.link.timeout()),
        }
    }

    /// Runs a script: by its name, and by its text where the server does not know the name and so
    /// did nothing.
    async fn run(&self, script: &Lua, name: &str, arguments: &[&[u8]]) -> Result<Value, Failure> {
        let by_name = self.link.send(&script.by_name(name, arguments)).await;
        if !by_name.as_ref().is_err_and(Failure::is_unknown_script) {
            return by_name;
        }
        self.link.send(&script.by_text(name, arguments)).await
    }

    async fn swap_cell(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let Swap { key, expected, tag, draft } = swap;
        if expected.is_none() && !self.make {
            return Err(StoreError::unavailable(RedisStoreError::OnlyLooks));
        }
        let sealed = self
            .sealer
            .seal(&key, tag, &draft.record, &*self.entropy)
            .map_err(StoreError::unavailable)?;
        let share = if expected.is_none() { Share::Most } else { Share::All };
        // Held until the answer is there or the caller is gone.
        let _inside = self.door.enter(sealed.len(), share)?;
        let flag = |set: bool| if set { b"1".as_slice() } else { b"0" };
        let (lease, grace) = (micros(draft.lease), micros(draft.record.terms.lease));
        let keep = draft.keep.map(micros).unwrap_or_default();
        let arguments: [&[u8]; 8] = [
            tag.as_bytes(),
            expected.as_ref().map_or(&[], |tag| tag.as_bytes()),
            flag(draft.stamp == Stamp::NextFence),
            lease.as_bytes(),
            keep.as_bytes(),
            grace.as_bytes(),
            // Those who wait for a key are not interested in renewals.
            flag(draft.record.state != State::InFlight),
            &sealed,
        ];
        let answer = self.run(&self.swap, &self.names.name(&key), &arguments).await;
        let answer = answer.map_err(Failure::of_write)?;
        cell::swapped((&key, tag), answer, &self.sealer).map_err(|answer| match answer {
            Answer::Damaged(error) => error,
            Answer::Unreadable => StoreError::ambiguous(RedisStoreError::Unreadable),
        })
    }

    async fn load_cell(&self, key: &StoreKey) -> Result<Snapshot, StoreError> {
        let _inside = self.door.enter(0, Share::All)?;
        let name = self.names.name(key);
        let answer = self.run(&self.load, &name, &[]).await;
        cell::loaded((key, &name), answer.map_err(Failure::of_read)?, &self.sealer).map_err(
            |answer| match answer {
                Answer::Damaged(error) => error,
                Answer::Unreadable => StoreError::unavailable(RedisStoreError::Unreadable),
            },
        )
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

// Cancellation: a future that is dropped holds nothing but its place at the door. What it sent may
// be carried out, whole, as the script is; what it did not send yet is not.
impl Store for RedisStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            let answer = self.swap_cell(swap).await;
            self.counters.answered(&answer);
            answer
        })
    }

    fn load<'a>(&'a self, key: &'a StoreKey) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            let answer = self.load_cell(key).await;
            count(if answer.is_ok() { &self.counters.loads } else { &self.counters.refused });
            answer
        })
    }

    /// The server removes by itself what is due, so there is nothing to do.
    fn reap(&self, _limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async { Ok(Reaped::default()) })
    }
}

impl Inspect for RedisStore {
    /// Walks over every key of the server's database: keys have no order there.
    fn page(
        &self,
        after: Option<StoreKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            let found = pages::keys(&self.link, &self.names, after, limit).await?;
            let (mut cells, mut now) = (Vec::new(), self.load_cell(&NOBODY).await?.now);
            let mut bytes = 0;
            for key in &found.keys {
                if bytes >= PAGE_BYTES {
                    return Ok(Page { now, cells, more: true });
                }
                match self.load_cell(key).await {
                    // Removed since it was found.
                    Ok(Snapshot { cell: None, .. }) => {}
                    Ok(Snapshot { now: later, cell: Some(cell) }) => {
                        now = now.max(later);
                        bytes += weight(&cell);
                        cells.push((*key, Ok(cell)));
                    }
                    Err(error @ StoreError::Corrupt(_)) => cells.push((*key, Err(error))),
                    Err(error) => return Err(error),
                }
            }
            Ok(Page { now, cells, more: found.more })
        })
    }

    /// Takes one step of `SCAN`, so that a whole walk costs the server one look at each key.
    fn scan<'a>(
        &'a self,
        from: Place,
        limit: NonZeroU32,
        visit: Visit<'a>,
    ) -> BoxFuture<'a, Result<Scanned, StoreError>> {
        Box::pin(async move {
            let step = pages::step(&self.link, &self.names, &from, limit).await?;
            let mut now = self.load_cell(&NOBODY).await?.now;
            // A few at a time, so that a slow network does not make the walk long, and a few cells
            // alone are in memory.
            for keys in step.keys.chunks(AT_ONCE) {
                let loads = keys.iter().map(|key| async move { (key, self.load_cell(key).await) });
                for (key, loaded) in join_all(loads).await {
                    let cell = match loaded {
                        // Removed since it was found.
                        Ok(Snapshot { cell: None, .. }) => continue,
                        Ok(Snapshot { now: later, cell: Some(cell) }) => {
                            now = now.max(later);
                            Ok(cell)
                        }
                        Err(error @ StoreError::Corrupt(_)) => Err(error),
                        Err(error) => return Err(error),
                    };
                    visit(key, &cell, now);
                }
            }
            Ok(Scanned { now, next: step.next })
        })
    }
}

impl Notify for RedisStore {
    fn written<'a>(&'a self, key: &'a StoreKey) -> BoxFuture<'a, ()> {
        // On the list before this returns, and not only once the future is polled.
        let watching = self.watches.watch(*key);
        Box::pin(watching.written())
    }
}

/// Cells that a step of a walk reads at once.
const AT_ONCE: usize = 8;

/// Bytes of outcomes and checkpoints after which a page ends early.
const PAGE_BYTES: usize = 8 << 20;

fn weight(cell: &Cell) -> usize {
    let outcome = match &cell.record.state {
        State::Done(outcome) | State::Unknown { seen: Some(outcome), .. } => outcome.bytes().len(),
        State::InFlight | State::Released | State::Unknown { seen: None, .. } => 0,
    };
    outcome + cell.record.checkpoint.as_ref().map_or(0, Bytes::len)
}

/// A key that no scope and key hash to, but for one chance in 2²⁵⁶: to ask what time it is.
const NOBODY: StoreKey = StoreKey::from_bytes([0; 32]);
