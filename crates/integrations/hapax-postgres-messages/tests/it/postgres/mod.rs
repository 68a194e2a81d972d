//! Each test has its own server.

mod attempts;
mod batch;
mod log;
mod operators;
mod positions;
mod relay;
mod relays;
mod retention;
mod sequences;
mod shared;
mod sql;
mod standbys;
mod timeouts;

use deadpool_postgres::{Manager, Object, Pool};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::Connections;
use hapax_testkit::servers::PostgresServer;

/// Starts a server with the tables in the database `postgres`.
async fn server() -> PostgresServer {
    let server = PostgresServer::start().await;
    server.sql("postgres", hapax_postgres_messages::message_migrations()).await;
    server
}

fn pool(server: &PostgresServer) -> Pool {
    let config = server.url("postgres").parse().unwrap();
    let manager = Manager::new(config, tokio_postgres::NoTls);
    Pool::builder(manager).max_size(8).build().unwrap()
}

fn connections(server: &PostgresServer) -> Connections<Pooled<Object>> {
    let pool = pool(server);
    Connections::new(move || {
        let pool = pool.clone();
        async move { pool.get().await.map(|object| Pooled::new(object, |object| object)) }
    })
}
