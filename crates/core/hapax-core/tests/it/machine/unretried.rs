//! Calls of a hook without a retry.

use hapax_core::machine::{Announcement, ClaimQuarantine};

use super::*;

const FENCE: FencingToken = FencingToken::new(NOW - 10_000_000);

fn announcement() -> Announcement {
    Announcement {
        expected: FENCE,
        terms: terms(OnUnknown::Reconcile),
        hook: HOOK.unwrap(),
        pause: Duration::ZERO,
        quarantine: None,
    }
}

#[test]
fn a_hook_is_called_without_a_retry_only_about_undecided_records_that_reconcile() {
    let event = Event::Announce(announcement());
    check(
        "announce",
        &event,
        "absent:not-found expired:not-found released:not-found live:rejected lapsed:rejected \
         lapsed-block:rejected lapsed-reconcile:unknown just-lapsed-reconcile:may-execute \
         unknown:rejected unknown-block:rejected unknown-reconcile:unknown reconciling:may-execute \
         reconciling-lapsed:unknown done:changed",
    );
    // The route may have another policy than the record.
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Block] {
        let event = Event::Announce(Announcement { terms: terms(on_unknown), ..announcement() });
        for (row, stored) in rows() {
            let found = word(&step(&Snapshot { now: at(0), stored }, &event));
            assert!(["not-found", "rejected", "changed"].contains(&&*found), "{row}: {found}");
        }
    }
}

#[test]
fn a_record_of_another_execution_than_the_listed_one_is_not_announced() {
    for expected in [FencingToken::next(Some(FENCE), at(0)), FencingToken::new(0)] {
        let event = Event::Announce(Announcement { expected, ..announcement() });
        for (row, stored) in rows() {
            let found = word(&step(&Snapshot { now: at(0), stored }, &event));
            let absent = ["absent", "expired", "released"].contains(&row);
            assert_eq!(found, if absent { "not-found" } else { "changed" }, "{row}");
        }
    }
}

#[test]
fn a_hook_is_not_called_before_the_first_request_has_ended() {
    let reconciled = |state, lease_secs| stored_record(state, lease_secs, OnUnknown::Reconcile);
    let with_settle = |mut stored: StoredRecord, secs| {
        stored.record.extensions.set_settle(Some(Duration::from_secs(secs)));
        stored
    };
    let response = RecordState::Unknown { seen: Some(outcome("500")), reconciling: false };
    let paused = Announcement { pause: Duration::from_secs(30), ..announcement() };
    let quarantine = ClaimQuarantine { since: at(-5), until: at(600), made_at: None };
    let restored = Announcement { quarantine: Some(quarantine), ..announcement() };
    for (name, stored, event, from) in [
        ("lapsed", reconciled(RecordState::InFlight, -10), announcement(), 50),
        // The timeout of the upstream was longer then.
        (
            "settle",
            with_settle(reconciled(RecordState::InFlight, -10), 90),
            announcement(),
            80,
        ),
        ("no response", with_settle(reconciled(UNKNOWN, -10), 60), announcement(), 50),
        ("a response", with_settle(reconciled(response, -10), 60), announcement(), -10),
        ("pause", reconciled(UNKNOWN, -10), paused.clone(), 20),
        ("a call in progress", reconciled(RECONCILING, 5), announcement(), 5),
        ("a call that was lost", reconciled(RECONCILING, -10), paused, 20),
        ("restored", reconciled(UNKNOWN, -10), restored, 85),
    ] {
        let by = |now| {
            let seen = Snapshot { now, stored: Some(stored.clone()) };
            step(&seen, &Event::Announce(event.clone()))
        };
        let until = at(from);
        let before = Timestamp::from_micros(until.as_micros() - 1);
        assert_eq!(by(before), Step::MayExecute { until }, "{name}");
        let Step::Write(draft) = by(until) else { panic!("{name}") };
        let RecordState::Unknown { reconciling: true, .. } = draft.record.state else {
            panic!("{name}")
        };
        assert_eq!((draft.stamp, draft.lease), (Stamp::Keep, Duration::from_secs(5)), "{name}");
        assert_eq!((draft.record.lease_id, draft.keep), (OWN, None), "{name}");
    }
}

#[test]
fn a_verdict_without_a_retry_executes_nothing() {
    let conclude = |announced, verdict| Event::Conclude { announced, verdict };
    for (verdict, expected) in [
        (Verdict::Happened(outcome("found")), "done"),
        (Verdict::DidNotHappen, "released"),
        (Verdict::CannotSay, "unknown"),
    ] {
        for (row, stored) in rows() {
            let seen = Snapshot { now: at(0), stored };
            let found = word(&step(&seen, &conclude(WRITE_ID, verdict.clone())));
            let unknown = row.starts_with("unknown") || row.starts_with("reconciling");
            assert_eq!(found, if unknown { expected } else { "changed" }, "{row}");
            let other = WriteId::from_bytes([9; 16]);
            assert_eq!(word(&step(&seen, &conclude(other, verdict.clone()))), "changed", "{row}");
        }
    }
    // The record keeps fence and attempts, so that the next execution has a larger fence.
    let stored = stored_record(RECONCILING, 1, OnUnknown::Reconcile);
    let seen = Snapshot { now: at(0), stored: Some(stored) };
    let Step::Write(draft) = step(&seen, &conclude(WRITE_ID, Verdict::DidNotHappen)) else {
        panic!("expected a release")
    };
    assert_eq!((draft.stamp, draft.record.attempt, draft.keep), (Stamp::Keep, 3, Some(LEASE)));
}
