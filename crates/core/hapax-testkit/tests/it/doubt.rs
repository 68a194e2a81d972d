//! COMMITs in doubt, in random schedules against a model of a database: what the core makes of a lost
//! reply must be what became of the transaction, and no operation of one life takes effect twice.
//! A database that does not lock is found out.

mod database;

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::exchange::{
    ClaimExchange, ClaimRequest, ClaimResult, CommitStatus, Completion, Next, Ownership,
    WriteExchange, WriteResult,
};
use hapax_core::machine::{DefiniteVerdict, OwnerAction, Resolve};
use hapax_core::store::{Snapshot, StoredRecord, Swap, Swapped};
use hapax_core::{
    Fingerprint, FingerprintScheme, OnUnknown, OperationId, Outcome, RecordState, Terms,
};
use hapax_testkit::SeededEntropy;

use database::{Database, Fate, Tx};

const KEY: OperationId = OperationId::from_bytes([1; 32]);
const LEASE: Duration = Duration::from_micros(40);
const RETENTION: Duration = Duration::from_micros(400);
const STEPS: u32 = 400;

/// What a swap is for, and who goes on when it is answered.
enum Doing {
    Nothing,
    Claiming(ClaimExchange, Swap),
    Renewing(Ownership, WriteExchange, Swap),
    Working(Ownership, usize),
    Swapped(Completion, Ownership, usize),
    Committing(Completion, Ownership, usize),
    Settling(Completion, Ownership, WriteExchange, Swap, usize),
    Ending(WriteExchange, Swap),
}

/// How often each thing happened, so that none is missing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Seen {
    Executed,
    Committed,
    Checkpointed,
    HeardOfCommit,
    HeardOfRollback,
    HeardOfTakeover,
    HeardOfNothing,
    Replayed,
    Died,
}

struct World {
    dice: SeededEntropy,
    database: Database,
    /// Copies of swaps that are on their way, whoever waits for them.
    late: Vec<Swap>,
    workers: Vec<Doing>,
    seen: HashMap<Seen, u64>,
}

impl World {
    fn new(seed: u64, locks: bool) -> Self {
        let database = Database {
            locks,
            now: 1_000,
            stored: None,
            transactions: Vec::new(),
            effects: HashMap::new(),
            forgotten: false,
        };
        Self {
            dice: SeededEntropy::new(seed),
            database,
            late: Vec::new(),
            workers: (0..3).map(|_| Doing::Nothing).collect(),
            seen: HashMap::new(),
        }
    }

    fn saw(&mut self, what: Seen) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn chance(&self, of_ten: u64) -> bool {
        self.dice.below(10) < of_ten
    }

    /// Sends a copy of a swap; `None` if no answer is heard.
    fn send(&mut self, swap: &Swap) -> Option<Swapped> {
        match self.dice.below(10) {
            0 => None,
            1 | 2 => {
                self.late.push(swap.clone());
                None
            }
            3 => {
                self.database.swap(swap);
                None
            }
            _ => self.database.swap(swap),
        }
    }

    fn step(&mut self) -> Result<(), String> {
        self.database.now += self.dice.below(4);
        match self.dice.below(20) {
            0 => self.database.now += LEASE.as_micros() as u64 + 1,
            1 if !self.late.is_empty() => {
                let at = self.dice.below(self.late.len() as u64) as usize;
                let swap = self.late.swap_remove(at);
                self.database.swap(&swap);
            }
            2 | 3 => self.land(),
            4 => self.operate(),
            5 => self.forget(),
            6 => {
                let worker = self.dice.below(self.workers.len() as u64) as usize;
                if let Doing::Working(_, tx) | Doing::Swapped(_, _, tx) = self.workers[worker] {
                    self.database.transactions[tx].orphaned = true;
                }
                self.workers[worker] = Doing::Nothing;
                self.saw(Seen::Died);
            }
            _ => {
                let worker = self.dice.below(self.workers.len() as u64) as usize;
                let doing = std::mem::replace(&mut self.workers[worker], Doing::Nothing);
                self.workers[worker] = self.go(doing)?;
            }
        }
        match self.database.effects.values().all(|effects| *effects <= 1) {
            true => Ok(()),
            false => Err("two transactions of one life took effect".into()),
        }
    }

