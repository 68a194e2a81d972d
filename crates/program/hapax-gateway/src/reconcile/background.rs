//! Reconciliation without a retry, of the undecided records that the census lists.
//!
//! 1. The hook of the route is called as for a retry: one at a time for each operation, because the record announces
//!    each call, also to other gateways; and not before the first request has ended.
//! 2. The census lists the records of all services that share the store. The reconcile URL of another service would
//!    answer that the operation did not happen. So only an operation whose record names the namespace of this gateway,
//!    and the route that its path has now, is reconciled, and only while all gateways of the namespace have one
//!    upstream.
//! 3. The future may be dropped at any await: a hook whose verdict is missing is called again after its timeout.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::{ClaimError, Entropy, Inspect, Key, OperationId, SystemEntropy};
use hapax_http::header::{IDEMPOTENCY_KEY, encode};
use hapax_http::server::{IdempotencyLayer, ReconcileRequest, Reconciled};
use hapax_operators::{Census, OperationDescription, RecordView, StoreRegister};
use http::header::{CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{HeaderName, Method, Request, Uri};
use tokio::time::sleep;

use crate::snapshot::{CurrentConfig, Route, RouteService};

/// Reconcile requests in progress at once.
const CONCURRENT: usize = 4;

/// The shortest path that a description may have cut, in bytes.
const MAY_BE_CUT: usize = 1020;

/// Marks a request that stands for a retry.
#[derive(Clone, Copy, Debug)]
struct WithoutRetry;

/// Returns whether no retry causes the request.
pub(super) fn is_without_retry(undecided: &ReconcileRequest) -> bool {
    undecided.request.extensions.get::<WithoutRetry>().is_some()
}

/// Reasons for which an operation is not reconciled without a retry.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreconcilable {
    #[error(
        "expected a record that describes its request, found none: without a secret, and in records of earlier \
         versions, a retry of the client is needed"
    )]
    NotDescribed,
    #[error(
        "expected a record of the namespace {ours:?} of this gateway, found {theirs:?}: send it to the gateway of its \
         service"
    )]
    OtherNamespace { ours: String, theirs: String },
    #[error(
        "expected the route of the record, {theirs:?}, for its path, found {ours:?}: the configuration has changed; a \
         retry of the client, or an operator decides"
    )]
    OtherRoute { ours: String, theirs: String },
    #[error(
        "expected one upstream for all gateways of the namespace, found several: the reconcile URL may be that of \
         another service"
    )]
    SeveralUpstreams,
    #[error(
        "expected a protected route with a reconcile URL, found another: an operator has to decide"
    )]
    NoHook,
    #[error(transparent)]
    Claim(#[from] ClaimError),
}

/// Reconciles operations without a retry.
#[derive(Debug)]
pub(crate) struct BackgroundReconciler {
    pub(crate) layer: IdempotencyLayer,
    pub(crate) current: Arc<CurrentConfig>,
    pub(crate) census: Arc<Census>,
    pub(crate) register: StoreRegister,
}

impl BackgroundReconciler {
    /// Reconciles the listed records again and again, until the future is dropped. The census walks through
    /// `walked`, if nothing else makes it walk.
    pub(crate) async fn run(self: Arc<Self>, every: Duration, walked: Option<Arc<dyn Inspect>>) {
        tokio::join!(self.passes(every), async {
            if let Some(store) = walked {
                Census::run(Arc::downgrade(&self.census), store).await;
            }
        });
    }

    async fn passes(&self, every: Duration) {
        loop {
            sleep(varied(every)).await;
            let undecided = self.census.reconcilable();
            if undecided.is_empty() {
                continue;
            }
            match self.is_one_service().await {
                // Boxed, since it is large: several operations at once.
                Ok(()) => Box::pin(self.pass(undecided.into())).await,
                Err(error) => tracing::warn!(%error, "undecided operations are not reconciled"),
            }
        }
    }

