//! The check of all records: before the store serves, within a time limit, and then in the
//! background, so that damage is found before a request needs the record.

use std::ops::Bound;
use std::time::Duration;

use crate::reader::{self, Stretch};
use crate::shared::Shared;

/// Pause after a stretch of at most 256 KiB: about 8 MiB a second, and less if reading itself is
/// slow.
const PAUSE: Duration = Duration::from_millis(31);
/// Time from the end of one round to the next.
const EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// Number of records after which the progress of a round is logged.
const PROGRESS: u64 = 1_000_000;

/// Time after which the check before serving logs its progress.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// Reads records before the store serves, for at most `bound`. Returns the round that continues in
/// the background; `None` if all records were read.
pub(crate) fn begin(shared: &Shared, bound: Duration) -> Option<Round> {
    let began = shared.clock.now();
    let (mut round, mut told) = (Round::default(), LOG_EVERY);
    loop {
        let took = shared.clock.now().since(began);
        if took >= bound {
            if bound > Duration::ZERO {
                tracing::info!(
                    records = round.records,
                    "the check of the records continues in the background"
                );
            }
            return Some(round);
        }
        if took >= told {
            told = took + LOG_EVERY;
            tracing::info!(records = round.records, "the records are checked before the start");
        }
        if round.step(shared) == Step::End {
            return None;
        }
    }
}

/// Reads in rounds until the store is closed. `round` was begun before.
pub(crate) fn run(shared: &Shared, mut round: Option<Round>) {
    loop {
        if let Some(mut round) = round.take() {
            while round.step(shared) == Step::More {
                if !shared.pause(PAUSE) {
                    return;
                }
            }
        }
        if !shared.pause(EVERY) {
            return;
        }
        round = Some(Round::default());
    }
}

/// One reading of all records.
#[derive(Debug, Default)]
pub(crate) struct Round {
    /// The last key that was read.
    last: Option<[u8; 32]>,
    records: u64,
    damaged: u64,
}

#[derive(PartialEq, Eq)]
enum Step {
    More,
    End,
}

impl Round {
    /// Reads a stretch.
    fn step(&mut self, shared: &Shared) -> Step {
        let from = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let stretch = match &*shared.database() {
            Some(database) => reader::stretch(database, from),
            // The database is being reopened.
            None => return Step::More,
        };
        let (last, read) = match stretch {
            Ok(Stretch::Read { last, records }) => (last, records),
            Ok(Stretch::Damaged { last }) => {
                self.damaged += 1;
                (last, 0)
            }
            Err(error) => {
                tracing::warn!(%error, "the check of the records ended early");
                return Step::End;
            }
        };
        let records = self.records + read;
        if self.records / PROGRESS != records / PROGRESS {
            tracing::info!(records, "the check of the records continues");
        }
        self.records = records;
        self.last = last;
        match last {
            Some(_) => return Step::More,
            None if self.damaged > 0 => tracing::error!(
                records,
                damaged = self.damaged,
                "the check of the records found damage: stop the process and write the intact \
                 records to a new file with `hapax doctor --salvage OLD NEW`"
            ),
            None => tracing::debug!(records, "the check found no damage"),
        }
        Step::End
    }
}