    /// COMMITs arrive, or their connections end before that.
    fn land(&mut self) {
        for tx in 0..self.database.transactions.len() {
            let Tx { sent, orphaned, .. } = self.database.transactions[tx];
            match self.dice.below(4) {
                0 if sent => self.database.commit(tx),
                1 if sent || orphaned => self.database.roll_back(tx),
                _ => {}
            }
        }
    }

    fn operate(&mut self) {
        let Some(stored) = &self.database.stored else { return };
        if self.chance(7) {
            return;
        }
        let resolution = match self.chance(5) {
            true => DefiniteVerdict::Happened(Outcome::new("operator", "yes")),
            false => DefiniteVerdict::DidNotHappen,
        };
        let resolve = Resolve {
            expected: stored.fence,
            force: true,
            forget: true,
            resolution,
            note: None,
            restart: false,
        };
        let seen = self.database.snapshot();
        let begun = WriteExchange::resolve(KEY, seen, resolve, &self.dice).unwrap();
        if let (_, Next::Send(swap)) = begun
            && let Some(Swapped::Stored(_)) = self.database.swap(&swap)
        {
            self.database.forgotten = true;
            // By their own word it may happen again, in the same life.
            self.database.effects.clear();
        }
    }

    /// A purge, long after.
    fn forget(&mut self) {
        if self.chance(1) {
            self.database.now += RETENTION.as_micros() as u64;
        }
        let now = self.database.now;
        let due = |stored: &StoredRecord| {
            let kept = stored.keep_until.map(|until| until.after(stored.record.terms.lease));
            kept.is_some_and(|until| until.as_micros() <= now)
        };
        if self.database.stored.as_ref().is_some_and(due) && !self.database.is_locked() {
            self.database.stored = None;
            self.database.forgotten = true;
        }
    }

