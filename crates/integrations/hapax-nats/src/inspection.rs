//! The search for messages that the client library cannot parse.
//!
//! Such a message ends the connection each time that it is delivered, and nothing names it: it is between the consumer's
//! last acknowledged and its last delivered message. After an end of the connection the messages there are read by
//! requests, and those that the client cannot parse are delivered from the answers.
//!
//! 1. After one end these are the messages that were delivered first since then: those behind the last one that was
//!    received. If the connection ends again soon, all that are not known to be acknowledged: the message may have been
//!    delivered to another process, or before this one started.
//! 2. A search finds messages that were terminated before, while an earlier one is not acknowledged: nothing says that the
//!    server has their acknowledgements. One that this process has terminated is terminated again, and not delivered. For
//!    one of another process the record, or the dead letter, is the same.
//! 3. A future that is dropped loses nothing: what was found is in the state, and the search goes on with the next call.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::jetstream::consumer::{Config, Info};
use futures_util::{StreamExt as _, stream};
use hapax_messages::{Delivery, SourceError};
use tokio::time::{Instant, timeout};

use crate::connection::{Connected, TIMEOUT, no_reply};
use crate::delivery::{Found, NatsDelivery, StoredId};
use crate::source::Shared;
use crate::stored;

/// Messages that are read at a time.
const AT_A_TIME: usize = 16;

/// Messages that are read before the source receives again.
const MOST: u64 = 4096;

/// Messages whose termination is known. An earlier one may be delivered again, and parked again under the same id.
const MOST_KNOWN: usize = 1 << 16;

/// Consecutive ends without a known cause from which on the connection is reported.
const OFTEN: u64 = 3;

/// Time between two reports.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// State of the search.
pub(crate) struct Inspection {
    /// Time without an end after which ends are no consecutive ones: a message that is delivered again and again ends
    /// the connection at shorter intervals.
    calm: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Ends that were noted.
    ends: u64,
    /// Consecutive ones without a known cause.
    unexplained: u64,
    ended_at: Option<Instant>,
    reported_at: Option<Instant>,
    /// Whether the range is to be set.
    is_due: bool,
    /// First and last sequence to read.
    range: Option<(u64, u64)>,
    /// Subjects of the consumer; none for all.
    subjects: Vec<String>,
    /// First and last sequence of the unacknowledged messages, for reports.
    unacknowledged: (u64, u64),
    /// Last sequence of a message that was received or read.
    newest: u64,
    /// Messages that were found, until all before them are acknowledged.
    known: BTreeMap<u64, Known>,
    /// Those to deliver. They have no part of the source, which would never end.
    found: VecDeque<Found>,
    /// Number of messages that were found.
    unreadable: u64,
}

/// A message that was found.
struct Known {
    id: StoredId,
    /// Its delivery; `None` if it is terminated.
    delivery: Option<Weak<()>>,
}

impl Known {
    const fn is_terminated(&self) -> bool {
        self.delivery.is_none()
    }

    /// Returns whether its delivery was dropped without an acknowledgement.
    fn is_dropped(&self) -> bool {
        self.delivery.as_ref().is_some_and(|delivery| delivery.strong_count() == 0)
    }
}

