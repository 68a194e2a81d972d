//! Requests to brokers and the database. They run in tasks and do not delay the polling thread.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::sync::{Arc, Weak};

use futures_util::stream::{self, StreamExt as _};
use hapax_core::Timestamp;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::runtime::Handle;

use super::KafkaStartAt;
use super::context::{Context, key, stored};
use super::metadata::CommitMetadata;
use super::partition::{Commit, Watermarks};
use super::state::{CheckedWatermarks, PartitionKey, PollSettings, Resolved, Shared};

/// Most partitions whose requests are in progress at the same time. A broker that does not answer delays the
/// partitions of others by little.
const CONCURRENT: usize = 8;

/// Requests of one source.
#[derive(Clone)]
pub(super) struct Requests {
    /// The polling thread owns the client, and ends it.
    consumer: Weak<BaseConsumer<Context>>,
    shared: Arc<Shared>,
    settings: Arc<PollSettings>,
    runtime: Handle,
    /// Locked while owners are checked.
    owner_check: Arc<tokio::sync::Mutex<()>>,
    /// Locked while missing topics are looked for.
    missing_check: Arc<tokio::sync::Mutex<()>>,
}

/// Partitions whose first offsets are being requested. Those that are left when it is dropped, because a store
/// panics or the runtime has ended, are requested again.
struct Resolving {
    shared: Arc<Shared>,
    number: u64,
    keys: BTreeSet<PartitionKey>,
}

impl Resolving {
    /// Stores a result. Returns false if its assignment has ended.
    fn end(&mut self, key: PartitionKey, resolved: Option<Resolved>) -> bool {
        self.keys.remove(&key);
        self.shared.resolved(self.number, key, resolved)
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        let mut lost = 0_u32;
        for key in std::mem::take(&mut self.keys) {
            lost += u32::from(self.shared.resolved(self.number, key, None));
        }
        if lost > 0 {
            self.shared.fail(format!(
                "expected the first offsets of {lost} partitions, found that their requests ended without a \
                 result: keep the runtime in which the source was started, and look for a panic in the log; \
                 they are requested again"
            ));
        }
    }
}

/// A commit that is in progress. If it is dropped, because the runtime has ended, the source ends.
struct CommitInProgress(Option<Arc<Shared>>);

impl CommitInProgress {
    fn end(mut self, result: KafkaResult<()>) {
        if let Some(shared) = self.0.take() {
            shared.end_commit(Some(result));
        }
    }
}

impl Drop for CommitInProgress {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            shared.end_commit(None);
            shared.end(
                "expected the runtime in which the source was started, found that it has ended: keep it for \
                 as long as the source"
                    .to_owned(),
            );
        }
    }
}

impl Requests {
    pub(super) fn new(consumer: &Arc<BaseConsumer<Context>>, runtime: Handle) -> Self {
        let context = consumer.context();
        Self {
            consumer: Arc::downgrade(consumer),
            shared: Arc::clone(&context.shared),
            settings: Arc::new(context.settings.clone()),
            runtime,
            owner_check: Arc::default(),
            missing_check: Arc::default(),
        }
    }