    fn go(&mut self, doing: Doing) -> Result<Doing, String> {
        Ok(match doing {
            Doing::Nothing => {
                let on_unknown = match self.chance(7) {
                    true => OnUnknown::Reexecute,
                    false => OnUnknown::Block,
                };
                let claim = ClaimRequest {
                    scheme: FingerprintScheme::new("doubt/1").unwrap(),
                    fingerprint: Fingerprint::builder("doubt/1").finish(),
                    terms: Terms { lease: LEASE, retention: RETENTION, on_unknown },
                    settle: None,
                    hook: None,
                    may_reconcile: true,
                    executions: Default::default(),
                    description: None,
                    keep_released: Duration::ZERO,
                    adopts: false,
                    quarantine: None,
                };
                let (claiming, next) = ClaimExchange::start(KEY, claim, &self.dice).unwrap();
                self.claimed(claiming, next)
            }
            Doing::Claiming(mut claiming, swap) => match self.send(&swap) {
                Some(swapped) => {
                    let next = claiming.receive(swapped, &self.dice).unwrap();
                    self.claimed(claiming, next)
                }
                None => Doing::Claiming(claiming, swap),
            },
            Doing::Renewing(mut ownership, mut writing, swap) => match self.send(&swap) {
                None => Doing::Renewing(ownership, writing, swap),
                Some(swapped) => match writing.receive(swapped, &self.dice).unwrap() {
                    Next::Send(swap) => Doing::Renewing(ownership, writing, swap),
                    Next::Ready(WriteResult::Recorded(seen)) => {
                        ownership.update(seen);
                        Doing::Working(ownership, self.database.begin())
                    }
                    Next::Ready(_) => Doing::Nothing,
                },
            },
            Doing::Working(ownership, tx) => {
                let outcome = Outcome::new("tx", tx.to_string());
                let action = match self.chance(3) {
                    true => OwnerAction::Checkpoint { checkpoint: Bytes::new(), lease: LEASE },
                    false => OwnerAction::Complete { outcome, retention: None },
                };
                let completion = ownership.completion(action, &self.dice).unwrap().unwrap();
                match self.database.swap_in(tx, completion.swap()) {
                    None => Doing::Working(ownership, tx),
                    Some(Swapped::Stored(_)) => Doing::Swapped(completion, ownership, tx),
                    Some(Swapped::Conflict(seen)) => {
                        self.status(&completion, ownership, seen, tx)?
                    }
                }
            }
            Doing::Swapped(completion, ownership, tx) => {
                self.database.transactions[tx].sent = true;
                match self.dice.below(3) {
                    0 => {
                        self.database.commit(tx);
                        self.committed(ownership, None, tx)?
                    }
                    _ => Doing::Committing(completion, ownership, tx),
                }
            }
            Doing::Committing(completion, ownership, tx) => {
                if self.chance(5) && self.database.transactions[tx].fate == Fate::Committed {
                    return self.committed(ownership, None, tx);
                }
                let renew = OwnerAction::Renew { lease: LEASE };
                match ownership.write(renew, &self.dice).unwrap() {
                    (writing, Next::Send(swap)) => {
                        Doing::Settling(completion, ownership, writing, swap, tx)
                    }
                    (_, Next::Ready(_)) => Doing::Nothing,
                }
            }
            Doing::Settling(completion, ownership, mut writing, swap, tx) => {
                let Some(swapped) = self.send(&swap) else {
                    return Ok(Doing::Settling(completion, ownership, writing, swap, tx));
                };
                match writing.receive(swapped, &self.dice).unwrap() {
                    Next::Send(swap) => Doing::Settling(completion, ownership, writing, swap, tx),
                    Next::Ready(WriteResult::Recorded(seen)) => {
                        let status = completion.renewed(writing.seen(), seen.clone());
                        self.settled(status, ownership, seen, tx)?
                    }
                    Next::Ready(_) => {
                        self.status(&completion, ownership, writing.into_seen(), tx)?
                    }
                }
            }
            Doing::Ending(mut writing, swap) => match self.send(&swap) {
                None => Doing::Ending(writing, swap),
                Some(swapped) => match writing.receive(swapped, &self.dice).unwrap() {
                    Next::Send(swap) => Doing::Ending(writing, swap),
                    Next::Ready(_) => Doing::Nothing,
                },
            },
        })
    }

    fn claimed(&mut self, claiming: ClaimExchange, next: Next<ClaimResult>) -> Doing {
        match next {
            Next::Send(swap) => Doing::Claiming(claiming, swap),
            Next::Ready(ClaimResult::Execute(ownership)) => {
                self.saw(Seen::Executed);
                self.renew(ownership)
            }
            Next::Ready(ClaimResult::Replay(_)) => {
                self.saw(Seen::Replayed);
                Doing::Nothing
            }
            Next::Ready(_) => Doing::Nothing,
        }
    }

    /// Before each transaction, as the first thing.
    fn renew(&self, ownership: Ownership) -> Doing {
        match ownership.write(OwnerAction::Renew { lease: LEASE * 2 }, &self.dice).unwrap() {
            (writing, Next::Send(swap)) => Doing::Renewing(ownership, writing, swap),
            (_, Next::Ready(_)) => Doing::Nothing,
        }
    }

    fn status(
        &mut self,
        completion: &Completion,
        ownership: Ownership,
        seen: Snapshot,
        tx: usize,
    ) -> Result<Doing, String> {
        let status = completion.status(seen.clone());
        self.settled(status, ownership, seen, tx)
    }

