//! Claims in a quarantine.

use hapax_core::machine::ClaimQuarantine;

use super::*;

fn claim(
    seen: &Snapshot,
    quarantine: (Timestamp, Timestamp),
    made_at: Option<Timestamp>,
    on_unknown: OnUnknown,
    may_reconcile: bool,
) -> Step {
    let (since, until) = quarantine;
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme: &FingerprintScheme::new("test/1").unwrap(),
        fingerprint: &fingerprint("same"),
        rehashed: &[],
        terms: terms(on_unknown),
        settle: None,
        hook: HOOK,
        may_reconcile,
        adopts: false,
        quarantine: Some(ClaimQuarantine { since, until, made_at }),
        local: &[],
        description: None,
    };
    step(seen, &Event::Claim(claim))
}

fn absent() -> Snapshot {
    Snapshot { now: at(0), stored: None }
}

fn rejected(secs: u64) -> Step {
    Step::Quarantined { remaining: Duration::from_secs(secs) }
}

#[test]
fn only_keys_whose_record_may_be_lost_are_rejected() {
    for on_unknown in [OnUnknown::Block, OnUnknown::Reexecute] {
        for (row, stored) in rows() {
            let seen = Snapshot { now: at(0), stored };
            let found = claim(&seen, (at(-5), at(60)), None, on_unknown, true);
            let outside = claim(&seen, (at(-5), at(0)), None, on_unknown, true);
            match row {
                // The record was released just now, by a claim of ten seconds ago.
                "released" => assert_eq!(word(&found), "execute#4"),
                "absent" | "expired" => {
                    assert_eq!(found, rejected(60), "{row}");
                    assert!(matches!(outside, Step::Execute(_)), "{row}");
                }
                _ => assert_eq!(found, outside, "{row}"),
            }
        }
    }
}

#[test]
fn a_key_claimed_before_and_released_after_the_start_executes() {
    // It was claimed ten seconds ago.
    let by = |released: i64, since: i64| {
        let released = stored_record(RecordState::Released, released, OnUnknown::Block);
        let seen = Snapshot { now: at(0), stored: Some(released) };
        claim(&seen, (at(since), at(60)), None, OnUnknown::Block, true)
    };
    assert_eq!(word(&by(-5, -5)), "execute#4");
    assert_eq!(by(-6, -5), rejected(60));
    assert_eq!(by(-5, -10), rejected(60), "a claim that was withdrawn");
}

#[test]
fn a_key_that_was_made_after_the_start_executes() {
    let by = |made: i64| claim(&absent(), (at(-5), at(60)), Some(at(made)), OnUnknown::Block, true);
    for (made, executes) in [(-6, false), (-5, false), (-4, true), (0, true), (300, true)] {
        assert_eq!(matches!(by(made), Step::Execute(_)), executes, "{made}");
    }
    // The clock of no client is so wrong: the key has no time.
    assert_eq!(by(301), rejected(60));
}

#[test]
fn under_reconcile_the_hook_is_called_once_earlier_requests_have_ended() {
    // A lease of 30 s, then 60 s for its requests.
    let ask = |since: i64, may: bool| {
        claim(&absent(), (at(since), at(600)), None, OnUnknown::Reconcile, may)
    };
    assert_eq!(ask(0, true), rejected(90));
    assert_eq!(ask(-89, true), rejected(5), "after the time-out of a hook at the earliest");
    assert_eq!(ask(-90, false), rejected(5), "another claim asks");
    let Step::Reconcile(announced) = ask(-90, true) else { panic!("expected the hook") };
    assert_eq!(announced.record.state, RECONCILING);
    assert_eq!((announced.record.lease_id, announced.lease), (NEW, Duration::from_secs(5)));
    assert_eq!((announced.stamp, announced.keep), (Stamp::NextFence, None));

    // The verdict is that about any record whose outcome is unknown.
    let stored = StoredRecord {
        write_id: WRITE_ID,
        fence: FencingToken::new(at(0).as_micros()),
        lease_until: at(5),
        keep_until: None,
        record: announced.record,
    };
    let seen = Snapshot { now: at(1), stored: Some(stored) };
    let conclude = |verdict| {
        let (announced, lease_id, terms) = (WRITE_ID, NEW, terms(OnUnknown::Reconcile));
        let (settle, description) = (None, None);
        let event = Event::Reconciled { announced, lease_id, terms, settle, description, verdict };
        word(&step(&seen, &event))
    };
    assert_eq!(conclude(Verdict::DidNotHappen), "execute#2");
    assert_eq!(conclude(Verdict::Happened(outcome("paid"))), "done");
    assert_eq!(conclude(Verdict::CannotSay), "unknown");

    // A policy that does not ask rejects.
    assert_eq!(claim(&absent(), (at(-90), at(600)), None, OnUnknown::Block, true), rejected(600));
}

#[test]
fn without_knowledge_of_a_quarantine_no_key_without_a_record_executes_at_any_time() {
    let unknown = (Timestamp::MAX, Timestamp::MAX);
    for now in [0, 1, 100_000] {
        let seen = Snapshot { now: at(now), stored: None };
        for on_unknown in [OnUnknown::Block, OnUnknown::Reconcile] {
            assert_eq!(claim(&seen, unknown, None, on_unknown, true), rejected(1));
        }
    }
}

#[test]
fn the_hook_is_called_about_an_older_record_once_requests_of_lost_executions_have_ended() {
    // The record was claimed ten seconds ago.
    let by = |since: i64, now: i64| {
        let state = RecordState::Unknown { seen: None, reconciling: false };
        let stored = stored_record(state, -5, OnUnknown::Reconcile);
        let seen = Snapshot { now: at(now), stored: Some(stored) };
        claim(&seen, (at(since), at(900)), None, OnUnknown::Reconcile, true)
    };
    let HookTiming { after, .. } = HOOK.unwrap();
    let from = (terms(OnUnknown::Reconcile).lease + after).as_secs() as i64;
    assert!(matches!(by(-10, 0), Step::Reconcile(_)), "a quarantine that began before it");
    assert_eq!(by(0, from - 1), Step::Unknown { reconcile_in: Some(Duration::from_secs(1)) });
    assert!(matches!(by(0, from), Step::Reconcile(_)));
}
