//! The simulation keeps every promise, does every fault, and finds every planted bug.

use hapax_testkit::sim::{self, Bug, Event, Fault, SimFailure};

#[test]
fn no_schedule_breaks_a_promise_and_every_fault_happens() {
    let tally = sim::run(0..8_000).unwrap_or_else(|failure| panic!("{failure}"));
    for fault in Fault::ALL {
        let times = tally[*fault];
        assert!(times >= 1_000, "{} only {times} times", fault.words());
    }
    for event in Event::ALL {
        // Seventeen conflicts in a row take more workers than these.
        let enough = tally[*event] >= 100 || *event == Event::Contended;
        assert!(enough, "{} only {} times", event.words(), tally[*event]);
    }
}

#[test]
fn a_seed_gives_one_schedule() {
    let again = |seed| sim::run_seed(seed).map_err(|failure| failure.trace);
    assert_eq!(again(7), again(7));
    assert_ne!(again(7), again(8));
}

fn found(bug: Bug) -> SimFailure {
    match sim::hunt(bug, 0..100_000) {
        Ok(_) => panic!("{bug:?} is not found in 100,000 schedules"),
        Err(failure) => *failure,
    }
}

#[test]
fn a_failure_has_its_seed_and_its_trace() {
    let failure = found(Bug::ChecksThenSets);
    let told = failure.to_string();
    assert!(told.ends_with(failure.violation.what), "{told}");
    assert!(told.contains(&format!("seed {}", failure.seed)), "{told}");
    assert!(failure.trace.iter().any(|line| line.contains("is written")), "{told}");
    let again = sim::hunt(Bug::ChecksThenSets, failure.seed..failure.seed + 1);
    assert_eq!(again.map_err(|again| again.trace), Err(failure.trace));
}

macro_rules! finds {
    ($($name:ident: $bug:ident)*) => {
        $(
            #[test]
            fn $name() {
                let SimFailure { seed, violation, .. } = found(Bug::$bug);
                println!("{:?}: seed {seed}, {}: {}", Bug::$bug, violation.promise, violation.what);
            }
        )*

        #[test]
        fn every_bug_has_a_test() {
            assert_eq!(Bug::ALL, &[$(Bug::$bug),*]);
        }
    };
}

finds! {
    finds_a_world_that_takes_over_from_itself: TakesOverFromItself
    finds_a_world_that_checks_then_sets: ChecksThenSets
    finds_a_world_that_loses_writes: LosesWrites
    finds_a_world_that_reaps_released_at_once: ReapsReleasedAtOnce
    finds_a_world_that_reaps_by_the_lease: ReapsUndecidedRecords
    finds_a_world_that_goes_by_the_clients_clock: UsesTheClientsClock
    finds_a_world_that_resolves_by_loading: ResolvesByLoading
    finds_a_world_that_leaves_ghost_claims: LeavesAbandonedClaims
    finds_a_world_that_takes_silence_for_success: TakesLostReplyForSuccess
    finds_a_world_that_compares_fences: ComparesFences
    finds_a_world_that_renews_without_ownership: RenewsWithoutOwnership
    finds_a_world_that_releases_without_ownership: ReleasesWithoutOwnership
    finds_a_world_that_completes_without_ownership: CompletesWithoutOwnership
    finds_a_world_that_reports_late_as_lost: ReportsLateAsLost
    finds_a_world_that_completes_once_only: CompletesOnceOnly
    finds_a_world_that_overwrites_outcomes: OverwritesOutcomes
    finds_a_world_that_expires_under_block: ExpiresUnderBlock
    finds_a_world_that_ignores_the_records_policy: IgnoresTheRecordsPolicy
    finds_a_world_that_ignores_the_claimers_policy: IgnoresTheClaimersPolicy
    finds_a_world_that_loosens_terms: LoosensTerms
    finds_a_world_that_takes_over_under_the_same_fence: TakesOverUnderTheSameFence
    finds_a_world_that_forgets_the_life: BeginsNewGeneration
    finds_a_world_that_drops_the_checkpoint: DropsTheCheckpoint
    finds_a_world_that_ignores_renewals: IgnoresRenewals
    finds_a_world_that_forgets_attempts: ResetsAttempts
    finds_a_world_that_counts_withdrawn_claims: CountsWithdrawnClaims
    finds_a_world_that_forgets_attempts_after_a_lease: ForgetsAttemptsAfterALease
    finds_a_world_that_forgets_the_crash: ForgetsTheCrash
    finds_a_world_that_ignores_the_fingerprint: IgnoresTheFingerprint
    finds_a_world_that_releases_the_unknown: ReleasesTheUnknown
    finds_a_world_that_asking_takes_the_grant: ReconcileReplacesLeaseId
    finds_a_world_that_counts_late_answers: AcceptsLateVerdicts
    finds_a_world_that_asks_too_soon: CallsHookTooSoon
    finds_a_world_that_calls_without_a_retry_too_soon: CallsHookWithoutRetryTooSoon
    finds_a_world_that_reconciles_the_unseen: ReconcilesUnseenExecution
    finds_a_world_that_reconciles_without_the_checkpoint: ReconcilesWithoutItsCheckpoint
    finds_a_world_that_settles_late: SettlesLate
    finds_a_world_that_forgets_the_end_in_a_call: CallHidesTheEnd
    finds_a_world_that_takes_over_the_description: TakesOverTheDescription
    finds_a_world_that_resolves_the_unseen: DecidesUnseenExecution
    finds_a_world_that_resolves_without_force: ResolvesWithoutForce
    finds_a_world_that_decides_before_it_settled: DecidesBeforeItSettled
    finds_a_world_that_forgets_when_an_execution_ended: ReconcileHidesTheEnd
    finds_a_world_that_forgets_redirects_once_the_target_executes: ForgetsRedirectsOnceExecuted
    finds_a_world_that_forgets_redirects_after_a_lease: ForgetsRedirectsAfterALease
    finds_a_world_that_redirects_every_request: RedirectsEveryRequest
}