impl Inspection {
    /// Creates a state for a consumer with this `ack_wait`.
    pub(crate) fn new(ack_wait: Duration) -> Self {
        let calm = ack_wait.saturating_mul(2).saturating_add(Duration::from_secs(30));
        Self { calm, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a message that was received.
    pub(crate) fn received(&self, sequence: u64) {
        let mut state = self.state();
        state.newest = state.newest.max(sequence);
    }

    /// Notes a message that was terminated.
    pub(crate) fn terminated(&self, id: StoredId) {
        self.state().terminated(id);
    }

    /// Returns the number of messages that were found.
    pub(crate) fn unreadable(&self) -> u64 {
        self.state().unreadable
    }

    /// Returns whether the connection ends again and again without a known cause.
    pub(crate) fn ends_often(&self) -> bool {
        let state = self.state();
        let is_recent = state.ended_at.is_some_and(|at| at.elapsed() <= self.calm);
        is_recent && state.unexplained >= OFTEN
    }

    /// Returns whether there are messages left to read.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.state().range.is_some()
    }

    /// Returns messages that the client cannot parse, after an end of the connection.
    pub(crate) async fn find(
        &self,
        shared: &Arc<Shared>,
        connected: &Connected,
        max: NonZeroUsize,
    ) -> Vec<Arc<dyn Delivery>> {
        let ends = shared.link.ends();
        self.state().note_ends(ends, self.calm);
        if self.state().is_due {
            match info(connected).await {
                Ok(info) => {
                    let is_over = self.state().begin(&info);
                    if is_over {
                        self.conclude(connected, None);
                    }
                }
                Err(error) => tracing::debug!(%error, "the state of the consumer was not read"),
            }
        }
        self.read(shared, connected, max.get()).await;
        let mut state = self.state();
        let count = state.found.len().min(max.get());
        let found = state.found.drain(..count);
        found
            .map(|found| Arc::new(NatsDelivery::found(shared, found)) as Arc<dyn Delivery>)
            .collect()
    }

    /// Reads messages of the range, until there are `max` to deliver.
    async fn read(&self, shared: &Shared, connected: &Connected, max: usize) {
        let Some((first, last)) = self.state().range else { return };
        let info = connected.consumer.cached_info();
        let names = (&*info.stream_name, &*info.name);
        let until = last.min(first.saturating_add(MOST - 1));
        let reading = stream::iter(first..=until).map(|sequence| async move {
            (sequence, stored::read(&connected.context, names.0, sequence).await)
        });
        let mut reading = pin!(reading.buffered(AT_A_TIME));
        while self.state().found.len() < max
            && let Some((sequence, read)) = reading.next().await
        {
            let found = read.and_then(|raw| {
                let raw = raw.filter(|raw| self.state().receives(&raw.subject));
                let found = raw.map(|raw| Found::of(&raw, names, &shared.order_key));
                Ok(found.transpose()?.flatten())
            });
            match found {
                Ok(None) => {}
                Ok(Some(found)) => self.note(shared, names, found).await,
                Err(error) => {
                    self.state().range = None;
                    self.conclude(connected, Some(&error));
                    return;
                }
            }
            let is_over = self.state().passed(sequence);
            if is_over {
                self.conclude(connected, None);
            }
        }
    }

    /// Keeps a message that was found from being delivered by the server, which would end the connection.
    async fn note(&self, shared: &Shared, (stream, consumer): (&str, &str), found: Found) {
        let is_terminated = self.state().is_terminated(found.id);
        let kept = match is_terminated {
            true => shared.link.send(&found.reply, AckKind::Term).await,
            false => shared.link.hold(&found.reply).await,
        };
        let (sequence, part) = (found.id.sequence, found.part);
        if let Err(error) = kept {
            tracing::debug!(%error, sequence, "a message may be delivered again");
        }
        if !is_terminated && self.state().add(found) {
            tracing::warn!(
                stream,
                consumer,
                sequence,
                found = part,
                "the NATS client cannot read a message"
            );
        }
    }

    /// Ends a search: reports the connection if its ends have no known cause.
    fn conclude(&self, connected: &Connected, error: Option<&async_nats::Error>) {
        let mut state = self.state();
        if state.known.values().any(|known| !known.is_terminated()) {
            state.unexplained = 0;
        }
        let is_recent = state.reported_at.is_some_and(|at| at.elapsed() < REPORT_EVERY);
        if state.unexplained < OFTEN || is_recent {
            return;
        }
        state.reported_at = Some(Instant::now());
        let (first, last) = state.unacknowledged;
        let info = connected.consumer.cached_info();
        tracing::error!(
            stream = info.stream_name,
            consumer = info.name,
            first_sequence = first,
            last_sequence = last,
            ends = state.unexplained,
            error = error.map(tracing::field::display),
            "the connection to the NATS server ends again and again, and no unacknowledged message was found that the client \
             cannot read: check the server's log, and that the user may publish to $JS.API.STREAM.MSG.GET of the stream"
        );
    }
}

async fn info(connected: &Connected) -> Result<Info, SourceError> {
    let info = timeout(TIMEOUT, connected.consumer.get_info()).await;
    info.map_err(|_| no_reply(TIMEOUT))?.map_err(SourceError::new)
}

impl State {
    fn note_ends(&mut self, ends: u64, calm: Duration) {
        if ends == self.ends {
            return;
        }
        let now = Instant::now();
        if self.ended_at.is_some_and(|at| now.duration_since(at) > calm) {
            self.unexplained = 0;
        }
        self.unexplained += ends.saturating_sub(self.ends);
        (self.ends, self.ended_at, self.is_due) = (ends, Some(now), true);
    }

