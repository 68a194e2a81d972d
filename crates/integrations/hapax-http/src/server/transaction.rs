//! Transactions of handlers, which commit together with their responses.
//!
//! For routes whose effects are rows in the database that has the records too;
//! [`hapax_core::transaction`] explains how both stay together. A route with
//! [`RouteOptions::transactions`](super::RouteOptions) has a [`TxHandle`] in the extensions of each
//! request; a handler takes its transaction from that, in axum by the extractor
//! `hapax_http::axum::InTransaction`. The transaction begins then, and not before: duplicates and
//! handlers that want none have no connection.
//!
//! | response | the handler's writes | the record |
//! | --- | --- | --- |
//! | final, and a success: 2xx, or 3xx; in gRPC *ok* (0); or after [`ExecutionHandle::commit`](super::ExecutionHandle::commit) | commit | with them |
//! | final, any other; or after [`ExecutionHandle::roll_back`](super::ExecutionHandle::roll_back) | are rolled back | after that, separately |
//! | final, and it is unknown whether it is a success: gRPC-Web, a gRPC response that is a stream or too large to store | are rolled back | released |
//! | retryable | are rolled back | released; after a [redirect](crate::classify::is_redirect) it keeps that, and a warning is logged |
//! | unknown; a panic; cut off | are rolled back | unknown |
//! | [`HandlerErrorExtension`] with an error of a lost race | are rolled back | the handler is called again |
//! | [`HandlerErrorExtension`] with any other error | are rolled back | released |
//!
//! The client gets the response after COMMIT, and 503 if that failed: `store-unavailable` or, if the
//! transaction lost a race each time, `overloaded`, and nothing was done; `outcome-pending` while the
//! result is unknown. A retry with the same key is right in each case.
//!
//! A handler may drop its transaction before it responds: it commits with the response. A handler
//! that takes none is recorded as on any other route, failures included: their effect is unknown. One
//! that keeps it beyond its response, in a task or a streamed body, or ends it by a statement, gives
//! its client 500 `handler-failed`, and the key follows the policy for unknown outcomes.
//!
//! A handler may be called more than once under one lease, with the same request, so effects outside
//! of the transaction may happen again: avoid them. The service is polled for readiness before each
//! call: a limit of concurrency belongs above the layer, since duplicates that wait count in one below
//! it, and would keep the handler from running again until they give up.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use hapax_core::{ExecutionEnd, ExecutionResult, FinishError, Timestamp};

use super::execute::{ExecutionReply, HandlerResponse, Recording, RequestExecution};
use super::observe::RecordStatus;
use super::policy::RETRY_AFTER;
use crate::classify::OutcomeClass;
use crate::problem::{Code, Problem};

pub use hapax_core::transaction::{
    LostRace, TakeTxError, TransactionBackend, Tx, TxHandle, TxOptions, TxOptionsError,
};

/// A response extension: the error of a handler, after which its transaction is rolled back, whatever
/// the rest of the response. If the transaction lost a race, the response is dropped, and the handler
/// called again; else the key is released, and the error logged.
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
    /// Returns what a response means for its transaction, if the handler has taken one, and for its
    /// key.
    pub(super) fn judge_transaction(
        &self,
        taken: bool,
        recording: Recording,
        mut given: HandlerResponse,
    ) -> (OutcomeClass, ExecutionEnd, ExecutionReply) {
        let failed = given.failed_by().filter(|_| taken);
        if let Some(HandlerErrorExtension(error)) = failed {
            let backend = self.policy.options.transactions.as_ref();
            let lost = backend.is_some_and(|it| it.database.any_is_conflict(&**error));
            let end = if lost { ExecutionEnd::Rerun } else { ExecutionEnd::Release };
            if !lost {
                given.log_failure();
                self.error_format.mark(&mut given.head.headers, OutcomeClass::Retryable);
            }
            return (OutcomeClass::Retryable, end, ExecutionReply::Handler(given));
        }
        given.log_failure();
        if taken && recording.class == OutcomeClass::Final && recording.commits.is_none() {
            tracing::error!(
                "it is unknown whether a response is a rejection: its handler must call \
                 `ExecutionHandle::commit` or `ExecutionHandle::roll_back`"
            );
            return (
                OutcomeClass::Retryable,
                ExecutionEnd::Release,
                ExecutionReply::Problem(undecided()),
            );
        }
        if taken && recording.is_redirect {
            tracing::warn!(
                operation = %self.named.id, route = &*self.policy.options.name,
                status = given.head.status.as_u16(),
                "a redirect rolls back the transaction of its handler: if its writes are to commit, the \
                 handler must call `ExecutionHandle::commit`"
            );
        }
        (recording.class, recording.into_end(), ExecutionReply::Handler(given))
    }
}

