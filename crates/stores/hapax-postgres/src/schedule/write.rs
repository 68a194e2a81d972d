//! Changes of the schedule, as the tasks that write send them.

use std::collections::HashMap;

use hapax_core::schedule::{EntryKey, QueueName};
use hapax_core::{EntryId, OperationId, StoreError};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_postgres::Row;

use crate::error::TransactionFailure;
use crate::link::{ConnectionSetup, Parameter, PgConnection, StatementCall};
use crate::queue::{Item, Ticket};
use crate::record::{DamagedRow, bytes, get};
use crate::shared::{Shared, WriteQueues};
use crate::sql::Verb;
use crate::writer::{RequiredTables, SendTerms, WriteJob};

/// A change that waits.
#[derive(Debug)]
pub(crate) struct ScheduleJob {
    pub(crate) key: EntryKey,
    pub(crate) change: Change,
    pub(crate) ticket: Ticket,
    /// Time at which its caller's timeout ends.
    pub(crate) deadline: Instant,
    /// Receives whether it was done: see `hapax_schedule_write_1`.
    pub(crate) reply: oneshot::Sender<Result<bool, StoreError>>,
}

/// A change of an entry; times from now, in microseconds.
#[derive(Debug)]
pub(crate) enum Change {
    Insert { queue: QueueName, delay: i64, note: Vec<u8> },
    Postpone { expected: Option<i64>, delay: i64 },
    Remove,
}

impl Item for ScheduleJob {
    /// Returns the operation id: of the entries of one operation only one is in a batch.
    fn key(&self) -> &OperationId {
        &self.key.operation
    }

    fn size(&self) -> usize {
        let note = match &self.change {
            Change::Insert { note, .. } => note.len(),
            Change::Postpone { .. } | Change::Remove => 0,
        };
        size_of::<Self>() + note
    }

    fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl WriteJob for ScheduleJob {
    type Answers = HashMap<EntryKey, Option<bool>>;

    const RARE: bool = true;

    fn queues(shared: &Shared) -> &WriteQueues<Self> {
        &shared.schedule
    }

    fn deadline(&self) -> Instant {
        self.deadline
    }

    fn required(&self) -> RequiredTables {
        match self.change {
            Change::Insert { .. } => RequiredTables::Known,
            Change::Postpone { .. } | Change::Remove => RequiredTables::Any,
        }
    }

    fn changes_row(&self) -> bool {
        !matches!(self.change, Change::Insert { .. })
    }

    async fn send(
        jobs: &[Self],
        link: &PgConnection,
        setup: &ConnectionSetup,
        terms: SendTerms<'_>,
    ) -> Result<Vec<Row>, TransactionFailure> {
        let mut sorted: Vec<_> = jobs.iter().collect();
        // As for swaps.
        sorted.sort_unstable_by_key(|job| job.key);
        let columns = Columns::of(&sorted);
        let mut parameters = columns.parameters();
        parameters.push(&terms.patient);
        let verb = match terms.known {
            Some(known) => {
                parameters.push(known);
                Verb::ScheduleWriteKnown
            }
            None => Verb::ScheduleWrite,
        };
        link.transact(setup, terms.begin, StatementCall { verb, parameters }).await
    }

    fn read(rows: &[Row]) -> Option<Self::Answers> {
        rows.iter().map(read).collect::<Result<_, _>>().ok()
    }

    fn answer(self, answers: &mut Self::Answers, _: &Shared) -> Option<Self> {
        // Without an answer another transaction had locked the row.
        let Some(done) = answers.remove(&self.key).flatten() else { return Some(self) };
        self.reply.send(Ok(done)).ok();
        None
    }

    fn fail(self, error: StoreError) {
        self.reply.send(Err(error)).ok();
    }
}

fn read(row: &Row) -> Result<(EntryKey, Option<bool>), DamagedRow> {
    let operation = OperationId::from_bytes(bytes(get(row, 0)?)?);
    let id = EntryId::from_bytes(bytes(get(row, 1)?)?);
    Ok((EntryKey { operation, id }, get(row, 2)?))
}

/// Changes as columns.
#[derive(Debug, Default)]
struct Columns<'a> {
    kinds: Vec<&'static str>,
    operations: Vec<&'a [u8]>,
    ids: Vec<&'a [u8]>,
    queues: Vec<Option<&'a str>>,
    notes: Vec<Option<&'a [u8]>>,
    delays: Vec<Option<i64>>,
    expected: Vec<Option<i64>>,
}

impl<'a> Columns<'a> {
    fn of(jobs: &[&'a ScheduleJob]) -> Self {
        let mut columns = Self::default();
        for ScheduleJob { key, change, .. } in jobs {
            columns.operations.push(key.operation.as_bytes());
            columns.ids.push(key.id.as_bytes());
            let (kind, queue, note, delay, expected) = match change {
                Change::Insert { queue, delay, note } => {
                    ("insert", Some(queue.as_str()), Some(&note[..]), Some(*delay), None)
                }
                Change::Postpone { expected, delay } => {
                    ("postpone", None, None, Some(*delay), *expected)
                }
                Change::Remove => ("remove", None, None, None, None),
            };
            columns.kinds.push(kind);
            columns.queues.push(queue);
            columns.notes.push(note);
            columns.delays.push(delay);
            columns.expected.push(expected);
        }
        columns
    }

    /// Returns the parameters, in the order of the statement's types.
    fn parameters(&self) -> Vec<Parameter<'_>> {
        let Self { kinds, operations, ids, queues, notes, delays, expected } = self;
        vec![kinds, operations, ids, queues, notes, delays, expected]
    }
}
