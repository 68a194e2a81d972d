//! Sagas of a store, and decisions about stuck ones.
//!
//! The admin listener and `hapax saga` on a store that it opened itself use the same
//! implementation. No definition is needed: the step log has all that an operator sees and decides
//! about.

mod decide;
mod id;
mod view;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, Schedule};
use hapax_core::store::BoxFuture;
use hapax_core::{EntryId, Idempotency, Key, OperationId, Scope, StoreError, WriteId};
use hapax_http::server::ScopePart;
use hapax_saga::{
    EndedSaga, SagaLookup, SagaOperator, SagaOperatorError, SagaView, UnacceptedStart,
};
use http::HeaderValue;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

use crate::audit::Audit;
use crate::keys::{OperatorError, id_or_none};
pub use decide::{SagaAction, SagaBefore, SagaDecisionRequest};
pub use id::SagaId;
use view::Scheduled;
pub use view::{
    DefinitionView, SagaDecisionView, SagaDetails, SagaStateView, SagaStepView, SagaSummary,
    StepOutcomeView, StuckView, TriesView,
};

/// Number of concurrent reads; further ones wait for a permit, in order.
const READERS: usize = 2;

/// Number of entries that are read from the schedule at once. Each has the input of its saga.
const PAGE: NonZeroU32 = NonZeroU32::MIN.saturating_add(31);

/// Largest number of pages of the schedule, and of records, that are read for one page of a list.
/// With a filter, few of them may match.
const MAX_PAGES: u32 = 320;
const MAX_LOADED: u32 = 1_000;

/// Number of entries of one operation among which that of its log is sought.
const MAX_ENTRIES: NonZeroU32 = NonZeroU32::MIN.saturating_add(7);

/// Largest number of sagas that metrics count, and the time for which they are not counted again: a count
/// reads each of them.
const MAX_COUNTED: u64 = 10_000;
const COUNT_EVERY: Duration = Duration::from_secs(60);

/// The sagas of a store, for operators.
#[derive(Clone, Debug)]
pub struct OperatorSagas {
    engine: Idempotency,
    sagas: SagaOperator,
    audit: Arc<Audit>,
    store_timeout: Duration,
    permits: Arc<Semaphore>,
    metrics: Arc<Mutex<Option<(Instant, String)>>>,
}

/// A choice of unfinished sagas to list.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SagaQuery {
    /// The state of the sagas; `None` for all that have not ended.
    #[serde(default)]
    pub state: Option<SagaStateView>,
    /// Their definition: a name, or a name and a version, like `place-order:2`.
    #[serde(default)]
    pub definition: Option<String>,
    /// The id after which the page begins.
    #[serde(default, deserialize_with = "id_or_none")]
    pub after: Option<OperationId>,
    /// The largest number of sagas; 1 to 1,000. Default 100.
    #[serde(default)]
    pub limit: Option<u32>,
}

/// A page of unfinished sagas, in the order of their ids.
#[derive(Debug, Serialize, Deserialize)]
pub struct SagaList {
    /// The sagas.
    pub sagas: Vec<SagaSummary>,
    /// Sagas that cannot be read: id and reason.
    pub damaged: Vec<(String, String)>,
    /// The id for `after` of the next page; `None` at the end.
    pub next: Option<String>,
}

/// The definitions that have unfinished sagas.
#[derive(Debug, Serialize, Deserialize)]
pub struct DefinitionList {
    /// The definitions, by name and version.
    pub definitions: Vec<DefinitionView>,
}

impl SagaQuery {
    fn has(&self, definition: (&str, u32)) -> bool {
        let (name, version) = definition;
        self.definition.as_deref().is_none_or(|wanted| match wanted.rsplit_once(':') {
            Some((of_name, of_version)) => {
                of_name == name && of_version.parse().is_ok_and(|it: u32| it == version)
            }
            None => wanted == name,
        })
    }

    fn selects(&self, saga: &SagaSummary) -> bool {
        match self.state {
            None => true,
            Some(SagaStateView::Overdue) => saga.overdue,
            Some(state) => saga.state == state,
        }
    }
}

