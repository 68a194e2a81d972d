//! Positions of partitions in the database of a handler.

use std::fmt;
use std::sync::Arc;

use hapax_core::store::BoxFuture;

/// A partition of a topic.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Partition {
    /// Name of the topic.
    pub topic: Arc<str>,
    /// Number of the partition.
    pub number: u32,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.topic, self.number)
    }
}

/// A position that was acquired: the partition belongs to the process that acquired it, until another one
/// does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AcquiredPosition {
    /// Offset of the next record to handle.
    pub next: u64,
    /// Timestamp of the last record that was handled, in milliseconds; `None` if there was none, or if an
    /// operator has set the position. The record before
    /// `next` has another timestamp if the topic was created again.
    pub handled_timestamp_ms: Option<i64>,
    /// Fencing token of the owner, which no other owner has.
    pub fence: u64,
    /// Whether there was no position before.
    pub is_new: bool,
}

/// Advance of a position past a record, or past successive ones, and past the offsets between that have no
/// record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PositionStep {
    /// The partition.
    pub partition: Partition,
    /// Fencing token of the owner.
    pub fence: u64,
    /// Position before the step.
    pub from: u64,
    /// Position after it: the offset after that of the last record.
    pub to: u64,
    /// Timestamp of the last record, in milliseconds; -1 if it has none.
    pub timestamp_ms: i64,
}

impl PositionStep {
    /// Merges steps that follow each other into one; `None` if they do not follow each other, or if there
    /// are none.
    pub fn merge<'a>(mut steps: impl Iterator<Item = &'a Self>) -> Option<Self> {
        let mut whole = steps.next()?.clone();
        for step in steps {
            let follows = step.from == whole.to
                && step.fence == whole.fence
                && step.partition == whole.partition;
            if !follows {
                return None;
            }
            (whole.to, whole.timestamp_ms) = (step.to, step.timestamp_ms);
        }
        Some(whole)
    }
}

/// Error of a store of positions. After an error of [`PositionStore::acquire`] the position may have been acquired.
#[derive(Debug, thiserror::Error)]
#[error("expected the position of a partition, found an error: {0}: check the database")]
pub struct PositionError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl PositionError {
    /// Creates an error with its cause.
    pub fn new(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }
}

/// The positions of a consumer, in the database that has the rows of its handler.
pub trait PositionStore: fmt::Debug + Send + Sync + 'static {
    /// Acquires a partition: from now on no step of another owner is committed. Waits for a
    /// transaction of the previous owner that is in progress. `first` is the position of a partition that
    /// has none.
    ///
    /// # Errors
    /// [`PositionError`]; the caller calls again after a pause.
    fn acquire<'a>(
        &'a self,
        partition: &'a Partition,
        first: u64,
    ) -> BoxFuture<'a, Result<AcquiredPosition, PositionError>>;

    /// Returns whether the owner with this fencing token still has the partition. Another owner may have it, or
    /// an operator may have set its position.
    ///
    /// # Errors
    /// [`PositionError`].
    fn is_owner<'a>(
        &'a self,
        partition: &'a Partition,
        fence: u64,
    ) -> BoxFuture<'a, Result<bool, PositionError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(from: u64, to: u64) -> PositionStep {
        let partition = Partition { topic: "orders".into(), number: 1 };
        PositionStep {
            partition,
            fence: 7,
            from,
            to,
            timestamp_ms: 1_000 + i64::try_from(to).unwrap(),
        }
    }

    #[test]
    fn steps_that_follow_each_other_are_merged() {
        let merged = |steps: &[PositionStep]| PositionStep::merge(steps.iter());
        // The offset 3 is that of no record.
        let steps = [step(2, 3), step(3, 5), step(5, 6)];
        let whole = merged(&steps).unwrap();
        assert_eq!((whole.from, whole.to, whole.timestamp_ms), (2, 6, 1_006));
        assert_eq!(merged(&[step(2, 3), step(4, 5)]), None);
        assert_eq!(merged(&[step(2, 3), PositionStep { fence: 8, ..step(3, 4) }]), None);
        assert_eq!(merged(&[]), None);
    }
}
