//! Unfinished and finished operations of a journal: lists, resumption, acknowledgement, removal.

use std::future::pending;
use std::num::NonZeroU32;
use std::sync::PoisonError;
use std::time::Duration;

use hapax_core::schedule::EntryKey;
use hapax_core::{
    DefiniteVerdict, EntryId, Key, OperationId, Outcome, RecordState, Resolve, Timestamp,
    WriteResult,
};
use hapax_saga::{SagaDecision, SagaLookup, SagaView, StuckReason, UnfinishedPage, UnreadableSaga};
use http::StatusCode;
use serde::Deserialize;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

use crate::client::Client;
use crate::error::SendError;
use crate::flow::last_try;
use crate::journal::JournalError;
use crate::request::RecordedRequest;
use crate::response::ResponseKind;

/// Records of a page.
const PAGE: NonZeroU32 = NonZeroU32::new(256).unwrap();

/// Entries of the first page of unfinished operations, and bytes of the later ones, about.
const FIRST_PAGE: NonZeroU32 = NonZeroU32::new(16).unwrap();
const PAGE_BYTES: usize = 16 << 20;

/// Bytes of an entry without its body, about.
const ENTRY: usize = 4 << 10;

const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();

/// Operations that are made due at once when a journal is resumed.
const WAKING: usize = 64;

/// Time for an operation whose tries are over to end.
const END: Duration = Duration::from_secs(30);

/// Numbers of the unfinished operations that [`Client::resume`] found in the journal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Resumed {
    /// Operations that are continued.
    pub pending: usize,
    /// Operations that this client does not try: their server is not declared, or honors no keys and a try may
    /// have arrived, or it cannot read the operation. [`Client::pending`] has the reasons.
    pub not_continued: usize,
    /// Operations of which a try may have arrived, and whose keys are too old to be sent again.
    pub expired: usize,
}

/// The state of an unfinished operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PendingState {
    /// The operation is tried, or waits for its next try.
    UnderWay,
    /// The operation has no response, and is not tried until a send, a resume or an acknowledgement.
    Stopped {
        /// The reason: `exhausted` if the time is over; `rejected` if the server executed nothing and no
        /// caller got its response; `unknown`, `key-expired`, `unauthorized`, `invalid-token`,
        /// `credentials-changed`, `key-changed`, as of [`SendError`]; `crashed` and `panicked` if executions
        /// ended without progress; others if another version wrote the operation.
        reason: String,
        /// A sentence with the reason.
        detail: String,
    },
    /// The journal has the operation, and this process cannot read all of it: another version or another
    /// secret wrote it, or it is damaged. It may have happened, and [`Client::resume`] does not try it.
    Unreadable {
        /// A sentence with the reason and with what to do.
        detail: String,
    },
}

/// An operation without a response.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PendingOperation {
    /// The operation id, by which `hapax saga show` and `hapax doctor` have it.
    pub id: OperationId,
    /// The idempotency key, as [`Client::key`] returns it.
    pub key: Key,
    /// The operation id of the server, if it has sent one in `Idempotency-Operation-Id`.
    pub server_operation: Option<String>,
    /// Begin of the first try, or of the operation if none has begun, by the clock of its process; `None` if
    /// it cannot be read.
    pub begun: Option<Timestamp>,
    /// Begin of the last try; `None` before the first one.
    pub last_try: Option<Timestamp>,
    /// The name; empty if it cannot be read.
    pub name: String,
    /// The method; empty if it cannot be read.
    pub method: String,
    /// The URL; empty if it cannot be read.
    pub url: String,
    /// The state.
    pub state: PendingState,
    /// Tries that began, over all processes, since the operation stopped last, if it did.
    pub tries: u32,
    /// True if a try may have arrived at the server.
    pub may_have_happened: bool,
    /// The error of the last try, if one has ended.
    pub last_error: Option<String>,
}

/// An operation with a response.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FinishedOperation {
    /// The idempotency key, as [`Client::key`] returns it.
    pub key: Key,
    /// The operation id of the server, if it has sent one in `Idempotency-Operation-Id`.
    pub server_operation: Option<String>,
    /// Begin of the first try, by the clock of its process; `None` of an operation that an earlier release ended.
    pub begun: Option<Timestamp>,
    /// Begin of the last try.
    pub last_try: Option<Timestamp>,
    /// The name.
    pub name: String,
    /// The method.
    pub method: String,
    /// The URL.
    pub url: String,
    /// The status of the response.
    pub status: StatusCode,
    /// Tries that began, over all processes, since the operation stopped last, if it did.
    pub tries: u32,
}

