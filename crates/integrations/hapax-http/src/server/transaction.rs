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
                "a response does not tell whether it is a refusal: its handler has to say so, by \
                 `Execution::commit` or `Execution::roll_back`"
            );
            return (
                OutcomeClass::Retryable,
                ExecutionEnd::Release,
                ExecutionReply::Problem(undecided()),
            );
        }
        (recording.class, recording.into_end(), ExecutionReply::Handler(given))
    }
}

impl Recording {
    fn into_end(self) -> ExecutionEnd {
        let Self { class, retention, kept, commits } = self;
        match (class, kept) {
            (OutcomeClass::Final, Some(outcome)) if commits == Some(true) => {
                ExecutionEnd::Complete { outcome, retention }
            }
            (OutcomeClass::Final, Some(outcome)) => ExecutionEnd::Reject { outcome, retention },
            (OutcomeClass::Retryable, _) => ExecutionEnd::Release,
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
                tracing::warn!(error = &*error as &dyn Error, "a transaction did not commit");
                (OutcomeClass::Retryable, RecordStatus::Stored, Some(rolled_back()))
            }
            Result::Kept => {
                tracing::error!("a handler kept its transaction beyond its response");
                (OutcomeClass::Unknown, RecordStatus::Stored, Some(kept()))
            }
            Result::EndedEarly(error) => {
                tracing::error!(
                    error = &*error as &dyn Error,
                    "a handler ended its transaction by itself"
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
    let detail = "Others were in the way of the request's transaction. Nothing of it was done.";
    Problem::new(Code::Overloaded, detail).retry_after(RETRY_AFTER)
}

pub(super) fn rolled_back() -> Problem {
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
