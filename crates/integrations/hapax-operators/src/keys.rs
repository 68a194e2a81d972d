//! Records as operators see them, and decisions on them.
//!
//! The admin listener and `hapax keys` on a file use the same implementation. A record is named by
//! its operation id, a hash of key and scope; if there is a secret, the record also has both in a
//! sealed description.

mod error;
mod find;
mod groups;
mod list;
mod prefix;
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
    SystemEntropy,
};
use hapax_http::server::{ScopePart, caller_hash};
use http::HeaderValue;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::audit::{Audit, AuditCase, AuditStage, Decider};
pub use error::OperatorError;
pub use find::{FindQuery, FoundRecords};
pub use groups::{UndecidedGroup, UndecidedGroups};
pub use list::{ListQuery, RecordList, UndecidedPage};
pub use prefix::is_id_prefix;
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

    /// Returns the hash by which the access log names a key; `None` if the store seals nothing.
    #[must_use]
    pub fn key_hash(&self, key: &Key) -> Option<String> {
        self.engine.key_pseudonym(key)
    }

    /// Returns the hash by which the access log names the caller with this scope; `None` if the store seals nothing, and
    /// for the empty scope.
    #[must_use]
    pub fn scope_hash(&self, scope: &[(ScopePart, HeaderValue)]) -> Option<String> {
        caller_hash(&self.engine, scope.iter().map(|(_, value)| value.as_bytes()))
    }

    /// Returns whether the store seals, so that records are described, and keys and callers have hashes.
    #[must_use]
    pub fn seals(&self) -> bool {
        self.store.capabilities().seals()
    }

    /// Returns whether records may have descriptions that this process can open.
    fn opens_descriptions(&self) -> bool {
        self.store.capabilities().secrets.is_some()
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
