//! The state of the search: what is to be read, and what was found.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_nats::jetstream::consumer::{Config, Info};
use tokio::time::Instant;

use crate::delivery::{Found, StoredId};

/// Messages that are known to be terminated, or to be readable. A terminated one beyond them may be delivered again, and
/// parked again under the same id.
const MOST_KNOWN: usize = 1 << 16;

/// Consecutive ends without a known cause from which on the connection is reported.
const OFTEN: u64 = 3;

/// Time between two reports.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// State of the search.
#[derive(Default)]
pub(super) struct State {
    /// Ends that were noted.
    ends: u64,
    /// Consecutive ones without a known cause.
    pub(super) unexplained: u64,
    ended_at: Option<Instant>,
    reported_at: Option<Instant>,
    /// Whether the range is to be set.
    pub(super) is_due: bool,
    /// First and last sequence to read.
    range: Option<(u64, u64)>,
    /// First sequence of the range when its search began.
    start: u64,
    /// Sequences before the range to read again: those of messages that were found, and dropped without an
    /// acknowledgement.
    again: BTreeSet<u64>,
    /// Whether the search rests until the next end of the connection, after an error.
    rests: bool,
    /// Subjects of the consumer; none for all.
    subjects: Vec<String>,
    /// First and last sequence of the unacknowledged messages, for reports.
    pub(super) unacknowledged: (u64, u64),
    /// Last sequence of a message that was received or read.
    newest: u64,
    /// Messages that were found, until all before them are acknowledged.
    known: BTreeMap<u64, Known>,
    /// Messages that the client has read, although their subjects look as if it could not.
    readable: BTreeMap<u64, StoredId>,
    /// Those to deliver. They have no part of the source, which would never end.
    pub(super) found: VecDeque<Found>,
    /// Number of messages that were found.
    pub(super) unreadable: u64,
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

    fn is_in_progress(&self) -> bool {
        self.delivery.as_ref().is_some_and(|delivery| delivery.strong_count() > 0)
    }

    /// Returns whether its delivery was dropped without an acknowledgement.
    fn is_dropped(&self) -> bool {
        !self.is_terminated() && !self.is_in_progress()
    }
}

/// Progress of a consumer.
pub(super) struct Progress {
    /// Last sequence up to which all messages are acknowledged.
    pub(super) floor: u64,
    /// Last sequence that was delivered.
    pub(super) last: u64,
    /// Messages in progress.
    pub(super) pending: usize,
    /// Subjects of the consumer; none for all.
    pub(super) subjects: Vec<String>,
}

impl Progress {
    pub(super) fn of(info: &Info) -> Self {
        Self {
            floor: info.ack_floor.stream_sequence,
            last: info.delivered.stream_sequence,
            pending: info.num_ack_pending,
            subjects: subjects(&info.config),
        }
    }
}

fn subjects(config: &Config) -> Vec<String> {
    let one = Some(&config.filter_subject).filter(|subject| !subject.is_empty());
    one.into_iter().chain(&config.filter_subjects).cloned().collect()
}

/// The messages that a search has to read.
pub(super) struct Unread {
    /// Sequences of single messages.
    pub(super) again: BTreeSet<u64>,
    /// First and last sequence of the others.
    pub(super) range: Option<(u64, u64)>,
    /// Subjects of the consumer; none for all.
    pub(super) subjects: Vec<String>,
}