    /// Sets the range to read. Returns whether it is empty.
    fn begin(&mut self, info: &Info) -> bool {
        let (floor, last) = (info.ack_floor.stream_sequence, info.delivered.stream_sequence);
        self.is_due = false;
        self.unacknowledged = (floor + 1, last);
        self.subjects = subjects(&info.config);
        self.known.retain(|sequence, _| *sequence > floor);
        let newest = if self.unexplained > 1 { floor } else { self.newest.max(floor) };
        let mut first = self.range.map_or(newest + 1, |(unread, _)| unread);
        // One that was dropped without an acknowledgement.
        let dropped = self.known.iter().find(|(_, known)| known.is_dropped());
        if let Some((sequence, _)) = dropped {
            first = first.min(*sequence);
        }
        self.range = (first <= last && info.num_ack_pending > 0).then_some((first, last));
        self.range.is_none()
    }

    /// Returns whether the consumer receives messages of a subject.
    fn receives(&self, subject: &str) -> bool {
        self.subjects.is_empty() || self.subjects.iter().any(|filter| matches(filter, subject))
    }

    /// Adds a message that was found, unless it is in progress. Returns whether it was added.
    fn add(&mut self, found: Found) -> bool {
        let known = self.known.get(&found.id.sequence).filter(|known| known.id == found.id);
        if known.is_some_and(|known| !known.is_dropped()) {
            return false;
        }
        let delivery = Some(Arc::downgrade(&found.in_progress));
        self.known.insert(found.id.sequence, Known { id: found.id, delivery });
        self.found.push_back(found);
        self.unreadable += 1;
        self.unexplained = 0;
        true
    }

    /// Returns whether this process has terminated a message.
    fn is_terminated(&self, id: StoredId) -> bool {
        self.known.get(&id.sequence).is_some_and(|known| known.id == id && known.is_terminated())
    }

    fn terminated(&mut self, id: StoredId) {
        self.known.insert(id.sequence, Known { id, delivery: None });
        if self.known.len() > MOST_KNOWN {
            let oldest = self.known.iter().find(|(_, known)| known.is_terminated());
            let oldest = oldest.map(|(sequence, _)| *sequence);
            oldest.and_then(|sequence| self.known.remove(&sequence));
        }
    }

    /// Notes a message that was read. Returns whether it was the last one.
    fn passed(&mut self, sequence: u64) -> bool {
        self.newest = self.newest.max(sequence);
        let Some((first, last)) = &mut self.range else { return false };
        *first = (*first).max(sequence + 1);
        let is_last = sequence >= *last;
        if is_last {
            self.range = None;
        }
        is_last
    }
}

fn subjects(config: &Config) -> Vec<String> {
    let one = Some(&config.filter_subject).filter(|subject| !subject.is_empty());
    one.into_iter().chain(&config.filter_subjects).cloned().collect()
}

/// Returns whether a subject matches a filter, which may have wildcards.
fn matches(filter: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for expected in filter.split('.') {
        match (expected, tokens.next()) {
            (">", token) => return token.is_some(),
            ("*", Some(_)) => {}
            (expected, Some(token)) if expected == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_matches_by_tokens() {
        for (filter, subject, expected) in [
            ("orders.>", "orders.a.b", true),
            ("orders.>", "orders", false),
            ("orders.*", "orders.a", true),
            ("orders.*", "orders.a.b", false),
            ("orders.*.b", "orders.a.b", true),
            ("orders.a", "orders.a", true),
            ("orders.a", "orders.b", false),
        ] {
            assert_eq!(matches(filter, subject), expected, "{filter} {subject}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn three_ends_without_a_known_cause_are_often_until_there_was_none_for_a_time() {
        let inspection = Inspection::new(Duration::from_secs(1));
        let note = |ends| inspection.state().note_ends(ends, inspection.calm);
        for ends in 1..=3 {
            assert!(!inspection.ends_often());
            note(ends);
            tokio::time::advance(Duration::from_secs(20)).await;
        }
        assert!(inspection.ends_often());
        tokio::time::advance(Duration::from_secs(20)).await;
        assert!(!inspection.ends_often());
        note(4);
        assert!(!inspection.ends_often(), "the first one again");
        let state = inspection.state();
        assert_eq!((state.unexplained, state.is_due), (1, true));
    }
}