impl OperatorSagas {
    /// Returns the sagas of the store of `engine`. Decisions are appended to `audit`; `store_timeout`
    /// is the timeout of a read.
    #[must_use]
    pub fn new(engine: Idempotency, audit: Arc<Audit>, store_timeout: Duration) -> Self {
        let sagas = SagaOperator::new(engine.clone());
        let permits = Arc::new(Semaphore::new(READERS));
        Self { engine, sagas, audit, store_timeout, permits, metrics: Arc::default() }
    }

    /// Returns a page of unfinished sagas.
    ///
    /// # Errors
    /// [`OperatorError::NoSchedule`], [`OperatorError::Store`].
    pub async fn list(&self, query: SagaQuery) -> Result<SagaList, OperatorError> {
        let limit = query.limit.unwrap_or(100).clamp(1, 1000) as usize;
        let mut listed = SagaList { sagas: Vec::new(), damaged: Vec::new(), next: None };
        let last_of = |operation| EntryKey { operation, id: EntryId::from_bytes([u8::MAX; 16]) };
        let (mut after, mut loaded) = (query.after.map(last_of), 0);
        let next = |after: Option<EntryKey>| after.map(|key| key.operation.to_string());
        let _permit = self.permit().await;
        for _ in 0..MAX_PAGES {
            let page = self.on_schedule(|it| it.entries(after, PAGE)).await?;
            for (key, entry) in &page.entries {
                // A damaged entry of the last operation may have exceeded the limit.
                if listed.sagas.len() + listed.damaged.len() >= limit || loaded >= MAX_LOADED {
                    // The next page begins with an operation: of several entries of one, only that
                    // of its log counts, and it may be the last.
                    if after.is_none_or(|after| after.operation != key.operation) {
                        listed.next = next(after);
                        return Ok(listed);
                    }
                }
                after = Some(*key);
                let id = key.operation.to_string();
                let entry = match entry {
                    Ok(entry) => Scheduled { queue: &entry.queue, due: entry.due },
                    Err(error) => {
                        listed.damaged.push((id, error.to_string()));
                        continue;
                    }
                };
                // What the entry says is cheaper than the record.
                let queue = UnacceptedStart::parse_queue(entry.queue);
                let Some((_, _, is_rejected)) = queue.filter(|it| query.has((it.0, it.1))) else {
                    continue;
                };
                if is_rejected {
                    let start = UnacceptedStart::of(*key, entry.queue, entry.due, page.now);
                    let start = start.map(|start| SagaDetails::unaccepted(&start).summary);
                    listed.sagas.extend(start.filter(|start| query.selects(start)));
                    continue;
                }
                if query.state == Some(SagaStateView::Overdue) && !entry.is_overdue(page.now) {
                    continue;
                }
                loaded += 1;
                match self.within(self.sagas.show(&key.operation)).await {
                    Ok(SagaLookup::Unfinished(saga)) if is_of(&saga, *key) => {
                        let saga = SagaSummary::of(&saga, Some(entry));
                        if listed.lacks(&saga) && query.selects(&saga) {
                            listed.sagas.push(saga);
                        }
                    }
                    // It was started in a transaction, and no process has looked at it. One that is not
                    // overdue has just been inserted, or is that of a start that was withdrawn.
                    Ok(SagaLookup::NotFound) if entry.is_overdue(page.now) => {
                        let start = UnacceptedStart::of(*key, entry.queue, entry.due, page.now);
                        let start = start.map(|start| SagaDetails::unaccepted(&start).summary);
                        let is_wanted = |it: &SagaSummary| listed.lacks(it) && query.selects(it);
                        let start = start.filter(is_wanted);
                        listed.sagas.extend(start);
                    }
                    Ok(_) => {}
                    Err(error @ OperatorError::SagaUnreadable) => {
                        listed.damaged.push((id, error.to_string()));
                    }
                    Err(OperatorError::Store(error @ StoreError::Corrupt(_))) => {
                        listed.damaged.push((id, error.to_string()));
                    }
                    Err(error) => return Err(error),
                }
            }
            after = page.next();
            if after.is_none() {
                return Ok(listed);
            }
        }
        listed.next = next(after);
        Ok(listed)
    }

