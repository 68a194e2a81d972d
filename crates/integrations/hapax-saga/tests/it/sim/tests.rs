//! The simulation keeps every invariant, does every fault, and finds every planted bug.

use super::bugs::Bug;
use super::tally::{EVENTS, FAULTS};
use super::{SimFailure, play, run};

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("expected a number"))
}

#[test]
fn no_schedule_breaks_an_invariant_and_every_fault_happens() {
    if let Some(seed) = variable("HAPAX_SAGA_SEED") {
        let bug = std::env::var("HAPAX_SAGA_BUG").ok();
        let bug = bug.and_then(|name| Bug::ALL.iter().find(|bug| format!("{bug:?}") == name));
        play(seed..=seed, bug.copied()).unwrap_or_else(|failure| panic!("{failure}"));
        return;
    }
    let seeds = variable("HAPAX_SAGA_SEEDS").unwrap_or(3_000);
    let tally = run(0..seeds).unwrap_or_else(|failure| panic!("{failure}"));
    for what in FAULTS.iter().chain(EVENTS) {
        println!("{what}: {}", tally.of(what));
    }
    let rare: Vec<_> = FAULTS.iter().chain(EVENTS).filter(|it| tally.of(it) == 0).collect();
    assert!(rare.is_empty(), "did not happen: {rare:?}");
}

#[test]
fn a_seed_fails_in_the_same_way_each_time() {
    let again = || play(0..100_000, Some(Bug::UndoesInOrder)).map(drop);
    let first = again();
    assert!(first.is_err());
    assert_eq!(first, again());
}

fn found(bug: Bug) -> SimFailure {
    match play(0..3_000, Some(bug)) {
        Ok(_) => panic!("{bug:?} is not found in 3,000 schedules"),
        Err(failure) => *failure,
    }
}

macro_rules! finds {
    ($($name:ident: $bug:ident)*) => {
        $(
            #[test]
            fn $name() {
                let SimFailure { seed, violation, .. } = found(Bug::$bug);
                println!("{:?}: seed {seed}, {}: {}", Bug::$bug, violation.what, violation.detail);
            }
        )*

        #[test]
        fn every_bug_has_a_test() {
            assert_eq!(Bug::ALL, &[$(Bug::$bug),*]);
        }
    };
}

finds! {
    finds_an_entry_removed_before_completion: RemovesBeforeCompletion
    finds_entries_removed_by_operation: RemovesByOperation
    finds_parking_without_a_second_look: ParksWithoutASecondLook
    finds_a_parked_entry_postponed_without_a_look: PostponesWithoutALook
    finds_a_retention_shorter_than_a_sleep: ShortRetention
    finds_undos_in_the_order_of_the_steps: UndoesInOrder
    finds_results_found_by_position: ResumesByPosition
    finds_tries_counted_after_the_call: CountsTriesAfterwards
    finds_a_foreign_entry_that_runs: RunsForeignEntries
    finds_calls_without_a_lease: CallsWithoutALease
    finds_an_undo_without_settling: UndoesWithoutSettling
    finds_a_once_step_that_is_repeated: RepeatsOnce
    finds_a_blind_postponement: PostponesBlindly
    finds_an_entry_inserted_after_begin: InsertsAfterBegin
    finds_an_undo_before_its_reason_is_saved: UndoesBeforeTheReason
    finds_a_signal_answered_before_the_wake_up: AnswersBeforeTheWakeUp
    finds_an_adoption_that_creates_a_record: AdoptsNothing
    finds_a_wake_up_of_a_running_saga: WakesTheRunning
    finds_a_takeover_without_an_entry: TakesOverWithoutAnEntry
    finds_a_call_without_a_look_for_a_cancellation: CallsWithoutALook
    finds_a_duplicate_accepted_early: AcceptsDuplicatesEarly
    finds_rows_committed_without_the_log: CommitsWithoutTheLog
    finds_a_panic_that_counts_as_nothing: TakesPanicsForNothing
    finds_a_large_result_that_counts_as_nothing: TakesLargeResultsForNothing
    finds_an_unreadable_result_that_is_replaced: ReplacesUnreadableResults
    finds_signals_to_any_generation: SignalsAnyGeneration
    finds_a_saga_run_by_another_version: RunsOtherVersions
    finds_a_duplicate_accepted_by_the_log: AcceptsByTheLog
    finds_a_call_before_the_entry: CallsBeforeTheEntry
    finds_a_log_beside_an_entry_of_another_owner: SavesBesideAnEntry
    finds_a_release_of_what_may_be_accepted: ReleasesWhatMayBeAccepted
    finds_a_call_that_goes_on_after_its_timeout: CallsAfterItsTimeout
}
