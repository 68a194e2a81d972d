//! Entries that commit with a caller's own writes.

use hapax_core::StoreError;
use hapax_core::schedule::{EntryKey, NewEntry, TransactionalSchedule};
use hapax_core::store::BoxFuture;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use crate::error::{PostgresStoreError, is_missing, refused};
use crate::link::{Parameter, PgConnection};
use crate::record::micros;
use crate::secret::Purpose;
use crate::sql::SCHEDULE_IN_TYPES;
use crate::store::PostgresStore;
use crate::transactional::{SAVEPOINT, SPOIL};
use crate::transactions::PgTx;

/// The error that `hapax_schedule_insert_in_1` raises if the tables were emptied or replaced.
const REPLACED: &str = "HX004";

impl TransactionalSchedule<Transaction<'_>> for PostgresStore {
    fn insert_in<'a>(
        &'a self,
        tx: &'a mut Transaction<'_>,
        entry: NewEntry,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        // A shared borrow suffices for a statement, and has no lifetime of `tx`.
        let client: &'a Client = tx.client();
        Box::pin(self.insert_on(client, entry))
    }
}

impl TransactionalSchedule<PgTx> for PostgresStore {
    fn insert_in<'a>(
        &'a self,
        tx: &'a mut PgTx,
        entry: NewEntry,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let client: &'a Client = tx;
        Box::pin(self.insert_on(client, entry))
    }
}

impl PostgresStore {
    async fn insert_on(&self, client: &Client, entry: NewEntry) -> Result<(), StoreError> {
        let insertion = match self.insertion(&entry) {
            Ok(insertion) => insertion,
            Err(error) => {
                client.batch_execute(SPOIL).await.ok();
                return Err(error);
            }
        };
        let Insertion { operation, id, queue, note, delay, known } = &insertion;
        let parameters: [Parameter<'_>; 6] = [operation, id, queue, note, delay, known];
        let parameters: Vec<_> = parameters.into_iter().zip(SCHEDULE_IN_TYPES).collect();
        let text = &self.shared.setup.statements.schedule_in;
        match client.query_typed(text, &parameters).await {
            Ok(_) => Ok(()),
            Err(error) => Err(match error.as_db_error() {
                // The transaction has failed: no part of it can be committed.
                Some(db) => match self.rejected(db.code().code()).await {
                    Some(error) => error,
                    None => refused(Box::new(db.clone())),
                },
                // The connection is lost before COMMIT was sent: no part of it is committed.
                None => StoreError::unavailable(PostgresStoreError::Broken(error.into())),
            }),
        }
    }

    /// Returns the parameters of an insertion.
    pub(super) fn insertion<'a>(&self, entry: &'a NewEntry) -> Result<Insertion<'a>, StoreError> {
        let NewEntry { key, queue, due_in, note } = entry;
        let note = self.seal_note(key, note)?;
        let EntryKey { operation, id } = key;
        Ok(Insertion {
            operation: operation.as_bytes(),
            id: id.as_bytes(),
            queue: queue.as_str(),
            note,
            delay: micros(*due_in),
            known: self.shared.setup.known.expected(),
        })
    }

    /// Returns the error of an insertion that the server rejected with this code, if it has a name.
    pub(super) async fn rejected(&self, code: &str) -> Option<StoreError> {
        match code {
            SAVEPOINT => Some(StoreError::unavailable(PostgresStoreError::Savepoint)),
            REPLACED => {
                // A new connection compares the identity: if an operator has confirmed it, the next
                // insertion requires the new one.
                if let Ok(link) = PgConnection::open(&self.shared.setup, Purpose::Inspect).await {
                    link.close().await;
                }
                Some(StoreError::unavailable(PostgresStoreError::Replaced))
            }
            code if is_missing(&SqlState::from_code(code)) => {
                Some(StoreError::unavailable(PostgresStoreError::NoSchedule))
            }
            _ => None,
        }
    }
}

/// The parameters of an insertion, in the order of [`SCHEDULE_IN_TYPES`].
pub(super) struct Insertion<'a> {
    pub(super) operation: &'a [u8],
    pub(super) id: &'a [u8],
    pub(super) queue: &'a str,
    pub(super) note: Vec<u8>,
    pub(super) delay: i64,
    pub(super) known: Option<String>,
}
