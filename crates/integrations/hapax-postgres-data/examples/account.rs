//! An event-sourced account: commands that are applied once, and a balance that is computed from
//! the events.
//!
//! ```text
//! cargo run -p hapax-postgres-data --example account -- postgres://postgres@127.0.0.1/postgres
//! ```

use hapax_postgres_data::{
    AppendResult, DataError, EventLog, IdScope, InsertOrFetch, Inserted, LayoutError, StoredEvent,
    TableName, UpdateResult, VersionedRows,
};
use serde::{Deserialize, Serialize};
use tokio_postgres::{Client, NoTls};

pub(crate) const TABLES: &str = "
CREATE TABLE IF NOT EXISTS account_events (
    account text NOT NULL, sequence bigint NOT NULL, PRIMARY KEY (account, sequence),
    command text NOT NULL, UNIQUE (account, command),
    cents bigint NOT NULL, at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS balances (
    account text PRIMARY KEY, cents bigint NOT NULL, sequence bigint NOT NULL DEFAULT 0)";

/// Money came, or, if negative, went. Its id is that of the command that had it happen.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub(crate) struct Moved {
    pub(crate) command: String,
    pub(crate) cents: i64,
}

/// A balance as it was after as many events as its version says.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct Balance {
    account: String,
    pub(crate) cents: i64,
}

/// The tables, as this service uses them.
pub(crate) struct Accounts {
    events: EventLog,
    balances: VersionedRows,
    opened: InsertOrFetch,
}

/// Events that are read at a time.
const PAGE: u32 = 500;

impl Accounts {
    pub(crate) fn new() -> Result<Self, LayoutError> {
        let balances = TableName::new("balances");
        Ok(Self {
            events: EventLog::on_table(TableName::new("account_events"))
                .stream("account")
                .id("command", IdScope::UniqueInStream)
                .field("cents")
                .build()?,
            balances: VersionedRows::in_table(balances.clone())
                .key("account")
                .version("sequence")
                .field("cents")
                .build()?,
            opened: InsertOrFetch::into_table(balances).key("account").field("cents").build()?,
        })
    }

    /// Moves money, unless there is too little. The same command again is told what became of it the
    /// first time.
    pub(crate) async fn carry_out(
        &self,
        client: &Client,
        account: &str,
        command: &Moved,
    ) -> Result<String, DataError> {
        loop {
            let (mut version, mut cents) = (0, 0);
            while let page @ [_, ..] = &self.page(client, account, version).await?[..] {
                for StoredEvent { position, event } in page {
                    if event.command == command.command && event.cents == command.cents {
                        return Ok(format!("done before, as {account}-{position}"));
                    }
                    (version, cents) = (*position, cents + event.cents);
                }
            }
            if cents + command.cents < 0 {
                return Ok(format!("declined: there are {cents}"));
            }
            let events = std::slice::from_ref(command);
            match self.events.append(client, account, version, events).await? {
                AppendResult::Appended { positions }
                | AppendResult::AlreadyAppended { positions } => {
                    return Ok(format!("done, as {account}-{}", positions.start));
                }
                // Somebody else was quicker: what was decided was about another balance.
                AppendResult::Conflict { .. } => {}
                other => return Ok(format!("refused: {other:?}")),
            }
        }
    }

    /// Brings the balance up to date, from the events that it does not have yet. Any number of
    /// processes may: each event counts once, since the version says which was the last.
    pub(crate) async fn project(&self, client: &Client, account: &str) -> Result<i64, DataError> {
        let opened = Balance { account: account.into(), cents: 0 };
        let key = serde_json::json!({"account": account});
        let _: Inserted<Balance> = self.opened.insert(client, &opened).await?;
        loop {
            let Some(loaded) = self.balances.load(client, &key).await? else { return Ok(0) };
            let (mut version, mut balance): (u64, Balance) = (loaded.version, loaded.row);
            let page = self.page(client, account, version).await?;
            if page.is_empty() {
                return Ok(balance.cents);
            }
            for StoredEvent { event, .. } in page {
                balance.cents += event.cents;
                match self.balances.update::<_, Balance>(client, version, &balance).await? {
                    UpdateResult::Updated { version: next } => version = next,
                    // Another process is at it: on from what it has made.
                    UpdateResult::Conflict { .. } | UpdateResult::NotFound => break,
                }
            }
        }
    }

    async fn page(
        &self,
        client: &Client,
        account: &str,
        after: u64,
    ) -> Result<Vec<StoredEvent<Moved>>, DataError> {
        self.events.read(client, account, after, PAGE).await
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("which database? postgres://…")?;
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(TABLES).await?;
    let accounts = Accounts::new()?;
    for (command, cents) in [("pay-in", 1_000), ("pay-in", 1_000), ("rent", -800), ("car", -800)] {
        let command = Moved { command: command.into(), cents };
        println!("{}: {}", command.command, accounts.carry_out(&client, "a-1", &command).await?);
    }
    println!("balance: {}", accounts.project(&client, "a-1").await?);
    Ok(())
}
