//! Swaps, as the tasks that write send them.

use std::collections::HashMap;

use hapax_core::{OperationId, StoreError};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_postgres::Row;

use crate::error::TransactionFailure;
use crate::link::{ConnectionSetup, Parameter, PgConnection, StatementCall};
use crate::queue::{Item, Ticket};
use crate::record::{RawSwapped, ResultRow, Write};
use crate::shared::{Shared, WriteQueues, count};
use crate::sql::Verb;
use crate::writer::{RequiredTables, SendTerms, WriteJob};

/// A swap that waits.
#[derive(Debug)]
pub(crate) struct SwapJob {
    pub(crate) write: Write,
    pub(crate) ticket: Ticket,
    /// Time at which its caller's timeout ends.
    pub(crate) deadline: Instant,
    pub(crate) reply: oneshot::Sender<Result<RawSwapped, StoreError>>,
}

impl Item for SwapJob {
    fn key(&self) -> &OperationId {
        &self.write.key
    }

    fn size(&self) -> usize {
        self.write.size()
    }

    fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl WriteJob for SwapJob {
    type Answers = HashMap<OperationId, ResultRow>;

    const RARE: bool = false;

    fn queues(shared: &Shared) -> &WriteQueues<Self> {
        &shared.swaps
    }

    fn deadline(&self) -> Instant {
        self.deadline
    }

    fn required(&self) -> RequiredTables {
        match (self.write.strict, self.write.is_new) {
            (true, _) => RequiredTables::Known,
            (false, true) => RequiredTables::Logged,
            (false, false) => RequiredTables::Any,
        }
    }

    fn changes_row(&self) -> bool {
        self.write.expected.is_some()
    }

    async fn send(
        jobs: &[Self],
        link: &PgConnection,
        setup: &ConnectionSetup,
        terms: SendTerms<'_>,
    ) -> Result<Vec<Row>, TransactionFailure> {
        let mut writes: Vec<_> = jobs.iter().map(|job| &job.write).collect();
        // In the order of keys: batches that insert the same keys then wait for each other in one
        // direction.
        writes.sort_unstable_by_key(|write| write.key);
        let columns = Columns::of(&writes);
        let mut parameters = columns.parameters();
        parameters.push(&terms.patient);
        let verb = match terms.known {
            Some(known) => {
                parameters.push(known);
                Verb::SwapKnown
            }
            None => Verb::Swap,
        };
        link.transact(setup, terms.begin, StatementCall { verb, parameters }).await
    }

    fn read(rows: &[Row]) -> Option<Self::Answers> {
        let mut by_key = HashMap::with_capacity(rows.len());
        for row in rows {
            let said = ResultRow::read(row).ok()?;
            // The first row of a key is used: if this statement wrote it, all of them are the same.
            by_key.entry(said.key?).or_insert(said);
        }
        Some(by_key)
    }

    fn answer(self, answers: &mut Self::Answers, shared: &Shared) -> Option<Self> {
        let said = answers.remove(&self.write.key);
        let written = said.as_ref().is_some_and(|said| said.written);
        let Some(answer) = said.and_then(|said| said.answer(&self.write)) else {
            return Some(self);
        };
        if matches!(answer, Ok(RawSwapped::Conflict { .. })) {
            count(&shared.counters.conflicts, 1);
        }
        if let Some(bell) = shared.bell.as_ref().filter(|_| written && self.write.ends()) {
            bell.ring(&self.write.key);
        }
        self.reply.send(answer).ok();
        None
    }

    fn fail(self, error: StoreError) {
        self.reply.send(Err(error)).ok();
    }
}

/// Swaps as columns, the form in which a statement takes many at once.
#[derive(Debug, Default)]
pub(crate) struct Columns<'a> {
    keys: Vec<&'a [u8]>,
    write_ids: Vec<&'a [u8]>,
    states: Vec<&'static str>,
    sealed: Vec<&'a [u8]>,
    leases: Vec<i64>,
    keeps: Vec<Option<i64>>,
    graces: Vec<i64>,
    hints: Vec<i64>,
    expected: Vec<Option<&'a [u8]>>,
    next_fences: Vec<bool>,
}

impl<'a> Columns<'a> {
    pub(crate) fn of(writes: &[&'a Write]) -> Self {
        let mut columns = Self::default();
        for write in writes {
            columns.keys.push(write.key.as_bytes());
            columns.write_ids.push(write.write_id.as_bytes());
            columns.states.push(write.state);
            columns.sealed.push(&write.sealed);
            columns.leases.push(write.lease);
            columns.keeps.push(write.keep);
            columns.graces.push(write.grace);
            columns.hints.push(write.hint);
            columns.expected.push(write.expected.as_ref().map(|write_id| &write_id.as_bytes()[..]));
            columns.next_fences.push(write.next_fence);
        }
        columns
    }

    /// Returns the parameters, in the order of [`crate::sql::SWAP_IN_TYPES`].
    pub(crate) fn parameters(&self) -> Vec<Parameter<'_>> {
        let Self {
            keys,
            write_ids,
            states,
            sealed,
            leases,
            keeps,
            graces,
            hints,
            expected,
            next_fences,
        } = self;
        vec![keys, write_ids, states, sealed, leases, keeps, graces, hints, expected, next_fences]
    }
}
