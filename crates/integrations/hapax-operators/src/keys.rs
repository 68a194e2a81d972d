//! Records as operators see them, and decisions on them.
//!
//! The admin listener and `hapax keys` on a file use the same implementation. A record is named by
//! its operation id, a hash of key and scope; if there is a secret, the record also has both in a
//! sealed description.

mod groups;
mod list;
mod time;
mod verdict;
mod view;

use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::exchange::{Resolved, WriteResult};
use hapax_core::machine::Resolve;
use hapax_core::{
    ClaimError, Entropy, FencingToken, Idempotency, Inspect, Key, OperationId, Scope, StoreError,
    SystemEntropy, Timestamp,
};
use hapax_http::server::ScopePart;
use hapax_saga::{DecisionMismatch, SagaOperatorError};
use http::HeaderValue;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::audit::{Audit, AuditCase, AuditStage, Decider};
use crate::register::QuarantineError;
pub use groups::{UndecidedGroup, UndecidedGroups};
pub use list::{ListQuery, RecordList, UndecidedPage};
pub use time::rfc3339;
use verdict::resolution;
pub(crate) use view::id_or_none;
pub use view::{
    CallerView, OperationDescription, RecordBefore, RecordView, ResponseView, StateView,
};

/// Number of concurrent reads; further ones wait for a permit, in order. Records may be large.
const READERS: usize = 2;

/// The records of a store, for operators.
#[derive(Clone, Debug)]
pub struct OperatorRecords {
    engine: Idempotency,
    store: Arc<dyn Inspect>,
    audit: Arc<Audit>,
    store_timeout: Duration,
    permits: Arc<Semaphore>,
}

/// Decision of an operator.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    /// The fence that the operator saw. A record that has another fence now is not changed.
    pub fence: u64,
    /// Also decides a record in flight whose lease has not lapsed, and one whose request may still
    /// execute.
    #[serde(default)]
    pub force: bool,
    /// Also releases a record that is done: its outcome is no longer replayed, and the next request
    /// executes.
    #[serde(default)]
    pub forget: bool,
    /// Also releases a record that is not of an HTTP request.
    #[serde(default)]
    pub any_kind: bool,
    /// The reason, for the record and the audit file: one line of at most 1,000 bytes.
    pub reason: String,
    /// The name of the operator. Default: that of the user, or `token` over HTTP.
    #[serde(default)]
    pub who: Option<String>,
    /// The verdict on the operation.
    pub outcome: OperatorVerdict,
    /// The status of the response that retries get, 200 to 599. Default 200.
    #[serde(default)]
    pub status: Option<u16>,
    /// The headers of the response.
    #[serde(default)]
    pub headers: Vec<(String, String)>,
    /// The body of the response, as text.
    #[serde(default)]
    pub body: Option<String>,
    /// The body of the response, as base64, instead of `body`.
    #[serde(default)]
    pub body_base64: Option<String>,
}

impl Decision {
    /// Returns the body that a response is given.
    pub(crate) fn body_bytes(&self) -> Result<Bytes, OperatorError> {
        match (&self.body, &self.body_base64) {
            (Some(_), Some(_)) => {
                Err(OperatorError::Invalid("either `body` or `body_base64`, not both"))
            }
            (Some(text), None) => Ok(Bytes::from(text.clone())),
            (None, Some(coded)) => view::from_base64(coded)
                .map(Bytes::from)
                .ok_or(OperatorError::Invalid("`body_base64` is not base64")),
            (None, None) => Ok(Bytes::new()),
        }
    }
}

/// Verdict of an operator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OperatorVerdict {
    /// The operation happened, with this response.
    Happened,
    /// The operation did not happen: the next request executes.
    DidNotHappen,
}

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
            Self::NotFound | Self::Quarantine(QuarantineError::NotFound { .. }) => "not-found",
            Self::Released { .. } => "released",
            Self::InFlight => "in-flight",
            Self::MayExecute { .. } => "may-execute",
            Self::Done { .. } => "done",
            Self::Changed { .. } => "changed",
            Self::Invalid(_) | Self::NotHttp { .. } | Self::Quarantine(_) => "bad-request",
            Self::OtherKind { .. } => "other-kind",
            Self::Audit(_) => "audit",
            Self::Contended => "contended",
            Self::Store(StoreError::Corrupt(_))
            | Self::Engine(ClaimError::Store(StoreError::Corrupt(_))) => "corrupt",
            Self::Saga => "saga",
            Self::NoSaga => "not-found",
            Self::SeveralSagas => "ambiguous",
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

