//! Checks whether a server is durable and has the tables.

use hapax_core::Timestamp;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::error::{PostgresConnectError, UnsafeSetting};
use crate::options::PostgresOptions;
use crate::schema::VERSION;
use crate::sql::qualified;

/// The oldest version of the server that is supported.
pub(crate) const OLDEST: i32 = 13;

/// Properties of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ServerInfo {
    pub(crate) major: i32,
    pub(crate) standby: bool,
    pub(crate) synchronous_commit: String,
    pub(crate) fsync: String,
    pub(crate) full_page_writes: String,
    /// The standbys that a commit waits for, as the server has them; empty: none.
    pub(crate) synchronous_standbys: String,
    /// The names of the connected standbys, and of any other receiver of the log.
    pub(crate) standbys: Vec<String>,
    /// Persistence of the table of records: `p` permanent, `u` unlogged, `t` temporary; `None` if
    /// there is no table.
    pub(crate) persistence: Option<String>,
    /// The same of the schedule.
    pub(crate) schedule: Option<String>,
    /// Whether there is a table of migrations.
    pub(crate) migrations: bool,
    /// The server's clock, in microseconds since 1970.
    pub(crate) now: i64,
}

impl ServerInfo {
    pub(crate) async fn ask(
        client: &Client,
        schema: Option<&str>,
    ) -> Result<Self, PostgresConnectError> {
        let cells = qualified(schema, "hapax_cells");
        let migrations = qualified(schema, "hapax_migrations");
        let schedule = qualified(schema, "hapax_schedule");
        let row = client
            .query_typed_one(
                "SELECT current_setting('server_version_num')::int4, pg_is_in_recovery(),
                    current_setting('synchronous_commit'), current_setting('fsync'),
                    current_setting('full_page_writes'),
                    (SELECT c.relpersistence::text FROM pg_class c WHERE c.oid = to_regclass($1)),
                    to_regclass($2) IS NOT NULL,
                    (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
                    current_setting('synchronous_standby_names'),
                    ARRAY(SELECT coalesce(r.application_name, '') FROM pg_stat_replication r
                        WHERE r.state IS DISTINCT FROM 'backup'),
                    (SELECT c.relpersistence::text FROM pg_class c WHERE c.oid = to_regclass($3))",
                &[(&cells, Type::TEXT), (&migrations, Type::TEXT), (&schedule, Type::TEXT)],
            )
            .await
            .map_err(PostgresConnectError::Query)?;
        let read = || -> Result<Self, tokio_postgres::Error> {
            Ok(Self {
                major: row.try_get::<_, i32>(0)? / 10_000,
                standby: row.try_get(1)?,
                synchronous_commit: row.try_get(2)?,
                fsync: row.try_get(3)?,
                full_page_writes: row.try_get(4)?,
                persistence: row.try_get(5)?,
                migrations: row.try_get(6)?,
                now: row.try_get(7)?,
                synchronous_standbys: row.try_get(8)?,
                standbys: row.try_get(9)?,
                schedule: row.try_get(10)?,
            })
        };
        read().map_err(PostgresConnectError::Query)
    }

    /// Returns the setting under which a crash loses acknowledged writes, if any.
    pub(crate) fn forgetful(&self) -> Option<UnsafeSetting> {
        if self.synchronous_commit == "off" {
            return Some(UnsafeSetting::SynchronousCommit);
        }
        let is_unlogged = |table: &Option<String>| table.as_deref().is_some_and(|kept| kept != "p");
        let unlogged = is_unlogged(&self.persistence) || is_unlogged(&self.schedule);
        unlogged.then_some(UnsafeSetting::Unlogged)
    }
}

/// Rejects a server that is unfit.
pub(crate) async fn check(
    client: &Client,
    options: &PostgresOptions,
) -> Result<(), PostgresConnectError> {
    let server = ServerInfo::ask(client, options.schema.as_deref()).await?;
    if server.major < OLDEST {
        return Err(PostgresConnectError::TooOld { found: server.major });
    }
    if server.standby {
        return Err(PostgresConnectError::Standby);
    }
    match server.forgetful() {
        Some(forgetful) if !options.allow_lost_writes => {
            Err(PostgresConnectError::Forgetful(forgetful))
        }
        _ => Ok(()),
    }
}

/// Returns the version of the tables; `None` if there are none.
pub(crate) async fn version(
    client: &Client,
    options: &PostgresOptions,
) -> Result<Option<i32>, PostgresConnectError> {
    let schema = options.schema.as_deref();
    if !ServerInfo::ask(client, schema).await?.migrations {
        return Ok(None);
    }
    let text = format!("SELECT max(version) FROM {}", qualified(schema, "hapax_migrations"));
    let row = client.query_typed_one(&text, &[]).await.map_err(PostgresConnectError::Query)?;
    row.try_get(0).map_err(PostgresConnectError::Query)
}

/// The tables of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    /// Time at which they were created, in microseconds since 1970.
    pub(crate) made: i64,
    /// Time of the first write to them, in microseconds since 1970, by which they have an identity;
    /// `None` before it, and after they were emptied.
    pub(crate) first_used: Option<i64>,
    /// Whether the server reads some blocks of a table without reading the others: from 14 on.
    pub(crate) reads_blocks: bool,
    /// Whether there is a schedule.
    pub(crate) schedule: bool,
}

impl Tables {
    pub(crate) async fn ask(
        client: &Client,
        options: &PostgresOptions,
    ) -> Result<Self, PostgresConnectError> {
        let text = format!(
            "SELECT (extract(epoch FROM min(applied)) * 1000000)::int8,
                current_setting('server_version_num')::int4 >= 140000, max(version) = {VERSION},
                (SELECT (extract(epoch FROM min(s.since)) * 1000000)::int8 FROM {} s
                    WHERE s.identity IS NOT NULL)
            FROM {}",
            qualified(options.schema.as_deref(), "hapax_secrets"),
            qualified(options.schema.as_deref(), "hapax_migrations")
        );
        let row = client.query_typed_one(&text, &[]).await.map_err(PostgresConnectError::Query)?;
        let read = || {
            let (made, reads_blocks) = (row.try_get(0)?, row.try_get(1)?);
            Ok(Self { made, reads_blocks, schedule: row.try_get(2)?, first_used: row.try_get(3)? })
        };
        read().map_err(PostgresConnectError::Query)
    }

    /// Returns the time at which the store was created.
    pub(crate) fn created(&self) -> Option<Timestamp> {
        self.first_used.and_then(|micros| u64::try_from(micros).ok()).map(Timestamp::from_micros)
    }
}

/// Returns whether tables of version `found` must be migrated first.
pub(crate) fn needs_migration(found: Option<i32>) -> Result<bool, PostgresConnectError> {
    match found {
        Some(VERSION) => Ok(false),
        Some(newer) if newer > VERSION => {
            Err(PostgresConnectError::Newer { found: newer, known: VERSION })
        }
        _ => Ok(true),
    }
}