impl Client {
    /// Continues the unfinished operations of this journal, of earlier processes and of this one, in the
    /// background until the client is closed: at most 16 at once, within the budgets of their servers. Those
    /// that stopped are tried again, if that can have no second effect; those whose server is not declared here
    /// are left to other processes. Returns what it found, and waits for no response. Call it once after
    /// [`build`](crate::ClientBuilder::build).
    ///
    /// # Errors
    /// [`SendError::Journal`].
    pub async fn resume(&self) -> Result<Resumed, SendError> {
        self.begin_runner()?;
        let (mut resumed, mut failed) = (Resumed::default(), None);
        let (mut pages, mut waking) = (Pages::default(), JoinSet::new());
        let mut unreadable = 0;
        let mut count = |end: Result<Result<PendingFate, SendError>, JoinError>| match end {
            Ok(Ok(PendingFate::Continues)) => resumed.pending += 1,
            Ok(Ok(PendingFate::Unknown)) => resumed.not_continued += 1,
            Ok(Ok(PendingFate::Expired)) => resumed.expired += 1,
            Ok(Err(error)) => _ = failed.get_or_insert(error),
            // The runtime is shutting down.
            Err(_) => _ = failed.get_or_insert(SendError::Closed),
        };
        while let Some(page) = self.page(&mut pages).await? {
            unreadable += page.unreadable.len();
            for (view, request) in page.sagas {
                if waking.len() >= WAKING
                    && let Some(end) = waking.join_next().await
                {
                    count(end);
                }
                let client = self.clone();
                waking.spawn(async move { client.resume_one(&view, &request).await });
            }
            if *self.inner.closed.borrow() {
                return Err(SendError::Closed);
            }
        }
        while let Some(end) = waking.join_next().await {
            count(end);
        }
        resumed.not_continued += unreadable;
        // One that could not be continued does not keep the others from it.
        failed.map_or(Ok(resumed), Err)
    }

    /// Begins to drive operations that are due, unless the client closes.
    pub(crate) fn begin_runner(&self) -> Result<(), SendError> {
        let mut runner = self.inner.runner.lock().unwrap_or_else(PoisonError::into_inner);
        // A client that closes takes the runner after it has said so.
        if *self.inner.closed.borrow() {
            return Err(SendError::Closed);
        }
        let sagas = self.inner.resuming.clone();
        runner.get_or_insert_with(|| {
            tokio::spawn(async move {
                sagas.run(pending(), Duration::ZERO).await;
            })
        });
        Ok(())
    }

    async fn resume_one(
        &self,
        view: &SagaView,
        request: &RecordedRequest,
    ) -> Result<PendingFate, SendError> {
        if self.inner.state.host(request).is_none() {
            // It is left to a process that declares its server.
            return Ok(PendingFate::Unknown);
        }
        let Some(log) = &view.log else { return Ok(PendingFate::Continues) };
        if let Some(stuck) = &log.stuck {
            if stuck.reason == StuckReason::KeyExpired {
                return Ok(PendingFate::Expired);
            }
            if !self.may_retry(request, &stuck.reason, log) {
                return Ok(PendingFate::Unknown);
            }
            // If it has changed since, a process runs it, or has run it.
            self.retry(view).await?;
            return Ok(PendingFate::Continues);
        }
        if !self.inner.state.live().contains_key(&view.id) {
            // Its process may have died, and its entry in the schedule may be due much later than its lease
            // lapses.
            let left = view.lease_until.since(view.now);
            let key = EntryKey { operation: view.id, id: EntryId::from_bytes(log.entry) };
            let schedule = self.inner.engine.schedule();
            let schedule = schedule.ok_or(JournalError::NoSchedule)?;
            schedule.postpone(key, None, left).await.map_err(JournalError::Store)?;
        }
        Ok(PendingFate::Continues)
    }

    /// Returns the operations without a response, in no particular order; all are in memory at once. One that
    /// cannot be read is [`PendingState::Unreadable`].
    ///
    /// # Errors
    /// [`SendError::Journal`].
    pub async fn pending(&self) -> Result<Vec<PendingOperation>, SendError> {
        let (mut found, mut pages) = (Vec::new(), Pages::default());
        while let Some(page) = self.page(&mut pages).await? {
            found.extend(page.sagas.into_iter().map(|(view, request)| listed(view, request)));
            found.extend(page.unreadable.into_iter().map(unreadable));
        }
        Ok(found)
    }

