//! Stores of the tests, and the steps that they share.

use std::sync::Arc;

use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;

pub(crate) use hapax_testkit::steps::{
    SameRequest, claim, claim_key, complete, expect_stored, key, load, named, own, policy, write_id,
};

pub(crate) fn at(server: &PostgresServer) -> PostgresOptions {
    server.url("postgres").parse().unwrap()
}

/// By way of a proxy on `port`.
pub(crate) fn by(port: u16) -> PostgresOptions {
    format!("postgres://postgres@127.0.0.1:{port}/postgres").parse().unwrap()
}

pub(crate) async fn connect(server: &PostgresServer) -> Arc<PostgresStore> {
    Arc::new(PostgresStore::connect(at(server)).await.unwrap())
}

/// Connects with a time-out that may be too short for that on a busy machine: a test needs it later.
pub(crate) async fn connect_within(options: PostgresOptions) -> PostgresStore {
    loop {
        match PostgresStore::connect(options.clone()).await {
            Ok(store) => return store,
            Err(error) => assert!(error.is_unreachable(), "{error}"),
        }
    }
}

/// Returns the numbers of scans of a table, and of its indexes, by sessions that have ended.
pub(crate) async fn scans(server: &PostgresServer, table: &str) -> (u32, u32) {
    let left = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'
        AND pid <> pg_backend_pid()";
    // Backends report their scans when they end.
    while server.sql("postgres", left).await != "0" {}
    let text =
        format!("SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = '{table}'");
    let found = server.sql("postgres", &text).await;
    let (table, indexes) = found.split_once('|').unwrap();
    (table.parse().unwrap(), indexes.parse().unwrap())
}
