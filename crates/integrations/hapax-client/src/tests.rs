//! Tests with a paused clock, which sockets do not follow: the server is a double.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failure here is a failed test"
)]

mod damage;
mod outage;
mod resuming;
mod store;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use hapax_proxy::UpstreamError;
use http::Request;
use http_body_util::Full;
use tokio::time::sleep;

use self::store::CountedStore;
use crate::{Client, ClientBuilder, Journal, Server};

/// The behaviour of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// Answers at once, with 200.
    Answers,
    /// Takes no connection.
    Away,
    /// Takes the request, and is silent until the client gives up.
    Silent,
    /// Takes the request, and sends bytes so slowly that the client gives up after the time for a try.
    Slow,
}

/// A server in memory.
#[derive(Clone, Debug)]
pub(crate) struct Double(Arc<DoubleState>);

#[derive(Debug)]
struct DoubleState {
    origin: String,
    mode: Mutex<Mode>,
    /// Requests that arrived.
    tries: AtomicU64,
    /// Keys of those that arrived.
    keys: Mutex<HashSet<Vec<u8>>>,
    answered: AtomicU64,
}

/// Time for which a client lets a server be silent.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

impl Double {
    fn new(origin: &str, mode: Mode) -> Self {
        let (tries, keys, answered) = (AtomicU64::new(0), Mutex::default(), AtomicU64::new(0));
        let (origin, mode) = (origin.to_owned(), Mutex::new(mode));
        Self(Arc::new(DoubleState { origin, mode, tries, keys, answered }))
    }

    fn set(&self, mode: Mode) {
        *self.0.mode.lock().unwrap() = mode;
    }

    fn tries(&self) -> u64 {
        self.0.tries.load(Ordering::Relaxed)
    }

    /// Returns the tries that were not the first one of their operation.
    fn retries(&self) -> u64 {
        self.tries() - self.0.keys.lock().unwrap().len() as u64
    }

    fn answered(&self) -> u64 {
        self.0.answered.load(Ordering::Relaxed)
    }

    pub(crate) async fn answer(
        &self,
        request: &Request<Full<Bytes>>,
    ) -> Result<Bytes, UpstreamError> {
        self.0.tries.fetch_add(1, Ordering::Relaxed);
        let key = request.headers()["idempotency-key"].as_bytes().to_vec();
        self.0.keys.lock().unwrap().insert(key);
        let mode = *self.0.mode.lock().unwrap();
        match mode {
            Mode::Answers => {
                sleep(Duration::from_millis(1)).await;
                self.0.answered.fetch_add(1, Ordering::Relaxed);
                Ok(Bytes::from_static(b"done"))
            }
            Mode::Away => Err(UpstreamError::Busy),
            Mode::Silent => {
                sleep(IDLE_TIMEOUT).await;
                Err(UpstreamError::Timeout)
            }
            Mode::Slow => std::future::pending().await,
        }
    }
}

/// Opens a client of these servers.
async fn open(store: &Arc<CountedStore>, doubles: &[&Double]) -> Client {
    let mut client: ClientBuilder =
        Client::open(Journal::over(Arc::clone(store)).unwrap()).clock(store.clock());
    for double in doubles {
        client = client.server(&*double.0.origin, Server::plain());
        let name = crate::request::server_name(&double.0.origin.parse().unwrap()).unwrap();
        client.doubles.insert(name, (*double).clone());
    }
    client.build().await.unwrap()
}

/// Sends operations at a server, each on a task of its own, which waits for nothing.
fn send(client: &Client, double: &Double, name: String) {
    let post = client.post(format!("{}/", double.0.origin)).operation(name).send();
    tokio::spawn(post);
}
