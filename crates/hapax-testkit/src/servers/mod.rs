//! Private servers for tests: on a free port of 127.0.0.1, in a folder of their own, gone when
//! they are dropped. Nothing of what runs on the machine already is touched.
//!
//! A server that is not installed is an error that says how to get it, never a skipped test.

mod postgres;
mod process;
mod redis;

use std::io;

pub use postgres::PostgresServer;
pub use process::Signal;
pub use redis::RedisServer;

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Its program is not there.
    #[error("{program} is not installed: run `cargo xtask setup`")]
    Missing {
        /// The program.
        program: &'static str,
    },
    /// A program ended with an error.
    #[error("{program} failed: {output}")]
    Failed {
        /// The program.
        program: &'static str,
        /// What it wrote.
        output: String,
    },
    /// It does not answer in time.
    #[error("{program} did not answer within a minute: {log}")]
    Silent {
        /// The program.
        program: &'static str,
        /// The end of its log.
        log: String,
    },
    /// The operating system refuses something.
    #[error(transparent)]
    Io(#[from] io::Error),
}
