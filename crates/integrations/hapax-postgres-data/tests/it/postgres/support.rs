//! Connections, and what is asked of servers.

use std::time::Duration;

use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};
use tokio::time::timeout;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

/// A connection of its own.
pub(crate) async fn client(server: &PostgresServer) -> Client {
    connect(&server.url("postgres")).await.unwrap()
}

pub(crate) async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// A server that ends deadlocks soon.
pub(crate) async fn quick_at_deadlocks() -> PostgresServer {
    let options = PostgresServerOptions::new().set("deadlock_timeout", "20ms");
    PostgresServer::start_with(options).await
}

/// How often the server had to end a deadlock, by its log: its statistics come late.
pub(crate) fn deadlocks(server: &PostgresServer) -> usize {
    let log = server.data().with_file_name("server.log");
    std::fs::read_to_string(log).unwrap().matches("ERROR:  deadlock detected").count()
}

/// Waits until `sql` answers with true.
pub(crate) async fn until(server: &PostgresServer, sql: &str) {
    let client = client(server).await;
    let waiting = async {
        while !holds(&client, sql).await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(Duration::from_secs(60), waiting).await.unwrap_or_else(|_| panic!("never: {sql}"));
}

async fn holds(client: &Client, sql: &str) -> bool {
    let answer = client.simple_query(sql).await.unwrap();
    let mut rows = answer.into_iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(0) == Some("t")),
        _ => None,
    });
    rows.next().unwrap_or_else(|| panic!("no answer to {sql}"))
}

/// Waits until so many wait for a lock.
pub(crate) async fn are_waiting(server: &PostgresServer, many: u32) {
    let waiting =
        format!("SELECT count(*) >= {many} FROM pg_stat_activity WHERE wait_event_type = 'Lock'");
    until(server, &waiting).await;
}

/// A test of several, one after the other on one server: most of a short one is its start.
macro_rules! on_one_server {
    ($name:ident: $($test:ident),+ $(,)?) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $name() {
            let server = crate::postgres::support::quick_at_deadlocks().await;
            $(
                println!("{}", stringify!($test));
                $test(&server).await;
                crate::postgres::support::clear(&server).await;
            )+
        }
    };
}
pub(crate) use on_one_server;

/// Nobody is connected and nothing is there.
pub(crate) async fn clear(server: &PostgresServer) {
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    server.sql("postgres", end).await;
    until(server, ALONE).await;
    let drop = "DO $$ DECLARE own text; BEGIN
        FOR own IN SELECT nspname FROM pg_namespace
            WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
        LOOP EXECUTE format('DROP SCHEMA %I CASCADE', own); END LOOP;
        END $$; CREATE SCHEMA public";
    server.sql("postgres", drop).await;
}

/// No connection but the one that asks.
pub(crate) const ALONE: &str =
    "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'client backend'";
