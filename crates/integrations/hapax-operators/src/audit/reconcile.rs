//! The audit lines of a reconcile request of an operator, about which a service decides.

use std::sync::Arc;

use bytes::Bytes;
use hapax_core::{
    ClaimError, Clock, Entropy, OperationId, Reconciled, StoreError, SystemClock, SystemEntropy,
};
use serde::Serialize;

use super::{Audit, Decider, DecisionChannel, DecisionNote, cut};
use crate::keys::rfc3339;
use crate::{OperatorError, OperatorVerdict};

/// The reason that a released record shows.
const DENIED: &str = "the reconcile URL answered that it did not happen";

#[derive(Serialize)]
struct Line<'a> {
    at: String,
    stage: &'static str,
    decision: &'a str,
    who: &'a str,
    role: &'static str,
    by: DecisionChannel,
    from: &'a str,
    id: String,
    fence: u64,
    reconcile: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'static str>,
    gateway: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// A reconcile request of an operator about one execution.
#[derive(Clone, Debug)]
pub struct ReconcileDecision {
    /// The operation id.
    pub id: OperationId,
    /// The fence of the execution.
    pub fence: u64,
    /// The reconcile URL, without its query.
    pub url: String,
    /// The operator.
    pub decider: Decider,
}

impl DecisionNote {
    /// Returns the decision of a record that a reconcile URL released without an operator.
    #[must_use]
    pub fn by_hook(url: &str) -> Self {
        Self {
            decision: String::new(),
            at: rfc3339(SystemClock.now()),
            who: "reconcile_url".to_owned(),
            by: DecisionChannel::Hook,
            from: cut(url),
            outcome: OperatorVerdict::DidNotHappen,
            why: DENIED.to_owned(),
        }
    }

    /// Returns the decision as a record keeps it.
    #[must_use]
    pub fn to_bytes(&self) -> Option<Bytes> {
        serde_json::to_vec(self).map(Bytes::from).ok()
    }
}

impl Audit {
    /// Makes a reconcile request by calling `apply`, between two audit lines; `apply` gets the note of a record that is
    /// released. Without a second line it is unknown whether a verdict was stored.
    ///
    /// It runs on a task of its own: a caller that is dropped leaves no request between its two lines.
    ///
    /// # Errors
    /// [`OperatorError::Audit`]: nothing was requested. The error of `apply`.
    pub async fn reconcile<F>(
        self: &Arc<Self>,
        about: ReconcileDecision,
        apply: impl FnOnce(Option<Bytes>) -> F + Send + 'static,
    ) -> Result<Reconciled, OperatorError>
    where
        F: Future<Output = Result<Reconciled, ClaimError>> + Send + 'static,
    {
        let mut number = [0; 16];
        SystemEntropy.fill(&mut number).map_err(|error| OperatorError::Engine(error.into()))?;
        let (audit, decision) = (Arc::clone(self), crate::hex(&number));
        let task =
            tokio::spawn(
                async move { audit.reconcile_between_lines(&decision, &about, apply).await },
            );
        task.await.unwrap_or(Err(OperatorError::Engine(ClaimError::Shutdown)))
    }

    async fn reconcile_between_lines<F>(
        self: &Arc<Self>,
        decision: &str,
        about: &ReconcileDecision,
        apply: impl FnOnce(Option<Bytes>) -> F,
    ) -> Result<Reconciled, OperatorError>
    where
        F: Future<Output = Result<Reconciled, ClaimError>>,
    {
        let ReconcileDecision { id, fence, url, decider } = about;
        let Decider { who, by, from } = decider;
        let (who, from, url) = (cut(who), cut(from), cut(url));
        let line = |stage, result, code| Line {
            at: rfc3339(SystemClock.now()),
            stage,
            decision,
            who: &who,
            role: "decide",
            by: *by,
            from: &from,
            id: id.to_string(),
            fence: *fence,
            reconcile: &url,
            result,
            gateway: self.gateway(),
            code,
        };
        let intended = self.write_off(&line("intended", None, None)).await;
        intended.map_err(OperatorError::Audit)?;
        let note = DecisionNote {
            decision: decision.to_owned(),
            who: who.clone(),
            by: *by,
            from: from.clone(),
            ..DecisionNote::by_hook(&url)
        };
        let (result, last) = match apply(note.to_bytes()).await {
            Ok(result) => (Ok(result), line("done", Some(result.as_str()), None)),
            // A verdict may have been stored: that has no second line.
            Err(error @ ClaimError::Store(StoreError::Ambiguous(_))) => {
                return Err(OperatorError::Engine(error));
            }
            Err(error) => {
                let error = OperatorError::Engine(error);
                let code = error.code();
                (Err(error), line("rejected", None, Some(code)))
            }
        };
        if let Err(error) = self.write_off(&last).await {
            tracing::error!(%error, decision, "the second line of a reconcile request could not be written to the audit file");
        }
        result
    }
}