    fn settled(
        &mut self,
        status: CommitStatus,
        mut ownership: Ownership,
        seen: Snapshot,
        tx: usize,
    ) -> Result<Doing, String> {
        let is_silent = seen.stored.as_ref().is_none_or(|stored| {
            let expired = stored.keep_until.is_some_and(|until| until <= seen.now);
            expired || stored.record.state == RecordState::Released
        });
        match status {
            CommitStatus::Committed(seen) => {
                match &seen.stored.as_ref().unwrap().record.state {
                    RecordState::Done(outcome) if *outcome.bytes() != tx.to_string() => {
                        return Err("told of another's outcome".into());
                    }
                    RecordState::Done(_) => self.saw(Seen::HeardOfCommit),
                    RecordState::InFlight if self.database.transactions[tx].checkpoints => {
                        self.saw(Seen::Checkpointed);
                    }
                    _ => return Err("told that it was committed, and it is not done".into()),
                }
                self.committed(ownership, Some(seen), tx)
            }
            CommitStatus::Owned(seen) => {
                ownership.update(seen);
                self.rolled_back(ownership, tx)
            }
            CommitStatus::Lost => {
                self.saw(Seen::HeardOfTakeover);
                // An operator may have forgotten what was committed, by their own word. A checkpoint
                // that was committed leaves a lease that lapses.
                if !self.database.forgotten && !self.database.transactions[tx].checkpoints {
                    self.is_gone(tx)?;
                }
                Ok(Doing::Nothing)
            }
            CommitStatus::Gone => {
                self.saw(Seen::HeardOfNothing);
                match self.database.forgotten || is_silent {
                    true => Ok(Doing::Nothing),
                    false => Err("nobody took the record away, and it can not tell".into()),
                }
            }
        }
    }

    /// After a checkpoint that is known to be the record, the execution goes on.
    fn committed(
        &mut self,
        mut ownership: Ownership,
        seen: Option<Snapshot>,
        tx: usize,
    ) -> Result<Doing, String> {
        self.saw(Seen::Committed);
        let Tx { fate, checkpoints, .. } = self.database.transactions[tx];
        match (fate, seen) {
            (Fate::Committed, Some(seen)) if checkpoints => {
                ownership.update(seen);
                Ok(self.renew(ownership))
            }
            (Fate::Committed, _) => Ok(Doing::Nothing),
            (fate, _) => Err(format!("told that it was committed: {fate:?}")),
        }
    }

    /// Runs again, or lets go.
    fn rolled_back(&mut self, ownership: Ownership, tx: usize) -> Result<Doing, String> {
        self.saw(Seen::HeardOfRollback);
        self.is_gone(tx)?;
        if self.chance(7) {
            return Ok(self.renew(ownership));
        }
        Ok(match ownership.write(ownership.release(), &self.dice).unwrap() {
            (writing, Next::Send(swap)) => Doing::Ending(writing, swap),
            (_, Next::Ready(_)) => Doing::Nothing,
        })
    }

    /// It was not committed, and never will be.
    fn is_gone(&self, tx: usize) -> Result<(), String> {
        match self.database.transactions[tx].fate {
            Fate::RolledBack => Ok(()),
            fate => Err(format!("told that it was rolled back: {fate:?}")),
        }
    }
}

fn play(seed: u64, locks: bool) -> (Result<(), String>, HashMap<Seen, u64>) {
    let mut world = World::new(seed, locks);
    for _ in 0..STEPS {
        if let Err(broken) = world.step() {
            return (Err(broken), world.seen);
        }
    }
    (Ok(()), world.seen)
}

#[test]
fn the_reported_result_of_a_commit_is_true() {
    let mut all: HashMap<Seen, u64> = HashMap::new();
    for seed in 0..5_000 {
        let (result, seen) = play(seed, true);
        assert_eq!(result, Ok(()), "seed {seed}");
        for (what, times) in seen {
            *all.entry(what).or_default() += times;
        }
    }
    for what in [
        Seen::Executed,
        Seen::Committed,
        Seen::Checkpointed,
        Seen::HeardOfCommit,
        Seen::HeardOfRollback,
        Seen::HeardOfTakeover,
        Seen::HeardOfNothing,
        Seen::Replayed,
        Seen::Died,
    ] {
        assert!(all.get(&what).is_some_and(|times| *times >= 250), "{what:?} in {all:?}");
    }
}

#[test]
fn the_check_finds_a_database_that_does_not_lock_rows() {
    assert!((0..1_000).any(|seed| play(seed, false).0.is_err()));
}
