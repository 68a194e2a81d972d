//! Idempotency for Rust services: an operation has one effect and one outcome, however often it is
//! requested.
//!
//! A network loses replies. A client that receives none cannot know whether its request took effect,
//! so it retries, and a customer pays twice. With Hapax a client names the operation with an
//! *idempotency key*: the first request executes, a duplicate waits or is rejected while that one is
//! in flight, and a retry gets the stored outcome.
//!
//! ```no_run
//! use std::time::Duration;
//! use axum::{Router, routing::post};
//! use hapax::prelude::*;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let store = FileStore::open(FileOptions::new("orders.db"))?;
//!     let layer = IdempotencyLayer::builder(store).build()?;
//!     let app = Router::new().route("/orders", post(|| async { "ordered" })).layer(layer.clone());
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     let ending = layer.drain_on_signal(Duration::from_secs(25));
//!     axum::serve(listener, app).with_graceful_shutdown(ending).await?;
//!     Ok(())
//! }
//! ```
//!
//! # Tour
//!
//! 1. **HTTP.** [`IdempotencyLayer`] protects the routes of a tower, axum, tonic or hyper service. A
//!    caller is named by a header or by a function ([`http::server::ScopeSource`]); the header
//!    `Idempotency-Key` names the operation. See [`http::server`].
//! 2. **Functions.** [`Idempotency::at_most_once`] and [`Idempotency::at_least_once`] execute a
//!    function under a key. The name of the method states the guarantee for the case that an
//!    earlier call may have taken effect. [`Idempotency::function`] declares a function with its
//!    own policy and a reconcile hook.
//! 3. **Transactions.** If the operation writes to the database that has the records, both commit
//!    together: [`Idempotency::transact`], and in axum the extractors [`SqlxTx`] and
//!    [`http::axum::InTransaction`].
//! 4. **Sagas.** An operation of several steps, most of them calls to other systems, continues after a
//!    crash where it was, and undoes its steps if it fails: [`saga`].
//! 5. **Calls.** A client names its operations, keeps them in a journal, and sends each until it has an
//!    answer, whatever crashes: [`client`].
//! 6. **Stores.** [`FileStore`] is for one process, [`RedisStore`] and [`PostgresStore`] are for any
//!    number; [`tiered`] puts a cache in front. [`MemoryStore`] is for tests.
//! 7. **Unknown outcomes.** A process can crash between the effect and the record. [`OnUnknown`] says
//!    what a retry gets then; by default nothing executes until an operator decides. The API for
//!    operators is in [`operators`].
//! 8. **Manual.** [`manual`] has the defaults with their reasons, the failures with what follows, the
//!    limits, and how to choose a policy and a store.
//!
//! # Features
//!
//! None is on by default.
//!
//! | feature | brings |
//! |---|---|
//! | `http` | the tower layer |
//! | `axum` | `http`, extractors for axum, and the routes of sagas if there is `saga` |
//! | `function` | functions and transactions under a key |
//! | `keys` | UUIDs, ULIDs and keys of payloads |
//! | `file`, `redis`, `postgres`, `tiered` | stores |
//! | `sqlx` | `postgres` on sqlx pools, and sqlx transactions |
//! | `tls` | TLS by rustls for PostgreSQL and Redis |
//! | `postgres-data` | detection of duplicates in the service's own tables |
//! | `client` | a client whose operations survive crashes |
//! | `reqwest`, `reqwest-middleware`, `tower` | `client`, and requests of these libraries as its operations |
//! | `saga` | sagas: several steps under one key |
//! | `rehearsal` | `saga`, and rehearsals of sagas for tests |
//! | `operators` | the API to list and decide records and sagas |

#[cfg(feature = "client")]
pub use hapax_client as client;
pub use hapax_core::*;
#[cfg(feature = "file")]
pub use hapax_file as file;
#[cfg(feature = "file")]
pub use hapax_file::{FileOptions, FileStore};
#[cfg(feature = "http")]
pub use hapax_http as http;
#[cfg(feature = "http")]
pub use hapax_http::server::IdempotencyLayer;
#[cfg(feature = "messages")]
pub use hapax_messages as messages;
#[cfg(feature = "operators")]
pub use hapax_operators as operators;
#[cfg(feature = "postgres")]
pub use hapax_postgres as postgres;
#[cfg(feature = "sqlx")]
pub use hapax_postgres::SqlxTransactions;
#[cfg(feature = "postgres")]
pub use hapax_postgres::{PostgresOptions, PostgresStore};
#[cfg(any(feature = "postgres-data", feature = "postgres-messages"))]
pub use hapax_postgres_data as postgres_data;
#[cfg(feature = "postgres-messages")]
pub use hapax_postgres_messages as postgres_messages;
#[cfg(feature = "redis")]
pub use hapax_redis as redis;
#[cfg(feature = "redis")]
pub use hapax_redis::{RedisOptions, RedisStore};
#[cfg(feature = "saga")]
pub use hapax_saga as saga;
#[cfg(feature = "tiered")]
pub use hapax_tiered as tiered;

#[cfg(all(feature = "axum", feature = "sqlx"))]
mod sqlx_tx;
#[cfg(all(feature = "axum", feature = "sqlx"))]
pub use sqlx_tx::SqlxTx;

pub mod prelude {
    //! The names of a common program: `use hapax::prelude::*`.

    #[cfg(all(feature = "axum", feature = "sqlx"))]
    pub use crate::SqlxTx;
    pub use hapax_core::{Idempotency, Key, MemoryStore, NaturalKey, OnUnknown, Policy, Scope};
    #[cfg(feature = "file")]
    pub use hapax_file::{FileOptions, FileStore};
    #[cfg(feature = "axum")]
    pub use hapax_http::axum::{HandlerError, InTransaction};
    #[cfg(feature = "http")]
    pub use hapax_http::server::{IdempotencyLayer, MissingScope, ScopeSource};
    #[cfg(feature = "sqlx")]
    pub use hapax_postgres::SqlxTransactions;
    #[cfg(feature = "postgres")]
    pub use hapax_postgres::{PostgresOptions, PostgresStore};
    #[cfg(feature = "redis")]
    pub use hapax_redis::{RedisOptions, RedisStore};
    #[cfg(feature = "saga")]
    pub use hapax_saga::{Saga, Sagas};
}

#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../../README.md")]
    mod readme {}
    #[doc = include_str!("../../../../docs/client.md")]
    mod client {}
    #[doc = include_str!("../../../../docs/rust.md")]
    mod rust {}
    #[doc = include_str!("../../../../docs/sagas.md")]
    mod sagas {}
}