    /// Returns a saga with its steps and decisions, or a start that no process has accepted.
    ///
    /// # Errors
    /// [`OperatorError::NoSaga`], [`OperatorError::SagaUnreadable`], [`OperatorError::Store`].
    pub async fn show(&self, id: &SagaId) -> Result<SagaDetails, OperatorError> {
        let _turn = self.permit().await;
        let saga = match self.look_up(id).await? {
            Found::Start(start) => return Ok(SagaDetails::unaccepted(&start)),
            Found::Ended(ended) => return Ok(SagaDetails::ended(&id.operation, &ended)),
            Found::Saga(saga) => saga,
        };
        let first = EntryKey { operation: id.operation, id: EntryId::from_bytes([0; 16]) };
        let page = self.on_schedule(|it| it.entries(Some(first), MAX_ENTRIES)).await?;
        let entry = page.entries.iter().find(|(key, _)| is_of(&saga, *key));
        let entry = entry.and_then(|(_, entry)| entry.as_ref().ok());
        let entry = entry.map(|entry| Scheduled { queue: &entry.queue, due: entry.due });
        Ok(SagaDetails::of(&saga, entry))
    }

    /// Returns the id of the saga that was started under a key, with the name of its definition, in the scope
    /// that these parts form.
    #[must_use]
    pub fn id(&self, definition: &str, scope: &[(ScopePart, HeaderValue)], key: &Key) -> SagaId {
        let scope = Scope::of(scope.iter().map(|(part, value)| (part.as_str(), value.as_bytes())));
        self.sagas.id(definition, &scope, key).into()
    }

    /// Returns the id of the one unfinished saga, or rejected start, whose id begins with these digits: at
    /// least 8, and fewer than 64. A rejected start has the digits of the saga to which its key belongs.
    ///
    /// # Errors
    /// [`OperatorError::NoSaga`], [`OperatorError::SeveralSagas`], [`OperatorError::Store`].
    pub async fn find(&self, prefix: &str) -> Result<SagaId, OperatorError> {
        let prefix = prefix.to_ascii_lowercase();
        let first = OperationId::from_hex(&format!("{prefix:0<64}"));
        let first = first.filter(|_| SagaId::is_prefix(&prefix)).ok_or(OperatorError::NoSaga)?;
        let (mut found, mut pages) = (None, 0);
        let mut after = EntryKey { operation: first, id: EntryId::from_bytes([0; 16]) };
        let _permit = self.permit().await;
        loop {
            let page = self.on_schedule(|it| it.entries(Some(after), PAGE)).await?;
            for (key, entry) in &page.entries {
                if !key.operation.to_string().starts_with(&prefix) {
                    return found.ok_or(OperatorError::NoSaga);
                }
                // One that is damaged counts: it may be the one that is meant.
                let queue = entry.as_ref().ok().map(|entry| &entry.queue);
                let queue = queue.map(|queue| UnacceptedStart::parse_queue(queue));
                let id = match queue {
                    Some(Some((_, _, true))) => SagaId::of_rejected(*key),
                    Some(None) => continue,
                    _ => key.operation.into(),
                };
                if found.is_some_and(|found| found != id) {
                    return Err(OperatorError::SeveralSagas);
                }
                found = Some(id);
            }
            pages += 1;
            match page.next() {
                Some(next)
                    if pages < MAX_PAGES && next.operation.to_string().starts_with(&prefix) =>
                {
                    after = next;
                }
                _ => return found.ok_or(OperatorError::NoSaga),
            }
        }
    }

    /// Looks up a saga, or a start that no process has accepted.
    async fn look_up(&self, id: &SagaId) -> Result<Found, OperatorError> {
        let operation = id.operation;
        let start = match id.entry {
            Some(id) => {
                let start = self.within(self.sagas.start(&EntryKey { operation, id })).await?;
                start.filter(|start| start.is_rejected)
            }
            None => match self.within(self.sagas.show(&operation)).await? {
                SagaLookup::Unfinished(saga) => return Ok(Found::Saga(saga)),
                SagaLookup::Ended(ended) => return Ok(Found::Ended(ended)),
                SagaLookup::NotFound => self.within(self.sagas.start_of(&operation)).await?,
            },
        };
        start.map(Found::Start).ok_or(OperatorError::NoSaga)
    }

