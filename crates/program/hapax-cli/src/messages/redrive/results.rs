//! Results of a redrive, and its errors.

use std::collections::{BTreeSet, HashSet};

use hapax_core::Fingerprint;
use hapax_postgres_messages::DeadLetterSummary;

use super::super::render;
use crate::exit::CliError;
use crate::output::print;

/// Messages, one after the other, that the broker does not acknowledge, or that nothing handles within `--wait`, after which the
/// command ends: then the broker is unavailable, or no consumer runs.
const IN_A_ROW: usize = 3;

/// Numbers of dead letters by what was done.
#[derive(Default)]
pub(super) struct Results {
    published: usize,
    released: usize,
    pub(super) moved: usize,
    waiting: usize,
    gone: usize,
    /// Those that failed, and the first error.
    failed: usize,
    first: Option<CliError>,
    /// Those behind them, with their order keys, which are these.
    left_out: usize,
    failed_keys: OrderKeys,
    /// Those with an order key since the last one whose message was handled, or was parked again: id, and time at which it was
    /// last parked.
    unhandled: Vec<([u8; 32], String)>,
    /// Those since the last one whose message the broker acknowledged.
    unacknowledged: usize,
}

/// Reason for which a dead letter was not redriven.
pub(super) enum NotRedriven {
    /// An older one with its order key is in front of it.
    Behind,
    /// A dead letter that exists no longer: its message was handled, or an operator dropped it.
    Gone,
    /// Its message has failed, or cannot be redriven. Others may be.
    Failed(CliError),
    /// The broker did not acknowledge its message, which may be published.
    Unacknowledged(CliError),
    /// Nothing handled its message in time.
    Unhandled(CliError),
    /// None can be redriven.
    All(CliError),
}

impl From<CliError> for NotRedriven {
    fn from(error: CliError) -> Self {
        match error.code() {
            1 => Self::Failed(error),
            _ => Self::All(error),
        }
    }
}

/// Order keys, each of a consumer. They are hashed, since they may be long.
#[derive(Default)]
pub(super) struct OrderKeys {
    consumers: BTreeSet<String>,
    hashes: HashSet<Fingerprint>,
}

impl OrderKeys {
    /// Adds the order key of a dead letter, if it has one.
    pub(super) fn insert(&mut self, dead_letter: &DeadLetterSummary) {
        if let Some(hash) = Self::hash(dead_letter) {
            self.hashes.insert(hash);
            if !self.consumers.contains(&dead_letter.consumer) {
                self.consumers.insert(dead_letter.consumer.clone());
            }
        }
    }

    /// Returns whether the order key of a dead letter is among them.
    pub(super) fn contains(&self, dead_letter: &DeadLetterSummary) -> bool {
        Self::hash(dead_letter).is_some_and(|hash| self.hashes.contains(&hash))
    }

    /// Returns the consumers.
    pub(super) fn consumers(&self) -> impl Iterator<Item = &str> {
        self.consumers.iter().map(String::as_str)
    }

    fn hash(dead_letter: &DeadLetterSummary) -> Option<Fingerprint> {
        let key = dead_letter.order_key.as_ref()?;
        let mut hash = Fingerprint::builder("order-key/1");
        Some(hash.field(dead_letter.consumer.as_bytes()).field(key.as_bytes()).finish())
    }
}

impl Results {
    /// Notes a dead letter that was not redriven. Returns the error that ends the command, if one does. `is_one` is true if
    /// no other was selected: then the error is all that the command prints.
    pub(super) fn note(
        &mut self,
        dead_letter: &DeadLetterSummary,
        reason: NotRedriven,
        is_one: bool,
    ) -> Result<(), CliError> {
        let error = match reason {
            NotRedriven::Behind => {
                self.waiting += 1;
                return Ok(());
            }
            NotRedriven::Gone => {
                self.note_gone(&dead_letter.id);
                return Ok(());
            }
            NotRedriven::All(error) => return Err(error),
            NotRedriven::Failed(error) => error,
            NotRedriven::Unacknowledged(error) => {
                self.unacknowledged += 1;
                if self.unacknowledged == IN_A_ROW {
                    return Err(
                        error.and("; it is the third one in a row: check the broker of --to")
                    );
                }
                error
            }
            NotRedriven::Unhandled(error) => {
                self.unhandled.push((dead_letter.id, dead_letter.last_at.clone()));
                if self.unhandled.len() == IN_A_ROW {
                    return Err(error.and(
                        "; it is the third one in a row: check that the consumer runs; if it does, its handler fails, and \
                         messages wait for their next attempts: fix that, or pass a longer --wait",
                    ));
                }
                error
            }
        };
        if !is_one {
            print(&format!("{} not redriven: {error}\n", &render::hex(&dead_letter.id)[..12]));
        }
        self.failed += 1;
        self.first.get_or_insert(error);
        self.failed_keys.insert(dead_letter);
        Ok(())
    }

