//! Functions over the store, in one process and in two.

use std::sync::Arc;

use hapax_core::Idempotency;
use hapax_postgres::PostgresStore;
use hapax_testkit::functions::{self, ProcessRole};
use hapax_testkit::servers::PostgresServer;

use super::support::connect;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn functions_have_their_guarantees() {
    let server = PostgresServer::start().await;
    let engines = [connect(&server).await, connect(&server).await];
    functions::rules(
        &engines.map(|store| Idempotency::builder(store).namespace("").build().unwrap()),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn functions_have_their_guarantees_in_two_processes() {
    if let Some(part) = ProcessRole::of_this_process() {
        let store = PostgresStore::connect(part.store().parse().unwrap()).await.unwrap();
        return part
            .play(Idempotency::builder(Arc::new(store)).namespace("").build().unwrap())
            .await;
    }
    let server = PostgresServer::start().await;
    let engine = Idempotency::builder(connect(&server).await).namespace("").build().unwrap();
    let test = "postgres::functions::functions_have_their_guarantees_in_two_processes";
    functions::two_processes(test, &server.url("postgres"), &engine).await;
}
