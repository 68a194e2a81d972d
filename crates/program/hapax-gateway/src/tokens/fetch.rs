//! Keys of an issuer at a URL.
//!
//! 1. One task fetches them: at the start, every [`EVERY`], and sooner after a failure. So one request is in progress at
//!    a time. A failure ends nothing, and neither does a panic: the keys before it stay in force.
//! 2. A token with an unknown key may have a new one. Its request has the keys fetched, at most every [`ASKED_EVERY`]
//!    however many such tokens there are, and waits for them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::store::BoxFuture;
use hapax_http::{Body, BoxError};
use hapax_operators::{Panic, caught, supervised};
use hapax_proxy::{Upstream, UpstreamError};
use http::header::{ACCEPT, HOST, HeaderValue, USER_AGENT};
use http::uri::PathAndQuery;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt, Collected, Limited};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::keys::{KeySet, KeySetError, MAX_BYTES};

/// Time between two fetches.
const EVERY: Duration = Duration::from_secs(300);

/// Time between two fetches for tokens with an unknown key, and after a failure.
const ASKED_EVERY: Duration = Duration::from_secs(10);

/// Time after a failure while there are no keys: until then requests are rejected.
const WITHOUT_KEYS: Duration = Duration::from_secs(1);

/// Time between two warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Time after the timeout of a fetch in which its result arrives.
const MARGIN: Duration = Duration::from_millis(500);

/// The client of a URL of keys.
#[derive(Clone, Debug)]
pub(super) struct KeyUrl {
    pub(super) upstream: Upstream,
    pub(super) path: PathAndQuery,
    /// Time in which the complete response must arrive.
    pub(super) timeout: Duration,
}

/// Fetches keys. Dropping it ends its task.
#[derive(Debug)]
pub(super) struct KeyFetcher {
    url: KeyUrl,
    shared: Arc<Shared>,
    task: OnceLock<AbortHandle>,
}

