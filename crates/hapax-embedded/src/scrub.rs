//! Reads all records in the background, so that damage is found before a request needs it.

use std::ops::Bound;
use std::time::Duration;

use crate::reader::{self, Stretch};
use crate::shared::Shared;

/// The pause after a stretch of at most 256 KiB: about 8 MiB a second, and less where reading
/// itself takes long.
const PAUSE: Duration = Duration::from_millis(31);
/// From the end of one round to the next.
const EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// Records after which the log says how far a round is.
const PROGRESS: u64 = 1_000_000;

/// Works in rounds until the store is closed.
pub(crate) fn run(shared: &Shared) {
    while round(shared) && shared.pause(EVERY) {}
}

/// Reads all records once. Returns whether the store is open.
fn round(shared: &Shared) -> bool {
    let (mut from, mut records, mut damaged) = (Bound::Unbounded, 0, 0);
    loop {
        if !shared.pause(PAUSE) {
            return false;
        }
        let stretch = match &*shared.database() {
            Some(database) => reader::stretch(database, from),
            // Being opened again.
            None => continue,
        };
        let (last, read) = match stretch {
            Ok(Stretch::Read { last, records }) => (last, records),
            Ok(Stretch::Damaged { last }) => {
                damaged += 1;
                (last, 0)
            }
            Err(error) => {
                tracing::warn!(%error, "the background check of the records ended early");
                return true;
            }
        };
        if records / PROGRESS != (records + read) / PROGRESS {
            tracing::info!(records = records + read, "the background check of the records goes on");
        }
        records += read;
        match last {
            Some(last) => from = Bound::Excluded(last),
            None if damaged > 0 => {
                tracing::error!(
                    records,
                    damaged,
                    "the background check found damage: stop the process and write what is whole \
                     to a new file with `hapax doctor --salvage OLD NEW`"
                );
                return true;
            }
            None => {
                tracing::debug!(records, "the background check found all records whole");
                return true;
            }
        }
    }
}