    /// Returns the operations with a response that the journal still has, in no particular order; all are in
    /// memory at once. One that [`acknowledge`](Self::acknowledge) ended is in neither list. It reads the whole
    /// journal.
    ///
    /// # Errors
    /// [`SendError::Journal`].
    pub async fn finished(&self) -> Result<Vec<FinishedOperation>, SendError> {
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = self.inner.store.page(after, PAGE).await.map_err(JournalError::Store)?;
            for (id, stored) in page.records {
                after = Some(id);
                let Ok(stored) = stored else { continue };
                if stored.keep_until.is_some_and(|until| until <= page.now) {
                    continue;
                }
                let RecordState::Done(outcome) = &stored.record.state else { continue };
                let Some(Ok(recorded)) = self.inner.saga.output(outcome) else { continue };
                // A journal that programs share has the operations of all of its namespaces.
                let is_own = Key::new(&recorded.name).is_ok_and(|name| self.id(&name) == id);
                if is_own && recorded.kind != ResponseKind::NothingHappened {
                    found.push(FinishedOperation {
                        key: id.downstream(),
                        server_operation: recorded.operation(),
                        begun: recorded.times.first.map(Timestamp::from),
                        last_try: recorded.times.last.map(Timestamp::from),
                        status: recorded.status(),
                        name: recorded.name,
                        method: recorded.method,
                        url: recorded.url,
                        tries: recorded.tries,
                    });
                }
            }
            if !page.more {
                return Ok(found);
            }
        }
    }

    /// Accepts that a stopped operation has no response: while the journal has it
    /// ([`remember`](crate::ClientBuilder::remember)), nothing is sent under its name, and a send returns
    /// [`SendError::Unknown`]. [`pending`](Self::pending) does not list it. Returns false if there is no such
    /// operation, or it has a response.
    ///
    /// # Errors
    /// [`JournalError::UnderWay`] of one that may still be tried.
    pub async fn acknowledge(&self, name: &str) -> Result<bool, SendError> {
        let Ok(name) = Key::new(name) else { return Ok(false) };
        let id = self.id(&name);
        loop {
            let view = match self.inner.operator.show(&id).await.map_err(SendError::journal)? {
                SagaLookup::Unfinished(view) => view,
                SagaLookup::Ended(_) | SagaLookup::NotFound => return Ok(false),
            };
            let Some(stuck) = view.log.as_ref().and_then(|log| log.stuck.as_ref()) else {
                return Err(JournalError::UnderWay.into());
            };
            let detail = stuck.detail.clone();
            let operator = &self.inner.operator;
            match operator.decide(&view, &SagaDecision::Abort, "client", &detail).await {
                Ok(()) => {}
                Err(hapax_saga::SagaOperatorError::Changed) => continue,
                Err(error) => return Err(SendError::journal(error)),
            }
            self.end(&id, &name).await?;
            return Ok(true);
        }
    }

    /// Runs an aborted operation until its outcome is stored.
    async fn end(&self, id: &OperationId, name: &Key) -> Result<(), SendError> {
        let before = EntryKey { operation: *id, id: EntryId::from_bytes([0; 16]) };
        let mut pages = Pages { after: Some(before), ..Pages::default() };
        let sagas = self.page(&mut pages).await?.map(|page| page.sagas).unwrap_or_default();
        let Some((_, request)) = sagas.into_iter().find(|(view, _)| view.id == *id) else {
            return Ok(());
        };
        let inner = &self.inner;
        let started = inner.sending.start(&inner.saga, &Self::scope(), name, &request).await;
        let started = started.map_err(SendError::journal)?;
        // Its outcome is that it was cancelled. Another process may be about to store it.
        match timeout(END, started.outcome()).await {
            Ok(_) => Ok(()),
            Err(_) => Err(JournalError::UnderWay.into()),
        }
    }

    /// Removes an operation that no process tries, with its response or without one: the next send of its name
    /// sends again, under the same key. *At a server that has no record of the key any more, or honors no keys,
    /// that is a second effect*: call it only if the operation did not happen, or may happen again. To keep an
    /// operation without a response from being sent, use [`acknowledge`](Self::acknowledge). Returns false if
    /// the journal has no such operation.
    ///
    /// # Errors
    /// [`JournalError::UnderWay`] of one that may still be tried.
    pub async fn forget(&self, name: &str) -> Result<bool, SendError> {
        let Ok(name) = Key::new(name) else { return Ok(false) };
        self.acknowledge(name.as_str()).await?;
        self.free(&self.id(&name), |_| true).await
    }

    /// Releases the record of an operation that has ended, if `judge` wants that of its outcome. Returns
    /// whether this call has released it.
    ///
    /// Only the record that was judged is released: another caller may have freed the name since, and
    /// got a response that is to be stored. Each execution has a fence of its own, and an outcome does not
    /// change under its fence, so that the fence read with the outcome identifies it.
    pub(crate) async fn free(
        &self,
        id: &OperationId,
        judge: impl FnOnce(&Outcome) -> bool,
    ) -> Result<bool, SendError> {
        let seen = self.inner.engine.load(id).await.map_err(JournalError::Store)?;
        let Some(stored) = seen.stored else { return Ok(false) };
        match &stored.record.state {
            RecordState::Done(outcome) if judge(outcome) => {}
            _ => return Ok(false),
        }
        let resolve = Resolve {
            expected: stored.fence,
            force: false,
            forget: true,
            resolution: DefiniteVerdict::DidNotHappen,
            note: None,
            restart: false,
        };
        let resolved = self.inner.engine.resolve(*id, resolve).await.map_err(SendError::journal)?;
        Ok(matches!(resolved.result, WriteResult::Recorded(_)))
    }

    /// Returns the next page of unfinished operations; `None` after the last one.
    pub(crate) async fn page(
        &self,
        pages: &mut Pages,
    ) -> Result<Option<UnfinishedPage<RecordedRequest>>, SendError> {
        if pages.is_over {
            return Ok(None);
        }
        let inner = &self.inner;
        let (after, limit) = (pages.after, pages.limit);
        let page = inner.sending.unfinished(&inner.saga, after, limit).await;
        let page = page.map_err(SendError::journal)?;
        (pages.after, pages.is_over) = (page.next, page.next.is_none());
        let bytes: usize = page.sagas.iter().map(|(_, request)| request.body.0.len() + ENTRY).sum();
        let fit = PAGE_BYTES * page.sagas.len().max(1) / bytes.max(ENTRY);
        let fit = u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, PAGE.get());
        // At most doubled: the next ones may be larger.
        pages.limit = pages.limit.saturating_mul(TWO).min(NonZeroU32::MIN.saturating_add(fit - 1));
        Ok(Some(page))
    }
}

