//! Groups of scenarios, and the functions that play them.

use std::collections::HashMap;
use std::sync::Arc;

use hapax_core::store::BoxFuture;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::http::client::Protocol;
use crate::http::fixture::HttpFixture;
use crate::http::stage::ScenarioContext;

/// A scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Name, which begins with the number of its statement.
    pub name: &'static str,
    run: fn(ScenarioContext) -> BoxFuture<'static, ()>,
}

impl Scenario {
    #[doc(hidden)]
    pub const fn new(
        name: &'static str,
        run: fn(ScenarioContext) -> BoxFuture<'static, ()>,
    ) -> Self {
        Self { name, run }
    }
}

/// Scenarios with the same requirements on a fixture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Group {
    /// Needs an address, and another start on the same store once the first instance has drained.
    Any,
    /// Needs [`crate::http::Instance::kill`], and another start after it.
    Crashes,
    /// Needs [`crate::http::Instance::link`].
    Outages,
    /// Needs two instances on the store at a time.
    Several,
    /// Needs both: one of two instances is cut off.
    Partitions,
    /// Needs an instance that reconciles without a retry, as a gateway whose store has a secret does.
    Unretried,
    /// Needs [`crate::http::Instance::quarantine`].
    Quarantines,
}

impl Group {
    /// All groups but [`Unretried`](Self::Unretried) and [`Quarantines`](Self::Quarantines).
    pub const RETRIED: [Self; 5] =
        [Self::Any, Self::Crashes, Self::Outages, Self::Several, Self::Partitions];

    /// Returns the scenarios of the group.
    #[must_use]
    pub fn scenarios(self) -> &'static [Scenario] {
        match self {
            Self::Any => crate::__http_group!(any, list),
            Self::Crashes => crate::__http_group!(crashes, list),
            Self::Outages => crate::__http_group!(outages, list),
            Self::Several => crate::__http_group!(several, list),
            Self::Partitions => crate::__http_group!(partitions, list),
            Self::Unretried => crate::__http_group!(unretried, list),
            Self::Quarantines => crate::__http_group!(quarantines, list),
        }
    }
}

/// Plays one scenario.
pub async fn play(fixture: Arc<dyn HttpFixture>, protocol: Protocol, scenario: &Scenario) {
    (scenario.run)(ScenarioContext::new(fixture, protocol, scenario.name)).await;
}

/// Plays groups on one fixture, over `protocols`, `at_once` scenarios at a time: one if the store
/// has a single owner. Returns the number of scenarios. Once all have ended, panics with the names
/// of those that failed.
pub async fn play_all(
    fixture: Arc<dyn HttpFixture>,
    protocols: &[Protocol],
    groups: &[Group],
    at_once: usize,
) -> usize {
    let turns = Arc::new(Semaphore::new(at_once));
    let (mut playing, mut names) = (JoinSet::new(), HashMap::new());
    for protocol in protocols.iter().copied() {
        for scenario in groups.iter().flat_map(|group| group.scenarios()) {
            let (fixture, turns) = (Arc::clone(&fixture), Arc::clone(&turns));
            let played = playing.spawn(async move {
                let _turn = turns.acquire_owned().await.unwrap();
                play(fixture, protocol, scenario).await;
            });
            names.insert(played.id(), format!("{protocol:?} {}", scenario.name));
        }
    }
    let mut failed = Vec::new();
    while let Some(played) = playing.join_next_with_id().await {
        if let Err(error) = played {
            failed.extend(names.get(&error.id()).cloned());
        }
    }
    failed.sort();
    assert!(failed.is_empty(), "{} of {} failed: {failed:#?}", failed.len(), names.len());
    names.len()
}

