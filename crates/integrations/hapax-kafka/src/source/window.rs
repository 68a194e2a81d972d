//! The number of records that a commit opens.

use super::partition::to_offsets;

/// Records that the first commit of an assignment opens, and least number that one opens.
const MIN: usize = 100;

/// Number of records that the next commit of a partition opens.
///
/// After a crash the open records are suspects, and each commit is a write of the broker: a commit opens as many records
/// as are delivered in about half of an interval ([`commit_every`](super::KafkaSourceBuilder::commit_every)).
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    records: usize,
    max: usize,
    /// Offset after the last record that was delivered before the interval.
    interval_begin: i64,
}

impl Window {
    /// Creates the window of an assignment that begins at `first`, of at most `max` records.
    pub(super) fn new(max: usize, first: i64) -> Self {
        Self { records: MIN.min(max), max, interval_begin: first }
    }

    /// Returns the number of records.
    pub(super) fn records(self) -> i64 {
        to_offsets(self.records)
    }

    /// Doubles the number, because a record had to wait for a commit.
    pub(super) fn double(&mut self) {
        self.records = self.records.saturating_mul(2).min(self.max);
    }

    /// Ends an interval. The commit needs half of the records that were delivered in the interval, and at least as many
    /// as are in progress: a batch may last longer than an interval, and the next one needs as many. The window grows to
    /// that number at once, and halves if it is more than four times that number. `delivered_end` is the offset after
    /// the last record that was delivered.
    pub(super) fn end_interval(&mut self, delivered_end: i64, in_progress: usize) {
        let begin = std::mem::replace(&mut self.interval_begin, delivered_end);
        let delivered = usize::try_from(delivered_end.saturating_sub(begin)).unwrap_or(0);
        let needed = (delivered / 2).max(in_progress);
        let records = match self.records / 4 > needed {
            true => self.records / 2,
            false => self.records.max(needed),
        };
        self.records = records.clamp(MIN.min(self.max), self.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_follows_the_records_that_are_delivered_in_an_interval() {
        let mut window = Window::new(1_000, 50);
        for expected in [100, 200, 400, 800, 1_000, 1_000] {
            assert_eq!(window.records(), expected);
            window.double();
        }
        let mut delivered_end = 50;
        for (delivered, in_progress, expected) in [
            (500, 0, 1_000),
            (498, 250, 1_000),
            (498, 249, 500),
            (0, 0, 250),
            (0, 62, 250),
            (0, 0, 125),
            (0, 0, 100),
            (502, 0, 251),
            (0, 400, 400),
            (9_000, 0, 1_000),
        ] {
            delivered_end += delivered;
            window.end_interval(delivered_end, in_progress);
            assert_eq!(window.records(), expected, "after {delivered}, {in_progress} in progress");
        }
        let mut least = Window::new(4, 0);
        least.end_interval(0, 0);
        assert_eq!(least.records(), 4);
    }
}
