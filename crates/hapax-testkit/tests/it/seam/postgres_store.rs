use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax::store::{BoxFuture, Cell, Page, Reaped, Snapshot, Stamp, Stamped, Swap, Swapped};
use hapax::{
    FencingToken, Inspect, Sealer, Store, StoreError, StoreKey, SystemEntropy, Tag, Timestamp,
};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, NoTls, Row};

const PATIENCE: Duration = Duration::from_secs(2);
/// Rounds of a swap that finds neither what it expects nor a reason: somebody is quicker.
const ROUNDS: u32 = 16;

/// A row for each cell; one statement for each swap, and one more for a conflict.
pub(super) struct PostgresStore {
    address: SocketAddr,
    table: String,
    /// Several, so that statements meet in the server.
    connections: [Mutex<Option<Arc<Client>>>; 4],
    turn: AtomicUsize,
    sealer: Sealer,
}

impl std::fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostgresStore").finish_non_exhaustive()
    }
}

/// The statement's clock, read once. `now()` would be the transaction's beginning.
const CLOCK: &str = "clock AS MATERIALIZED (
    SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS now)";

type Arguments<'a> = &'a [(&'a (dyn ToSql + Sync), Type)];

impl PostgresStore {
    pub(super) fn at(address: SocketAddr, table: String) -> Self {
        Self {
            address,
            table,
            connections: Default::default(),
            turn: AtomicUsize::new(0),
            sealer: Sealer::checksum(),
        }
    }

    pub(super) async fn create(&self) -> Result<(), StoreError> {
        let table = &self.table;
        let create = format!(
            "CREATE TABLE IF NOT EXISTS {table} (
                key bytea PRIMARY KEY, tag bytea NOT NULL, fence int8 NOT NULL,
                lease_until int8 NOT NULL, keep_until int8, due int8, record bytea NOT NULL)"
        );
        self.query(&create, &[]).await.map(drop)
    }

    async fn query(&self, sql: &str, arguments: Arguments<'_>) -> Result<Vec<Row>, StoreError> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.connections.len();
        let client = self.connect(turn).await?;
        let error = match timeout(PATIENCE, client.query_typed(sql, arguments)).await {
            Ok(Ok(rows)) => return Ok(rows),
            // A statement that the server refused did not happen.
            Ok(Err(error)) if error.as_db_error().is_some() => {
                return Err(StoreError::unavailable(error));
            }
            Ok(Err(error)) => StoreError::ambiguous(error),
            Err(elapsed) => StoreError::ambiguous(elapsed),
        };
        *self.connections[turn].lock().await = None;
        Err(error)
    }

    /// Nothing was sent yet: whatever fails here did not happen.
    async fn connect(&self, turn: usize) -> Result<Arc<Client>, StoreError> {
        let mut connection = self.connections[turn].lock().await;
        if let Some(client) = connection.as_ref().filter(|client| !client.is_closed()) {
            return Ok(Arc::clone(client));
        }
        let mut config = tokio_postgres::Config::new();
        config.host(self.address.ip().to_string()).port(self.address.port());
        config.user("postgres").dbname("postgres");
        let connecting = timeout(PATIENCE, config.connect(NoTls)).await;
        let (client, driver) =
            connecting.map_err(StoreError::unavailable)?.map_err(StoreError::unavailable)?;
        // It ends with its client; its errors reach the queries.
        tokio::spawn(driver);
        Ok(Arc::clone(connection.insert(Arc::new(client))))
    }

    async fn swap_cell(&self, swap: Swap) -> Result<Swapped, StoreError> {
        let Swap { key, expected, tag, draft } = &swap;
        let record = self.sealer.seal(key, *tag, &draft.record, &SystemEntropy);
        let record = record.map_err(StoreError::unavailable)?;
        let table = &self.table;
        let lease = micros(draft.lease);
        let keep = draft.keep.map(micros);
        let due = draft.keep.map(|keep| micros(keep.saturating_add(draft.record.terms.lease)));
        let next = draft.stamp == Stamp::NextFence;
        let (key_bytes, tag_bytes) = (&key.as_bytes()[..], &tag.as_bytes()[..]);
        let mut arguments: Vec<(&(dyn ToSql + Sync), Type)> = vec![
            (&key_bytes, Type::BYTEA),
            (&tag_bytes, Type::BYTEA),
            (&lease, Type::INT8),
            (&keep, Type::INT8),
            (&due, Type::INT8),
            (&record, Type::BYTEA),
        ];
        let expected = expected.as_ref().map(|tag| &tag.as_bytes()[..]);
        let sql = if let Some(expected) = &expected {
            arguments.push((expected, Type::BYTEA));
            arguments.push((&next, Type::BOOL));
            format!(
                "WITH {CLOCK} UPDATE {table} SET tag = $2, lease_until = now + $3,
                    keep_until = now + $4, due = now + $5, record = $6,
                    fence = CASE WHEN $8 THEN greatest(now, fence + 1) ELSE fence END
                FROM clock WHERE key = $1 AND tag = $7
                RETURNING now, fence, lease_until"
            )
        } else {
            format!(
                "WITH {CLOCK} INSERT INTO {table}
                    (key, tag, fence, lease_until, keep_until, due, record)
                SELECT $1, $2, now, now + $3, now + $4, now + $5, $6 FROM clock
                ON CONFLICT (key) DO NOTHING
                RETURNING fence AS now, fence, lease_until"
            )
        };
        for _ in 0..ROUNDS {
            if let Some(row) = self.query(&sql, &arguments).await?.first() {
                let [now, fence, lease_until] =
                    ["now", "fence", "lease_until"].map(|name| moment(row, name));
                let fence = FencingToken::new(fence.as_micros());
                return Ok(Swapped::Stored(Stamped { now, fence, lease_until }));
            }
            // A statement of its own: the first one's snapshot may not show who won.
            let seen = self.load_cell(key).await?;
            let found = seen.cell.as_ref().map(|cell| cell.tag);
            if found == Some(*tag) {
                let cell = seen.cell.ok_or_else(|| StoreError::corrupt("no cell"))?;
                let Cell { fence, lease_until, .. } = cell;
                return Ok(Swapped::Stored(Stamped { now: seen.now, fence, lease_until }));
            }
            if found != swap.expected {
                return Ok(Swapped::Conflict(seen));
            }
            // It was there, was gone, and is what was expected now: again.
        }
        Err(StoreError::unavailable("too much is going on under this key"))
    }

    async fn load_cell(&self, key: &StoreKey) -> Result<Snapshot, StoreError> {
        let table = &self.table;
        let sql = format!(
            "WITH {CLOCK} SELECT now, cell.* FROM clock
            LEFT JOIN {table} AS cell ON key = $1"
        );
        let key_bytes = &key.as_bytes()[..];
        let rows = self.query(&sql, &[(&key_bytes, Type::BYTEA)]).await?;
        let row = rows.first().ok_or_else(|| StoreError::corrupt("no clock"))?;
        let absent = row.get::<_, Option<&[u8]>>("key").is_none();
        let cell = if absent { None } else { Some(self.cell(key, row)?) };
        Ok(Snapshot { now: moment(row, "now"), cell })
    }

    fn cell(&self, key: &StoreKey, row: &Row) -> Result<Cell, StoreError> {
        let tag = Tag::from_bytes(bytes(row, "tag")?);
        let record = self.sealer.open(key, tag, row.get("record")).map_err(StoreError::corrupt)?;
        Ok(Cell {
            tag,
            fence: FencingToken::new(moment(row, "fence").as_micros()),
            lease_until: moment(row, "lease_until"),
            keep_until: row
                .get::<_, Option<i64>>("keep_until")
                .map(|micros| Timestamp::from_micros(micros as u64)),
            record,
        })
    }

    async fn reap_cells(&self, limit: NonZeroU32) -> Result<Reaped, StoreError> {
        let table = &self.table;
        let limit = i64::from(limit.get());
        // Whoever renews a cell holds its lock: it is passed over, and not due any more.
        let sql = format!(
            "WITH {CLOCK}, gone AS (
                SELECT key FROM {table}, clock WHERE due <= now
                LIMIT $1 FOR UPDATE OF {table} SKIP LOCKED)
            DELETE FROM {table} USING gone WHERE {table}.key = gone.key RETURNING 1"
        );
        let removed = self.query(&sql, &[(&limit, Type::INT8)]).await?.len();
        Ok(Reaped { removed: removed as u32, more: removed as i64 == limit })
    }

    async fn page_cells(
        &self,
        after: Option<StoreKey>,
        limit: NonZeroU32,
    ) -> Result<Page, StoreError> {
        let table = &self.table;
        let sql = format!(
            "WITH {CLOCK}, page AS (
                SELECT * FROM {table} WHERE $1::bytea IS NULL OR key > $1
                ORDER BY key LIMIT $2)
            SELECT now, page.* FROM clock LEFT JOIN page ON true ORDER BY key"
        );
        let after = after.as_ref().map(|key| &key.as_bytes()[..]);
        let one_more = i64::from(limit.get()) + 1;
        let rows = self.query(&sql, &[(&after, Type::BYTEA), (&one_more, Type::INT8)]).await?;
        let now = rows.first().map(|row| moment(row, "now")).unwrap_or_default();
        let mut cells = Vec::new();
        for row in rows.iter().filter(|row| row.get::<_, Option<&[u8]>>("key").is_some()) {
            let key = StoreKey::from_bytes(bytes(row, "key")?);
            cells.push((key, self.cell(&key, row)));
        }
        let more = cells.len() > limit.get() as usize;
        cells.truncate(limit.get() as usize);
        Ok(Page { now, cells, more })
    }
}

impl Store for PostgresStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(self.swap_cell(swap))
    }

    fn load<'a>(&'a self, key: &'a StoreKey) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(self.load_cell(key))
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(self.reap_cells(limit))
    }
}

impl Inspect for PostgresStore {
    fn page(
        &self,
        after: Option<StoreKey>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(self.page_cells(after, limit))
    }
}

/// Half of what an `int8` holds, so that the clock and two of them fit.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 4)
}

fn moment(row: &Row, name: &str) -> Timestamp {
    Timestamp::from_micros(row.get::<_, i64>(name) as u64)
}

fn bytes<const N: usize>(row: &Row, name: &str) -> Result<[u8; N], StoreError> {
    row.get::<_, &[u8]>(name).try_into().map_err(StoreError::corrupt)
}
