//! Sagas over HTTP: a resource that starts a saga, and one that shows its state.
//!
//! 1. `POST PATH` with an `Idempotency-Key` and a JSON body starts a saga. The response is the answer
//!    if the saga ends in time, else 202 with `Location` and `Retry-After`. `Prefer: respond-async`
//!    gets 202 at once; `Prefer: wait=N` waits N seconds, at most [`SagaRoutesBuilder::max_wait`]
//!    (RFC 7240). With both, it waits N seconds.
//! 2. The same request again gets the same, whichever process it reaches: 202 until the saga has
//!    ended, then its answer, with `Idempotency-Replayed: true`. Another body under the key gets 422
//!    `key-reused`. Bodies are compared in canonical JSON as they were sent: a further field of the
//!    input's type, with a default, makes no other request of one that was sent before.
//! 3. `GET PATH/KEY` shows the state of the caller's own saga; the same key in another scope is
//!    another saga, or 404. `Location` is this resource, and contains nothing of the scope.
//! 4. `DELETE PATH/KEY`, if it is [allowed](SagaRoutesBuilder::allow_cancel), cancels the saga: 202,
//!    or 200 if it has ended.
//! 5. Every rejection is an RFC 9457 problem of [`hapax_http::problem`]; 404 has the code `not-found`.
//!    After a 503 the saga may have been started: send the same request again.
//!
//! The status resource is JSON. While the saga is unfinished it has `Retry-After`:
//!
//! | member | value |
//! | --- | --- |
//! | `state` | `running`, `parked`, `stuck`; at the end `done`, `undone`, `cancelled` |
//! | `step`, `nth`, `tries` | the step that runs or waits, its number, and its tries; a pause is `sleep/NAME` or `signal/NAME` |
//! | `compensating` | `true` once the compensation has begun |
//! | `parked_for` | with `parked`: seconds until it continues, or waits no longer for a signal |
//! | `reason` | with `stuck`: the reason; an operator has to decide |
//! | `answer` | at the end: `status` and, if it is JSON or text, `body` of the answer |
//!
//! `POST` again for an answer with all its headers and bytes.
//!
//! *Not behind another layer or gateway on the same path*, unless it forwards `Idempotency-Fence`: it
//! would store the 202 and replay it. A 202 to a request with `Idempotency-Fence` is marked as
//! retryable, so that a gateway of Hapax in front passes the next attempt on.
//!
//! ```
//! use axum::Json;
//! use axum::http::StatusCode;
//! use axum::response::IntoResponse;
//! use hapax_core::{Idempotency, MemoryStore};
//! use hapax_saga::routes::{SagaOutcome, SagaRoutes};
//! use hapax_saga::{Saga, Sagas};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let order = Saga::define("order", 1, ())
//!     .flow(|_op, cents: u64| async move { Ok::<_, String>(cents * 2) })?;
//! let engine = Idempotency::builder(MemoryStore::default()).build()?;
//! let sagas = Sagas::builder(engine).register(&order).build()?;
//! let answer = |end| match end {
//!     SagaOutcome::Done(cents) => (StatusCode::CREATED, Json(cents)).into_response(),
//!     SagaOutcome::Undone(error) => (StatusCode::CONFLICT, error).into_response(),
//!     SagaOutcome::Cancelled { .. } => StatusCode::GONE.into_response(),
//! };
//! let orders = SagaRoutes::builder(sagas, order, "/orders", answer).build()?;
//! let app: axum::Router = axum::Router::new().merge(orders.router());
//! # drop(app);
//! # Ok(())
//! # }
//! ```

mod location;
mod prefer;
mod progress;
mod rejection;
mod requests;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request};
use axum::http::header::AUTHORIZATION;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hapax_http::server::{MissingScope, ScopeSource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;

use crate::{Saga, Sagas};

/// Requests that may wait for an answer at the same time; further ones get 202 at once.
const MAX_WAITING: usize = 10_000;

/// The outcome of a saga, which a service maps to a response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SagaOutcome<O, E> {
    /// The flow returned this output.
    Done(O),
    /// The flow returned this error, and what had happened was undone.
    Undone(E),
    /// The saga was cancelled, and what had happened was undone.
    Cancelled {
        /// The reason, as the caller, the service or an operator gave it.
        reason: String,
    },
}

type AnswerFn<O, E> = dyn Fn(SagaOutcome<O, E>) -> Response + Send + Sync;

/// The resources of a saga. Cheap to clone.
pub struct SagaRoutes<I, O, E> {
    state: Arc<RoutesState<I, O, E>>,
}

struct RoutesState<I, O, E> {
    sagas: Sagas,
    saga: Saga<I, O, E>,
    answer: Arc<AnswerFn<O, E>>,
    path: String,
    location: String,
    scope: ScopeSource,
    wait: Duration,
    max_wait: Duration,
    max_body: usize,
    cancels: bool,
    waiting: Semaphore,
}

impl<I, O, E> Clone for SagaRoutes<I, O, E> {
    fn clone(&self) -> Self {
        Self { state: Arc::clone(&self.state) }
    }
}