impl State {
    pub(super) fn note_ends(&mut self, ends: u64, calm: Duration) {
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

    /// Returns whether the connection ends again and again without a known cause.
    pub(super) fn ends_often(&self, calm: Duration) -> bool {
        let is_recent = self.ended_at.is_some_and(|at| at.elapsed() <= calm);
        is_recent && self.unexplained >= OFTEN
    }

    /// Notes a message that the client has read. It is doubtful if a search would take it for one that the client cannot
    /// read.
    pub(super) fn received(&mut self, id: StoredId, is_doubtful: bool) {
        self.newest = self.newest.max(id.sequence);
        if is_doubtful {
            self.readable.insert(id.sequence, id);
            if self.readable.len() > MOST_KNOWN {
                self.readable.pop_first();
            }
        }
    }

    /// Returns whether the client has read a message.
    pub(super) fn is_readable(&self, id: StoredId) -> bool {
        self.readable.get(&id.sequence) == Some(&id)
    }

    /// Sets what is to be read.
    ///
    /// What a search has read is not read again because of a later end: with many messages, it would begin again and again.
    /// Only if the search began behind messages that are to be read now, it begins again, with them.
    pub(super) fn begin(&mut self, progress: Progress) {
        let Progress { floor, last, pending, subjects } = progress;
        (self.is_due, self.rests) = (false, false);
        self.unacknowledged = (floor + 1, last);
        self.subjects = subjects;
        self.known.retain(|sequence, _| *sequence > floor);
        self.readable.retain(|sequence, _| *sequence > floor);
        let from = if self.unexplained > 1 { floor } else { self.newest.max(floor) } + 1;
        let first = match self.range {
            Some((unread, _)) if self.start <= from => unread.max(floor + 1),
            _ => {
                self.start = from;
                from
            }
        };
        self.range = (first <= last && pending > 0).then_some((first, last));
        let dropped = self.known.range(..first).filter(|(_, known)| known.is_dropped());
        self.again = dropped.map(|(sequence, _)| *sequence).collect();
    }

    /// Returns whether there are messages left to read.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.rests && (self.range.is_some() || !self.again.is_empty())
    }

    /// Returns what is left to read; `None` if that is nothing.
    pub(super) fn unread(&self) -> Option<Unread> {
        let (range, subjects) = (self.range, self.subjects.clone());
        self.is_unfinished().then(|| Unread { again: self.again.clone(), range, subjects })
    }

    /// Returns whether a message is still to be read.
    pub(super) fn is_unread(&self, sequence: u64) -> bool {
        self.again.contains(&sequence)
            || self.range.is_some_and(|(first, last)| (first..=last).contains(&sequence))
    }

    /// Notes that a single message was read.
    pub(super) fn passed_again(&mut self, sequence: u64) {
        self.again.remove(&sequence);
    }

    /// Notes that the messages of the range were read up to this one.
    pub(super) fn passed(&mut self, sequence: u64) {
        let Some((first, last)) = self.range else { return };
        self.newest = self.newest.max(sequence.min(last));
        let first = first.max(sequence.saturating_add(1));
        self.range = (first <= last).then_some((first, last));
    }

    /// Notes that the stream has no messages of the consumer from one sequence to before another.
    pub(super) fn absent(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        while let Some(sequence) = self.known.range(from..to).next().map(|(sequence, _)| *sequence)
        {
            self.known.remove(&sequence);
        }
    }

    /// Notes which message the stream has at a sequence.
    pub(super) fn present(&mut self, id: StoredId) {
        if self.known.get(&id.sequence).is_some_and(|known| known.id != id) {
            self.known.remove(&id.sequence);
        }
    }

    /// Returns whether the consumer receives messages of a subject.
    pub(super) fn receives(&self, subject: &str) -> bool {
        self.subjects.is_empty() || self.subjects.iter().any(|filter| matches(filter, subject))
    }

    /// Adds a message that was found, unless it is in progress. Returns whether it was added.
    pub(super) fn add(&mut self, found: Found) -> bool {
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
    pub(super) fn is_terminated(&self, id: StoredId) -> bool {
        self.known.get(&id.sequence).is_some_and(|known| known.id == id && known.is_terminated())
    }

    pub(super) fn terminated(&mut self, id: StoredId) {
        self.known.insert(id.sequence, Known { id, delivery: None });
        if self.known.len() > MOST_KNOWN {
            let oldest = self.known.iter().find(|(_, known)| known.is_terminated());
            let oldest = oldest.map(|(sequence, _)| *sequence);
            oldest.and_then(|sequence| self.known.remove(&sequence));
        }
    }

    /// Ends a search, or a part of it at an error. Returns whether to report the connection, whose ends have no known cause.
    ///
    /// A message in progress is a cause: its acknowledgement is not here yet, and the server may deliver it again. After
    /// an error it is not known to be the one.
    pub(super) fn conclude(&mut self, has_failed: bool) -> bool {
        if has_failed {
            self.rests = true;
        } else if self.known.values().any(Known::is_in_progress) {
            self.unexplained = 0;
        }
        let is_recent = self.reported_at.is_some_and(|at| at.elapsed() < REPORT_EVERY);
        let is_due = self.unexplained >= OFTEN && !is_recent;
        if is_due {
            self.reported_at = Some(Instant::now());
        }
        is_due
    }
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
mod tests;
