//! Errors of operators' requests.

use std::io;
use std::time::Duration;

use hapax_core::{ClaimError, StoreError, Timestamp};
use hapax_saga::{DecisionMismatch, SagaOperatorError};

use super::time::rfc3339;
use super::{OperatorVerdict, StateView};
use crate::register::QuarantineError;

/// Errors of an operator's request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// There is no such record, or it has expired.
    #[error(
        "expected a record of this key for this caller in this namespace, found none, or it has expired: check the key, the \
         caller (--scope) and the namespace (--namespace)"
    )]
    NotFound,
    /// No record has an id that begins with the digits.
    #[error(
        "expected the id of a record or its first digits, found no record whose id begins with them, or it has expired: \
         copy the id from the list"
    )]
    NoId,
    /// The digits begin the ids of several records.
    #[error(
        "expected the first digits of one id, found those of {}{}: add digits",
        ids.join(", "), if *more { " and more" } else { "" }
    )]
    SeveralIds {
        /// The ids, in their order.
        ids: Vec<String>,
        /// Whether there are further ones.
        more: bool,
    },
    /// A damaged part of the store may hide ids that begin with the digits.
    #[error(
        "expected readable records around these digits, found a damaged one, which may hide others: pass the whole id, and \
         run `hapax doctor`"
    )]
    HiddenIds(#[source] StoreError),
    /// The store has no secret: its records contain neither keys nor callers.
    #[error(
        "expected a store with a secret, found one without: its records contain neither keys nor callers and cannot be \
         searched; find the record by key and caller (`hapax keys show KEY --scope VALUE`) or by its id; a store \
         gets a secret by --secret-file, one that began without by a ring with `name none`"
    )]
    NoSecret,
    /// The record was released before.
    #[error(
        "the key was released at {at}: the next request with it executes; no decision is needed"
    )]
    Released {
        /// The time at which it was released, RFC 3339.
        at: String,
    },
    /// An execution is in progress.
    #[error(
        "expected an undecided record, found one in flight: wait until its lease lapses, or set `force`"
    )]
    InFlight,
    /// The request may still execute, so that it is not known yet that it did not happen.
    #[error(
        "the request may still execute until {until} (in {} s): `happened` is accepted now; \
         did-not-happen and release then, or with `force`", remaining.as_secs_f64().ceil()
    )]
    MayExecute {
        /// The time from which it no longer does, RFC 3339.
        until: String,
        /// The time until then.
        remaining: Duration,
    },
    /// The record is done, with another outcome than the decision.
    #[error("{}", done(at, *status, *wanted))]
    Done {
        /// The time at which it was done, RFC 3339.
        at: String,
        /// The status of its response; `None` if the outcome is no HTTP response.
        status: Option<u16>,
        /// The verdict that was requested.
        wanted: OperatorVerdict,
    },
    /// The record has changed since the operator read it.
    #[error(
        "expected the record with the fence of the decision, found {state} with fence {fence}: load it and decide again"
    )]
    Changed {
        /// State of the record now.
        state: StateView,
        /// Its fence now.
        fence: u64,
    },
    /// The decision is invalid, or its response cannot be stored.
    #[error("{0}")]
    Invalid(&'static str),
    /// The record is of a function or a message: only its own program can write its value.
    #[error(
        "expected the record of an HTTP request, found another kind ({scheme}): only the program that \
         wrote it can record its value"
    )]
    NotHttp {
        /// The scheme of its fingerprint.
        scheme: String,
    },
    /// The record is of a function or a message, and the decision does not allow other kinds.
    #[error(
        "expected the record of an HTTP request, found another kind ({scheme}): set `any_kind` to \
         release it"
    )]
    OtherKind {
        /// The scheme of its fingerprint.
        scheme: String,
    },
    /// The record is of a saga: its steps would be lost.
    #[error(
        "expected the record of a request, a function or a message, found that of a saga: decide \
         about its steps with `hapax saga`"
    )]
    Saga,
    /// There is no saga with this id.
    #[error(
        "expected a saga, found none with this id or key: it never began, or its outcome has expired; the id of one that has ended is needed as a whole"
    )]
    NoSaga,
    /// The digits begin the ids of several sagas.
    #[error(
        "expected the first digits of one id, found several sagas that begin with them: add digits, or pass the whole id from the list"
    )]
    SeveralSagas,
    /// The saga has ended.
    #[error("expected an unfinished saga, found one that has ended: no decision is needed")]
    SagaEnded,
    /// The saga has changed since it was read.
    #[error("the saga has changed since it was read: show it, and decide again")]
    SagaChanged,
    /// The decision does not apply to the saga.
    #[error(transparent)]
    SagaMismatch(DecisionMismatch),
    /// The log of the saga cannot be read.
    #[error(
        "expected a step log of this version, found another encoding or damage: use the version of `hapax` or of the service that wrote it"
    )]
    SagaUnreadable,
    /// The log of the saga has no room for the decision.
    #[error(
        "expected a step log that fits with the decision, found that it would be too large: decide without a result, or give a shorter one"
    )]
    SagaTooLarge,
    /// The decision is in the log of the saga, which could not be woken.
    #[error(
        "the decision was recorded, but the saga could not be woken: repeat the decision with the same \
         reason, or wait until it is due, see `hapax saga show`"
    )]
    SagaNotWoken,
    /// The store has no schedule, which lists the sagas.
    #[error(
        "expected a store with a schedule, found none: sagas need memory, file, Redis or PostgreSQL"
    )]
    NoSchedule,
    /// A quarantine cannot begin or end.
    #[error(transparent)]
    Quarantine(QuarantineError),
    /// The audit file cannot be written; nothing was decided.
    #[error(
        "the audit file cannot be written: {0}; nothing was decided: make the file writable and retry"
    )]
    Audit(#[source] io::Error),
    /// Other writers changed the record again and again; nothing was decided.
    #[error("other writers changed the record each time: nothing was decided; retry")]
    Contended,
    /// The store is unavailable, or the record is damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The decision could not be written; it may have been.
    #[error(transparent)]
    Engine(ClaimError),
}