/// Makes a test for each scenario of the named groups, in modules `http1` and `http2`. `fixture` is
/// an asynchronous function in scope that returns a fixture, as `Arc<dyn HttpFixture>`.
#[macro_export]
macro_rules! http_suite {
    ($fixture:ident; $($group:ident),+ $(,)?) => {
        mod http1 {
            use super::$fixture;
            $($crate::__http_group! { $group, test $fixture Http1 })+
        }
        mod http2 {
            use super::$fixture;
            $($crate::__http_group! { $group, test $fixture Http2 })+
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __http_each {
    ([test $fixture:ident $protocol:ident] $($module:ident: $($name:ident)+;)+) => {
        $($(
            #[::tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let scenario = $crate::__http_scenario!($module $name);
                $crate::http::play($fixture().await, $crate::http::Protocol::$protocol, &scenario).await;
            }
        )+)+
    };
    ([list] $($module:ident: $($name:ident)+;)+) => {
        const { &[$($($crate::__http_scenario!($module $name),)+)+] }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __http_scenario {
    ($module:ident $name:ident) => {
        $crate::http::Scenario::new(stringify!($name), |arena| {
            Box::pin($crate::http::scenarios::$module::$name(arena))
        })
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __http_group {
    (any, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            keys: w01_quoted_and_bare_are_one_key w01_parameters_are_parsed_and_ignored
                w01_a_strict_route_accepts_strings_only w02_a_key_has_1_to_255_characters
                w02_a_quoted_key_may_have_any_printable_ascii
                w02_a_bare_key_may_have_visible_ascii_except_four_characters
                w03_an_invalid_key_is_400_and_claims_nothing w03_the_body_need_not_be_read
                w04_a_required_key_is_required
                w04_without_an_optional_key_a_request_passes_untouched
                w04_without_a_key_the_handler_gets_the_request_unchanged
                w05_post_and_patch_are_protected_by_default w05_the_route_sets_the_protected_methods;
            identity: w06_two_scopes_have_separate_records w32_two_namespaces_have_separate_records
                w06_scope_and_key_are_not_concatenated w06_a_missing_scope_is_rejected
                w06_a_missing_scope_may_be_a_shared_scope w06_one_global_scope
                w06_credentials_that_change_with_each_request_are_rejected
                w07_json_members_in_any_order_are_the_same_request
                w07_json_white_space_and_escapes_do_not_count w07_json_numbers_count_as_written
                w07_json_without_a_canonical_form_is_compared_by_its_bytes
                w07_other_bodies_count_by_their_bytes w07_canonical_and_raw_are_separate_domains
                w07_method_path_and_query_count w07_query_pairs_are_sorted_by_name
                w35_the_target_that_the_client_sent_is_compared
                w36_one_cookie_may_name_the_caller
                w36_a_cookie_and_a_header_name_the_caller_together
                w36_a_claim_of_a_verified_token_may_name_the_caller
                w36_a_token_that_does_not_verify_is_rejected_and_claims_nothing
                w36_a_claim_and_a_header_name_the_caller_together
                w37_form_data_is_compared_by_its_decoded_pairs_in_order
                w37_form_data_of_another_charset_is_compared_by_its_bytes
                w07_only_chosen_headers_are_compared w07_a_method_override_is_compared
                w07_form_data_is_compared_without_its_boundary
                w07_bodies_may_be_compared_by_their_bytes w07_bodies_may_be_ignored
                w07_only_selected_json_members_may_be_compared w07_selected_json_members_may_be_ignored
                w07_a_changed_configuration_makes_no_false_422 w08_reuse_of_a_finished_key_is_422
                w08_reuse_of_a_key_in_flight_is_422 w08_reuse_of_a_key_with_an_unknown_outcome_is_422;
            execution: w09_of_100_duplicates_one_executes
                w10_a_client_that_disconnects_neither_cancels_nor_loses_the_execution
                w10_a_client_that_disconnects_during_its_request_executes_nothing
                w12_a_handler_may_take_many_times_the_lease
                w13_every_execution_has_a_larger_fence_and_its_attempt
                w13_a_reused_key_has_a_larger_fence
                w13_the_clients_own_key_reaches_the_handler
                w13_a_fence_that_a_client_sends_is_dropped
                w13_a_fence_that_a_client_sends_reaches_no_unprotected_handler
                w24_the_operation_id_is_derived_from_scope_and_key
                w34_responses_after_a_claim_have_the_operation_id_if_there_is_a_secret
                w38_a_request_to_an_upstream_carries_its_deadline_and_none_that_a_client_sends;
            headers: w29_a_route_may_have_the_key_in_another_header
                w29_a_header_spelled_with_an_underscore_is_rejected;
            outcomes: w14_statuses_by_default w14_a_response_that_breaks_off_is_unknown
                w14_a_response_shorter_than_declared_is_unknown
                w14_a_503_is_unknown_unless_its_header_states_retryable
                w14_a_503_is_retryable_under_reexecute w25_status_lists_take_precedence_over_the_profile
                w25_the_outcome_header_takes_precedence_over_the_status_lists w25_a_status_in_two_lists_is_rejected
                w27_outcome_unknown_has_retry_after
                w15_reexecute_runs_again_with_a_larger_fence w15_under_block_nothing_executes_again_without_a_decision
                w15_after_happened_the_response_is_replayed w15_after_did_not_happen_the_retry_executes
                w15_cannot_say_is_409
                w24_two_callers_with_one_key_get_their_own_outcomes w16_under_stripe_v1_all_but_409_and_429_are_final
                w16_under_success_only_2xx_is_final w16_a_response_overrides_its_status
                w16_a_response_sets_its_retention
                w16_no_idempotency_header_of_a_handler_reaches_the_client
                w23_an_invalid_override_is_ignored
                w23_under_any_profile_a_response_that_breaks_off_is_unknown;
            grpc: w16_grpc_unavailable_is_retryable_under_reexecute w16_grpc_is_classified_by_its_status w16_grpc_rejections_are_trailers_only
                w16_profiles_do_not_apply_to_grpc w16_a_grpc_response_overrides_its_status;
            replay: w17_replays_of_all_shapes_are_exact
                w17_cookies_are_replayed_if_the_route_enables_it w17_a_replay_has_its_own_date
                w17_hop_by_hop_headers_are_not_replayed w17_a_replay_has_idempotency_replayed;
            in_flight: w18_a_duplicate_in_flight_gets_retry_after w18_retry_after_ends_with_the_lease
                w18_waiters_get_the_replay
                w18_a_waiter_is_promoted_when_the_owner_releases w18_a_waiter_gets_409_after_its_timeout
                w18_the_number_of_waiters_is_limited;
            sizes: w19_a_request_over_its_limit_is_413_and_claims_nothing
                w23_body_limits_are_for_protected_requests_with_a_key
                w19_a_response_over_its_limit_is_delivered_completely_and_once
                w19_event_streams_are_final_at_the_headers w19_a_route_may_stream_every_response;
            outages: w20_open_with_block_is_rejected;
            rejections: w21_rejections_are_problem_details w21_in_flight_has_retry_after
                w21_rejections_state_their_outcome_class_for_a_gateway_in_front
                w21_an_unknown_outcome_is_unknown_for_a_gateway_in_front
                w21_rejections_link_to_the_documentation w21_rejections_have_the_routes_cors_headers
                w21_every_response_to_a_page_has_cors_headers
                w21_without_cors_there_are_no_such_headers
                w28_every_problem_has_an_error_for_sdks;
            protocols: w22_one_key_over_both_protocols w22_chunks_and_a_length_are_the_same_body
                w22_request_trailers_reach_the_handler w22_trailers_are_stored_and_replayed
                w22_a_100_continue_is_not_the_response
                w22_responses_may_have_idempotency_expires w22_by_default_responses_have_no_idempotency_expires
                w22_a_key_may_be_reused_after_its_retention;
            redirects: w33_a_client_that_follows_a_redirect_has_one_effect
                w33_a_redirect_is_sent_again_whatever_the_state
                w33_several_redirects_in_a_row_are_kept_up_to_a_limit
                w33_a_redirect_to_the_same_target_releases_the_key
                w33_lists_and_headers_take_precedence w33_redirects_are_kept_under_every_profile
                w33_a_key_with_a_redirect_is_free_until_the_target_is_claimed
                w33_a_307_without_a_location_is_no_redirect w33_a_redirect_in_raw_utf_8_is_kept
                w33_a_redirect_is_recognised_by_the_scheme_of_its_record;
            details: w23_a_released_key_accepts_another_fingerprint
                w23_connection_must_not_name_key_or_scope
                w23_connection_must_not_name_a_fingerprinted_header w23_malformed_framing_is_400
                w23_paths_reach_the_handler_unchanged w23_while_draining_new_requests_get_503
                w23_a_request_that_a_drain_cuts_off_is_unknown;
        }
    };
    (crashes, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            execution: w11_the_outcome_of_a_sent_response_is_recorded;
            outcomes: w14_a_lease_that_lapsed_is_unknown
                w15_a_lapsed_execution_runs_again_with_a_larger_fence;
        }
    };
    (outages, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            execution: w11_there_is_no_response_before_its_outcome_is_recorded;
            grpc: w16_grpc_without_a_store_is_unavailable;
            outages: w20_closed_executes_nothing w20_open_executes_unprotected
                w21_a_page_may_read_the_rejection_during_an_outage
                w20_without_a_store_at_completion_the_response_is_delivered_as_pending
                w20_without_a_store_at_completion_the_response_may_be_withheld
                w20_a_drain_waits_until_a_deferred_outcome_is_stored
                w23_a_lapsed_lease_without_a_takeover_is_renewed;
        }
    };
    (several, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            execution: w09_of_duplicates_at_two_processes_one_executes;
        }
    };
    (partitions, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            execution: w13_an_owner_that_was_taken_over_is_superseded;
            outages: w20_after_a_completion_deferred_beyond_the_lease_the_policy_applies;
        }
    };
    (unretried, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            unretried: w46_what_happened_is_known_without_a_retry
                w46_what_did_not_happen_releases_its_key_without_a_retry
                w46_without_a_verdict_the_outcome_stays_unknown;
        }
    };
    (quarantines, $($then:tt)*) => {
        $crate::__http_each! {
            [$($then)*]
            quarantines: w47_in_a_quarantine_a_key_without_a_record_executes_nothing
                w47_a_key_that_was_made_after_the_start_executes;
        }
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Group;

    /// Compares only the numbers. Readers have to judge whether a scenario checks the whole
    /// statement.
    #[test]
    fn every_statement_has_a_scenario() {
        // Also for a store that has one owner and is never unreachable.
        for groups in [&Group::RETRIED[..], &[Group::Any, Group::Crashes]] {
            let scenarios = || groups.iter().flat_map(|group| group.scenarios());
            let numbers: BTreeSet<&str> = scenarios().map(|scenario| &scenario.name[..3]).collect();
            let all: BTreeSet<String> = (1..=23).map(|number| format!("w{number:02}")).collect();
            // Some later statements are about the gateway alone, and are checked by its tests.
            let first = numbers.into_iter().filter(|number| *number <= "w23");
            assert_eq!(first.map(str::to_owned).collect::<BTreeSet<_>>(), all);
            let names: BTreeSet<&str> = scenarios().map(|scenario| scenario.name).collect();
            assert_eq!(names.len(), scenarios().count());
        }
    }

    #[test]
    fn every_scenario_is_in_a_group() {
        let written: usize = [
            include_str!("scenarios/details.rs"),
            include_str!("scenarios/execution.rs"),
            include_str!("scenarios/grpc.rs"),
            include_str!("scenarios/headers.rs"),
            include_str!("scenarios/identity.rs"),
            include_str!("scenarios/in_flight.rs"),
            include_str!("scenarios/keys.rs"),
            include_str!("scenarios/outages.rs"),
            include_str!("scenarios/outcomes.rs"),
            include_str!("scenarios/protocols.rs"),
            include_str!("scenarios/quarantines.rs"),
            include_str!("scenarios/redirects.rs"),
            include_str!("scenarios/rejections.rs"),
            include_str!("scenarios/replay.rs"),
            include_str!("scenarios/sizes.rs"),
            include_str!("scenarios/unretried.rs"),
        ]
        .iter()
        .map(|source| source.matches("pub async fn w").count())
        .sum();
        let groups = Group::RETRIED.iter().chain([&Group::Unretried, &Group::Quarantines]);
        let grouped: usize = groups.map(|group| group.scenarios().len()).sum();
        assert_eq!(written, grouped);
    }
}
