//! Each planted bug breaks the rule that it is listed with.

use std::time::Duration;

use hapax_testkit::messages::suite as rules;

use super::bugs::{Broken, Bug};

/// Time after which a rule that has not ended counts as broken: what it waits for does not come.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Returns whether a rule holds.
async fn holds(rule: impl Future<Output = ()> + Send + 'static) -> bool {
    matches!(tokio::spawn(tokio::time::timeout(TIMEOUT, rule)).await, Ok(Ok(())))
}

macro_rules! found {
    ($($name:ident: $bug:ident => $rule:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $name() {
                let rule = rules::$rule::<Broken<{ Bug::$bug as u8 }>>();
                assert!(!holds(rule).await, "{:?} keeps the rule", Bug::$bug);
                // It is the bug that breaks it.
                rules::$rule::<Broken<{ Bug::None as u8 }>>().await;
            }
        )*
    };
}

found! {
    finds_more_messages_than_wanted: IgnoresMax => every_message_is_received_and_at_most_max_at_a_time
    finds_messages_that_are_acknowledged_on_receipt: AcknowledgesOnReceipt => a_message_that_was_dropped_is_delivered_again
    finds_redeliveries_without_a_mark: MarksNothing => a_message_that_was_dropped_is_delivered_again
    finds_messages_that_are_lost_with_their_connection: LosesOnCut => a_message_is_delivered_again_after_its_connection_was_lost
    finds_acknowledgements_without_an_effect: IgnoresAcknowledgements => an_acknowledged_message_is_not_delivered_again
    finds_messages_that_are_held_by_nak: HoldsByNak => a_held_message_is_not_delivered_again
    finds_holds_that_are_counted: CountsHolds => a_held_message_is_not_delivered_again
    finds_acknowledgements_by_place: AcknowledgesByPlace => a_stale_acknowledgement_does_no_harm
    finds_delayed_messages_that_are_lost: LosesDelayed => a_delayed_message_is_delivered_again_after_its_pause
    finds_pauses_that_are_too_short: CutsDelays => a_delayed_message_is_delivered_again_after_its_pause
    finds_messages_of_a_dropped_receive: LosesOnDrop => a_receive_that_is_dropped_loses_no_message
    finds_messages_out_of_order: ReversesOrder => messages_with_one_order_key_are_received_in_order
    finds_messages_without_their_order_key: DropsKeys => messages_with_one_order_key_are_received_in_order
    finds_messages_that_are_lost_in_a_kill: LosesOnCut => every_message_is_received_although_the_broker_is_killed
    finds_a_source_that_waits_for_ever: HangsWhenDown => a_frozen_broker_is_an_error_in_time_and_found_again
    finds_lost_headers: DropsHeaders => a_message_arrives_byte_for_byte
    finds_the_first_of_several_values: KeepsFirstValue => a_message_arrives_byte_for_byte
    finds_payloads_as_text: SendsText => a_message_arrives_byte_for_byte
    finds_trimmed_headers: TrimsHeaders => a_message_that_cannot_arrive_as_it_is_is_rejected
    finds_rejections_that_are_swallowed: SwallowsRejections => a_message_that_is_too_large_is_rejected
    finds_rejections_that_are_retried: RetriesRejections => a_message_that_is_too_large_is_rejected
    finds_messages_that_are_confirmed_too_early: ConfirmsFirst => a_confirmed_message_survives_a_kill
    finds_confirmations_of_a_lost_connection: ConfirmsFirst => no_confirmed_message_is_lost_with_its_connection
    finds_ids_that_are_new_each_time: MakesIds => a_repeated_publication_has_the_same_id
    finds_redriven_messages_that_are_dropped: IgnoresBrokerIds => a_message_with_another_broker_id_is_delivered_again
    finds_outages_as_rejections: RejectsWhenDown => a_broker_that_is_down_does_not_reject
    finds_letters_without_their_data: DropsHeaders => a_dead_letter_is_published_with_its_data
    finds_effects_that_are_missing: AcknowledgesOnReceipt => a_shutdown_loses_no_message
    finds_second_effects: MakesIds => each_id_has_one_effect
    finds_waiting_messages_that_come_again: HoldsByNak => a_message_that_waits_for_its_next_attempt_is_not_handled_before
    finds_waiting_messages_that_stay: KeepsDelayed => messages_that_fail_keep_no_other_from_being_handled
    finds_messages_that_pass_a_delayed_one_of_their_key: PassesDelayed => an_order_key_that_waits_keeps_no_other_key_from_being_handled
    finds_messages_behind_a_delayed_one_that_stay: KeepsDelayed => an_order_key_that_waits_keeps_no_other_key_from_being_handled
    finds_messages_behind_one_that_stays: DeliversFollowers => an_order_key_whose_message_stays_keeps_no_other_key_from_being_handled
}
