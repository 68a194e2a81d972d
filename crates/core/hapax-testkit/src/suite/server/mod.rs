//! Rules of stores on a server, as one test for each: the server freezes, crashes and returns, the
//! network loses messages, and secrets change.
//!
//! A store's crate implements [`ServerFixture`] and calls `server_suite!(Fixture)`.

mod faults;
mod histories;
mod schedule;
mod secrets;

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use hapax_core::{KeyRing, Store};
use tokio::time::timeout;

use super::StoreFixture;
use crate::steps::key;

pub use faults::*;
pub use histories::*;
pub use schedule::*;
pub use secrets::*;

/// Timeout of what a server or the engine must do; longer than a busy machine needs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A private server, and the store that uses it.
pub trait ServerFixture: Sized + Send + Sync + 'static {
    /// The store.
    type Store: Store;
    /// Stores for the rules of every store, on one server.
    type Stores: StoreFixture<Store = Self::Store>;

    /// The share of messages of each kind that a network loses in histories, in thousandths.
    const LOSS: u32;
    /// The least number of swaps that a history must store in spite of its faults.
    const STORED: u64;

    /// Starts a server whose acknowledged writes survive [`kill`](Self::kill).
    fn start() -> impl Future<Output = Self> + Send;

    /// Returns the address on which it listens. Rules put proxies in front of it.
    fn address(&self) -> SocketAddr;

    /// Returns stores that reach the server through `port`, each separate from the others.
    fn stores(&self, port: u16) -> Self::Stores;

    /// Opens a store.
    ///
    /// # Errors
    /// If the server cannot be reached: another attempt may succeed.
    fn connect(
        &self,
        connection: StoreConnection,
    ) -> impl Future<Output = Result<Self::Store, String>> + Send;

    /// Freezes the server: connections stay open without a reply.
    fn pause(&self);

    /// Lets a frozen server continue.
    fn resume(&self);

    /// Kills the server; its files stay.
    fn kill(&mut self) -> impl Future<Output = ()> + Send;

    /// Starts the server again on its files.
    fn restart(&mut self) -> impl Future<Output = ()> + Send;
}

/// Options with which a rule opens a store.
#[derive(Clone, Debug)]
pub struct StoreConnection {
    /// The port on 127.0.0.1: the server's, or a proxy's.
    pub port: u16,
    /// The timeout of the store; `None` for its default.
    pub timeout: Option<Duration>,
    /// The secrets; `None` for none.
    pub secrets: Option<KeyRing>,
}

impl StoreConnection {
    /// Returns a connection through `port` without further options.
    #[must_use]
    pub const fn through(port: u16) -> Self {
        Self { port, timeout: None, secrets: None }
    }

    fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    fn secrets(self, secrets: KeyRing) -> Self {
        Self { secrets: Some(secrets), ..self }
    }
}

/// Opens a store directly.
async fn open<F: ServerFixture>(server: &F) -> F::Store {
    open_by(server, StoreConnection::through(server.address().port())).await
}

/// Opens a store. Its timeout may be too short for that on a busy machine, so it is tried again.
async fn open_by<F: ServerFixture>(server: &F, connection: StoreConnection) -> F::Store {
    let attempts = async {
        loop {
            if let Ok(store) = server.connect(connection.clone()).await {
                return store;
            }
        }
    };
    timeout(TIMEOUT, attempts).await.expect("the server can be reached")
}

/// Waits until the store answers again.
async fn answers_again(store: &dyn Store) {
    let answered = async { while store.load(&key(0)).await.is_err() {} };
    timeout(TIMEOUT, answered).await.expect("the server is back");
}

macro_rules! server_rules {
    ($($rule:ident)*) => { server_rules!(@export ($) $($rule)*); };
    (@export ($d:tt) $($rule:ident)*) => {
        /// Makes a `#[tokio::test]` of each rule of stores on a server; takes the type of the
        /// [`ServerFixture`]($crate::suite::server::ServerFixture).
        #[macro_export]
        macro_rules! server_suite {
            ($d fixture:ty) => {
                $(
                    #[::tokio::test(flavor = "multi_thread", worker_threads = 4)]
                    async fn $rule() {
                        $d crate::suite::server::$rule::<$d fixture>().await;
                    }
                )*
            };
        }
    };
}

server_rules! {
    the_rules_hold_over_a_network_that_loses_replies
    claims_dropped_during_a_freeze_block_no_key
    a_frozen_server_is_reported_in_time_and_found_again
    a_connection_without_a_working_network_is_replaced
    a_swap_without_a_server_is_unavailable
    acknowledged_completions_survive_kills
    a_deferred_outcome_is_written_when_the_server_returns
    histories_over_a_network_that_loses_and_delays
    histories_on_a_server_that_freezes
    histories_on_a_server_that_is_killed
    histories_detect_a_store_that_reports_ambiguous_swaps_as_unavailable
    a_retry_is_replayed_after_the_secret_was_replaced
    secrets_change_without_losing_records
    a_store_that_began_without_a_secret_is_sealed_in_steps
}
