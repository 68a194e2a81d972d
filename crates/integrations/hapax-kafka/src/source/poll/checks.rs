//! Checks of the polling thread from time to time: of brokers, topics, logs and owners, and control records.

use std::time::Duration;

use rdkafka::consumer::Consumer as _;
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;
use tokio::time::Instant;

use super::super::context::key;
use super::super::state::{CheckedWatermarks, PartitionKey};
use super::{Poller, outside};

/// Pause between two requests of watermarks.
const CHECK_WATERMARKS_EVERY: Duration = Duration::from_secs(1);

impl Poller {
    /// Checks that a broker answers, if no record came for a time: the client reports no broker that
    /// accepts connections and does not answer.
    pub(super) fn check_broker(&mut self) {
        let now = Instant::now();
        if now >= self.check_broker_at {
            // Later than the last check has ended.
            let settings = self.settings();
            self.check_broker_at = now + settings.idle_check_after.max(settings.request_timeout);
            self.requests.check_broker(self.topic.clone());
        }
    }

    /// Checks whether this process still owns the positions of partitions without records.
    pub(super) fn check_owner(&mut self) {
        let now = Instant::now();
        if now < self.check_owner_at {
            return;
        }
        self.check_owner_at = now + self.settings().idle_check_after;
        let state = self.shared.lock();
        let idle = state.partitions.iter().filter(|(_, partition)| partition.is_idle());
        let idle =
            idle.filter_map(|(key, it)| Some((key.clone(), it.assignment_number, it.fence?)));
        let idle: Vec<_> = idle.collect();
        drop(state);
        if !idle.is_empty() {
            self.requests.check_owner(idle);
        }
    }

    /// Looks for the topics that did not exist, if there are any.
    pub(super) fn check_missing(&mut self) {
        let now = Instant::now();
        if now < self.check_missing_at {
            return;
        }
        let settings = self.settings();
        self.check_missing_at = now + settings.idle_check_after.max(settings.request_timeout);
        let missing = self.shared.lock().missing_topics.clone();
        if !missing.is_empty() {
            self.requests.check_missing(missing);
        }
    }

    /// Returns whether some topics did not exist when they were last looked for.
    pub(super) fn lacks_topics(&self) -> bool {
        !self.shared.lock().missing_topics.is_empty()
    }

    /// Advances idle partitions to the positions of the client, which are after the records of transactions that were
    /// committed or aborted and that the source does not receive. So the offset to commit reaches the end of the log.
    pub(super) fn pass_control_records(&mut self) {
        // Each error before them is in the queue, and is read before they count.
        let positions = self.consumer.position();
        if self.read_events() > 0 {
            self.events.added();
        }
        if self.events.has_more() {
            self.has_more = true;
            return;
        }
        let Ok(positions) = positions else { return };
        let mut state = self.shared.lock();
        for element in positions.elements() {
            if let Offset::Offset(offset) = element.offset()
                && let Some(partition) = state.partitions.get_mut(&key(&element))
            {
                partition.pass(offset);
            }
        }
    }

    /// Requests the watermarks of unverified logs, at most once in an interval.
    pub(super) fn schedule_check(&mut self) {
        let earliest = self.watermarks_checked_at.map(|at| at + CHECK_WATERMARKS_EVERY);
        self.check_watermarks_at = Some(earliest.unwrap_or_else(Instant::now));
    }

    /// Checks logs: stops the partitions whose next record is not in an unverified log, and fetches the record before it
    /// again from the others. From time to time, looks whether the start or end of any log is before the known one.
    pub(super) fn check_watermarks(&mut self) {
        let now = Instant::now();
        let result = self.shared.lock().watermarks.take();
        let Some(CheckedWatermarks { checked, unanswered }) = result else {
            if !self.is_checking_watermarks {
                self.request_watermarks(now);
            }
            return;
        };
        self.is_checking_watermarks = false;
        self.retry_unverified(unanswered, now);
        let remedy = self.settings().remedy();
        let mut state = self.shared.lock();
        let mut must_assign = false;
        for (key, assignment_number, watermarks) in checked {
            let Some(partition) = state.owned(&key, assignment_number) else { continue };
            let was_unverified = !partition.is_verified();
            match partition.end_check(watermarks) {
                Ok(true) => state.unverify(Some(&key.0), Some(key.1)),
                Ok(false) => must_assign |= was_unverified,
                Err(next) => {
                    let cause = outside(next, watermarks, remedy);
                    state.stop(key, cause.unwrap_or_default());
                    must_assign = true;
                }
            }
        }
        drop(state);
        if must_assign {
            self.assign();
        }
    }

    /// Requests the watermarks of unverified logs again whose leaders have not answered, and reports that.
    fn retry_unverified(&mut self, unanswered: Vec<(PartitionKey, u64, KafkaError)>, now: Instant) {
        let mut state = self.shared.lock();
        let is_unverified = |(key, number, _): &(PartitionKey, u64, KafkaError)| {
            state.owned(key, *number).is_some_and(|partition| !partition.is_verified())
        };
        let unverified: Vec<_> = unanswered.into_iter().filter(is_unverified).collect();
        drop(state);
        let Some(((topic, number), _, error)) = unverified.first() else { return };
        self.check_watermarks_at = Some(now + CHECK_WATERMARKS_EVERY);
        self.shared.fail(format!(
            "expected the first and last offsets of all partitions, found {} errors, the first one: partition \
             {number} of {topic}: {error}: they are requested again",
            unverified.len()
        ));
    }

    /// Requests the watermarks of unverified logs, or from time to time of all, if that is due.
    fn request_watermarks(&mut self, now: Instant) {
        let is_due = self.check_watermarks_at.is_some_and(|at| at <= now);
        let is_periodic = now >= self.check_all_at;
        if !is_due && !is_periodic {
            return;
        }
        let mut state = self.shared.lock();
        let due = state.partitions.iter_mut().filter_map(|(key, partition)| {
            (partition.begin_check() || is_periodic)
                .then(|| (key.clone(), partition.assignment_number))
        });
        let requested: Vec<_> = due.collect();
        drop(state);
        (self.check_watermarks_at, self.watermarks_checked_at) = (None, Some(now));
        self.check_all_at = now + self.settings().idle_check_after;
        if !requested.is_empty() {
            self.is_checking_watermarks = true;
            self.requests.check_watermarks(requested);
        }
    }
}
