//! What a power failure leaves behind: images of the file that drop, tear and reorder what was
//! not synced. Each opens, and holds every swap and every change of the schedule that was
//! acknowledged, byte for byte.
//!
//! `HAPAX_IMAGES` says how many images to look at, 60 if it is not set; `HAPAX_SEED` which:
//! `HAPAX_IMAGES=1000 cargo test --release -p hapax-file --test it images -- --nocapture`.

mod entries;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{Stamped, StoredRecord, Swap, Swapped};
use hapax_core::{Inspect, OperationId, Store, StoreError};
use hapax_file::{FileOptions, FileStore, SecretSource};
use hapax_testkit::{ManualClock, SeededEntropy};

use self::entries::EntryHistory;
use crate::medium::{Crashes, Fault, Lies, Loss, Medium, Op};
use crate::support::{claim, complete};

const CALLERS: u64 = 16;
const LIMIT: NonZeroU32 = NonZeroU32::new(1000).unwrap();

/// A swap, and how many operations the disk had done when it was sent and when it was answered.
#[derive(Clone, Debug)]
struct Written {
    swap: Swap,
    sent: usize,
    acknowledged: Option<(usize, Stamped)>,
}

/// What was sent, by key, in order.
#[derive(Default, Debug)]
struct History(Mutex<BTreeMap<OperationId, Vec<Written>>>, EntryHistory);

impl History {
    /// Sends a swap and notes what came of it.
    async fn write(&self, store: &FileStore, medium: &Medium, swap: &Swap) {
        let sent = medium.operations();
        let written = Written { swap: swap.clone(), sent, acknowledged: None };
        self.0.lock().unwrap().entry(swap.id).or_default().push(written);
        // Where a sync failed, the same swap goes again until the store knows.
        let stamped = loop {
            match store.swap(swap.clone()).await {
                Ok(Swapped::Stored(stamped)) => break stamped,
                Ok(Swapped::Conflict(seen)) => panic!("nobody else writes this key: {seen:?}"),
                Err(StoreError::Corrupt(error)) => panic!("{error}"),
                Err(_) => tokio::task::yield_now().await,
            }
        };
        let acknowledged = Some((medium.operations(), stamped));
        let mut keys = self.0.lock().unwrap();
        keys.get_mut(&swap.id).unwrap().last_mut().unwrap().acknowledged = acknowledged;
    }

    /// Whether `cell` may be what a failure after `at` operations left of `key`.
    fn allows(&self, key: &OperationId, at: usize, stored: Option<&StoredRecord>) -> bool {
        let keys = self.0.lock().unwrap();
        let Some(chain) = keys.get(key) else { return stored.is_none() };
        let old = |written: &Written| written.acknowledged.is_some_and(|(when, _)| when <= at);
        let first = chain.iter().rposition(old);
        let Some(stored) = stored else {
            // What was due at once may have been reaped.
            return first.is_none() || chain[0].swap.draft.keep == Some(Duration::ZERO);
        };
        chain[first.unwrap_or(0)..].iter().any(|Written { swap, sent, acknowledged }| {
            *sent <= at
                && stored.write_id == swap.write_id
                && stored.record == swap.draft.record
                // A copy that failed, and was sent again, may be there with other times before the one
                // that was acknowledged.
                && acknowledged.is_none_or(|(when, stamped)| {
                    when > at
                        || stored.fence == stamped.fence
                        && stored.keep_until == swap.draft.keep.map(|keep| stamped.now.after(keep))
                })
        })
    }

    fn keys(&self) -> Vec<OperationId> {
        self.0.lock().unwrap().keys().copied().collect()
    }
}

/// A run on a recording disk.
struct Run {
    start: Vec<u8>,
    log: Vec<Op>,
    history: History,
}

