//! Responses that commit together with their handlers' writes, in one transaction.
//!
//! For routes whose effects are rows of the database that also stores the records;
//! [`hapax_core::transaction`] explains how both stay together after any failure. On a route with
//! [`RouteOptions::transactions`](super::RouteOptions), each request has a [`TxHandle`] in its
//! extensions. A handler takes its transaction from it, in axum with the extractor
//! `hapax_http::axum::InTransaction`. The transaction begins then, and not before: no connection is
//! used by duplicates that wait or get a replay, nor by handlers that take no transaction.
//!
//! | response | the handler's writes | the record |
//! | --- | --- | --- |
//! | final and a success: 2xx or 3xx; in gRPC *ok* (0); or after [`ExecutionHandle::commit`](super::ExecutionHandle::commit) | are committed | commits with them |
//! | any other final response; or after [`ExecutionHandle::roll_back`](super::ExecutionHandle::roll_back) | are rolled back | is final, written after the rollback |
//! | final, and its success is not known: gRPC-Web, a gRPC response that is a stream or too large to store | are rolled back | is released |
//! | retryable | are rolled back | is released |
//! | unknown; a panic; cut off | are rolled back | is unknown |
//! | [`HandlerErrorExtension`] with an error that is a lost race | are rolled back | stays in flight, and the handler is called again |
//! | [`HandlerErrorExtension`] with any other error | are rolled back | is released |
//!
//! The client gets its response after COMMIT. If COMMIT failed, it gets 503: `store-unavailable`
//! or, if other transactions conflicted each time, `overloaded`, and nothing was done;
//! `outcome-pending` if the result is not known yet. A retry with the same key is right in each
//! case.
//!
//! A transaction that the handler drops before it returns is still committed with the response. A
//! handler that has no transaction is recorded as on any other route, and its failure leads to
//! *unknown*. A handler must neither keep its transaction after its response, in a task or a
//! streamed body, nor end it with a statement: then the client gets 500 `handler-failed`, and the
//! outcome is unknown.
//!
//! A handler may be called several times under one lease, with the same request. An effect outside
//! of the transaction may then happen several times, and does not belong into such a handler.
//! Before each further call the layer waits until the service is ready. A concurrency limit
//! therefore belongs above the layer. Below it, waiting duplicates count, and would keep the
//! handler from being called again until they time out.

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

/// A response extension: the error that a handler failed with. Its transaction is rolled back,
/// whatever else the response says. If the error is a lost race, the response is dropped and the
/// handler is called again; otherwise the key is released and the error is logged.
///
/// Without a transaction the response is classified as usual, and the error is logged.
#[derive(Clone)]
pub struct HandlerErrorExtension(pub Arc<dyn Error + Send + Sync>);

impl fmt::Debug for HandlerErrorExtension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HandlerErrorExtension").field(&self.0).finish()
    }
}

