//! Steps that write in the database of the records: their rows commit with the log.

use std::rc::Rc;

use hapax_core::exchange::{CommitStatus, Completion, Next, WriteResult};
use hapax_core::machine::OwnerAction;
use hapax_core::store::{Swap, Swapped};
use hapax_saga::log::{Direction, Log};
use hapax_saga::run::{Call, RunEvent, TryEnd, UndoFailure};

use super::bugs::Bug;
use super::checks;
use super::drive::{Driver, Dropped};
use super::flows::blob;
use super::outside::OutsideCall;
use super::plan::{LEASE, SECOND, duration};
use super::store;
use super::world::{W, World};

/// The rows that a transaction writes beside the log.
#[derive(Clone)]
enum Rows {
    Effect(u64),
    Undone,
}

/// The result of a transaction.
enum Transaction {
    Committed,
    RolledBack,
}

impl Driver {
    pub(super) async fn call_within(&mut self, call: Call) -> Result<RunEvent, Dropped> {
        self.check_cancelled("no step runs forward after an answered cancellation");
        self.check_lease().await?;
        let (w, to) = (Rc::clone(&self.w), self.outside(&call));
        checks::sent(&w, &to, Direction::Forward);
        if w.fault(w.plan.calls) {
            w.count("transaction not begun");
            return Ok(RunEvent::Called(TryEnd::NotSent("no connection".to_owned())));
        }
        if w.dice.below(12) == 0 {
            w.count("call rejected");
            return Ok(RunEvent::Called(TryEnd::Rejected(blob(10 + w.dice.below(5)))));
        }
        let effect = w.outside.borrow_mut().next_effect();
        if w.has(Bug::CommitsWithoutTheLog) {
            let (node, to) = (self.node.number, to.clone());
            store::ask(&w, node, move |w| w.write_rows(&to, &Rows::Effect(effect))).await;
            return Ok(RunEvent::Called(TryEnd::Happened(blob(effect))));
        }
        let log = self.run.log_with(call.step, blob(effect));
        Ok(match self.commit(to, &log, Rows::Effect(effect)).await? {
            Transaction::Committed => RunEvent::Committed(blob(effect)),
            Transaction::RolledBack => {
                RunEvent::Called(TryEnd::NotSent("the transaction was rolled back".to_owned()))
            }
        })
    }

    pub(super) async fn undo_within(&mut self, call: Call) -> Result<RunEvent, Dropped> {
        self.check_lease().await?;
        let to = self.outside(&call);
        checks::sent(&self.w, &to, Direction::Undo);
        let log = self.run.log_undone(call.step);
        Ok(match self.commit(to, &log, Rows::Undone).await? {
            Transaction::Committed => RunEvent::UndoCommitted,
            Transaction::RolledBack => {
                RunEvent::Undone(Err(UndoFailure::Error("it was rolled back".to_owned())))
            }
        })
    }

    /// Commits a log with rows, and determines the result of a COMMIT without a reply.
    async fn commit(
        &mut self,
        call: OutsideCall,
        log: &Log,
        rows: Rows,
    ) -> Result<Transaction, Dropped> {
        let checkpoint = log.encode().map_err(|_| Dropped)?;
        let action = OwnerAction::Checkpoint { checkpoint, lease: duration(LEASE) };
        let completion = self.lease.ownership.completion(action, &self.w.ids);
        let completion = completion.ok().flatten().ok_or(Dropped)?;
        let (sent, swap) = (self.w.now(), completion.swap().clone());
        let commit = move |w: &W| w.commit(&swap, &call, &rows);
        let status = match store::ask(&self.w, self.node.number, commit).await {
            Some(Swapped::Stored(stamped)) => {
                self.lease.until = sent + LEASE;
                self.lease.renew_at = sent + LEASE / 3;
                CommitStatus::Committed(completion.snapshot(stamped))
            }
            Some(Swapped::Conflict(seen)) => completion.status(seen),
            None => {
                self.w.count("COMMIT without a reply");
                self.committed(&completion).await?
            }
        };
        match status {
            CommitStatus::Committed(seen) => {
                self.w.count("rows committed");
                self.lease.ownership.update(seen);
                Ok(Transaction::Committed)
            }
            CommitStatus::Owned(seen) => {
                self.w.count("transaction rolled back");
                self.lease.ownership.update(seen);
                Ok(Transaction::RolledBack)
            }
            // The next run finds in the log whether it was committed.
            CommitStatus::Lost | CommitStatus::Gone => Err(Dropped),
        }
    }

    /// Renews with the write id from before the transaction, which can then no longer commit.
    async fn committed(&mut self, completion: &Completion) -> Result<CommitStatus, Dropped> {
        let w = Rc::clone(&self.w);
        let renew = OwnerAction::Renew { lease: duration(LEASE) };
        let begun = self.lease.ownership.write(renew, &w.ids);
        let (mut exchange, mut next) = begun.map_err(|_| Dropped)?;
        loop {
            let swap: Swap = match next {
                Next::Ready(WriteResult::Recorded(seen)) => {
                    return Ok(completion.renewed(exchange.seen(), seen));
                }
                Next::Ready(_) => return Ok(completion.status(exchange.into_seen())),
                Next::Send(swap) => swap,
            };
            let sent = w.now();
            let reply = loop {
                match store::swap(&w, self.node.number, &swap).await {
                    Some(reply) => break reply,
                    None if w.now() >= self.lease.until => return Err(Dropped),
                    None => w.sleep(SECOND / 5).await,
                }
            };
            if matches!(reply, Swapped::Stored(_)) {
                self.lease.until = sent + LEASE;
                self.lease.renew_at = sent + LEASE / 3;
            }
            next = exchange.receive(reply, &w.ids).map_err(|_| Dropped)?;
        }
    }
}

impl World {
    /// Commits a transaction: the log and the rows, or neither.
    fn commit(self: &Rc<Self>, swap: &Swap, call: &OutsideCall, rows: &Rows) -> Swapped {
        let before = self.load(&swap.id).stored.map(|stored| stored.write_id);
        let swapped = self.swap(swap);
        // A copy of a COMMIT that has arrived finds its own write.
        if before == swap.expected && matches!(swapped, Swapped::Stored(_)) {
            self.write_rows(call, rows);
        }
        swapped
    }

    fn write_rows(&self, call: &OutsideCall, rows: &Rows) {
        let mut outside = self.outside.borrow_mut();
        match rows {
            Rows::Effect(effect) => outside.insert(call, *effect),
            Rows::Undone => {
                checks::undo_arrived(self, &outside, call);
                outside.delete(call);
            }
        }
    }
}
