//! Responses that commit with what their handlers wrote, in one transaction.
//!
//! For routes whose effects are rows in the database that keeps the records too; how both stay
//! together, whatever fails, is said in [`hapax_core::transaction`]. A route with
//! [`RouteOptions::transactions`](super::RouteOptions) has a [`TxHandle`] in the extensions of each
//! request; a handler takes its transaction from that, in axum by the extractor
//! `hapax_http::axum::InTransaction`. It begins then, and not before: copies that wait or are
//! answered hold no connection, nor do handlers that want none.
//!
//! | response | what was written | the record |
//! | --- | --- | --- |
//! | final, and good: 2xx or 3xx; in gRPC *ok* (0); or after [`Execution::commit`](super::ExecutionHandle::commit) | commits | with it |
//! | final, any other: a refusal; or after [`Execution::roll_back`](super::ExecutionHandle::roll_back) | is rolled back | after that, by itself |
//! | final, but not known whether it is good: gRPC-Web, a gRPC answer that is a stream or too large to keep | is rolled back | released |
//! | retryable | is rolled back | released |
//! | unknown; a panic; cut off | is rolled back | unknown |
//! | [`HandlerErrorExtension`] an error that says that another transaction won | is rolled back | the handler is called again |
//! | [`HandlerErrorExtension`] any other | is rolled back | released |
//!
//! The client is answered after COMMIT, and gets 503 where that failed: `store-unavailable` or, where
//! others were in the way each time, `overloaded`, and nothing was done; `outcome-pending` where
//! nobody knows yet. Asking again under the same key is right in each case.
//!
//! A handler that drops its transaction before it answers has it committed with the answer all the
//! same. One that is given none, or takes none, is recorded as on any other route, and so is its
//! failure: nobody knows what it did. One that keeps it beyond its answer, in a task or a streamed
//! body, or ends it by a statement, gets its client 500 `handler-failed`, and the key goes by the policy
//! for what is unknown.
//!
//! A handler may be called more than once under one lease, with the same request: what it does
//! outside of the transaction may be done again, and so belongs elsewhere. Before it is called again it
//! is asked whether it is ready: a limit of concurrency belongs above the layer, since copies that wait
//! count in one below it, and would keep the handler from running again until they give up.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::transaction::{TransactionEnd as End, TransactionResult, TransactionalLease};
use hapax_core::{FinishError, Lease};
use http::{Request, Response};
use tokio::time::Instant;
use tower_service::Service;

use super::execute::{
    BufferedRequest, ExecutionReply, HandlerResponse, HandlerResult, Panicked, Recording,
    RequestExecution, catch,
};
use super::observe::{RecordStatus, RequestEvent};
use super::policy::RETRY_AFTER;
use crate::body::{Body, BoxError};
use crate::classify::OutcomeClass;
use crate::problem::{Code, Problem};

pub use hapax_core::transaction::{
    LostRace, TakeTxError, TransactionBackend, Tx, TxHandle, TxOptions, TxOptionsError,
};

/// A response extension: the error that a handler failed by, after which its transaction is rolled
/// back, whatever else the response says. If it says that the transaction lost against another, the
/// response is dropped, and the handler called again; else the key is released, and the error
/// logged.
///
/// Without a transaction the response goes by what else it says, and the error is logged.
#[derive(Clone)]
pub struct HandlerErrorExtension(pub Arc<dyn Error + Send + Sync>);

impl fmt::Debug for HandlerErrorExtension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FailedBy").field(&self.0).finish()
    }
}