    async fn pass(&self, undecided: VecDeque<RecordView>) {
        let queue = Mutex::new(undecided);
        let work = || async {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                let Some(view) = next else { return };
                match self.reconcile(&view).await {
                    Ok(result) => {
                        tracing::debug!(id = view.id, ?result, "reconciled without a retry")
                    }
                    Err(error) => tracing::debug!(id = view.id, %error, "not reconciled"),
                }
            }
        };
        const { assert!(CONCURRENT == 4, "as many as are joined") };
        tokio::join!(work(), work(), work(), work());
    }

    /// Reconciles the operation of a record, if its namespace has one upstream.
    pub(crate) async fn reconcile_one(
        &self,
        view: &RecordView,
    ) -> Result<Reconciled, Unreconcilable> {
        self.is_one_service().await?;
        self.reconcile(view).await
    }

    async fn reconcile(&self, view: &RecordView) -> Result<Reconciled, Unreconcilable> {
        let described = view.described.as_ref().ok_or(Unreconcilable::NotDescribed)?;
        let id = OperationId::from_hex(&view.id).ok_or(Unreconcilable::NotDescribed)?;
        let theirs = described.namespace.as_ref().ok_or(Unreconcilable::NotDescribed)?;
        let ours = self.layer.engine().namespace().as_str();
        if theirs != ours {
            let (ours, theirs) = (ours.to_owned(), theirs.clone());
            return Err(Unreconcilable::OtherNamespace { ours, theirs });
        }
        let (path, method) = head(described).ok_or(Unreconcilable::NotDescribed)?;
        let snapshot = self.current.load_full();
        let route = snapshot.route(path.path(), &method).map_err(|_| Unreconcilable::NoHook)?;
        let theirs = described.route.as_deref().unwrap_or_default();
        if *route.name != *theirs {
            let (ours, theirs) = (route.name.to_string(), theirs.to_owned());
            return Err(Unreconcilable::OtherRoute { ours, theirs });
        }
        let RouteService::Protected { policy, methods, .. } = &route.service else {
            return Err(Unreconcilable::NoHook);
        };
        if !methods.contains(&method) {
            return Err(Unreconcilable::NoHook);
        }
        let key = Key::new(&described.key).map_err(|_| Unreconcilable::NotDescribed)?;
        let request = request(route, &key, path, method, described.grpc)
            .ok_or(Unreconcilable::NotDescribed)?;
        match self.layer.reconcile(policy, id, &key, &request).await? {
            Reconciled::Blocked => Err(Unreconcilable::NoHook),
            result => Ok(result),
        }
    }

    /// Checks that all gateways of the namespace which run have one upstream.
    async fn is_one_service(&self) -> Result<(), Unreconcilable> {
        let users = self.register.users().await.map_err(ClaimError::from)?;
        let namespace = self.layer.engine().namespace().as_str();
        let ours = users.iter().filter(|user| user.namespace == namespace);
        let mut upstreams = ours.filter_map(|user| user.upstream.as_ref());
        let first = upstreams.next();
        match upstreams.all(|other| Some(other) == first) {
            true => Ok(()),
            false => Err(Unreconcilable::SeveralUpstreams),
        }
    }
}

/// Returns target and method of a described request; `None` if it is not one, or its path may have been cut.
fn head(described: &OperationDescription) -> Option<(Uri, Method)> {
    let target = described.target.as_ref().filter(|target| target.len() < MAY_BE_CUT)?;
    Some((target.parse().ok()?, described.method.as_ref()?.parse().ok()?))
}

/// Returns the head of a request that stands for a retry: it has the key, and no header of a caller.
fn request(route: &Route, key: &Key, target: Uri, method: Method, grpc: bool) -> Option<Parts> {
    let value = match route.key_header == IDEMPOTENCY_KEY {
        true => encode(key),
        false => HeaderValue::from_str(key.as_str()).ok()?,
    };
    let name: &HeaderName = &route.key_header;
    let mut request =
        Request::builder().method(method).uri(target).header(name, value).body(()).ok()?;
    if grpc {
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    }
    request.extensions_mut().insert(WithoutRetry);
    Some(request.into_parts().0)
}

/// Returns a time from three to five quarters of `every`, so that gateways do not begin at once.
fn varied(every: Duration) -> Duration {
    let mut random = [0; 1];
    // Without randomness they may begin at once.
    let _ = SystemEntropy.fill(&mut random);
    every * 3 / 4 + every / 2 * u32::from(random[0]) / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_varies_by_a_quarter() {
        let every = Duration::from_secs(60);
        for _ in 0..100 {
            let varied = varied(every);
            assert!((45..=75).contains(&varied.as_secs()), "{varied:?}");
        }
    }
}
