use async_nats::datetime::parse_rfc3339;
use async_nats::jetstream::stream::RawMessage;

use super::*;
use crate::source::NatsOrderKey;

const CALM: Duration = Duration::from_secs(3600);

const TIME: &str = "2026-11-29T18:00:00.000000001Z";
const LATER: &str = "2026-11-29T18:00:00.000000002Z";

fn id(sequence: u64, time: &str) -> StoredId {
    StoredId { sequence, stored_at: parse_rfc3339(time).unwrap() }
}

/// Returns a message that the client cannot read.
fn found(sequence: u64) -> Found {
    let raw = RawMessage {
        subject: "orders.M\u{fffd}ller".to_owned(),
        sequence,
        payload: String::new(),
        headers: None,
        time: parse_rfc3339(TIME).unwrap(),
    };
    Found::of(&raw, ("ORDERS", "test"), &NatsOrderKey::None).unwrap().unwrap()
}

fn progress(floor: u64, last: u64) -> Progress {
    Progress { floor, last, pending: 1, subjects: Vec::new() }
}

/// Returns a state after this number of ends.
fn after(ends: u64) -> State {
    let mut state = State::default();
    state.note_ends(ends, CALM);
    state
}

#[test]
fn a_subject_matches_by_tokens() {
    for (filter, subject, expected) in [
        ("orders.>", "orders.a.b", true),
        ("orders.>", "orders", false),
        ("orders.*", "orders.a", true),
        ("orders.*", "orders.a.b", false),
        ("orders.*.b", "orders.a.b", true),
        ("orders.a", "orders.a", true),
        ("orders.a", "orders.b", false),
    ] {
        assert_eq!(matches(filter, subject), expected, "{filter} {subject}");
    }
}

#[tokio::test(start_paused = true)]
async fn three_ends_without_a_known_cause_are_often_until_there_was_none_for_a_time() {
    let calm = Duration::from_secs(32);
    let mut state = State::default();
    for ends in 1..=3 {
        assert!(!state.ends_often(calm));
        state.note_ends(ends, calm);
        tokio::time::advance(Duration::from_secs(20)).await;
    }
    assert!(state.ends_often(calm));
    tokio::time::advance(Duration::from_secs(20)).await;
    assert!(!state.ends_often(calm));
    state.note_ends(4, calm);
    assert!(!state.ends_often(calm), "the first one again");
    assert_eq!((state.unexplained, state.is_due), (1, true));
}

#[test]
fn only_a_message_in_progress_explains_ends() {
    let mut state = after(3);
    assert!(state.add(found(7)));
    state.unexplained = 3;
    assert!(state.conclude(true), "a search that has failed has found no cause");
    state.reported_at = None;
    assert!(!state.conclude(false));
    assert_eq!(state.unexplained, 0);
    // Its delivery is dropped, and the stream has it no more.
    state.found.clear();
    state.unexplained = 3;
    assert!(state.conclude(false));
    assert!(state.ends_often(CALM));
}

#[test]
fn a_message_that_is_absent_or_replaced_is_not_known() {
    let mut state = after(1);
    for sequence in [3, 4, 5] {
        assert!(state.add(found(sequence)));
        assert!(!state.add(found(sequence)), "it is in progress");
    }
    state.absent(3, 4);
    state.present(id(4, LATER));
    state.present(id(5, TIME));
    assert_eq!(state.known.keys().copied().collect::<Vec<_>>(), [5]);
    // Another message of the same sequence is none that was terminated.
    state.terminated(id(5, LATER));
    assert!(state.add(found(5)));
    state.absent(9, 2);
}

#[test]
fn a_later_end_does_not_move_the_range_back() {
    let mut state = after(2);
    state.begin(progress(1, 20_000));
    assert_eq!(state.range, Some((2, 20_000)));
    state.passed(300);
    state.note_ends(3, CALM);
    state.begin(progress(1, 20_001));
    assert_eq!(state.range, Some((301, 20_001)));
    // Not after an error either.
    state.conclude(true);
    assert!(!state.is_unfinished());
    state.note_ends(4, CALM);
    state.begin(progress(400, 20_001));
    assert_eq!(state.range, Some((401, 20_001)));
    state.passed(20_001);
    assert!(!state.is_unfinished());
    state.begin(progress(400, 20_001));
    assert_eq!(state.range, Some((401, 20_001)));
}

#[test]
fn a_second_end_adds_the_messages_before_the_range() {
    let mut state = after(1);
    state.received(id(100, TIME), false);
    state.begin(progress(1, 200));
    assert_eq!(state.range, Some((101, 200)));
    state.passed(150);
    state.note_ends(2, CALM);
    state.begin(progress(1, 200));
    assert_eq!(state.range, Some((2, 200)));
    state.passed(10);
    state.note_ends(3, CALM);
    state.begin(progress(1, 200));
    assert_eq!(state.range, Some((11, 200)));
}

#[test]
fn a_dropped_message_is_read_again_without_those_behind_it() {
    let mut state = after(1);
    assert!(state.add(found(5)));
    assert!(state.add(found(6)));
    state.received(id(100, TIME), false);
    // Drops the first one.
    state.found.pop_front();
    state.begin(progress(1, 200));
    assert_eq!(state.again.iter().copied().collect::<Vec<_>>(), [5]);
    assert_eq!(state.range, Some((101, 200)));
    assert!(state.is_unread(5) && !state.is_unread(6) && state.is_unread(200));
    state.passed(200);
    assert!(state.is_unfinished());
    state.passed_again(5);
    assert!(!state.is_unfinished());
}

#[test]
fn a_message_that_the_client_has_read_is_readable_until_it_is_acknowledged() {
    let mut state = after(1);
    state.received(id(5, TIME), true);
    state.received(id(6, TIME), false);
    assert!(state.is_readable(id(5, TIME)));
    assert!(!state.is_readable(id(5, LATER)) && !state.is_readable(id(6, TIME)));
    state.begin(progress(5, 6));
    assert!(!state.is_readable(id(5, TIME)));
}