/// The pages of unfinished operations.
pub(crate) struct Pages {
    after: Option<EntryKey>,
    limit: NonZeroU32,
    is_over: bool,
}

impl Default for Pages {
    fn default() -> Self {
        Self { after: None, limit: FIRST_PAGE, is_over: false }
    }
}

/// Result of the resumption of an operation.
enum PendingFate {
    Continues,
    Unknown,
    Expired,
}

fn listed(view: SagaView, request: RecordedRequest) -> PendingOperation {
    let log = view.log;
    let stuck = log.as_ref().and_then(|log| log.stuck.clone());
    let state = match stuck {
        None => PendingState::UnderWay,
        Some(stuck) => {
            PendingState::Stopped { reason: stuck.reason.as_str().to_owned(), detail: stuck.detail }
        }
    };
    let (times, server_operation) = log.as_ref().map(last_try).unwrap_or_default();
    let started = log.as_ref().map(|log| log.started);
    let tries = log.as_ref().and_then(|log| log.steps.first()).map(|step| &step.forward);
    PendingOperation {
        id: view.id,
        key: view.id.downstream(),
        server_operation,
        begun: times.first.or(started).map(Timestamp::from),
        last_try: times.last.map(Timestamp::from),
        name: request.name,
        method: request.method,
        url: request.url,
        state,
        tries: tries.map_or(0, |tries| tries.begun),
        may_have_happened: tries.is_some_and(|tries| tries.arrived || tries.open),
        last_error: tries.and_then(|tries| tries.error.clone()),
    }
}

/// Returns what is known of an operation that cannot be read.
fn unreadable(saga: UnreadableSaga<RecordedRequest>) -> PendingOperation {
    #[derive(Deserialize)]
    struct Description {
        key: String,
    }
    let described = || serde_json::from_slice::<Description>(saga.description.as_ref()?).ok();
    let (name, method, url) = match saga.input {
        Some(request) => (request.name, request.method, request.url),
        None => (described().map(|it| it.key).unwrap_or_default(), String::new(), String::new()),
    };
    let detail = format!(
        "{}; look the operation up at the server, and do not send it under another name before",
        saga.error
    );
    PendingOperation {
        id: saga.id,
        key: saga.id.downstream(),
        server_operation: None,
        begun: None,
        last_try: None,
        name,
        method,
        url,
        state: PendingState::Unreadable { detail },
        tries: 0,
        may_have_happened: true,
        last_error: None,
    }
}
