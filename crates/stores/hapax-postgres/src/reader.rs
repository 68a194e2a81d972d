//! The task that loads. While a statement is in progress loads queue, and then all are sent in one.

use std::collections::HashMap;
use std::sync::Arc;

use hapax_core::{OperationId, StoreError};
use tokio::time::timeout;

use crate::error::{PostgresStoreError, TransactionFailure};
use crate::link::{PgConnection, StatementCall};
use crate::record::ResultRow;
use crate::shared::{LoadJob, Loaded, Shared};
use crate::sql::Verb;
use crate::writer::WriterConnection;

/// Limit of loads in a statement.
const BATCH: usize = 128;

/// Loads until the queue is closed and empty.
pub(crate) async fn run(shared: Arc<Shared>) {
    let mut line = WriterConnection::default();
    while line.rest(shared.loads.wait(), true).await {
        let link = match line.link(&shared).await {
            Ok(link) => link,
            Err(error) => {
                for job in shared.loads.drain() {
                    job.reply.send(Err(StoreError::unavailable(error.clone()))).ok();
                }
                line.pause().await;
                continue;
            }
        };
        let jobs = shared.loads.take(BATCH, usize::MAX);
        let keys: Vec<OperationId> = jobs.iter().map(|job| job.key).collect();
        if !jobs.is_empty() && !load(&shared, link, &keys, jobs).await {
            line.hang_up();
        }
        shared.loads.done(&keys);
    }
    line.close().await;
}

/// Loads and answers. Returns whether the connection is still usable.
async fn load(
    shared: &Shared,
    link: &PgConnection,
    keys: &[OperationId],
    jobs: Vec<LoadJob>,
) -> bool {
    let keys: Vec<&[u8]> = keys.iter().map(|key| &key.as_bytes()[..]).collect();
    let call = StatementCall { verb: Verb::Load, parameters: vec![&keys] };
    let sent = link.transact(&shared.setup, shared.setup.begin(), call);
    let failure = match timeout(shared.setup.answer, sent).await {
        Ok(Ok(rows)) => {
            let said = rows.iter().filter_map(|row| ResultRow::read(row).ok());
            let mut said: HashMap<_, _> = said.map(|said| (said.key, said)).collect();
            for job in jobs {
                let said = said.remove(&Some(job.key));
                job.reply.send(loaded(said)).ok();
            }
            return true;
        }
        Ok(Err(failure)) => failure,
        Err(_) => TransactionFailure::Lost(PostgresStoreError::TimedOut),
    };
    let good = !failure.ends_connection();
    for job in jobs {
        job.reply.send(Err(failure.clone().into_read_error())).ok();
    }
    good
}

fn loaded(said: Option<ResultRow>) -> Result<Loaded, StoreError> {
    let ResultRow { now, found, .. } =
        said.ok_or_else(|| StoreError::unavailable(PostgresStoreError::UnexpectedAnswer))?;
    Ok(Loaded { now, found: found.map_err(StoreError::corrupt)? })
}
