//! Responses that commit with what their handlers wrote, in one transaction.
//!
//! For routes whose effects are rows in the database that keeps the records too; how both stay
//! together, whatever fails, is said in [`hapax::transaction`]. A route with
//! [`RouteOptions::transactions`](super::RouteOptions) has a [`TxHandle`] in the extensions of each
//! request; a handler takes its transaction from that, in axum by the extractor
//! `hapax_http::axum::InTransaction`. It begins then, and not before: copies that wait or are
//! answered hold no connection, nor do handlers that want none.
//!
//! | response | what was written | the record |
//! | --- | --- | --- |
//! | final, 2xx or 3xx, or after [`Execution::commit`](super::Execution::commit) | commits | with it |
//! | final, any other: a refusal | is rolled back | after that, by itself |
//! | retryable | is rolled back | released |
//! | unknown; a panic; cut off | is rolled back | unknown |
//! | [`FailedBy`] an error that says that another transaction won | is rolled back | the handler is called again |
//!
//! The client is answered after COMMIT, and gets 503 where that failed: `store-unavailable` or, where
//! others were in the way each time, `overloaded`, and nothing was done; `outcome-pending` where
//! nobody knows yet. Asking again under the same key is right in each case.
//!
//! A handler that drops its transaction before it answers has it committed with the answer all the
//! same. One that is given none, or takes none, is recorded as on any other route. One that keeps
//! it beyond its answer, in a task or a streamed body, has nothing committed: the client gets 500
//! `handler-failed`, and the key goes by the policy for what is unknown.
//!
//! A handler may be called more than once under one lease, with the same request: what it does
//! outside of the transaction may be done again, and so belongs elsewhere.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use hapax::transaction::{Ended, Ending as End, Transacting};
use hapax::{FinishError, Lease};
use http::{Request, Response};
use tokio::time::Instant;
use tower_service::Service;

use super::observe::{Event, Recorded};
use super::policy::COME_BACK;
use super::service::draining;
use super::work::{Answer, Attempt, Ending, Given, Received, Work};
use crate::body::{Body, BoxError};
use crate::classify::Class;
use crate::problem::{Code, Problem};

pub use hapax::transaction::{InDatabase, LostRace, TakeError, Tx, TxHandle, TxTerms};

/// A response extension: the error that a handler failed by. If it says that the handler's
/// transaction lost against another, the response is dropped, and the handler called again.
#[derive(Clone)]
pub struct FailedBy(pub Arc<dyn Error + Send + Sync>);

impl fmt::Debug for FailedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FailedBy").field(&self.0).finish()
    }
}

impl Work {
    /// Like [`Work::run`], with transactions to be had.
    pub(super) async fn run_in<S, B>(
        self,
        route: &InDatabase,
        lease: Lease,
        mut inner: S,
        received: Received,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let number = lease.attempt();
        let began = Instant::now();
        let mut transacting = Transacting::new(lease, route.clone());
        loop {
            let run = transacting.run();
            let mut request = received.copy();
            request.extensions_mut().insert(run.clone());
            let attempt = self.attempt(transacting.lease(), &mut inner, request).await;
            let took = began.elapsed();
            let (class, end, answer) = match attempt {
                Attempt::Given(ending, given) => {
                    let class = ending.class;
                    let end = if lost(route, &given) { End::Again } else { end(ending) };
                    (class, end, Ok(Answer::Given(given)))
                }
                Attempt::Problem(problem) => {
                    (Class::Unknown, end(Ending::unknown()), Ok(Answer::Problem(problem)))
                }
                Attempt::Failed(error) => (Class::Unknown, end(Ending::unknown()), Err(error)),
            };
            // On a task of its own from here on; this one is not cancelled either.
            let ended = transacting.end(run, end).await;
            let (class, recorded, until, instead) = match ended {
                Ended::Again(again) => {
                    if self.pass.gate().is_stopping() {
                        let _ = again.into_lease().release().await;
                        return Ok(self.layer.refuse(&self.policy, self.manner, &draining()));
                    }
                    if let Err(error) = poll_fn(|cx| inner.poll_ready(cx)).await {
                        let _ = again.into_lease().release().await;
                        return Err(error);
                    }
                    transacting = again;
                    continue;
                }
                Ended::Recorded(until) => (class, Recorded::Stored, until, None),
                Ended::Exhausted => (Class::Retryable, Recorded::Stored, None, Some(in_the_way())),
                Ended::RolledBack(error) => {
                    tracing::warn!(error = &*error as &dyn Error, "a transaction did not commit");
                    (Class::Retryable, Recorded::Stored, None, Some(rolled_back()))
                }
                Ended::Kept => {
                    tracing::error!("a handler kept its transaction beyond its response");
                    (Class::Unknown, Recorded::Stored, None, Some(kept()))
                }
                Ended::Unsure => (class, Recorded::Pending, None, Some(unsure())),
                Ended::Failed(FinishError::Pending) => (class, Recorded::Pending, None, None),
                Ended::Failed(_) => (class, Recorded::Lost, None, None),
            };
            let event = Event::Executed { class, recorded, attempt: number, took };
            self.layer.observe(&self.policy, event);
            let answer = match (instead, answer) {
                (Some(problem), _) => Answer::Problem(problem),
                (None, answer) => answer?,
            };
            return Ok(self.answer(class, recorded, until, answer));
        }
    }
}

/// Whether the handler's transaction lost against another.
fn lost(route: &InDatabase, given: &Given) -> bool {
    let failed = given.head.extensions.get::<FailedBy>();
    failed.is_some_and(|FailedBy(error)| route.database.any_is_conflict(&**error))
}

fn end(ending: Ending) -> End {
    let Ending { class, retention, kept, commits } = ending;
    match (class, kept) {
        (Class::Final, Some(outcome)) if commits => End::Complete { outcome, retention },
        (Class::Final, Some(outcome)) => End::Refuse { outcome, retention },
        (Class::Retryable, _) => End::Release,
        // What is final has something that is kept.
        (Class::Final | Class::Unknown, seen) => End::Abandon { seen },
    }
}

fn in_the_way() -> Problem {
    let detail = "Others were in the way of the request's transaction. Nothing of it was done.";
    Problem::new(Code::Overloaded, detail).retry_after(COME_BACK)
}

fn rolled_back() -> Problem {
    let detail = "The request's transaction was not committed. Nothing of it was done.";
    Problem::new(Code::StoreUnavailable, detail).retry_after(COME_BACK)
}

fn unsure() -> Problem {
    let detail = "Whether the request's transaction was committed is not known yet.";
    Problem::new(Code::OutcomePending, detail).retry_after(COME_BACK)
}

fn kept() -> Problem {
    let detail = "The handler did not give its transaction back: nothing of it is committed.";
    Problem::new(Code::HandlerFailed, detail)
}
