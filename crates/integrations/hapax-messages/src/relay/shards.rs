//! The shards that a relay has, by leases of the engine.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{
    Claim, ClaimError, Fingerprint, FingerprintScheme, Idempotency, Key, Lease, LeaseHandle,
    NaturalKey, OnUnknown, OperationRequest, Policy, Scope, Terms,
};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::WARN_EVERY;
use crate::handler::describe;

/// The leases of the shards of one outbox.
#[derive(Debug)]
pub(super) struct Shards {
    scope: Scope,
    engine: Idempotency,
    policy: Policy,
    held: Mutex<HashMap<u16, LeaseHandle>>,
    warned_at: Mutex<Option<Instant>>,
}

/// A claim of a shard, which all relays make alike.
struct ShardRequest;

impl OperationRequest for ShardRequest {
    #[allow(clippy::unreachable, reason = "the name is far shorter than the limit")]
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("relay/1").unwrap_or_else(|_| unreachable!("the name is short"))
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (scheme.as_str() == "relay/1").then(|| Fingerprint::builder("hapax 1 relay").finish())
    }
}

impl Shards {
    pub(super) fn new(name: &str, engine: Idempotency, lease: Duration) -> Self {
        let retention = Duration::from_secs(24 * 60 * 60).max(lease);
        // A relay that died has at most repeated messages.
        let terms = Terms { lease, retention, on_unknown: OnUnknown::Reexecute };
        let policy = Policy { terms, ..Policy::default() };
        Self {
            scope: Scope::of([("outbox", name)]),
            engine,
            policy,
            held: Mutex::default(),
            warned_at: Mutex::default(),
        }
    }

    /// Returns the shards that this relay has; none in a quarantine.
    pub(super) fn owned(&self) -> HashSet<u16> {
        if self.engine.quarantines().pauses() {
            return HashSet::new();
        }
        self.lock()
            .iter()
            .filter(|(_, lease)| !lease.remaining().is_zero())
            .map(|(shard, _)| *shard)
            .collect()
    }

    /// Returns whether this relay still has the lease of `shard`, by its own clock, and no quarantine has begun.
    pub(super) fn is_held(&self, shard: u16) -> bool {
        let is_held = self.lock().get(&shard).is_some_and(|lease| !lease.remaining().is_zero());
        is_held && !self.engine.quarantines().pauses()
    }

    /// Claims a shard until `stop`, again after it was lost.
    pub(super) async fn hold(self: Arc<Self>, shard: u16, mut stop: watch::Receiver<bool>) {
        let key = NaturalKey::new("shard").part("shard", i64::from(shard)).key();
        loop {
            let claimed = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return,
                claimed = self.claim(&key) => claimed,
            };
            if let Some(lease) = claimed {
                let is_stopped = self.keep(shard, &lease, &mut stop).await;
                self.lock().remove(&shard);
                if is_stopped {
                    // If that fails, the lease lapses.
                    let _ = lease.release().await;
                    return;
                }
            }
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                () = sleep(self.policy.terms.lease / 5) => {}
            }
        }
    }

    async fn claim(&self, key: &Key) -> Option<Lease> {
        match self.engine.claim(&self.scope, key, &ShardRequest, &self.policy).await {
            Ok(Claim::Execute(lease)) => Some(lease),
            Ok(_) => None,
            Err(error) => {
                self.warn(&error);
                None
            }
        }
    }

    /// Logs that a claim failed: one line for all shards.
    fn warn(&self, error: &ClaimError) {
        let now = Instant::now();
        let mut warned_at = self.warned_at.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_at.is_none_or(|at| now >= at + WARN_EVERY) {
            *warned_at = Some(now);
            let owned = self.owned().len();
            tracing::warn!(error = %describe(error), owned, "shards of the outbox cannot be claimed");
        }
    }

    /// Keeps a lease until it is lost, or `stop`. Returns whether it was stopped.
    async fn keep(&self, shard: u16, lease: &Lease, stop: &mut watch::Receiver<bool>) -> bool {
        let handle = lease.handle();
        self.lock().insert(shard, handle.clone());
        let until = async {
            tokio::select! {
                () = handle.lost() => false,
                _ = stop.wait_for(|stop| *stop) => true,
            }
        };
        lease.keep_alive(until).await
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u16, LeaseHandle>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