impl OperatorError {
    /// Returns the error of a decision before the time `until`.
    pub(crate) fn may_execute(until: Timestamp, now: Timestamp) -> Self {
        Self::MayExecute { until: rfc3339(until), remaining: until.since(now) }
    }

    /// Returns the code of the error in the API.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotFound | Self::NoId | Self::Quarantine(QuarantineError::NotFound { .. }) => {
                "not-found"
            }
            Self::NoSecret => "no-secret",
            Self::Released { .. } => "released",
            Self::InFlight => "in-flight",
            Self::MayExecute { .. } => "may-execute",
            Self::Done { .. } => "done",
            Self::Changed { .. } => "changed",
            Self::Invalid(_) | Self::NotHttp { .. } | Self::Quarantine(_) => "bad-request",
            Self::OtherKind { .. } => "other-kind",
            Self::Audit(_) => "audit",
            Self::Contended => "contended",
            Self::HiddenIds(_)
            | Self::Store(StoreError::Corrupt(_))
            | Self::Engine(ClaimError::Store(StoreError::Corrupt(_))) => "corrupt",
            Self::Saga => "saga",
            Self::NoSaga => "not-found",
            Self::SeveralSagas | Self::SeveralIds { .. } => "ambiguous",
            Self::SagaEnded => "ended",
            Self::SagaChanged => "changed",
            Self::SagaMismatch(DecisionMismatch::NotStuck) => "not-stuck",
            Self::SagaMismatch(DecisionMismatch::NoStep) => "no-step",
            Self::SagaMismatch(DecisionMismatch::NoUndo) => "no-undo",
            Self::SagaMismatch(DecisionMismatch::NotAccepted) => "not-accepted",
            Self::SagaMismatch(DecisionMismatch::Compensates) => "compensates",
            Self::SagaMismatch(_) => "mismatch",
            Self::SagaUnreadable => "unreadable",
            Self::SagaNotWoken => "not-woken",
            Self::SagaTooLarge => "too-large",
            Self::NoSchedule => "no-schedule",
            Self::Store(_) | Self::Engine(_) => "store-unavailable",
        }
    }
}

impl From<QuarantineError> for OperatorError {
    fn from(error: QuarantineError) -> Self {
        match error {
            QuarantineError::Store(error) => Self::Store(error),
            error => Self::Quarantine(error),
        }
    }
}

impl From<SagaOperatorError> for OperatorError {
    fn from(error: SagaOperatorError) -> Self {
        match error {
            SagaOperatorError::NotFound => Self::NoSaga,
            SagaOperatorError::Mismatch(DecisionMismatch::MayTakeEffect { until, remaining }) => {
                Self::MayExecute { until: rfc3339(until.into()), remaining }
            }
            SagaOperatorError::Mismatch(mismatch) => Self::SagaMismatch(mismatch),
            SagaOperatorError::NotWoken(error) => {
                tracing::warn!(%error, "a saga was decided, but could not be woken");
                Self::SagaNotWoken
            }
            SagaOperatorError::Changed => Self::SagaChanged,
            SagaOperatorError::Unreadable => Self::SagaUnreadable,
            SagaOperatorError::Value(_) => Self::SagaTooLarge,
            SagaOperatorError::Store(error) => Self::Store(error),
            SagaOperatorError::Write(error) => Self::Engine(error),
            // A new error of sagas: nothing is known of the write.
            error => Self::Store(StoreError::ambiguous(error)),
        }
    }
}

fn done(at: &str, status: Option<u16>, wanted: OperatorVerdict) -> String {
    let answer = status.map_or_else(String::new, |status| format!(" with status {status}"));
    let done = format!("the key was completed at {at}{answer}, and retries get that response");
    match wanted {
        OperatorVerdict::DidNotHappen => {
            format!(
                "{done}; set `forget` to release it: the next request with this key executes again"
            )
        }
        OperatorVerdict::Happened => format!("{done}; a stored response cannot be replaced"),
    }
}
