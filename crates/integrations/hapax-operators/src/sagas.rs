//! Sagas of a store, and decisions about stuck ones.
//!
//! The admin listener and `hapax saga` on a store that it opened itself use the same
//! implementation. No definition is needed: the step log has all that an operator sees and decides
//! about.

mod decide;
mod view;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, Schedule};
use hapax_core::store::BoxFuture;
use hapax_core::{EntryId, Idempotency, OperationId, StoreError, WriteId};
use hapax_saga::{SagaLookup, SagaOperator, SagaOperatorError, SagaView};
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::audit::Audit;
use crate::keys::{OperatorError, id_or_none};
pub use decide::{SagaAction, SagaBefore, SagaDecisionRequest};
pub use view::{
    DefinitionView, SagaDecisionView, SagaDetails, SagaStateView, SagaStepView, SagaSummary,
    StepOutcomeView, StuckView, TriesView,
};
use view::{Scheduled, definition};

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

/// The sagas of a store, for operators.
#[derive(Clone, Debug)]
pub struct OperatorSagas {
    engine: Idempotency,
    sagas: SagaOperator,
    audit: Arc<Audit>,
    store_timeout: Duration,
    permits: Arc<Semaphore>,
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
        Self { engine, sagas, audit, store_timeout, permits }
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
        let _turn = self.permit().await;
        for _ in 0..MAX_PAGES {
            let page = self.on_schedule(|it| it.entries(after, PAGE)).await?;
            for (key, entry) in &page.entries {
                if listed.sagas.len() + listed.damaged.len() == limit || loaded == MAX_LOADED {
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
                let is_wanted = definition(entry.queue).is_some_and(|it| query.has(it))
                    && (query.state != Some(SagaStateView::Overdue) || entry.is_overdue(page.now));
                if !is_wanted {
                    continue;
                }
                loaded += 1;
                match self.within(self.sagas.show(&key.operation)).await {
                    Ok(SagaLookup::Unfinished(saga)) if is_of(&saga, *key) => {
                        let saga = SagaSummary::of(&saga, Some(entry));
                        let is_new = listed.sagas.last().is_none_or(|last| last.id != saga.id);
                        if is_new && query.selects(&saga) {
                            listed.sagas.push(saga);
                        }
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
            if !page.more {
                return Ok(listed);
            }
        }
        listed.next = next(after);
        Ok(listed)
    }

    /// Returns a saga with its steps and decisions.
    ///
    /// # Errors
    /// [`OperatorError::NoSaga`], [`OperatorError::SagaUnreadable`], [`OperatorError::Store`].
    pub async fn show(&self, id: &OperationId) -> Result<SagaDetails, OperatorError> {
        let _turn = self.permit().await;
        let saga = match self.within(self.sagas.show(id)).await? {
            SagaLookup::NotFound => return Err(OperatorError::NoSaga),
            SagaLookup::Ended(history) => return Ok(SagaDetails::ended(id, &history)),
            SagaLookup::Unfinished(saga) => saga,
        };
        let first = EntryKey { operation: *id, id: EntryId::from_bytes([0; 16]) };
        let page = self.on_schedule(|it| it.entries(Some(first), MAX_ENTRIES)).await?;
        let entry = page.entries.iter().find(|(key, _)| is_of(&saga, *key));
        let entry = entry.and_then(|(_, entry)| entry.as_ref().ok());
        let entry = entry.map(|entry| Scheduled { queue: &entry.queue, due: entry.due });
        Ok(SagaDetails::of(&saga, entry))
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
        let schedule = self.engine.store().capabilities().schedule;
        let read = timeout(self.store_timeout, call(schedule.ok_or(OperatorError::NoSchedule)?));
        Ok(read.await.map_err(|_| StoreError::unavailable("no answer in time"))??)
    }
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
