//! Processes whose steps commit with the log, and whose callers start sagas in their transactions.
//! They are killed before and after every call of the store, the schedule and the database, and
//! replies to COMMIT are lost. In the end the ledger and the logs must agree.
//!
//! `HAPAX_SAGA_KILLS=3000` sets the number of kills, `HAPAX_SEED` the seed.

mod process;

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::OperationId;
use hapax_saga::log::{StuckReason, UndoEnd};
use hapax_saga::{EndedStep, SagaDecision, SagaError, SagaLookup};
use hapax_testkit::SeededEntropy;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates, ProxyCounts};
use hapax_testkit::servers::PostgresServer;
use tokio::time::sleep;

use self::process::Process;
use crate::kills::on_server;

/// A definition for each thread of the test, whose processes run only the sagas of that thread.
const NAMES: [&str; 6] =
    ["transfer-0", "transfer-1", "transfer-2", "transfer-3", "transfer-4", "transfer-5"];

const STEPS: [&str; 3] = ["debit", "fee", "credit"];

/// Numbers of points are drawn below this one. A saga that is done has fewer.
const POINTS: u64 = 90;

const TABLES: &str = "CREATE TABLE ledger (saga text, entry text, cents bigint); \
     CREATE TABLE orders (saga text PRIMARY KEY, made_by text)";

/// A bug that the check must find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Bug {
    /// Steps write outside of their transaction.
    Outside,
    /// Callers insert the entry outside of their transaction.
    EarlyEntry,
}

/// A saga of the test.
#[derive(Clone, Debug)]
struct Round {
    name: &'static str,
    key: String,
    /// True if it starts in a transaction of its caller, which is not repeated; otherwise its client
    /// repeats the start until it is accepted.
    in_transaction: bool,
    /// True if its last step is rejected.
    is_rejected: bool,
}

impl Round {
    fn input(&self) -> (String, i64, bool) {
        (self.key.clone(), 100, self.is_rejected)
    }
}

/// Counts of the faults and ends so far.
#[derive(Debug, Default)]
struct Seen {
    kills: u64,
    /// Kills by their points.
    places: BTreeMap<&'static str, u64>,
    /// Grants of further executions.
    grants: u64,
    rounds: Vec<Round>,
    done: u64,
    undone: u64,
    /// Sagas whose caller's transaction was rolled back.
    never: u64,
    violations: Vec<String>,
}

struct Torture {
    server: PostgresServer,
    proxy: FaultProxy,
    bug: Option<Bug>,
    seen: Mutex<Seen>,
}

