//! Results of a redrive, and its errors.

use std::collections::HashSet;

use hapax_postgres_messages::DeadLetterSummary;

use super::super::render;
use crate::exit::CliError;
use crate::output::print;

/// Order keys, one after the other, whose messages nothing handles within `--wait`, after which the command ends: then no
/// consumer runs.
const UNHANDLED: u32 = 3;

/// Numbers of dead letters by what was done.
#[derive(Default)]
pub(super) struct Results {
    pub(super) published: usize,
    pub(super) released: usize,
    pub(super) moved: usize,
    waiting: usize,
    /// Those that failed, and the first error.
    failed: usize,
    first: Option<CliError>,
    /// Those behind them, with their order keys, which are these, each of a consumer.
    left_out: usize,
    failed_keys: HashSet<(String, String)>,
    /// Order keys since the last one whose message was handled, or was parked again.
    unhandled: u32,
}

/// Reason for which a dead letter was not redriven.
pub(super) enum NotRedriven {
    /// An older one with its order key is in front of it.
    Behind,
    /// Its message has failed, or cannot be redriven. Others may be.
    Failed(CliError),
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
            NotRedriven::All(error) => return Err(error),
            NotRedriven::Failed(error) => error,
            NotRedriven::Unhandled(error) => {
                self.unhandled += 1;
                if self.unhandled == UNHANDLED {
                    return Err(
                        error.and("; it is the third one in a row: check that the consumer runs")
                    );
                }
                error
            }
        };
        if !is_one {
            print(&format!("{} not redriven: {error}\n", &render::hex(&dead_letter.id)[..12]));
        }
        self.failed += 1;
        self.first.get_or_insert(error);
        self.failed_keys.extend(order_key(dead_letter));
        Ok(())
    }

    /// Notes whether a consumer has handled a message, or has parked it again.
    pub(super) fn note_wait(&mut self, waited: &Result<(), NotRedriven>) {
        if matches!(waited, Ok(()) | Err(NotRedriven::Failed(_))) {
            self.unhandled = 0;
        }
    }

    /// Returns whether an older dead letter with the order key of this one has failed, and counts this one then.
    pub(super) fn leaves_out(&mut self, dead_letter: &DeadLetterSummary) -> bool {
        let is_behind = order_key(dead_letter).is_some_and(|key| self.failed_keys.contains(&key));
        self.left_out += usize::from(is_behind);
        is_behind
    }

    /// Returns the result of the command.
    pub(super) fn end(self, is_file: bool) -> Result<(), CliError> {
        let Self { waiting, failed, left_out, .. } = self;
        match (self.first, waiting) {
            (None, 0) => Ok(()),
            (None, waiting) => Err(not_redriven(waiting, is_file)),
            (Some(error), 0) if failed == 1 && left_out == 0 => Err(error),
            (Some(first), waiting) => Err(CliError::no(format!(
                "expected every message to be redriven and handled, found {failed} that were not, {left_out} behind them \
                 with their order keys, which were left out, and {waiting} behind others that were not selected; the first \
                 error: {first}"
            ))),
        }
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
        if text.is_empty() && !has_failed && self.waiting + self.failed == 0 {
            text.push_str("no dead letters\n");
        }
        text
    }
}

/// Returns consumer and order key of a dead letter that has one.
pub(super) fn order_key(dead_letter: &DeadLetterSummary) -> Option<(String, String)> {
    Some((dead_letter.consumer.clone(), dead_letter.order_key.clone()?))
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
            let mut results = Results { unhandled: 2, ..Results::default() };
            results.note_wait(&waited);
            assert_eq!(results.unhandled, unhandled);
        }
    }
}
