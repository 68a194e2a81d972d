//! Reconciliation without a retry, of an operation whose record alone is known.

use std::time::Duration;

use hapax_core::{AdoptedRequest, Claim, ClaimError, Key, OperationId};
use http::request::Parts;

use super::layer::IdempotencyLayer;
use super::observe::RequestEvent;
use super::policy::RoutePolicy;
use super::protect::ask;

/// Result of a reconciliation without a retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reconciled {
    /// The operation happened, and retries get the response.
    Happened,
    /// The operation did not happen: the key is released, and the next request executes.
    DidNotHappen,
    /// The hook could not say: the outcome stays unknown.
    CannotSay,
    /// The hook may be called later: the first request may still be on its way, or another process calls the hook.
    NotYet {
        /// The time until then.
        retry_in: Duration,
    },
    /// An execution is in progress.
    InFlight,
    /// An operator has to decide: the record or the route has no hook.
    Blocked,
    /// There is nothing to decide: the record is done, was released, or has expired.
    Decided,
}

impl IdempotencyLayer {
    /// Calls the hook of a route about the operation of an undecided record, as a retry would, and not before its
    /// time. `request` stands for the head of the retry: its headers are those that the hook gets.
    ///
    /// If the operation did not happen, the claim that a retry would execute is withdrawn. It is as safe to drop as
    /// [`Idempotency::claim`](hapax_core::Idempotency::claim): a claim that is not withdrawn lapses, and is reconciled
    /// again under its own fence, under which nothing was sent.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing was executed.
    pub async fn reconcile(
        &self,
        policy: &RoutePolicy,
        id: OperationId,
        key: &Key,
        request: &Parts,
    ) -> Result<Reconciled, ClaimError> {
        let engine = self.engine();
        let seen = engine.load(&id).await?;
        let Some(stored) = &seen.stored else { return Ok(Reconciled::Decided) };
        if !stored.record.scheme.of_request().starts_with("http/") {
            return Ok(Reconciled::Blocked);
        }
        let options = &policy.options;
        let adopted = AdoptedRequest::new(&stored.record, Some(options.name.clone()));
        let claim = match engine.adopt_undecided(id, seen, &adopted, &options.policy).await {
            Ok(Claim::Reconcile(question)) => {
                self.observe(policy, RequestEvent::ReconcileStarted);
                match Box::pin(ask(policy, key, request, question, &adopted)).await {
                    Ok(claim) => return Ok(concluded(id, claim).await),
                    Err(ClaimError::NotFound) => return Ok(Reconciled::Decided),
                    Err(error) => return Err(error),
                }
            }
            Ok(claim) => claim,
            Err(ClaimError::NotFound) => return Ok(Reconciled::Decided),
            Err(error) => return Err(error),
        };
        Ok(match claim {
            Claim::Unknown { reconcile_in: Some(retry_in) } => Reconciled::NotYet { retry_in },
            Claim::Unknown { reconcile_in: None } => Reconciled::Blocked,
            Claim::InFlight { .. } => Reconciled::InFlight,
            Claim::Replay(_) | Claim::Mismatch => Reconciled::Decided,
            claim @ (Claim::Execute(_) | Claim::Reconcile(_)) => concluded(id, claim).await,
        })
    }
}

/// Returns the result of a verdict. A claim that may execute has no request to execute, and is withdrawn.
async fn concluded(id: OperationId, claim: Claim) -> Reconciled {
    match claim {
        Claim::Execute(lease) => {
            let fence = lease.fence();
            match lease.withdraw().await {
                Ok(()) => tracing::info!(%id, %fence, "the reconcile hook released a key"),
                Err(error) => tracing::warn!(
                    %id, %fence, %error,
                    "the claim of a reconciliation could not be withdrawn: it lapses and is reconciled again"
                ),
            }
            Reconciled::DidNotHappen
        }
        Claim::Replay(_) => Reconciled::Happened,
        Claim::InFlight { .. } => Reconciled::InFlight,
        // The record has changed since the hook was called, or the hook could not say.
        Claim::Unknown { .. } | Claim::Reconcile(_) | Claim::Mismatch => Reconciled::CannotSay,
    }
}