impl OperatorRecords {
    /// Returns the records of `store`, which must be the store of `engine`. Decisions are appended
    /// to `audit`; `store_timeout` is the timeout of a read.
    #[must_use]
    pub fn new(
        engine: Idempotency,
        store: Arc<dyn Inspect>,
        audit: Audit,
        store_timeout: Duration,
    ) -> Self {
        let permits = Arc::new(Semaphore::new(READERS));
        Self { engine, store, audit: Arc::new(audit), store_timeout, permits }
    }

    /// Returns the audit file.
    #[must_use]
    pub const fn audit(&self) -> &Arc<Audit> {
        &self.audit
    }

    /// Returns the operation id of `key` in the scope that these parts form.
    #[must_use]
    pub fn id(&self, scope: &[(ScopePart, HeaderValue)], key: &Key) -> OperationId {
        let scope = Scope::of(scope.iter().map(|(part, value)| (part.as_str(), value.as_bytes())));
        self.engine.operation_id(&scope, key)
    }

    /// Returns a record as operators see it.
    ///
    /// # Errors
    /// [`OperatorError::NotFound`], [`OperatorError::Store`].
    pub async fn show(&self, id: &OperationId) -> Result<RecordView, OperatorError> {
        let _turn = self.permit().await;
        let seen = self.within(self.store.load(id)).await?;
        let stored = seen.stored.ok_or(OperatorError::NotFound)?;
        Ok(RecordView::of(id, &stored, seen.now))
    }

    /// Decides what became of an operation; copies that wait for it get the outcome. Returns what it
    /// was just before.
    ///
    /// It runs on a task of its own: a caller that is dropped leaves no decision between its two
    /// lines in the audit file.
    ///
    /// # Errors
    /// [`OperatorError`]; after [`OperatorError::Engine`] the decision may have been written: load
    /// the record again.
    pub async fn resolve(
        &self,
        id: &OperationId,
        decision: Decision,
        decider: Decider,
    ) -> Result<RecordBefore, OperatorError> {
        let (keys, id) = (self.clone(), *id);
        let task = tokio::spawn(async move { keys.execute(id, decision, decider).await });
        task.await.unwrap_or(Err(OperatorError::Engine(ClaimError::Shutdown)))
    }

    async fn execute(
        self,
        id: OperationId,
        decision: Decision,
        decider: Decider,
    ) -> Result<RecordBefore, OperatorError> {
        let mut number = [0; 16];
        SystemEntropy.fill(&mut number).map_err(|error| OperatorError::Engine(error.into()))?;
        let case = Arc::new(AuditCase::new(number, &id, &decision, &decider)?);
        let (expected, wanted) = (FencingToken::new(decision.fence), decision.outcome);
        let (force, forget, any_kind) = (decision.force, decision.forget, decision.any_kind);
        let resolution = resolution(decision)?;
        let before = self.decidable(&id, wanted, any_kind).await?;
        // On the disk before anything is written to the store: a process that ends in between
        // leaves an intention, never a decision without a line.
        self.note(&case, None, before.clone()).await.map_err(OperatorError::Audit)?;
        let note = serde_json::to_vec(&case.decided).map(Bytes::from).ok();
        let resolve = Resolve { expected, force, forget, resolution, note, restart: false };
        let decided = match self.engine.resolve(id, resolve).await {
            Ok(resolved) => outcome_of(resolved, expected, wanted),
            Err(error) => Err(OperatorError::Engine(error)),
        };
        let AuditCase { id, decided: said, .. } = &*case;
        let (result, second) = match decided {
            Ok(was) => {
                tracing::info!(
                    %id, fence = expected.get(), outcome = ?wanted, force, forget,
                    decision = said.decision, who = said.who, why = said.why,
                    was = ?was.state, was_answered = was.status,
                    "an operator decided about a record"
                );
                let noted = self.note(&case, Some(Ok(())), was.clone()).await;
                (Ok(was), noted)
            }
            // It may have been written: the intention alone says so.
            Err(OperatorError::Engine(ClaimError::Store(StoreError::Ambiguous(error)))) => {
                (Err(OperatorError::Engine(StoreError::Ambiguous(error).into())), Ok(()))
            }
            Err(error) => {
                let error = Arc::new(error);
                let noted = self.note(&case, Some(Err(Arc::clone(&error))), before).await;
                // The line is written, so that no other task has the error.
                (Err(Arc::into_inner(error).unwrap_or(OperatorError::Contended)), noted)
            }
        };
        if let Err(error) = second {
            tracing::error!(
                %error, decision = said.decision, decided = result.is_ok(),
                "the second line of a decision could not be written to the audit file"
            );
        }
        result
    }