/// What opening an image must not lose: runs, and after how many operations each ended.
type Past<'a> = [(&'a History, usize)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_acknowledged_swap_survives_every_power_failure() {
    survive(u64::MAX, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_swaps_survive_power_failures_with_quick_recovery() {
    survive(0, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_swaps_survive_failing_syncs() {
    survive(u64::MAX, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_swaps_survive_failing_syncs_with_quick_recovery() {
    survive(0, true).await;
}

async fn survive(above: u64, failing: bool) {
    // Four tests share them.
    let (images, seed) = (setting("HAPAX_IMAGES", 60) / 4, setting("HAPAX_SEED", 1));
    let dice = SeededEntropy::new(seed);
    let run = run(&dice, Lies::None, failing, above).await;
    let end = run.log.len();
    let mut points: Vec<_> = (0..images).map(|_| dice.below(end as u64 + 1) as usize).collect();
    points.sort_unstable();
    let mut crashes = Crashes::new(run.start.clone(), &run.log);
    let mut twice = 0;
    for at in points {
        let loss = Loss::ALL[dice.below(5) as usize];
        let image = crashes.image(at, loss, &dice);
        let past = [(&run.history, at)];
        if let Err(found) = check(image.clone(), &past).await {
            panic!("seed {seed}, {loss:?} after {at} of {end}: {found}");
        }
        // Power fails again while, or soon after, that image is opened.
        if dice.below(2) == 0 {
            let again = second(image, &dice, above).await;
            let at = dice.below(again.log.len() as u64 + 1) as usize;
            let image = Crashes::new(again.start, &again.log).image(at, loss, &dice);
            let past = [past[0], (&again.history, at)];
            if let Err(found) = check(image, &past).await {
                panic!("seed {seed}, {loss:?} in the recovery, after {at}: {found}");
            }
            twice += 1;
        }
    }
    eprintln!(
        "{} images of {end} operations, {twice} of them failed twice, seed {seed}, \
         quick recovery {}, failing syncs {failing}",
        images + twice,
        above == 0,
    );
    assert!(twice > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_sync_is_detected() {
    let dice = SeededEntropy::new(2);
    for lies in [Lies::Always, Lies::Odd, Lies::Even] {
        let run = run(&dice, lies, false, u64::MAX).await;
        let mut looked_at = 0;
        let found = loop {
            looked_at += 1;
            assert!(looked_at < 300, "nothing was lost, although syncs were omitted: {lies:?}");
            let at = dice.below(run.log.len() as u64 + 1) as usize;
            let loss = Loss::ALL[dice.below(5) as usize];
            let image = Crashes::new(run.start.clone(), &run.log).image(at, loss, &dice);
            if let Err(found) = check(image, &[(&run.history, at)]).await {
                break found;
            }
        };
        eprintln!("syncs omitted, {lies:?}: found in image {looked_at}: {found}");
    }
}

/// Callers who claim, renew and complete keys, and one who reaps.
async fn run(dice: &SeededEntropy, lies: Lies, failing: bool, above: u64) -> Run {
    let medium = Medium::new(Vec::new(), Lies::None);
    open(&medium, above).unwrap().close().await;
    let start = medium.bytes();
    let medium = Medium::new(start.clone(), lies);
    let store = Arc::new(open(&medium, above).unwrap());
    let history = Arc::new(History::default());
    let mut callers = Vec::new();
    for caller in 0..CALLERS {
        let (store, medium, history) = (Arc::clone(&store), medium.clone(), Arc::clone(&history));
        let dice = SeededEntropy::new(dice.next());
        callers.push(tokio::spawn(async move {
            for round in 0..12 {
                let base = (caller * 100 + round) * 10;
                operation(&store, &medium, &history, base, &dice).await;
                if caller % 4 == 0 {
                    history.1.changes(&store, &medium, base, &dice).await;
                }
                if caller == 0 {
                    store.reap(NonZeroU32::MIN.saturating_add(5)).await.ok();
                }
                if failing && caller == 1 {
                    medium.set_fault(Fault::Sync(dice.below(6) as u32));
                }
            }
        }));
    }
    for caller in callers {
        caller.await.unwrap();
    }
    medium.set_fault(Fault::None);
    assert!(!failing || store.stats().reopened > 2, "too few syncs failed");
    // The process ends without a goodbye: what closing writes is no part of the record.
    let log = medium.log();
    store.close().await;
    let history = Arc::into_inner(history).unwrap();
    Run { start, log, history }
}

/// One key's life: claimed, renewed now and then, completed with an answer of any size; or due
/// as soon as it is claimed.
async fn operation(
    store: &FileStore,
    medium: &Medium,
    history: &History,
    base: u64,
    dice: &SeededEntropy,
) {
    let mut last = claim(base);
    if dice.below(4) == 0 {
        last.draft.keep = Some(Duration::ZERO);
        last.draft.record.terms.lease = Duration::ZERO;
        return history.write(store, medium, &last).await;
    }
    history.write(store, medium, &last).await;
    for renewal in 0..dice.below(3) {
        let write_id = crate::support::write_id(base + 1 + renewal);
        last = Swap { expected: Some(last.write_id), write_id, ..last };
        last.draft.stamp = hapax_core::store::Stamp::Keep;
        history.write(store, medium, &last).await;
    }
    let size = [0, 100, 700, 5_000, 20_000][dice.below(5) as usize];
    let answer: Vec<u8> = (0..size).map(|_| dice.next() as u8).collect();
    history.write(store, medium, &complete(&last, base + 9, &answer)).await;
}

/// Opens an image on a recording disk and does a little more.
async fn second(image: Vec<u8>, dice: &SeededEntropy, above: u64) -> Run {
    let medium = Medium::new(image.clone(), Lies::None);
    let store = open(&medium, above).unwrap();
    let history = History::default();
    for round in 0..3 {
        operation(&store, &medium, &history, 1_000_000 + round * 10, dice).await;
        history.1.changes(&store, &medium, 1_000_000 + round, dice).await;
    }
    let log = medium.log();
    store.close().await;
    Run { start: image, log, history }
}

/// Opens an image and compares it with what was acknowledged.
async fn check(image: Vec<u8>, past: &Past<'_>) -> Result<(), String> {
    let medium = Medium::new(image, Lies::None);
    let clock = Arc::new(ManualClock::default());
    let options = options(u64::MAX).clock(clock.clone());
    let store = FileStore::open_on(Arc::new(medium), options)
        .map_err(|error| format!("it does not open: {error}"))?;
    for (history, at) in past {
        for key in history.keys() {
            let seen = store.load(&key).await.map_err(|error| format!("{key:?}: {error:?}"))?;
            if !history.allows(&key, *at, seen.stored.as_ref()) {
                return Err(format!("{key:?} holds {:?}", seen.stored));
            }
        }
    }
    // Nothing that nobody wrote, and nothing that the index of due cells does not know.
    let page = store.page(None, LIMIT).await.map_err(|error| format!("{error:?}"))?;
    let known: Vec<_> = past.iter().flat_map(|(history, _)| history.keys()).collect();
    if let Some((key, _)) = page.records.iter().find(|(key, _)| !known.contains(key)) {
        return Err(format!("nobody wrote {key:?}"));
    }
    let entries: Vec<_> = past.iter().map(|(history, at)| (&history.1, *at)).collect();
    entries::check(&store, &clock, &entries).await?;
    clock.advance(Duration::from_secs(1 << 30));
    while store.reap(LIMIT).await.map_err(|error| format!("{error:?}"))?.more {}
    let left = store.page(None, LIMIT).await.map_err(|error| format!("{error:?}"))?;
    store.close().await;
    if left.records.is_empty() { Ok(()) } else { Err("some cells are never due".into()) }
}

fn open(medium: &Medium, above: u64) -> Result<FileStore, hapax_file::OpenError> {
    FileStore::open_on(Arc::new(medium.clone()), options(above))
}

fn options(quick_recovery_above: u64) -> FileOptions {
    FileOptions::new("in memory")
        .secret(SecretSource::None)
        .clock(Arc::new(ManualClock::default()))
        .cache_bytes(1 << 20)
        .quick_recovery_above(quick_recovery_above)
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}
