//! Connections, and what is asked of servers.

use hapax_testkit::servers::PostgresServer;
use tokio_postgres::{Client, NoTls};

/// A connection of its own.
pub(crate) async fn client(server: &PostgresServer) -> Client {
    connect(&server.url("postgres")).await.unwrap()
}

pub(crate) async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// How often the server had to end a deadlock.
pub(crate) async fn deadlocks(server: &PostgresServer) -> String {
    let count = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'";
    server.sql("postgres", count).await
}

/// Waits until so many wait for a lock.
pub(crate) async fn are_waiting(server: &PostgresServer, many: u32) {
    let waiting =
        format!("SELECT count(*) >= {many} FROM pg_stat_activity WHERE wait_event_type = 'Lock'");
    while server.sql("postgres", &waiting).await != "t" {}
}
