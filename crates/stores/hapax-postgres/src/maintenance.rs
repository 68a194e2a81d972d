//! Occasional statements on a separate connection: pages, purging, and reading the schedule.

use std::sync::Arc;

use hapax_core::StoreError;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::{timeout, timeout_at};
use tokio_postgres::Row;

use crate::error::{PostgresStoreError, TransactionFailure};
use crate::link::{Parameter, StatementCall};
use crate::record::micros;
use crate::shared::Shared;
use crate::sql::Verb;
use crate::walk::Visited;
use crate::writer::WriterConnection;

/// Limit of requests that wait for the connection.
const WAITING: usize = 64;

#[derive(Debug)]
pub(crate) struct Maintenance {
    shared: Arc<Shared>,
    line: Mutex<WriterConnection>,
    waiting: Arc<Semaphore>,
}

/// A statement to be executed.
#[derive(Debug)]
pub(crate) enum Job {
    /// Loads records after a key; from the beginning if it is empty.
    Page { after: Vec<u8>, limit: i64 },
    /// Loads the records that a walk visits from the blocks of the table between `first` and `end`.
    Blocks { first: i64, end: i64, visited: Visited },
    /// Loads the records of some keys.
    Load { keys: Vec<Vec<u8>> },
    /// Removes expired records.
    Reap { limit: i64 },
    /// Loads entries of some queues that are due.
    Due { queues: Vec<String>, limit: i64 },
    /// Loads entries after a key; from the beginning if it is empty.
    Entries { after: [Vec<u8>; 2], limit: i64 },
}

/// Reasons for which there is no answer.
pub(crate) enum MaintenanceError {
    /// Nothing was sent.
    NotSent(PostgresStoreError),
    Failed(TransactionFailure),
}

impl Maintenance {
    pub(crate) fn new(shared: Arc<Shared>) -> Arc<Self> {
        let waiting = Arc::new(Semaphore::new(WAITING));
        Arc::new(Self { shared, line: Mutex::default(), waiting })
    }

    /// Executes one statement in a separate transaction and task: dropping the caller does not
    /// leave the connection in the middle of it.
    pub(crate) async fn run(self: &Arc<Self>, job: Job) -> Result<Vec<Row>, MaintenanceError> {
        let Ok(turn) = Arc::clone(&self.waiting).try_acquire_owned() else {
            return Err(MaintenanceError::NotSent(PostgresStoreError::QueueFull));
        };
        let this = Arc::clone(self);
        let task = tokio::spawn(async move {
            let _turn = turn;
            this.run_here(job).await
        });
        task.await.unwrap_or(Err(MaintenanceError::Failed(TransactionFailure::Lost(
            PostgresStoreError::Closed,
        ))))
    }

    async fn run_here(&self, job: Job) -> Result<Vec<Row>, MaintenanceError> {
        let Self { shared, line, .. } = self;
        let deadline = tokio::time::Instant::now() + shared.setup.answer;
        let Ok(mut line) = timeout_at(deadline, line.lock()).await else {
            return Err(MaintenanceError::NotSent(PostgresStoreError::NotSent));
        };
        let Ok(link) = timeout_at(deadline, line.link(shared)).await else {
            return Err(MaintenanceError::NotSent(PostgresStoreError::NotSent));
        };
        let link = link.map_err(MaintenanceError::NotSent)?;
        let (undecided, since) = match &job {
            Job::Blocks { visited: Visited::All(since), .. } => (false, since.map(micros)),
            _ => (true, None),
        };
        let (verb, parameters): (_, Vec<Parameter<'_>>) = match &job {
            Job::Page { after, limit } => (Verb::Page, vec![after, limit]),
            Job::Blocks { first, end, .. } => (Verb::Blocks, vec![first, end, &undecided, &since]),
            Job::Load { keys } => (Verb::Load, vec![keys]),
            Job::Reap { limit } => (Verb::Reap, vec![limit]),
            Job::Due { queues, limit } => (Verb::ScheduleDue, vec![queues, limit]),
            Job::Entries { after: [operation, id], limit } => {
                (Verb::ScheduleEntries, vec![operation, id, limit])
            }
        };
        let call = StatementCall { verb, parameters };
        let sent = link.transact(&shared.setup, shared.setup.begin(), call);
        let failure = match timeout(shared.setup.answer, sent).await {
            Ok(Ok(rows)) => return Ok(rows),
            Ok(Err(failure)) => failure,
            Err(_) => TransactionFailure::Lost(PostgresStoreError::TimedOut),
        };
        if failure.ends_connection() {
            line.hang_up();
        }
        Err(MaintenanceError::Failed(failure))
    }

    pub(crate) async fn close(&self) {
        self.line.lock().await.close().await;
    }
}

impl MaintenanceError {
    pub(crate) fn into_store_error(self) -> StoreError {
        match self {
            Self::NotSent(error) => StoreError::unavailable(error),
            Self::Failed(failure) => failure.into_store_error(),
        }
    }

    pub(crate) fn into_read_error(self) -> StoreError {
        match self {
            Self::NotSent(error) => StoreError::unavailable(error),
            Self::Failed(failure) => failure.into_read_error(),
        }
    }
}