    /// Notes a dead letter that exists no longer. It was not redriven, and has not failed.
    pub(super) fn note_gone(&mut self, id: &[u8; 32]) {
        print(&format!("{} gone meanwhile\n", &render::hex(id)[..12]));
        self.gone += 1;
    }

    /// Notes a message that the broker has acknowledged.
    pub(super) fn note_published(&mut self, is_released: bool) {
        self.published += 1;
        self.released += usize::from(is_released);
        self.unacknowledged = 0;
    }

    /// Notes whether a consumer has handled a message, or has parked it again.
    pub(super) fn note_wait(&mut self, waited: &Result<(), NotRedriven>) {
        if matches!(waited, Ok(()) | Err(NotRedriven::Failed(_))) {
            self.note_running();
        }
    }

    /// Returns the dead letters in a row whose messages nothing has handled within `--wait`, each with the time at which it was last
    /// parked.
    pub(super) fn unhandled(&self) -> &[([u8; 32], String)] {
        &self.unhandled
    }

    /// Notes that a consumer runs.
    pub(super) fn note_running(&mut self) {
        self.unhandled.clear();
    }

    /// Returns whether an older dead letter with the order key of this one has failed, and counts this one then.
    pub(super) fn leaves_out(&mut self, dead_letter: &DeadLetterSummary) -> bool {
        let is_behind = self.failed_keys.contains(dead_letter);
        self.left_out += usize::from(is_behind);
        is_behind
    }

    /// Returns the result of the command.
    pub(super) fn end(self, is_file: bool) -> Result<(), CliError> {
        let Self { waiting, failed, left_out, unacknowledged, .. } = self;
        let ended = match (self.first, waiting) {
            (None, 0) => Ok(()),
            (None, waiting) => Err(not_redriven(waiting, is_file)),
            (Some(error), 0) if failed == 1 && left_out == 0 => Err(error),
            (Some(first), waiting) => Err(CliError::no(format!(
                "expected every message to be redriven and handled, found {failed} that were not, {left_out} behind them \
                 with their order keys, which were left out, and {waiting} behind others that were not selected; the first \
                 error: {first}"
            ))),
        };
        // Without another failure, all may be redriven once the broker is available.
        let may_end = failed > 0 && failed == unacknowledged && waiting == 0;
        ended.map_err(|error| if may_end { error.may_end() } else { error })
    }

    /// Returns what was done, and what the operator does next.
    pub(super) fn summary(&self, has_store: bool, has_failed: bool) -> String {
        let Self { published, released, moved, .. } = self;
        let mut text = String::new();
        if *moved > 0 {
            text.push_str(&format!("{moved} moved back to the outbox\n"));
        }
        if *published > 0 && has_store {
            text.push_str(&format!("{published} published, records released: {released}\n"));
        } else if *published > 0 {
            text.push_str(&format!(
                "{published} published, records released: none, without --store. A consumer in batch mode \
                 handles the messages. One in claim mode does not: run the command again with the \
                 --store of its inbox\n"
            ));
        }
        if text.is_empty() && !has_failed && self.waiting + self.failed + self.gone == 0 {
            text.push_str("no dead letters\n");
        }
        text
    }
}

/// Returns the error of dead letters that are behind others.
fn not_redriven(waiting: usize, is_file: bool) -> CliError {
    let then = match is_file {
        true => "start the consumer, which handles those, then stop it and run the command again",
        false => {
            "redrive or drop those first; --consumer without --parked-as redrives all in order"
        }
    };
    CliError::no(format!(
        "expected the oldest dead letter of each order key, found {waiting} behind older ones, which were \
         not redriven: {then}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_is_parked_again_shows_that_the_consumer_runs() {
        let failed = || CliError::no("parked again");
        for (waited, unhandled) in [
            (Ok(()), 0),
            (Err(NotRedriven::Failed(failed())), 0),
            (Err(NotRedriven::Unhandled(failed())), 2),
            (Err(NotRedriven::All(failed())), 2),
        ] {
            let unhandled_ones = vec![([0; 32], String::new()), ([1; 32], String::new())];
            let mut results = Results { unhandled: unhandled_ones, ..Results::default() };
            results.note_wait(&waited);
            assert_eq!(results.unhandled().len(), unhandled);
        }
    }
}