    /// Returns the counts of unfinished sagas in the text format of Prometheus. They are up to a minute old:
    /// a count reads each saga, at most 10,000.
    ///
    /// # Errors
    /// [`OperatorError::NoSchedule`], [`OperatorError::Store`].
    pub async fn metrics(&self) -> Result<String, OperatorError> {
        // Held while it counts, so that concurrent calls count once.
        let mut counted = self.metrics.lock().await;
        if let Some((at, text)) = counted.as_ref().filter(|it| it.0.elapsed() < COUNT_EVERY) {
            return Ok(with_age(text, at.elapsed()));
        }
        if self.engine.schedule().is_none() {
            return Err(OperatorError::NoSchedule);
        }
        let text = self.sagas.census(MAX_COUNTED).await?.prometheus();
        let answer = with_age(&text, Duration::ZERO);
        *counted = Some((Instant::now(), text));
        Ok(answer)
    }

    /// Returns the definitions that have unfinished sagas, with their numbers.
    ///
    /// # Errors
    /// [`OperatorError::NoSchedule`], [`OperatorError::Store`].
    pub async fn definitions(&self) -> Result<DefinitionList, OperatorError> {
        let _turn = self.permit().await;
        let queues = self.on_schedule(|it| it.queues()).await?;
        let mut definitions: Vec<_> = queues.iter().filter_map(DefinitionView::of).collect();
        definitions.sort_by(|a, b| (&a.definition, a.version).cmp(&(&b.definition, b.version)));
        Ok(DefinitionList { definitions })
    }

    /// Waits for a permit to read. If the future is dropped, the next waiter gets the permit.
    async fn permit(&self) -> Option<SemaphorePermit<'_>> {
        // The semaphore is never closed.
        self.permits.acquire().await.ok()
    }

    async fn within<T>(
        &self,
        read: impl Future<Output = Result<T, SagaOperatorError>>,
    ) -> Result<T, OperatorError> {
        let read = timeout(self.store_timeout, read).await;
        Ok(read.map_err(|_| StoreError::unavailable("no answer in time"))??)
    }

    async fn on_schedule<'a, T>(
        &'a self,
        call: impl FnOnce(&'a dyn Schedule) -> BoxFuture<'a, Result<T, StoreError>>,
    ) -> Result<T, OperatorError> {
        let schedule = self.engine.schedule();
        let read = timeout(self.store_timeout, call(schedule.ok_or(OperatorError::NoSchedule)?));
        Ok(read.await.map_err(|_| StoreError::unavailable("no answer in time"))??)
    }
}

/// A saga, or a start that no process has accepted.
enum Found {
    Saga(Box<SagaView>),
    Ended(EndedSaga),
    Start(UnacceptedStart),
}

impl SagaList {
    /// Returns whether a saga is not listed yet: its operation may have several entries.
    fn lacks(&self, saga: &SagaSummary) -> bool {
        let of_operation = |it: &&SagaSummary| it.id.starts_with(&saga.id);
        self.sagas.iter().rev().take_while(of_operation).all(|it| it.id != saga.id)
    }
}

/// Adds the time since the sagas were counted.
fn with_age(text: &str, age: Duration) -> String {
    format!(
        "{text}# HELP hapax_sagas_census_age_seconds Time since the sagas of the store were counted.\n\
         # TYPE hapax_sagas_census_age_seconds gauge\n\
         hapax_sagas_census_age_seconds {}\n",
        age.as_secs()
    )
}

/// Parses a write id as [`SagaDetails::write_id`] shows it: 32 hexadecimal digits.
#[must_use]
pub fn parse_write_id(text: &str) -> Option<WriteId> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = is_hex.then(|| u128::from_str_radix(text, 16).ok())??;
    Some(WriteId::from_bytes(number.to_be_bytes()))
}

/// Returns whether an entry is that of this saga: one that an earlier start left behind is not.
fn is_of(saga: &SagaView, entry: EntryKey) -> bool {
    let log = saga.log.as_ref();
    entry.operation == saga.id && log.is_none_or(|log| log.entry == *entry.id.as_bytes())
}