impl RequestExecution {
    /// Executes like [`RequestExecution::run`], with a transaction for the handler.
    pub(super) async fn run_in<S, B>(
        self,
        route: &TransactionBackend,
        lease: Lease,
        mut inner: S,
        request: BufferedRequest,
    ) -> Result<Response<Body>, S::Error>
    where
        S: Service<Request<Body>, Response = Response<B>>,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let number = lease.attempt();
        let began = Instant::now();
        let mut transaction = TransactionalLease::new(lease, route.clone());
        loop {
            let handle = transaction.run();
            let mut copy = request.copy();
            copy.extensions_mut().insert(handle.clone());
            let attempt = self.attempt(transaction.lease(), &mut inner, copy).await;
            let took = began.elapsed();
            let (class, end, reply) = match attempt {
                HandlerResult::Response(recording, response) => {
                    let (class, end, reply) =
                        self.transaction_end(route, handle.is_taken(), recording, response);
                    (class, end, Ok(reply))
                }
                HandlerResult::Problem(problem) => (
                    OutcomeClass::Unknown,
                    end(Recording::unknown()),
                    Ok(ExecutionReply::Problem(problem)),
                ),
                HandlerResult::NotStarted => {
                    return Ok(self.not_started(transaction.into_lease()).await);
                }
                HandlerResult::Failed(error) => {
                    (OutcomeClass::Unknown, end(Recording::unknown()), Err(error))
                }
            };
            // The end runs on a task of its own; this task is not cancelled either.
            let ended = transaction.end(handle, end).await;
            let (class, recorded, until, instead) = match ended {
                TransactionResult::Rerun(next) => {
                    let ready = catch(poll_fn(|cx| inner.poll_ready(cx)));
                    let ready = tokio::select! {
                        biased;
                        () = self.permit.gate().stopping() => None,
                        ready = next.lease().keep_alive(ready) => Some(ready),
                    };
                    if let Some(Ok(Ok(()))) = ready {
                        transaction = next;
                        continue;
                    }
                    let lease = next.into_lease();
                    let problem = match ready {
                        None | Some(Ok(Ok(()))) => return Ok(self.not_started(lease).await),
                        Some(other) => other.map(Result::err),
                    };
                    // If the store does not accept the release, its write is deferred.
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
                    (OutcomeClass::Retryable, RecordStatus::Stored, None, Some(conflicts()))
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
                        "a handler ended its transaction itself"
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
            let reply = match (instead, reply) {
                (Some(problem), _) => ExecutionReply::Problem(problem),
                (None, reply) => reply?,
            };
            return Ok(self.respond(class, recorded, until, reply));
        }
    }

    /// Returns the end of the transaction, if one was taken, and the class and reply of the
    /// execution.
    fn transaction_end(
        &self,
        route: &TransactionBackend,
        taken: bool,
        recording: Recording,
        mut response: HandlerResponse,
    ) -> (OutcomeClass, End, ExecutionReply) {
        let failed = response.handler_error().filter(|_| taken);
        if let Some(HandlerErrorExtension(error)) = failed {
            if route.database.any_is_conflict(&**error) {
                return (OutcomeClass::Retryable, End::Rerun, ExecutionReply::Handler(response));
            }
            response.log_failure();
            self.error_format.mark(&mut response.head.headers, OutcomeClass::Retryable);
            return (OutcomeClass::Retryable, End::Release, ExecutionReply::Handler(response));
        }
        response.log_failure();
        if taken && recording.class == OutcomeClass::Final && recording.commits.is_none() {
            tracing::error!(
                "it is not known whether a response is a success: its handler has to call \
                 `ExecutionHandle::commit` or `ExecutionHandle::roll_back`"
            );
            return (OutcomeClass::Retryable, End::Release, ExecutionReply::Problem(undecided()));
        }
        (recording.class, end(recording), ExecutionReply::Handler(response))
    }
}

fn end(recording: Recording) -> End {
    let Recording { class, retention, outcome, commits } = recording;
    match (class, outcome) {
        (OutcomeClass::Final, Some(outcome)) if commits == Some(true) => {
            End::Complete { outcome, retention }
        }
        (OutcomeClass::Final, Some(outcome)) => End::Reject { outcome, retention },
        (OutcomeClass::Retryable, _) => End::Release,
        // A final recording always has an outcome.
        (OutcomeClass::Final | OutcomeClass::Unknown, seen) => End::Abandon { seen },
    }
}

fn conflicts() -> Problem {
    let detail = "Other transactions conflicted with the request each time. Nothing was done.";
    Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER)
}

fn rolled_back() -> Problem {
    let detail = "The request's transaction was not committed. Nothing was done.";
    Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_AFTER)
}

fn commit_unknown() -> Problem {
    let detail = "It is not known yet whether the request's transaction was committed.";
    Problem::new(Code::OutcomePending, detail).retry_after(RETRY_AFTER)
}

fn undecided() -> Problem {
    let detail = "It is not known whether the response is a success. Nothing was done.";
    Problem::new(Code::HandlerFailed, detail)
}

fn ended_early() -> Problem {
    let detail = "The handler ended its transaction itself: the request may have taken effect.";
    Problem::new(Code::HandlerFailed, detail)
}

fn kept() -> Problem {
    let detail = "The handler kept its transaction: the request may have taken effect.";
    Problem::new(Code::HandlerFailed, detail)
}