impl Torture {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap()
    }

    fn report(&self, violation: String) {
        self.seen().violations.push(violation);
    }

    async fn process(&self, name: &'static str, at: usize) -> Process {
        Process::new((&self.server, &self.proxy), name, at, self.bug).await
    }

    /// Plays sagas until there were enough kills.
    fn play(&self, name: &'static str, kills: u64, seed: u64) {
        let dice = SeededEntropy::new(seed);
        for number in 0.. {
            if self.seen().kills >= kills || !self.seen().violations.is_empty() {
                return;
            }
            let round = Round {
                name,
                key: format!("{name}-{number}"),
                in_transaction: dice.below(3) == 0,
                is_rejected: dice.below(2) == 0,
            };
            self.seen().rounds.push(round.clone());
            // The last process is not killed.
            let last = 1 + dice.below(4);
            for process in 0..=last {
                let at = if process < last { dice.below(POINTS) as usize } else { usize::MAX };
                if self.run(&round, at, process == 0) {
                    break;
                }
            }
        }
    }

    /// Runs a process until it is killed, or its saga has ended. Returns whether it has.
    fn run(&self, round: &Round, at: usize, is_first: bool) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // All that the process has is dropped with the runtime, as in a kill.
        runtime.block_on(async {
            let process = self.process(round.name, at).await;
            let work = async {
                if is_first && round.in_transaction {
                    process.order(round).await;
                }
                self.await_end(&process, round).await;
            };
            tokio::select! {
                () = process.kill.killed.notified() => {
                    let seen = &mut *self.seen();
                    seen.kills += 1;
                    *seen.places.entry(process.kill.place().unwrap()).or_default() += 1;
                    false
                }
                () = work => true,
                _ = process.sagas.run(pending(), Duration::ZERO) => unreachable!("it does not end"),
            }
        })
    }

    /// Waits until the saga has ended, or surely does not start.
    async fn await_end(&self, process: &Process, round: &Round) {
        let started = match round.in_transaction {
            false => process.start(round).await,
            true if process.is_ordered(round).await => process.find(round).await,
            true => return,
        };
        let outcome = tokio::select! {
            outcome = started.outcome() => outcome,
            () = self.grant(process, started.id()) => unreachable!("it does not end"),
        };
        let is_right = match &outcome {
            Ok(cents) => !round.is_rejected && *cents == 99,
            Err(SagaError::Undone(error)) => round.is_rejected && error == "the account is closed",
            Err(_) => false,
        };
        if !is_right {
            self.report(format!("{round:?}: {outcome:?}"));
        }
    }

    /// Grants further executions to a saga of which five in a row ended with their processes.
    async fn grant(&self, process: &Process, id: OperationId) {
        loop {
            sleep(Duration::from_millis(100)).await;
            let shown = process.operator.show(&id).await;
            let Ok(SagaLookup::Unfinished(view)) = shown else { continue };
            let Some(stuck) = view.log.as_ref().and_then(|log| log.stuck.as_ref()) else {
                continue;
            };
            if stuck.reason != StuckReason::Crashed {
                self.report(format!("{id}: {stuck:?}"));
            }
            let retry = SagaDecision::Retry;
            if process.operator.decide(&view, &retry, "ann", "it was killed").await.is_ok() {
                self.seen().grants += 1;
            }
        }
    }

    /// Compares the ledger with the logs.
    async fn judge(&self) {
        let process = self.process(NAMES[0], usize::MAX).await;
        let mut ledger: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (saga, entry) in process.ledger().await {
            ledger.entry(saga).or_default().push(entry);
        }
        let rounds = self.seen().rounds.clone();
        for round in &rounds {
            let starts = !round.in_transaction || process.is_ordered(round).await;
            let (entries, steps) = expected(starts, round.is_rejected);
            let found = ledger.remove(&round.key).unwrap_or_default();
            if found != entries {
                self.report(format!("{round:?}: expected {entries:?}, the ledger has {found:?}"));
            }
            let logged = match process.operator.show(&process.id(round)).await.unwrap() {
                SagaLookup::Ended(ended) => ended.steps.iter().map(brief).collect(),
                SagaLookup::NotFound => Vec::new(),
                SagaLookup::Unfinished(view) => panic!("{round:?} is unfinished: {view:?}"),
            };
            if logged != steps {
                self.report(format!("{round:?}: expected {steps:?}, the log has {logged:?}"));
            }
            let seen = &mut *self.seen();
            match (starts, round.is_rejected) {
                (false, _) => seen.never += 1,
                (true, false) => seen.done += 1,
                (true, true) => seen.undone += 1,
            }
        }
        if !ledger.is_empty() {
            self.report(format!("entries of no saga: {ledger:?}"));
        }
    }

    /// Runs what is left in the schedule until there is nothing, and no entry of the last kills.
    async fn drain(&self) {
        for name in NAMES {
            let process = self.process(name, usize::MAX).await;
            let empty = async {
                let queue = format!("saga:{name}:1");
                let is_left = async || {
                    let queues = process.operator.definitions().await.unwrap();
                    queues.iter().any(|it| it.queue.as_str() == queue)
                };
                while is_left().await {
                    sleep(Duration::from_millis(20)).await;
                }
            };
            tokio::select! {
                () = empty => {}
                _ = process.sagas.run(pending(), Duration::ZERO) => unreachable!("it does not end"),
            }
        }
    }
}