    /// Calls a function of the client that blocks, unless the source is being closed.
    async fn call<T: Send + 'static>(
        &self,
        function: impl FnOnce(&BaseConsumer<Context>) -> KafkaResult<T> + Send + 'static,
    ) -> KafkaResult<T> {
        let (consumer, shared) = (Weak::clone(&self.consumer), Arc::clone(&self.shared));
        let called = self.runtime.spawn_blocking(move || match consumer.upgrade() {
            Some(consumer) if !shared.lock().is_closing => function(&consumer),
            _ => Err(KafkaError::Canceled),
        });
        called.await.unwrap_or(Err(KafkaError::Canceled))
    }

    /// Commits, and stores the result ([`Shared::end_commit`]). One commit is in progress at a time.
    pub(super) fn commit(&self, commits: Vec<(PartitionKey, u64, Commit)>) {
        self.shared.lock().is_committing = true;
        let in_progress = CommitInProgress(Some(Arc::clone(&self.shared)));
        let consumer = Weak::clone(&self.consumer);
        self.runtime.spawn_blocking(move || {
            in_progress.end(match consumer.upgrade() {
                Some(consumer) => consumer.context().commit(&consumer, &commits),
                None => Err(KafkaError::Canceled),
            });
        });
    }

    /// Requests the first offsets of partitions, and acquires their positions, if these are in a database.
    pub(super) fn resolve_partitions(&self, number: u64, keys: Vec<PartitionKey>) {
        let (this, shared) = (self.clone(), Arc::clone(&self.shared));
        let mut resolving = Resolving { shared, number, keys: keys.iter().cloned().collect() };
        self.runtime.spawn(async move {
            let committed = this.committed(keys).await;
            let resolve = |(key, committed): (PartitionKey, Result<_, String>)| {
                let this = &this;
                async move {
                    let resolved = match committed {
                        Ok(committed) => this.resolve_partition(number, &key, committed).await,
                        Err(error) => Err(error),
                    };
                    (key, resolved)
                }
            };
            let mut resolved = stream::iter(committed).map(resolve).buffer_unordered(CONCURRENT).boxed();
            let mut errors = Vec::new();
            while let Some((key, resolved)) = resolved.next().await {
                let (resolved, error) = match resolved {
                    Ok(resolved) => (Some(resolved), None),
                    Err(error) => (None, Some(format!("partition {} of {}: {error}", key.1, key.0))),
                };
                // An error of an assignment that has ended is not one of the source.
                if resolving.end(key, resolved) {
                    errors.extend(error);
                }
            }
            if let Some(first) = errors.first() {
                this.shared.fail(format!(
                    "expected the first offsets of all partitions, found {} errors, the first one: {first}: \
                     they are requested again",
                    errors.len()
                ));
            }
        });
    }

    /// Requests the commits that the brokers have of partitions. Also notes whether the group has handled records of others,
    /// if that decides about records that are too old.
    async fn committed(
        &self,
        keys: Vec<PartitionKey>,
    ) -> Vec<(PartitionKey, Result<Option<Commit>, String>)> {
        let (timeout, mut requested) = (self.settings.request_timeout, keys.clone());
        if self.settings.retention.is_some() {
            let state = self.shared.lock();
            let others = state.partitions_at_start().filter(|key| !keys.contains(key));
            requested.extend(others);
        }
        let committed = self.call(move |consumer| {
            let mut list = TopicPartitionList::with_capacity(requested.len());
            for (topic, number) in &requested {
                list.add_partition(topic, *number);
            }
            let list = consumer.committed_offsets(list, timeout)?;
            let elements = list.elements();
            let committed = elements.iter().map(|element| {
                let committed = element.error().map(|()| stored(element));
                (key(element), committed.map_err(|error| error.to_string()))
            });
            Ok(committed.collect::<BTreeMap<_, _>>())
        });
        let mut committed = committed.await.map_err(|error| error.to_string());
        if let Ok(committed) = &committed {
            let mut found = committed.values().filter_map(|it| it.as_ref().ok().copied().flatten());
            let has_handled = found.any(Commit::shows_handling);
            self.shared.lock().group_has_handled |= has_handled;
        }
        let of = |key: PartitionKey| {
            let found = match &mut committed {
                Ok(committed) => committed.remove(&key),
                Err(error) => Some(Err(error.clone())),
            };
            (key, found.unwrap_or_else(|| Err("the broker has not answered for it".to_owned())))
        };
        keys.into_iter().map(of).collect()
    }

    async fn watermarks(&self, (topic, number): &PartitionKey) -> KafkaResult<Watermarks> {
        let (topic, number, timeout) = (topic.clone(), *number, self.settings.request_timeout);
        self.call(move |consumer| consumer.fetch_watermarks(&topic, number, timeout)).await
    }

    /// Requests the offset of the first record at or after a time; `None` if there is none.
    async fn offset_at(
        &self,
        (topic, number): &PartitionKey,
        at: Timestamp,
    ) -> KafkaResult<Option<i64>> {
        let (topic, number, timeout) = (topic.clone(), *number, self.settings.request_timeout);
        let millis = i64::try_from(at.as_micros().div_ceil(1000)).unwrap_or(i64::MAX);
        self.call(move |consumer| {
            let mut list = TopicPartitionList::new();
            list.add_partition_offset(&topic, number, Offset::Offset(millis))?;
            let list = consumer.offsets_for_times(list, timeout)?;
            let Some(found) = list.find_partition(&topic, number) else { return Ok(None) };
            found.error()?;
            Ok(match found.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            })
        })
        .await
    }

    async fn resolve_partition(
        &self,
        number: u64,
        key: &PartitionKey,
        committed: Option<Commit>,
    ) -> Result<Resolved, String> {
        const ENDED: &str = "its assignment has ended";
        let text = |error: KafkaError| error.to_string();
        if !self.shared.is_wanted(number, key) {
            return Err(ENDED.to_owned());
        }
        // Before the watermarks: a record that is appended meanwhile must not be after the end that they state.
        let at = match (committed, self.settings.start_at) {
            (None, KafkaStartAt::Time(at)) => self.offset_at(key, at).await.map_err(text)?,
            _ => None,
        };
        let watermarks = self.watermarks(key).await.map_err(text)?;
        let is_added = self.shared.lock().is_added(key);
        let first = match (committed, self.settings.start_at) {
            (Some(committed), _) => committed.offset,
            (None, KafkaStartAt::Earliest) => watermarks.0,
            // Records that are there already were published while this process ran.
            (None, KafkaStartAt::Latest) if is_added => watermarks.0,
            (None, KafkaStartAt::Latest) => watermarks.1,
            (None, KafkaStartAt::Time(_)) => at.unwrap_or(watermarks.1),
        };
        let key = key.clone();
        let Some(positions) = &self.settings.positions else {
            return Ok(Resolved { key, first, committed, position: None, watermarks });
        };
        // A position must not be acquired from the next owner.
        if !self.shared.is_wanted(number, &key) {
            return Err(ENDED.to_owned());
        }
        // Waits for a transaction of the previous owner.
        let acquired =
            positions.acquire(&to_partition(&key), u64::try_from(first).unwrap_or(0)).await;
        let position = acquired.map_err(|error| match error.source() {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        })?;
        let first = i64::try_from(position.next).unwrap_or(i64::MAX);
        // Records from a position on that has no commit may have been delivered before.
        let committed = match position.is_new {
            true => committed,
            false => {
                committed.or(Some(Commit { offset: first, metadata: CommitMetadata::Unknown }))
            }
        };
        // Again: the previous owner may have advanced the position until it was acquired.
        let watermarks = self.watermarks(&key).await.map_err(text)?;
        Ok(Resolved { key, first, committed, position: Some(position), watermarks })
    }

    /// Requests the watermarks of partitions.
    pub(super) fn check_watermarks(&self, partitions: Vec<(PartitionKey, u64)>) {
        let this = self.clone();
        self.runtime.spawn(async move {
            let check = |(key, assignment_number): (PartitionKey, u64)| {
                let this = &this;
                async move {
                    let watermarks = match this.shared.is_owned(&key, assignment_number) {
                        true => this.watermarks(&key).await.map(Some),
                        false => Ok(None),
                    };
                    (key, assignment_number, watermarks)
                }
            };
            let mut checks =
                stream::iter(partitions).map(check).buffer_unordered(CONCURRENT).boxed();
            let mut checked = CheckedWatermarks::default();
            while let Some((key, assignment_number, watermarks)) = checks.next().await {
                match watermarks {
                    Ok(Some(watermarks)) => {
                        checked.checked.push((key, assignment_number, watermarks))
                    }
                    Ok(None) => {}
                    Err(error) => checked.unanswered.push((key, assignment_number, error)),
                }
            }
            this.shared.lock().watermarks = Some(checked);
            this.shared.wake_poller();
        });
    }

    /// Looks for topics that did not exist. One check is in progress at a time.
    pub(super) fn check_missing(&self, topics: Vec<String>) {
        let Ok(checking) = Arc::clone(&self.missing_check).try_lock_owned() else { return };
        let (this, timeout) = (self.clone(), self.settings.request_timeout);
        self.runtime.spawn(async move {
            for topic in topics {
                let requested = topic.clone();
                let found = this.call(move |consumer| {
                    let metadata = consumer.fetch_metadata(Some(&requested), timeout)?;
                    Ok(super::partitions(&metadata, &requested).is_ok())
                });
                if matches!(found.await, Ok(true)) {
                    tracing::info!(topic, "a topic that did not exist is there");
                    this.shared.lock().missing_topics.retain(|it| *it != topic);
                }
            }
            drop(checking);
        });
    }

    /// Checks that a broker answers.
    pub(super) fn check_broker(&self, topic: String) {
        let (this, timeout) = (self.clone(), self.settings.request_timeout);
        self.runtime.spawn(async move {
            let answer =
                this.call(move |it| it.fetch_metadata(Some(&topic), timeout).map(drop)).await;
            if let Err(error) = answer
                && !matches!(error, KafkaError::Canceled)
            {
                this.shared.fail(format!(
                    "expected an answer of the Kafka brokers within {timeout:?}, found an error: {error}: \
                     check that they run and can be reached"
                ));
            }
        });
    }

    /// Checks the ownership of positions of idle partitions, where no step would fail. Resolves partitions again whose
    /// position has another owner. One check is in progress at a time.
    pub(super) fn check_owner(&self, partitions: Vec<(PartitionKey, u64, u64)>) {
        let Some(positions) = self.settings.positions.clone() else { return };
        let Ok(checking) = Arc::clone(&self.owner_check).try_lock_owned() else { return };
        let shared = Arc::clone(&self.shared);
        self.runtime.spawn(async move {
            let check = |(key, assignment_number, fence): (PartitionKey, u64, u64)| {
                let (shared, positions) = (&shared, &positions);
                async move {
                    match positions.is_owner(&to_partition(&key), fence).await {
                        Ok(true) => {}
                        Ok(false) => shared.resolve_again(&key, assignment_number),
                        Err(error) => tracing::debug!(%error, "an owner was not checked"),
                    }
                }
            };
            stream::iter(partitions).for_each(check).await;
            drop(checking);
        });
    }
}

/// Returns the name of a partition in a store of positions.
fn to_partition((topic, number): &PartitionKey) -> hapax_messages::Partition {
    // A broker counts from 0.
    let number = u32::try_from(*number).unwrap_or(0);
    hapax_messages::Partition { topic: Arc::clone(topic), number }
}
