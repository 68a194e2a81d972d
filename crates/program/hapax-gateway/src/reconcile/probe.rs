//! StoreFinding out at start whether a reconcile URL answers as it must.
//!
//! The probe requests an operation that never existed: a random key and operation id, and fence 0,
//! which no execution has. The only correct response is 404 with the marker. So a mistyped URL, a
//! router without the path, or a service that requires credentials is found at start, not after a
//! crash.

use hapax_core::{Entropy, EntropyError, SystemEntropy};
use hapax_http::header::{IDEMPOTENCY_FENCE, IDEMPOTENCY_KEY, IDEMPOTENCY_OPERATION_ID};
use http::header::HeaderValue;

use super::{DID_NOT_HAPPEN, ReconcileClient, ReconcileReply};
use crate::store::StoreFinding;
use hapax_core::diagnose::Severity;

impl ReconcileClient {
    /// Requests an operation that never existed. Returns `None` if the response is correct, else a
    /// description of the failure.
    async fn probe(&self) -> Option<String> {
        let said = match self.ask_of_nothing().await {
            Ok(ReconcileReply::DidNotHappen) => return None,
            Ok(said) => said,
            Err(error) => return Some(error.to_string()),
        };
        let effect = match said {
            ReconcileReply::Happened(..) => {
                "its answer would be replayed to callers of any operation"
            }
            _ => "retries of unknown outcomes would get 409 outcome-unknown",
        };
        Some(format!("{} for an operation that never existed: {effect}", said.describe()))
    }

    async fn ask_of_nothing(&self) -> Result<ReconcileReply, EntropyError> {
        let mut request = self.request();
        let headers = request.headers_mut();
        // The route's key header is the last one of `shown`.
        let key = self.shown.last().map_or(IDEMPOTENCY_KEY, |part| part.header().clone());
        for name in [key, IDEMPOTENCY_OPERATION_ID] {
            let mut random = [0; 32];
            SystemEntropy.fill(&mut random)?;
            let hex: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
            let value = if name == IDEMPOTENCY_OPERATION_ID { hex } else { format!("\"{hex}\"") };
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(name, value);
            }
        }
        headers.insert(IDEMPOTENCY_FENCE, 0.into());
        Ok(self.send(request, &self.unretried_readers).await)
    }
}

/// Probes a reconcile URL, and warns if the response is not correct.
pub(crate) async fn warn_of(reconciler: ReconcileClient) {
    match reconciler.probe().await {
        Some(found) => tracing::warn!(
            url = reconciler.url(),
            found,
            expected = format!("404 with `Idempotency-Outcome: {DID_NOT_HAPPEN}`"),
            "the reconcile URL failed its probe"
        ),
        None => tracing::info!(url = reconciler.url(), "the reconcile URL passed its probe"),
    }
}

/// Probes a reconcile URL, for `hapax doctor`.
pub(crate) async fn finding(reconciler: ReconcileClient) -> StoreFinding {
    let url = reconciler.url();
    let (severity, found, fix) = match reconciler.probe().await {
        None => (Severity::Fine, format!("{url} answers 404 with the marker"), String::new()),
        Some(found) => (
            Severity::Broken,
            format!("{url} {found}"),
            format!(
                "have it answer 404 with `Idempotency-Outcome: {DID_NOT_HAPPEN}` for operations that \
                 did not happen"
            ),
        ),
    };
    StoreFinding { severity, subject: "reconcile".into(), found, fix, gateway: None }
}
