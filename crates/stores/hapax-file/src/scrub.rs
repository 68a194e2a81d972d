//! The check of all records and of the schedule: before the store serves, within a time limit, and
//! then in the background, so that damage is found before a request needs the record.

use std::time::Duration;

use redb::Database;

use crate::database::{CELLS, ENTRIES};
use crate::pages::{Stretch, stretch};
use crate::schedule::format::KEY;
use crate::schedule::reader::index_stretch;
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

/// One reading of all records, then of the schedule.
#[derive(Debug, Default)]
pub(crate) struct Round {
    part: Part,
    records: u64,
    damaged: u64,
}

/// The table that a round reads, with the last key that was read.
#[derive(Debug)]
enum Part {
    Records(Option<[u8; 32]>),
    Entries(Option<[u8; KEY]>),
    /// The index of the schedule.
    Index(Option<Vec<u8>>),
    End,
}

impl Default for Part {
    fn default() -> Self {
        Self::Records(None)
    }
}

impl Part {
    /// Reads a stretch.
    fn read(&self, database: &Database) -> Result<Stretch<Self>, redb::Error> {
        Ok(match self {
            Self::Records(last) => stretch(database, CELLS, *last)?
                .map(|last| last.map_or(Self::Entries(None), |last| Self::Records(Some(last)))),
            Self::Entries(last) => stretch(database, ENTRIES, *last)?
                .map(|last| last.map_or(Self::Index(None), |last| Self::Entries(Some(last)))),
            Self::Index(last) => index_stretch(database, last.as_deref())?
                .map(|last| last.map_or(Self::End, |last| Self::Index(Some(last)))),
            Self::End => Stretch::Read { next: Self::End, count: 0 },
        })
    }
}

#[derive(PartialEq, Eq)]
enum Step {
    More,
    End,
}

impl Round {
    /// Reads a stretch.
    fn step(&mut self, shared: &Shared) -> Step {
        let read = match &*shared.database() {
            Some(database) => self.part.read(database),
            // The database is being reopened.
            None => return Step::More,
        };
        let (next, read) = match read {
            Ok(Stretch::Read { next, count }) => (next, count),
            Ok(Stretch::Damaged { next }) => {
                self.damaged += 1;
                (next, 0)
            }
            Err(error) => {
                tracing::warn!(%error, "the check of the records ended early");
                return Step::End;
            }
        };
        let is_record = matches!(self.part, Part::Records(_));
        let records = self.records + if is_record { read } else { 0 };
        if self.records / PROGRESS != records / PROGRESS {
            tracing::info!(records, "the check of the records continues");
        }
        self.records = records;
        self.part = next;
        match self.part {
            Part::End if self.damaged > 0 => tracing::error!(
                records,
                damaged = self.damaged,
                "the check of the records and the schedule found damage: stop the process and \
                 write what is intact to a new file with `hapax doctor --salvage OLD NEW`"
            ),
            Part::End => tracing::debug!(records, "the check found no damage"),
            _ => return Step::More,
        }
        Step::End
    }
}
