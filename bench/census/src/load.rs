//! Claims: many at once to fill a store, and at a steady pace to be measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Idempotency, Key, Lease, OperationId, OperationRequest,
    Outcome, Policy, Scope,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::Failure;

/// Requests at one time while a store is filled.
const FILLERS: u64 = 512;
/// Clients that are measured, and the time between two requests of one client.
const CLIENTS: u32 = 4;
const PACE: Duration = Duration::from_millis(40);
/// Bytes of an answer.
const ANSWER: usize = 300;
/// First bytes of the ids of the undecided records: the places where a walk in order finds them.
const SPREAD: [u8; 3] = [0x20, 0x80, 0xf0];

/// A request as records describe it.
struct Asked<'a> {
    key: &'a str,
    scheme: FingerprintScheme,
}

impl OperationRequest for Asked<'_> {
    fn scheme(&self) -> FingerprintScheme {
        self.scheme.clone()
    }

    fn fingerprint(&self, _: &FingerprintScheme) -> Option<Fingerprint> {
        Some(Fingerprint::from_bytes([9; 32]))
    }

    fn description(&self) -> Option<Bytes> {
        let rest = r#""method":"POST","target":"/payments","caller":[{"header":"authorization","hash":"2b1c7d90"}]"#;
        Some(format!(r#"{{"key":"{}",{rest}}}"#, self.key).into())
    }
}

/// Claims a new key.
async fn claim(engine: &Idempotency, key: &str) -> Result<Lease, Failure> {
    let request = Asked { key, scheme: FingerprintScheme::new("http/1")? };
    match engine.claim(&Scope::shared(), &Key::new(key)?, &request, &Policy::default()).await? {
        Claim::Execute(lease) => Ok(lease),
        other => Err(format!("expected a claim of the new key {key}, found {other:?}").into()),
    }
}

/// Claims a new key and completes it.
async fn execute(engine: &Idempotency, key: &str) -> Result<(), Failure> {
    let lease = claim(engine, key).await?;
    lease.complete(Outcome::new("http/1", vec![b'x'; ANSWER]), None).await?;
    Ok(())
}

/// Fills the store of `engine`. Returns the ids of the records that are left undecided, in order.
pub async fn fill(
    name: &str,
    engine: &Idempotency,
    records: u64,
) -> Result<Vec<OperationId>, Failure> {
    let mut undecided = Vec::new();
    for first in SPREAD {
        let named = |number: u32| {
            let key = format!("undecided-{number}");
            let id = engine.operation_id(&Scope::shared(), &Key::new(&key).ok()?);
            (id.as_bytes()[0] == first).then_some((key, id))
        };
        let (key, id) = (0..).find_map(named).ok_or("no key has such an id")?;
        claim(engine, &key).await?.abandon(None).await?;
        undecided.push(id);
    }
    let finished = records.saturating_sub(undecided.len() as u64);
    let (next, begun) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let mut fillers = JoinSet::new();
    for _ in 0..FILLERS {
        let (name, engine, next) = (name.to_owned(), engine.clone(), Arc::clone(&next));
        fillers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= finished {
                    return Ok::<_, Failure>(());
                }
                execute(&engine, &format!("fill-{number}")).await?;
                if number % (finished / 10).max(1) == 0 {
                    let seconds = begun.elapsed().as_secs();
                    eprintln!("{name}: {number} of {finished} records after {seconds} s");
                }
            }
        });
    }
    while let Some(filled) = fillers.join_next().await {
        filled??;
    }
    Ok(undecided)
}

/// Clients that claim and complete new keys at a steady pace.
pub struct Load {
    ended: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Result<Vec<Duration>, Failure>>>,
}

impl Load {
    pub fn start(engine: &Idempotency) -> Self {
        static PHASES: AtomicU64 = AtomicU64::new(0);
        let phase = PHASES.fetch_add(1, Ordering::Relaxed);
        let ended = Arc::new(AtomicBool::new(false));
        let begun = Instant::now();
        let clients = (0..CLIENTS).map(|client| {
            let (engine, ended, runtime) = (engine.clone(), Arc::clone(&ended), Handle::current());
            let due = begun + PACE * client / CLIENTS;
            let keys = format!("client-{phase}-{client}");
            thread::spawn(move || requests(&engine, &runtime, &keys, due, &ended))
        });
        Self { clients: clients.collect(), ended }
    }

    /// Stops. Returns how long the requests took, sorted.
    pub async fn stop(self) -> Result<Vec<Duration>, Failure> {
        self.ended.store(true, Ordering::Relaxed);
        let joined = tokio::task::spawn_blocking(move || {
            let mut took = Vec::new();
            for client in self.clients {
                took.extend(client.join().map_err(|_| "a client failed")??);
            }
            took.sort_unstable();
            Ok(took)
        });
        joined.await?
    }
}

/// An open loop: a request that is late does not make the next one later. Like those of connections,
/// requests come from outside of the runtime and are carried out on its threads.
fn requests(
    engine: &Idempotency,
    runtime: &Handle,
    keys: &str,
    mut due: Instant,
    ended: &AtomicBool,
) -> Result<Vec<Duration>, Failure> {
    let mut took = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        due += PACE;
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let (engine, key) = (engine.clone(), format!("{keys}-{}", took.len()));
        let request = runtime.spawn(async move {
            execute(&engine, &key).await?;
            Ok::<_, Failure>(Instant::now())
        });
        let done = runtime.block_on(request)??;
        took.push(done - due);
    }
    Ok(took)
}

/// Returns the latency below which `part` of the sorted `took` are, in milliseconds.
pub fn quantile(took: &[Duration], part: f64) -> f64 {
    let at = (took.len().saturating_sub(1) as f64 * part) as usize;
    took.get(at).map_or(f64::NAN, |took| took.as_secs_f64() * 1e3)
}