impl Recording {
    fn into_end(self) -> ExecutionEnd {
        let Self { class, retention, kept, is_redirect: _, redirect, commits } = self;
        match (class, kept) {
            (OutcomeClass::Final, Some(outcome)) if commits == Some(true) => {
                ExecutionEnd::Complete { outcome, retention }
            }
            (OutcomeClass::Final, Some(outcome)) => ExecutionEnd::Reject { outcome, retention },
            (OutcomeClass::Retryable, _) => match redirect {
                Some(outcome) => ExecutionEnd::Redirect { outcome },
                None => ExecutionEnd::Release,
            },
            // A final response always has an outcome.
            (OutcomeClass::Final | OutcomeClass::Unknown, seen) => ExecutionEnd::Abandon { seen },
        }
    }
}

/// The recorded end of an execution, for observers and for the client.
pub(super) struct Recorded {
    pub(super) class: OutcomeClass,
    pub(super) status: RecordStatus,
    /// The time until which a final outcome is stored, if it is known and not for ever.
    pub(super) until: Option<Timestamp>,
    /// The problem that replaces the handler's response.
    pub(super) problem: Option<Problem>,
}

impl Recorded {
    /// Returns what `result` means for a response of `class`. It is not for
    /// [`ExecutionResult::Rerun`].
    pub(super) fn of(class: OutcomeClass, result: ExecutionResult) -> Self {
        use ExecutionResult as Result;
        let (class, status, problem) = match result {
            Result::Recorded(until) => {
                let status = RecordStatus::Stored;
                return Self { class, status, until, problem: None };
            }
            Result::Exhausted => {
                (OutcomeClass::Retryable, RecordStatus::Stored, Some(in_the_way()))
            }
            Result::RolledBack(error) => {
                tracing::warn!(error = &*error as &dyn Error, "a transaction was rolled back");
                (OutcomeClass::Retryable, RecordStatus::Stored, Some(rolled_back()))
            }
            Result::Kept => {
                tracing::error!("a handler kept its transaction beyond its response");
                (OutcomeClass::Unknown, RecordStatus::Stored, Some(kept()))
            }
            Result::EndedEarly(error) => {
                tracing::error!(
                    error = &*error as &dyn Error,
                    "a handler ended its transaction itself"
                );
                (OutcomeClass::Unknown, RecordStatus::Stored, Some(ended_early()))
            }
            Result::Unknown => (class, RecordStatus::Pending, Some(commit_unknown())),
            Result::Failed(FinishError::Pending) => (class, RecordStatus::Pending, None),
            Result::Failed(_) | Result::Rerun(_) => (class, RecordStatus::Lost, None),
        };
        Self { class, status, until: None, problem }
    }
}

fn in_the_way() -> Problem {
    let detail = "The request's transaction lost a race each time. Nothing was done.";
    Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER)
}

pub(super) fn rolled_back() -> Problem {
    let detail = "The request's transaction was not committed. Nothing was done.";
    Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_AFTER)
}

fn commit_unknown() -> Problem {
    let detail = "It is unknown yet whether the request's transaction was committed.";
    Problem::new(Code::OutcomePending, detail).retry_after(RETRY_AFTER)
}

fn undecided() -> Problem {
    let detail = "It is unknown whether the response rejects the request. Nothing was done.";
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