impl<I, O, E> fmt::Debug for SagaRoutes<I, O, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SagaRoutes").field(&self.state.path).finish()
    }
}

impl<I, O, E> SagaRoutes<I, O, E> {
    /// Returns a builder. `path` is the path of the resource in the router, such as `/orders`.
    /// `answer` maps the end of a saga to a response: the same end to the same response, because each
    /// request calls it.
    pub fn builder<R: IntoResponse>(
        sagas: Sagas,
        saga: Saga<I, O, E>,
        path: impl Into<String>,
        answer: impl Fn(SagaOutcome<O, E>) -> R + Send + Sync + 'static,
    ) -> SagaRoutesBuilder<I, O, E> {
        let path = path.into();
        SagaRoutesBuilder {
            state: RoutesState {
                sagas,
                saga,
                answer: Arc::new(move |end| answer(end).into_response()),
                location: path.clone(),
                path,
                scope: ScopeSource::headers([AUTHORIZATION], MissingScope::Reject),
                wait: Duration::from_secs(10),
                max_wait: Duration::from_secs(60),
                max_body: 1 << 20,
                cancels: false,
                waiting: Semaphore::new(MAX_WAITING),
            },
        }
    }
}

impl<I, O, E> SagaRoutes<I, O, E>
where
    I: Serialize + DeserializeOwned + Send + Sync + 'static,
    O: DeserializeOwned + Send + 'static,
    E: DeserializeOwned + Send + 'static,
{
    /// Returns a router with the resources.
    pub fn router<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        let (starts, shows, cancels) = (self.clone(), self.clone(), self.clone());
        let start = post(async move |request: Request| starts.post(request).await);
        let mut of_key = get(async move |Path(key): Path<String>, request: Request| {
            shows.status(&request.into_parts().0, &key).await
        });
        if self.state.cancels {
            of_key = of_key.delete(async move |Path(key): Path<String>, request: Request| {
                cancels.cancel(&request.into_parts().0, &key).await
            });
        }
        let path = &self.state.path;
        Router::new().route(path, start).route(&format!("{path}/{{key}}"), of_key)
    }
}

/// A builder of a [`SagaRoutes`].
#[must_use]
pub struct SagaRoutesBuilder<I, O, E> {
    state: RoutesState<I, O, E>,
}

impl<I, O, E> fmt::Debug for SagaRoutesBuilder<I, O, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SagaRoutesBuilder").field(&self.state.path).finish()
    }
}

impl<I, O, E> SagaRoutesBuilder<I, O, E> {
    /// Sets the source of the scope. Default: the header `Authorization`, which a request must have.
    pub fn scope(mut self, scope: ScopeSource) -> Self {
        self.state.scope = scope;
        self
    }

    /// Sets the path that clients see, for `Location`, where it differs from the router's: behind a
    /// prefix, for example. Default: the path of the router.
    pub fn location(mut self, path: impl Into<String>) -> Self {
        self.state.location = path.into();
        self
    }

    /// Sets the time for which a request without a preference waits for the answer. Default 10 s.
    pub fn default_wait(mut self, wait: Duration) -> Self {
        self.state.wait = wait;
        self
    }

    /// Sets the longest time for which any request waits. Default 60 s.
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.state.max_wait = wait;
        self
    }

    /// Sets the largest body, in bytes. Default 1 MiB.
    pub fn max_body(mut self, bytes: usize) -> Self {
        self.state.max_body = bytes;
        self
    }

    /// Allows callers to cancel their sagas by `DELETE`. Otherwise it gets 405.
    pub fn allow_cancel(mut self) -> Self {
        self.state.cancels = true;
        self
    }

    /// Creates the routes.
    ///
    /// # Errors
    /// [`SagaRoutesError`].
    pub fn build(self) -> Result<SagaRoutes<I, O, E>, SagaRoutesError> {
        let RoutesState { sagas, saga, path, location, .. } = &self.state;
        if sagas.registered(saga).is_none() {
            let name = saga.definition.name;
            return Err(SagaRoutesError::NotRegistered { name });
        }
        for path in [path, location] {
            let is_valid = path.starts_with('/')
                && !path.ends_with('/')
                && path
                    .bytes()
                    .all(|byte| byte.is_ascii_graphic() && !b"?#{}\"<>*".contains(&byte));
            if !is_valid {
                return Err(SagaRoutesError::Path { found: path.clone() });
            }
        }
        Ok(SagaRoutes { state: Arc::new(self.state) })
    }
}

/// Errors of a [`SagaRoutesBuilder`].
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SagaRoutesError {
    /// The saga is not registered.
    #[error(
        "expected the definition that was registered, found another one of `{name}`, or none is: pass the value that was given to `SagasBuilder::register`, or a clone of it"
    )]
    NotRegistered {
        /// Its name.
        name: &'static str,
    },
    /// A path is no plain path.
    #[error(
        "expected a path such as `/orders`, found `{found}`: it has no parameters and no slash at its end"
    )]
    Path {
        /// The path.
        found: String,
    },
}
