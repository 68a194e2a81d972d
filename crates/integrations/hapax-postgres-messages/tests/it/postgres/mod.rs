//! Each test has its own server.

mod attempts;
mod batch;
mod bounds;
mod log;
mod namespaces;
mod operators;
mod positions;
mod redriven;
mod relay;
mod relays;
mod retention;
mod schemas;
mod sequences;
mod settings;
mod shared;
mod sql;
mod standbys;
mod timeouts;

use deadpool_postgres::{Manager, Object, Pool};
use hapax_postgres_data::Pooled;
use hapax_postgres_messages::Connections;
use hapax_testkit::faults::FaultProxy;
use hapax_testkit::servers::PostgresServer;
use tokio_postgres::Config;

/// Starts a server with the tables in the database `postgres`.
async fn server() -> PostgresServer {
    let server = PostgresServer::start().await;
    server.sql("postgres", &hapax_postgres_messages::message_migrations(&Default::default())).await;
    server
}

fn pool(server: &PostgresServer) -> Pool {
    let config = server.url("postgres").parse().unwrap();
    let manager = Manager::new(config, tokio_postgres::NoTls);
    Pool::builder(manager).max_size(8).build().unwrap()
}

/// Returns a pool whose connections pass through a proxy.
fn pool_through(proxy: &FaultProxy, server: &PostgresServer) -> Pool {
    let direct: Config = server.url("postgres").parse().unwrap();
    let mut config = Config::new();
    config.host("127.0.0.1").port(proxy.address().port());
    config.user(direct.get_user().unwrap()).dbname("postgres");
    let manager = Manager::new(config, tokio_postgres::NoTls);
    Pool::builder(manager).max_size(8).build().unwrap()
}

fn connections(server: &PostgresServer) -> Connections<Pooled<Object>> {
    connections_of(pool(server))
}

fn connections_of(pool: Pool) -> Connections<Pooled<Object>> {
    Connections::new(move || {
        let pool = pool.clone();
        async move { pool.get().await.map(|object| Pooled::new(object, |object| object)) }
    })
}
