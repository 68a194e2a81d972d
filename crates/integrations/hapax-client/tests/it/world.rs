//! Clients of the tests.

use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, ClientBuilder, Journal, Server};
use hapax_core::{MemoryStore, Secret};

use crate::bank::Bank;

/// Time within which everything happens on a slow machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn secret() -> Secret {
    Secret::new([7; 32])
}

pub(crate) fn store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::default().secret(secret()))
}

pub(crate) fn journal() -> Journal {
    Journal::over(store()).unwrap()
}

pub(crate) fn open(bank: &Bank, server: Server) -> ClientBuilder {
    Client::open(journal()).server(bank.origin(), server)
}

/// A client of one server over a journal in memory.
pub(crate) async fn client(bank: &Bank, server: Server) -> Client {
    open(bank, server).build().await.unwrap()
}

/// Runs a process: a runtime of its own, whose tasks end where they are once `until` resolves.
pub(crate) fn process<F: Future<Output = ()>>(until: impl FnOnce() -> F + Send) {
    std::thread::scope(|threads| {
        let run = || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(until());
            runtime.shutdown_background();
        };
        threads.spawn(run).join().unwrap();
    });
}
