//! Requests, and their durations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Swap, Swapped};
use hapax_core::{
    Fingerprint, FingerprintScheme, LeaseId, OnUnknown, OperationId, Outcome as Answer, Record,
    RecordState, Store, Terms, WriteId,
};
use hapax_testkit::SeededEntropy;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::Outcome;

/// Size of a stored outcome, in bytes.
const ANSWER: usize = 300;

/// A claim and its completion.
pub(crate) struct Request {
    pub(crate) claim: Swap,
    pub(crate) complete: Swap,
}

/// Executes requests with keys that were never used.
pub(crate) struct Requests {
    entropy: SeededEntropy,
    terms: Terms,
}

impl Requests {
    pub(crate) fn new(seed: u64, retention: Duration) -> Self {
        // A short lease, so that records are reaped soon after their retention.
        let lease = Duration::from_secs(5).min(retention);
        let terms = Terms { lease, retention, on_unknown: OnUnknown::Reexecute };
        Self { entropy: SeededEntropy::new(seed), terms }
    }

    pub(crate) fn next(&self) -> Outcome<Request> {
        let mut key = [0; 32];
        hapax_core::Entropy::fill(&self.entropy, &mut key)?;
        let key = OperationId::from_bytes(key);
        let lease_id = LeaseId::fresh(&self.entropy)?;
        let record = Record {
            scheme: FingerprintScheme::new("measure/1")?,
            fingerprint: Fingerprint::from_bytes([7; 32]),
            lease_id,
            generation: lease_id,
            attempt: 1,
            terms: self.terms,
            checkpoint: None,
            notes: hapax_core::Notes::default(),
            extensions: hapax_core::Extensions::default(),
            state: RecordState::InFlight,
        };
        let keep = Some(self.terms.retention);
        let state = RecordState::Done(Answer::new("http/1", vec![b'x'; ANSWER]));
        let done = Record { state, ..record.clone() };
        let (first, second) = (WriteId::fresh(&self.entropy)?, WriteId::fresh(&self.entropy)?);
        let draft = Draft { record, stamp: Stamp::NextFence, lease: self.terms.lease, keep };
        let claim = Swap { id: key, expected: None, write_id: first, draft };
        let draft = Draft { record: done, stamp: Stamp::Keep, lease: Duration::ZERO, keep };
        let complete = Swap { id: key, expected: Some(first), write_id: second, draft };
        Ok(Request { claim, complete })
    }
}

/// Executes a request, and returns the duration of the claim.
pub(crate) trait Server: Send + Sync + 'static {
    fn serve(&self, request: Request) -> impl Future<Output = Outcome<Duration>> + Send;
}

pub(crate) struct OfStore<S>(pub(crate) Arc<S>);

impl<S: Store> Server for OfStore<S> {
    async fn serve(&self, request: Request) -> Outcome<Duration> {
        let Request { claim, complete } = request;
        let before = Instant::now();
        stored(self.0.swap(claim).await?)?;
        let took = before.elapsed();
        stored(self.0.swap(complete).await?)?;
        Ok(took)
    }
}

fn stored(swapped: Swapped) -> Outcome<()> {
    match swapped {
        Swapped::Stored(_) => Ok(()),
        Swapped::Conflict(seen) => Err(format!("a conflict on a new key: {seen:?}").into()),
    }
}

/// The result of a run.
pub(crate) struct Measured {
    pub(crate) requests: u64,
    pub(crate) took: Duration,
    claims: Vec<Duration>,
}

impl Measured {
    pub(crate) fn rate(&self) -> f64 {
        self.requests as f64 / self.took.as_secs_f64()
    }

    /// Returns the duration that the share `of` of claims did not exceed.
    pub(crate) fn claim(&mut self, of: f64) -> Duration {
        self.claims.sort_unstable();
        let at = (self.claims.len() as f64 * of) as usize;
        self.claims.get(at.min(self.claims.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

/// The end of a run.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    Seconds(u64),
    Requests(u64),
}

/// Runs `callers` concurrently, each with one request after the other.
pub(crate) async fn drive<S: Server>(
    server: Arc<S>,
    callers: u64,
    seed: u64,
    retention: Duration,
    until: Until,
) -> Outcome<Measured> {
    let done = Arc::new(AtomicU64::new(0));
    let begun = Instant::now();
    let mut running = JoinSet::new();
    for caller in 0..callers {
        let (server, done) = (Arc::clone(&server), Arc::clone(&done));
        let requests = Requests::new(seed << 16 | caller, retention);
        running.spawn(async move {
            let mut claims = Vec::new();
            while match until {
                Until::Seconds(seconds) => begun.elapsed() < Duration::from_secs(seconds),
                Until::Requests(count) => done.load(Ordering::Relaxed) < count,
            } {
                claims.push(server.serve(requests.next()?).await?);
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(claims)
        });
    }
    let mut claims = Vec::new();
    while let Some(ended) = running.join_next().await {
        claims.extend(ended??);
    }
    Ok(Measured { requests: claims.len() as u64, took: begun.elapsed(), claims })
}