/// A step of a log: its name, whether it happened, and the end of its undo.
type Brief = (String, Option<bool>, Option<UndoEnd>);

fn brief(step: &EndedStep) -> Brief {
    (step.name.clone(), step.happened, step.undone)
}

/// Returns the entries of a saga in the ledger, sorted, and the steps in its log.
fn expected(starts: bool, is_rejected: bool) -> (Vec<String>, Vec<Brief>) {
    let undone = is_rejected.then_some(UndoEnd::Undone);
    let steps = STEPS.map(|name| match name {
        "credit" if is_rejected => (name.to_owned(), Some(false), None),
        _ => (name.to_owned(), Some(true), undone),
    });
    if !starts {
        return (Vec::new(), Vec::new());
    }
    let entries: &[&str] = match is_rejected {
        false => &["credit", "debit", "fee"],
        true => &["debit", "fee", "undo debit", "undo fee"],
    };
    (entries.iter().map(|entry| (*entry).to_owned()).collect(), steps.to_vec())
}

/// Kills processes until `kills` were counted, or until a violation.
fn torture(kills: u64, seed: u64, bug: Option<Bug>) -> (Seen, ProxyCounts) {
    let starting = async {
        let server = PostgresServer::start().await;
        server.sql("postgres", TABLES).await;
        let proxy = FaultProxy::before(server.address(), seed).await.unwrap();
        proxy.only(b"COMMIT\0");
        proxy.set(FaultProxyRates::all(30, Duration::from_millis(200)));
        Torture { server, proxy, bug, seen: Mutex::default() }
    };
    let (runtime, torture) = on_server(starting);
    std::thread::scope(|threads| {
        for (thread, name) in NAMES.into_iter().enumerate() {
            let torture = &torture;
            threads.spawn(move || torture.play(name, kills, (seed << 8) + thread as u64));
        }
    });
    let counts = torture.proxy.counts();
    torture.proxy.set(FaultProxyRates::default());
    runtime.block_on(async {
        torture.drain().await;
        torture.judge().await;
    });
    let seen = std::mem::take(&mut *torture.seen());
    drop(torture);
    (seen, counts)
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

#[test]
fn ledger_and_logs_agree_after_kills_and_lost_replies() {
    let kills = setting("HAPAX_SAGA_KILLS", 60);
    let (seen, faults) = torture(kills, setting("HAPAX_SEED", 1), None);
    let Seen { kills: killed, places, grants, done, undone, never, violations, .. } = seen;
    println!(
        "{killed} kills at {places:?}; {done} sagas done, {undone} undone, {never} not started, \
         {grants} grants; {faults:?}"
    );
    assert!(violations.is_empty(), "{violations:#?}");
    assert!(killed >= kills && done > 0 && undone > 0);
    assert!(faults.lost_replies + faults.torn_replies > 0);
    if kills >= 1_000 {
        assert!(never > 0 && faults.late_requests > 0 && faults.lost_requests > 0);
        for call in [
            "a swap",
            "a load",
            "insert",
            "remove",
            "a connection",
            "BEGIN",
            "a statement",
            "the log",
            "COMMIT",
            "ROLLBACK",
            "the order",
            "the caller's COMMIT",
        ] {
            for place in [format!("before {call}"), format!("after {call}")] {
                assert!(places.contains_key(&*place), "no process was killed {place}");
            }
        }
    }
}

#[test]
fn planted_bugs_are_found() {
    for bug in [Bug::Outside, Bug::EarlyEntry] {
        let found = (0..10).any(|seed| {
            let (seen, _) = torture(40, seed, Some(bug));
            println!("{bug:?}: {:?} after {} kills", seen.violations.first(), seen.kills);
            !seen.violations.is_empty()
        });
        assert!(found, "{bug:?} was not found");
    }
}