impl RequestExecution {
    /// Like [`RequestExecution::run`], with transactions to be had.
    pub(super) async fn run_in<S, B>(
        self,
        route: &TransactionBackend,
        lease: Lease,
        mut inner: S,
        received: BufferedRequest,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let number = lease.attempt();
        let began = Instant::now();
        let mut transacting = TransactionalLease::new(lease, route.clone());
        loop {
            let run = transacting.run();
            let mut request = received.copy();
            request.extensions_mut().insert(run.clone());
            let attempt = self.attempt(transacting.lease(), &mut inner, request).await;
            let took = began.elapsed();
            let (class, end, answer) = match attempt {
                HandlerResult::Response(ending, given) => {
                    let (class, end, answer) = self.fate(route, run.is_taken(), ending, given);
                    (class, end, Ok(answer))
                }
                HandlerResult::Problem(problem) => (
                    OutcomeClass::Unknown,
                    end(Recording::unknown()),
                    Ok(ExecutionReply::Problem(problem)),
                ),
                HandlerResult::NotBegun => {
                    return Ok(self.not_begun(transacting.into_lease()).await);
                }
                HandlerResult::Failed(error) => {
                    (OutcomeClass::Unknown, end(Recording::unknown()), Err(error))
                }
            };
            // On a task of its own from here on; this one is not cancelled either.
            let ended = transacting.end(run, end).await;
            let (class, recorded, until, instead) = match ended {
                TransactionResult::Rerun(again) => {
                    let ready = catch(poll_fn(|cx| inner.poll_ready(cx)));
                    let ready = tokio::select! {
                        biased;
                        () = self.permit.gate().stopping() => None,
                        ready = again.lease().keep_alive(ready) => Some(ready),
                    };
                    if let Some(Ok(Ok(()))) = ready {
                        transacting = again;
                        continue;
                    }
                    let lease = again.into_lease();
                    let problem = match ready {
                        None | Some(Ok(Ok(()))) => return Ok(self.not_begun(lease).await),
                        Some(other) => other.map(Result::err),
                    };
                    // If the store does not take it, it is held back.
                    let _ = lease.release().await;
                    return match problem {
                        Ok(Some(error)) => Err(error),
                        Ok(None) | Err(Panicked) => {
                            Ok(self.layer.reject(&self.policy, self.error_format, &rolled_back()))
                        }
                    };
                }
                TransactionResult::Recorded(until) => (class, RecordStatus::Stored, until, None),
                TransactionResult::Exhausted => {
                    (OutcomeClass::Retryable, RecordStatus::Stored, None, Some(in_the_way()))
                }
                TransactionResult::RolledBack(error) => {
                    tracing::warn!(error = &*error as &dyn Error, "a transaction did not commit");
                    (OutcomeClass::Retryable, RecordStatus::Stored, None, Some(rolled_back()))
                }
                TransactionResult::Kept => {
                    tracing::error!("a handler kept its transaction beyond its response");
                    (OutcomeClass::Unknown, RecordStatus::Stored, None, Some(kept()))
                }
                TransactionResult::EndedEarly(error) => {
                    tracing::error!(
                        error = &*error as &dyn Error,
                        "a handler ended its transaction by itself"
                    );
                    (OutcomeClass::Unknown, RecordStatus::Stored, None, Some(ended_early()))
                }
                TransactionResult::Unknown => {
                    (class, RecordStatus::Pending, None, Some(commit_unknown()))
                }
                TransactionResult::Failed(FinishError::Pending) => {
                    (class, RecordStatus::Pending, None, None)
                }
                TransactionResult::Failed(_) => (class, RecordStatus::Lost, None, None),
            };
            let event = RequestEvent::Executed { class, recorded, attempt: number, took };
            self.layer.observe(&self.policy, event);
            let answer = match (instead, answer) {
                (Some(problem), _) => ExecutionReply::Problem(problem),
                (None, answer) => answer?,
            };
            return Ok(self.answer(class, recorded, until, answer));
        }
    }

    /// What a response means for its transaction, if one was taken, and for its key.
    fn fate(
        &self,
        route: &TransactionBackend,
        taken: bool,
        ending: Recording,
        mut given: HandlerResponse,
    ) -> (OutcomeClass, End, ExecutionReply) {
        let failed = given.failed_by().filter(|_| taken);
        if let Some(HandlerErrorExtension(error)) = failed {
            if route.database.any_is_conflict(&**error) {
                return (OutcomeClass::Retryable, End::Rerun, ExecutionReply::Handler(given));
            }
            given.log_failure();
            self.error_format.mark(&mut given.head.headers, OutcomeClass::Retryable);
            return (OutcomeClass::Retryable, End::Release, ExecutionReply::Handler(given));
        }
        given.log_failure();
        if taken && ending.class == OutcomeClass::Final && ending.commits.is_none() {
            tracing::error!(
                "a response does not tell whether it is a refusal: its handler has to say so, by \
                 `Execution::commit` or `Execution::roll_back`"
            );
            return (OutcomeClass::Retryable, End::Release, ExecutionReply::Problem(undecided()));
        }
        (ending.class, end(ending), ExecutionReply::Handler(given))
    }
}

fn end(ending: Recording) -> End {
    let Recording { class, retention, kept, commits } = ending;
    match (class, kept) {
        (OutcomeClass::Final, Some(outcome)) if commits == Some(true) => {
            End::Complete { outcome, retention }
        }
        (OutcomeClass::Final, Some(outcome)) => End::Reject { outcome, retention },
        (OutcomeClass::Retryable, _) => End::Release,
        // What is final has something that is kept.
        (OutcomeClass::Final | OutcomeClass::Unknown, seen) => End::Abandon { seen },
    }
}

fn in_the_way() -> Problem {
    let detail = "Others were in the way of the request's transaction. Nothing of it was done.";
    Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER)
}

fn rolled_back() -> Problem {
    let detail = "The request's transaction was not committed. Nothing of it was done.";
    Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_AFTER)
}

fn commit_unknown() -> Problem {
    let detail = "Whether the request's transaction was committed is not known yet.";
    Problem::new(Code::OutcomePending, detail).retry_after(RETRY_AFTER)
}

fn undecided() -> Problem {
    let detail = "Whether the response refuses the request is not known. Nothing of it was done.";
    Problem::new(Code::HandlerFailed, detail)
}

fn ended_early() -> Problem {
    let detail = "The handler ended its transaction by itself: the request may have taken effect.";
    Problem::new(Code::HandlerFailed, detail)
}

fn kept() -> Problem {
    let detail =
        "The handler did not give its transaction back: the request may have taken effect.";
    Problem::new(Code::HandlerFailed, detail)
}
