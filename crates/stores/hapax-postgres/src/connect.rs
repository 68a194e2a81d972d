//! Preparation of the server and the tables, once, before the first request.

use std::time::Duration;

use tokio::time::timeout;

use crate::error::PostgresConnectError;
use crate::identity::recognise;
use crate::link::{ConnectionSetup, PgConnection};
use crate::schema::{self, RECORDS, VERSION};
use crate::secret::{Purpose, agree};
use crate::server_info::{self, Tables};

/// Timeout of a migration: other processes may be migrating too.
const MIGRATION: Duration = Duration::from_secs(60);

/// The result of the preparation.
pub(crate) struct Prepared {
    /// The connection that was used, if it may be written on. `None` if nothing is to be migrated
    /// and no process has entered a secret yet: then the first writer enters one.
    pub(crate) link: Option<PgConnection>,
    pub(crate) tables: Tables,
}

/// Checks the server, migrates the tables, and ensures that all processes use the same secret.
///
/// Dropping the future closes the connection, which rolls back what was in progress on it.
pub(crate) async fn prepare(setup: &ConnectionSetup) -> Result<Prepared, PostgresConnectError> {
    let options = &setup.options;
    let mut link = PgConnection::reach(setup).await?;
    let work = async {
        let found = server_info::version(link.client(), options).await?;
        if options.must_exist && found.is_none() {
            return Err(PostgresConnectError::Missing { tables: false });
        }
        let outdated = server_info::needs_migration(found)?;
        if outdated && !options.migrate && found < Some(RECORDS) {
            return Err(PostgresConnectError::NotMigrated { found, needed: VERSION });
        }
        if outdated && options.migrate {
            schema::migrate(link.client(), options).await?;
            // A default of the schema may have created it unlogged, for example.
            server_info::check(link.client(), options).await?;
        }
        let makes = options.migrate && !options.must_exist;
        let purpose = if makes { Purpose::Write } else { Purpose::Inspect };
        let entered = agree(link.client(), setup, purpose).await?;
        recognise(link.client(), setup, purpose).await?;
        link.prepare(setup).await?;
        let tables = Tables::ask(link.client(), options).await?;
        if options.must_exist && tables.first_used.is_none() {
            return Err(PostgresConnectError::Missing { tables: true });
        }
        Ok((entered, tables))
    };
    let (entered, tables) =
        timeout(MIGRATION, work).await.unwrap_or(Err(PostgresConnectError::TimedOut))?;
    if let Some(created) = tables.created() {
        tracing::info!(tables = options.place(), %created, "the store is open");
    }
    Ok(Prepared { link: entered.then_some(link), tables })
}
