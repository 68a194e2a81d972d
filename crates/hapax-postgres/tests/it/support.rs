//! What the tests write and read.

use hapax_postgres::Options;
use hapax_testkit::servers::PostgresServer;

pub(crate) fn at(server: &PostgresServer) -> Options {
    server.url("postgres").parse().unwrap()
}