/// The state of the fetches.
#[derive(Debug)]
pub(super) struct Shared {
    state: watch::Sender<FetchState>,
    wanted: Notify,
    /// True while the last fetch has failed. Metrics have it too, as long as these keys are in force.
    failed: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct FetchState {
    set: Option<Arc<KeySet>>,
    /// The number of fetches that have ended.
    round: u64,
    has_failed: bool,
    is_fetching: bool,
    /// Time of the last fetch for an unknown key.
    asked: Option<Instant>,
}

/// Keys as of a fetch.
#[derive(Clone, Debug)]
pub(super) struct FetchedKeys {
    pub(super) set: Arc<KeySet>,
    pub(super) round: u64,
    /// True if the last fetch has failed, so that the keys are those of an earlier one.
    pub(super) has_failed: bool,
}

/// Reasons for which keys were not fetched.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("no response was received")]
    Failure(#[source] UpstreamError),
    #[error("no complete response arrived within the timeout")]
    Late,
    #[error("its status was {0}; expected 200")]
    Status(StatusCode),
    #[error("its response broke off, or was larger than {MAX_BYTES} bytes")]
    Unreadable(#[source] BoxError),
    #[error(transparent)]
    Keys(#[from] KeySetError),
    #[error("it panicked: {0}")]
    Panicked(Panic),
}

impl KeyFetcher {
    pub(super) fn new(url: KeyUrl) -> Self {
        Self { url, shared: Arc::new(Shared::new()), task: OnceLock::new() }
    }

    /// Begins to fetch, once. Returns the flag that is set while the last fetch has failed.
    pub(super) fn begin(&self, runtime: &Handle) -> Arc<AtomicBool> {
        self.task.get_or_init(|| {
            let (url, shared) = (self.url.clone(), Arc::clone(&self.shared));
            let fetch = move || -> BoxFuture<'static, _> {
                let url = url.clone();
                Box::pin(async move { url.fetch().await })
            };
            let name = self.url.name();
            let run = async move {
                supervised("the fetch of the keys of bearer tokens", || shared.run(&fetch, &name))
                    .await;
            };
            runtime.spawn(run).abort_handle()
        });
        self.shared.failed()
    }

    /// Returns the keys, once the first fetch has ended; `None` if there are none.
    pub(super) async fn keys(&self) -> Option<FetchedKeys> {
        let fetched = self.shared.fetched();
        match fetched {
            None => self.shared.after(0, self.limit()).await,
            fetched => fetched,
        }
    }

    /// Returns keys of a later fetch than `round`, if one is in progress or is due for an unknown key.
    pub(super) async fn newer(&self, round: u64) -> Option<FetchedKeys> {
        self.shared.newer(round, self.limit()).await
    }

    fn limit(&self) -> Duration {
        self.url.timeout + MARGIN
    }
}

impl Drop for KeyFetcher {
    fn drop(&mut self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

impl Shared {
    pub(super) fn new() -> Self {
        let first = FetchState { is_fetching: true, ..FetchState::default() };
        Self { state: watch::Sender::new(first), wanted: Notify::new(), failed: Arc::default() }
    }

    pub(super) fn failed(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.failed)
    }

    pub(super) fn fetched(&self) -> Option<FetchedKeys> {
        let state = self.state.borrow();
        let FetchState { round, has_failed, .. } = *state;
        let set = state.set.clone()?;
        Some(FetchedKeys { set, round, has_failed })
    }

    /// Waits at most `limit` for a later fetch than `round`; returns the keys then.
    pub(super) async fn after(&self, round: u64, limit: Duration) -> Option<FetchedKeys> {
        let mut state = self.state.subscribe();
        // Without a result in time, what there is decides.
        let _ = timeout(limit, state.wait_for(|state| state.round > round)).await;
        self.fetched()
    }

    pub(super) async fn newer(&self, round: u64, limit: Duration) -> Option<FetchedKeys> {
        let (mut is_later, mut begins) = (false, false);
        self.state.send_if_modified(|state| {
            let now = Instant::now();
            is_later = state.round > round || state.is_fetching;
            begins = !is_later && state.asked.is_none_or(|at| now - at >= ASKED_EVERY);
            if begins {
                state.asked = Some(now);
                state.is_fetching = true;
            }
            false
        });
        if begins {
            self.wanted.notify_one();
        }
        match is_later || begins {
            true => self.after(round, limit).await.filter(|fetched| fetched.round > round),
            false => None,
        }
    }

    /// Fetches until the future is dropped.
    pub(super) async fn run(
        &self,
        fetch: &impl Fn() -> BoxFuture<'static, Result<KeySet, FetchError>>,
        url: &str,
    ) {
        let mut warned: Option<Instant> = None;
        loop {
            self.state.send_if_modified(|state| {
                state.is_fetching = true;
                false
            });
            // A panic counts as a failure, so that a token does not wait for this fetch, and `/readyz` states it.
            let result = caught(fetch()).await.unwrap_or_else(|panic| {
                tracing::error!(url, %panic, "the fetch of the keys of bearer tokens panicked: report this as a bug");
                Err(FetchError::Panicked(panic))
            });
            match &result {
                Ok(set) => {
                    let keys = set.keys().len();
                    if warned.take().is_some() || self.state.borrow().set.is_none() {
                        tracing::info!(url, keys, "the keys of bearer tokens were fetched");
                    }
                }
                Err(error) if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) => {
                    warned = Some(Instant::now());
                    let error = chain(error);
                    let what = match self.state.borrow().set {
                        Some(_) => "those before stay in force",
                        None => "requests with a key get 503 where a token names the caller",
                    };
                    tracing::warn!(
                        url,
                        error,
                        "the keys of bearer tokens could not be fetched: {what}"
                    );
                }
                Err(_) => {}
            }
            let has_failed = result.is_err();
            self.failed.store(has_failed, Ordering::Relaxed);
            self.state.send_modify(|state| {
                state.round += 1;
                state.is_fetching = false;
                state.has_failed = has_failed;
                if let Ok(set) = result {
                    state.set = Some(Arc::new(set));
                }
            });
            let pause = match (has_failed, self.state.borrow().set.is_some()) {
                (false, _) => EVERY,
                (true, true) => ASKED_EVERY,
                (true, false) => WITHOUT_KEYS,
            };
            // Either end of the pause begins a fetch.
            let _ = timeout(pause, self.wanted.notified()).await;
        }
    }
}

impl KeyUrl {
    /// Returns the URL without its query, which may be secret.
    fn name(&self) -> String {
        let scheme = if self.upstream.origin().secure { "https" } else { "http" };
        format!("{scheme}://{}{}", self.upstream.authority(), self.path.path())
    }

    async fn fetch(&self) -> Result<KeySet, FetchError> {
        let fetched = timeout(self.timeout, self.answer()).await;
        Ok(KeySet::parse(&fetched.unwrap_or(Err(FetchError::Late))?)?)
    }

    async fn answer(&self) -> Result<Bytes, FetchError> {
        let answer = match self.upstream.send(self.request()).await {
            // A reused connection may have been closed meanwhile; repeating the request is safe.
            Err(UpstreamError::Broken(_)) => self.upstream.send(self.request()).await,
            answer => answer,
        };
        let answer = answer.map_err(FetchError::Failure)?;
        if answer.status() != StatusCode::OK {
            return Err(FetchError::Status(answer.status()));
        }
        let body = Limited::new(answer.into_body(), MAX_BYTES).collect().await;
        body.map(Collected::to_bytes).map_err(FetchError::Unreadable)
    }

    fn request(&self) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = Uri::from(self.path.clone());
        let headers = request.headers_mut();
        if let Ok(host) = HeaderValue::from_str(self.upstream.authority().as_str()) {
            headers.insert(HOST, host);
        }
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static("hapax"));
        request
    }
}

/// Returns an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Writing to a string cannot fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}
