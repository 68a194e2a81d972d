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

/// The rows without a checkpoint, from which a retry would continue.
fn fresh_rows() -> Vec<(&'static str, Option<StoredRecord>)> {
    let mut rows = rows();
    rows.iter_mut().filter_map(|(_, stored)| stored.as_mut()).for_each(|stored| {
        stored.record.checkpoint = None;
    });
    rows
}

#[test]
fn a_record_from_whose_checkpoint_a_retry_may_continue_is_not_announced() {
    let event = Event::Announce(announcement());
    check(
        "announce with a checkpoint",
        &event,
        "absent:not-found expired:not-found released:not-found live:rejected lapsed:rejected \
         lapsed-block:rejected lapsed-reconcile:rejected just-lapsed-reconcile:rejected \
         unknown:rejected unknown-block:rejected unknown-reconcile:rejected reconciling:rejected \
         reconciling-lapsed:rejected done:changed",
    );
    // Nor is that of a saga, whatever its state.
    for (row, stored) in fresh_rows() {
        let stored = stored.map(|mut stored| {
            stored.record.scheme = FingerprintScheme::new("saga/order/1").unwrap();
            assert!(stored.record.scheme.is_saga());
            stored
        });
        let found = word(&step(&Snapshot { now: at(0), stored }, &event));
        assert!(["not-found", "rejected", "changed"].contains(&&*found), "{row}: {found}");
    }
}

#[test]
fn a_hook_is_called_without_a_retry_only_about_undecided_records_that_reconcile() {
    let event = Event::Announce(announcement());
    let found = fresh_rows().into_iter().map(|(row, stored)| {
        format!("{row}:{}", word(&step(&Snapshot { now: at(0), stored }, &event)))
    });
    assert_eq!(
        found.collect::<Vec<_>>().join(" "),
        "absent:not-found expired:not-found released:not-found live:rejected lapsed:rejected \
         lapsed-block:rejected lapsed-reconcile:unknown just-lapsed-reconcile:may-execute \
         unknown:rejected unknown-block:rejected unknown-reconcile:unknown reconciling:may-execute \
         reconciling-lapsed:unknown done:changed",
    );
    // The route may have another policy than the record.
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Block] {
        let event = Event::Announce(Announcement { terms: terms(on_unknown), ..announcement() });
        for (row, stored) in fresh_rows() {
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
    let reconciled = |state, lease_secs| {
        let mut stored = stored_record(state, lease_secs, OnUnknown::Reconcile);
        stored.record.checkpoint = None;
        stored
    };
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
        ("settle", with_settle(reconciled(RecordState::InFlight, -10), 90), announcement(), 80),
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
    let conclude = |announced, verdict| Event::Conclude {
        announced,
        verdict,
        note: Some(Bytes::from("by the hook")),
    };
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
    // It stays as long as an outcome: it shows operators why the key executes again.
    let retention = draft.record.terms.retention;
    assert_eq!(draft.record.notes.decision.unwrap(), "by the hook");
    assert!(retention > LEASE);
    assert_eq!((draft.stamp, draft.record.attempt, draft.keep), (Stamp::Keep, 3, Some(retention)));
}

/// Another process may have another hook for the operation: a hook is chosen by the description.
#[test]
fn a_takeover_has_the_description_of_its_own_claim_and_never_the_hook_of_an_earlier_one() {
    let [theirs, ours] = ["theirs", "ours"].map(Bytes::from);
    let mut stored = stored_record(RECONCILING, 1, OnUnknown::Reconcile);
    stored.record.notes.description = Some(theirs.clone());
    stored.record.extensions.set_described(Some(OWN));
    let taken_over = |description: Option<&Bytes>| {
        let verdict = Verdict::DidNotHappen;
        let (announced, lease_id, terms) = (WRITE_ID, NEW, terms(OnUnknown::Reconcile));
        let event =
            Event::Reconciled { announced, lease_id, terms, settle: None, description, verdict };
        let seen = Snapshot { now: at(0), stored: Some(stored.clone()) };
        let Step::Execute(draft) = step(&seen, &event) else { panic!("expected a takeover") };
        let Record { notes, extensions, lease_id, .. } = draft.record;
        assert_eq!(lease_id, NEW);
        assert!(!extensions.describes(OWN));
        (notes.description, extensions.describes(NEW))
    };
    assert_eq!(taken_over(Some(&ours)), (Some(ours), true));
    // Without a description of its own, as of a resumed execution or a long one.
    assert_eq!(taken_over(None), (Some(theirs), false));
}

#[test]
fn a_first_execution_under_reconcile_is_described_by_its_own_claim() {
    let ours = Bytes::from("ours");
    let released = stored_record(RecordState::Released, 0, OnUnknown::Reconcile);
    for (stored, on_unknown, description, expected) in [
        (None, OnUnknown::Reconcile, Some(&ours), true),
        (None, OnUnknown::Reconcile, None, false),
        (None, OnUnknown::Block, Some(&ours), false),
        (Some(&released), OnUnknown::Reconcile, Some(&ours), true),
        (Some(&released), OnUnknown::Reconcile, None, false),
    ] {
        let mut stored = stored.cloned();
        if let Some(stored) = &mut stored {
            stored.record.extensions.set_described(Some(OWN));
        }
        let scheme = FingerprintScheme::new("test/1").unwrap();
        let (fingerprint, terms) = (fingerprint("same"), terms(on_unknown));
        let claim = ClaimEvent { description, ..claim_event(&scheme, &fingerprint, terms) };
        let Step::Execute(draft) = step(&Snapshot { now: at(0), stored }, &Event::Claim(claim))
        else {
            panic!("expected an execution")
        };
        let extensions = draft.record.extensions;
        assert_eq!([OWN, NEW].map(|it| extensions.describes(it)), [false, expected]);
    }
}
