//! What is done once, before the first request.

use std::time::Duration;

use tokio::time::timeout;

use crate::error::PostgresConnectError;
use crate::identity::recognise;
use crate::link::{ConnectionSetup, PgConnection};
use crate::schema::{self, VERSION};
use crate::secret::{Purpose, agree};
use crate::server_info::{self, Tables};

/// How long a migration may take: other processes may be at it.
const MIGRATION: Duration = Duration::from_secs(60);

/// What was found there.
pub(crate) struct Prepared {
    /// The connection it was found on, if it may be written on: where nothing is to be migrated and
    /// nobody has entered a secret, the first to write does.
    pub(crate) link: Option<PgConnection>,
    pub(crate) tables: Tables,
}

/// Looks at the server, migrates, and makes sure that everybody uses the same secret.
///
/// Dropping it closes its connection, and with it what was under way there is undone.
pub(crate) async fn prepare(setup: &ConnectionSetup) -> Result<Prepared, PostgresConnectError> {
    let options = &setup.options;
    let mut link = PgConnection::reach(setup).await?;
    let work = async {
        let found = server_info::version(link.client(), options).await?;
        if server_info::needs_migration(found)? {
            if !options.migrate {
                return Err(PostgresConnectError::NotMigrated { found, needed: VERSION });
            }
            schema::migrate(link.client(), options).await?;
            // Unlogged by a default of the schema, say.
            server_info::check(link.client(), options).await?;
        }
        let purpose = if options.migrate { Purpose::Write } else { Purpose::Inspect };
        let entered = agree(link.client(), setup, purpose).await?;
        recognise(link.client(), setup, purpose).await?;
        link.prepare(setup).await?;
        let tables = Tables::ask(link.client(), options).await?;
        Ok((entered, tables))
    };
    let (entered, tables) =
        timeout(MIGRATION, work).await.unwrap_or(Err(PostgresConnectError::TimedOut))?;
    Ok(Prepared { link: entered.then_some(link), tables })
}