    /// Appends a line to the audit file: the intention if `end` is `None`, else the result.
    async fn note(
        &self,
        case: &Arc<AuditCase>,
        end: Option<Result<(), Arc<OperatorError>>>,
        before: RecordBefore,
    ) -> io::Result<()> {
        let (audit, case) = (Arc::clone(&self.audit), Arc::clone(case));
        let written = tokio::task::spawn_blocking(move || {
            let stage = match &end {
                None => AuditStage::Intended,
                Some(Ok(())) => AuditStage::Done,
                Some(Err(error)) => AuditStage::Rejected(error),
            };
            audit.append(&case, stage, &before)
        });
        written.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Returns the present record if this decision may be applied to its kind. A record keeps its
    /// scheme as long as it has the same fence.
    async fn decidable(
        &self,
        id: &OperationId,
        wanted: OperatorVerdict,
        any_kind: bool,
    ) -> Result<RecordBefore, OperatorError> {
        let _turn = self.permit().await;
        let seen = self.within(self.store.load(id)).await?;
        let stored = seen.stored.ok_or(OperatorError::NotFound)?;
        if stored.record.scheme.is_saga() {
            return Err(OperatorError::Saga);
        }
        let scheme = stored.record.scheme.of_request();
        if !scheme.starts_with("http/") {
            let scheme = scheme.to_owned();
            match wanted {
                OperatorVerdict::Happened => return Err(OperatorError::NotHttp { scheme }),
                OperatorVerdict::DidNotHappen if !any_kind => {
                    return Err(OperatorError::OtherKind { scheme });
                }
                OperatorVerdict::DidNotHappen => {}
            }
        }
        Ok(RecordBefore::of(&stored, seen.now))
    }

    /// Removes at most `limit` expired records. Returns their number, and whether more may be due.
    ///
    /// # Errors
    /// [`OperatorError::Store`]; what was removed until then stays removed.
    pub async fn purge(&self, limit: NonZeroU32) -> Result<(u32, bool), OperatorError> {
        let reaped = self.store.reap(limit).await?;
        Ok((reaped.removed, reaped.more))
    }

    /// Returns whether the store answers within the timeout.
    pub async fn store_answers(&self) -> bool {
        // Any key: nothing is known of it, and nothing is changed.
        let probe = OperationId::from_bytes([0; 32]);
        match self.within(self.store.load(&probe)).await {
            Ok(_) | Err(StoreError::Corrupt(_)) => true,
            Err(error) => {
                tracing::warn!(%error, "the store does not answer");
                false
            }
        }
    }

    /// Waits for a permit to read. If the future is dropped, the next waiter gets the permit.
    async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.permits.acquire().await.ok()
    }

    async fn within<T>(
        &self,
        read: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        timeout(self.store_timeout, read)
            .await
            .unwrap_or_else(|_| Err(StoreError::unavailable("no answer in time")))
    }
}

fn outcome_of(
    resolved: Resolved,
    expected: FencingToken,
    wanted: OperatorVerdict,
) -> Result<RecordBefore, OperatorError> {
    let Resolved { result: wrote, was } = resolved;
    let (now, stored) = (was.now, was.stored.ok_or(OperatorError::NotFound)?);
    let was = RecordBefore::of(&stored, now);
    match wrote {
        WriteResult::Recorded(_) => Ok(was),
        WriteResult::Rejected | WriteResult::NotFound | WriteResult::Changed => {
            Err(why_not(was, stored.fence, expected, wanted))
        }
        WriteResult::MayExecute { until } => Err(OperatorError::may_execute(until, now)),
        WriteResult::Saga => Err(OperatorError::Saga),
        WriteResult::Contended | WriteResult::Lost | WriteResult::Gone => {
            Err(OperatorError::Contended)
        }
    }
}

/// Returns the error for a record that differs from the one that was decided about.
fn why_not(
    was: RecordBefore,
    fence: FencingToken,
    expected: FencingToken,
    wanted: OperatorVerdict,
) -> OperatorError {
    let RecordBefore { state, ended, status } = was;
    let is_it = fence == expected;
    match (state, ended) {
        (StateView::Expired, _) => OperatorError::NotFound,
        (StateView::Released, Some(at)) => OperatorError::Released { at },
        (StateView::InFlight, _) if is_it => OperatorError::InFlight,
        (StateView::Done, Some(at)) if is_it => OperatorError::Done { at, status, wanted },
        _ => OperatorError::Changed { state, fence: fence.get() },
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
