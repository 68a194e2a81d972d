//! Decisions of operators.

use super::*;

#[test]
fn an_operator_decides() {
    let fence = FencingToken::new(at(-10).as_micros());
    let resolve = |expected, force, resolution| {
        Event::Resolve(Resolve {
            expected,
            force,
            forget: false,
            resolution,
            note: None,
            restart: false,
        })
    };
    let nothing = "absent:not-found expired:not-found released:not-found";
    let all = |lapsed: &str, word: &str| {
        let rows = [
            "lapsed-reconcile",
            "just-lapsed-reconcile",
            "unknown",
            "unknown-block",
            "unknown-reconcile",
            "reconciling",
            "reconciling-lapsed",
        ];
        let rows = rows.map(|row| format!("{row}:{word}")).join(" ");
        format!("lapsed:{lapsed} lapsed-block:{lapsed} {rows}")
    };
    let rest = |word: &str| all(word, word);
    // Two records lapsed just now.
    let early = all("may-execute", "released");
    let release = resolve(fence, false, DefiniteVerdict::DidNotHappen);
    let expected = format!("{nothing} live:rejected {early} done:rejected");
    check("release", &release, &expected);
    let forced = resolve(fence, true, DefiniteVerdict::DidNotHappen);
    let expected = format!("{nothing} live:released {} done:rejected", rest("released"));
    check("forced release", &forced, &expected);
    let resolution = DefiniteVerdict::DidNotHappen;
    let forget = Resolve {
        expected: fence,
        force: false,
        forget: true,
        resolution,
        note: None,
        restart: false,
    };
    let expected = format!("{nothing} live:rejected {early} done:released");
    check("forget", &Event::Resolve(forget), &expected);
    let happened = resolve(fence, false, DefiniteVerdict::Happened(outcome("found")));
    let expected = format!("{nothing} live:rejected {} done:changed", rest("done"));
    check("happened", &happened, &expected);
    let stale = resolve(FencingToken::new(1), true, DefiniteVerdict::DidNotHappen);
    let expected = format!("{nothing} live:changed {} done:changed", rest("changed"));
    check("stale", &stale, &expected);
}

fn decide(now: Timestamp, stored: &StoredRecord, force: bool, happened: bool) -> Step {
    let resolution = match happened {
        true => DefiniteVerdict::Happened(outcome("found")),
        false => DefiniteVerdict::DidNotHappen,
    };
    let expected = stored.fence;
    let resolve =
        Resolve { expected, force, forget: false, resolution, note: None, restart: false };
    let seen = Snapshot { now, stored: Some(stored.clone()) };
    step(&seen, &Event::Resolve(resolve))
}

fn with_settle(mut stored: StoredRecord, secs: u64) -> StoredRecord {
    stored.record.extensions.set_settle(Some(Duration::from_secs(secs)));
    stored
}

/// Returns the record that a draft leaves, written at `now`.
fn written(now: Timestamp, before: &StoredRecord, draft: Draft) -> StoredRecord {
    let Draft { record, lease, keep, .. } = draft;
    let keep_until = keep.map(|keep| now.after(keep));
    StoredRecord {
        lease_until: now.after(lease),
        keep_until,
        record,
        write_id: WRITE_ID,
        fence: before.fence,
    }
}

#[test]
fn a_release_that_restarts_counts_attempts_anew_and_another_keeps_their_number() {
    let parked = stored_record(RecordState::Done(outcome("parked")), 0, OnUnknown::Block);
    for (state, restart) in [(RecordState::InFlight, true), (UNKNOWN, true), (UNKNOWN, false)] {
        let mut stored = StoredRecord { keep_until: None, ..parked.clone() };
        (stored.record.state, stored.record.attempt) = (state, 7);
        for forget in [false, true] {
            if forget {
                stored.record.state = parked.record.state.clone();
            }
            let (expected, resolution) = (stored.fence, DefiniteVerdict::DidNotHappen);
            let resolve =
                Resolve { expected, force: true, forget, resolution, note: None, restart };
            let seen = Snapshot { now: at(1), stored: Some(stored.clone()) };
            let Step::Write(draft) = step(&seen, &Event::Resolve(resolve)) else { panic!() };
            assert_eq!(draft.record.state, RecordState::Released);
            let released = Some(written(at(1), &stored, draft));
            let claimed = executes(&Snapshot { now: at(2), stored: released });
            assert_eq!(claimed.record.attempt, if restart { 1 } else { 8 });
        }
    }
}

#[test]
fn a_decision_while_the_request_may_still_execute_is_rejected_unless_it_happened_or_is_forced() {
    let lapsed = stored_record(RecordState::InFlight, 0, OnUnknown::Block);
    let abandoned = stored_record(UNKNOWN, 0, OnUnknown::Block);
    for (name, stored, secs) in [
        ("of a service without an upstream", lapsed.clone(), 30),
        ("of a gateway", with_settle(lapsed, 60), 90),
        ("the upstream gave no response", with_settle(abandoned, 60), 90),
    ] {
        let stored = StoredRecord { keep_until: None, ..stored };
        let until = at(secs);
        assert_eq!(may_execute_until(&stored), Some(until), "{name}");
        let before = Timestamp::from_micros(until.as_micros() - 1);
        let early = decide(before, &stored, false, false);
        assert_eq!(early, Step::MayExecute { until }, "{name}");
        assert_eq!(word(&decide(before, &stored, true, false)), "released", "{name}");
        assert_eq!(word(&decide(before, &stored, false, true)), "done", "{name}");
        assert_eq!(word(&decide(until, &stored, false, false)), "released", "{name}");
    }
    let seen = RecordState::Unknown { seen: Some(outcome("500")), reconciling: false };
    for (name, stored) in [
        ("the service responded", with_settle(stored_record(seen, 0, OnUnknown::Block), 60)),
        ("its handler panicked", stored_record(UNKNOWN, 0, OnUnknown::Block)),
    ] {
        assert_eq!(may_execute_until(&stored), None, "{name}");
        assert_eq!(word(&decide(at(0), &stored, false, false)), "released", "{name}");
    }
}

#[test]
fn a_call_of_a_hook_does_not_change_until_when_a_request_may_still_execute() {
    let claim = |stored: &StoredRecord, now| {
        let scheme = FingerprintScheme::new("test/1").unwrap();
        let claim = ClaimEvent {
            lease_id: NEW,
            own_lease_ids: &[],
            scheme: &scheme,
            fingerprint: &fingerprint("same"),
            terms: terms(OnUnknown::Reconcile),
            rehashed: &[],
            settle: Some(Duration::from_secs(60)),
            hook: HOOK,
            may_reconcile: true,
            adopts: false,
            quarantine: None,
            local: &[],
            description: None,
        };
        step(&Snapshot { now, stored: Some(stored.clone()) }, &Event::Claim(claim))
    };
    let answer = |stored: &StoredRecord, now, verdict| {
        let event = Event::Reconciled {
            announced: WRITE_ID,
            lease_id: NEW,
            terms: terms(OnUnknown::Reconcile),
            settle: Some(Duration::from_secs(60)),
            description: None,
            verdict,
        };
        step(&Snapshot { now, stored: Some(stored.clone()) }, &event)
    };
    let lapsed = stored_record(RecordState::InFlight, -60, OnUnknown::Reconcile);
    let abandoned = stored_record(UNKNOWN, 0, OnUnknown::Reconcile);
    for (name, stored, until) in [
        ("lapsed", with_settle(lapsed.clone(), 60), Some(at(30))),
        ("lapsed, without an upstream", lapsed, Some(at(-30))),
        ("abandoned", with_settle(abandoned.clone(), 60), Some(at(90))),
        ("abandoned, without an upstream", abandoned, None),
    ] {
        let mut stored = StoredRecord { keep_until: None, ..stored };
        for secs in [1, 9] {
            let Step::Reconcile(draft) = claim(&stored, at(secs)) else { panic!("{name}") };
            stored = written(at(secs), &stored, draft);
            assert_eq!(may_execute_until(&stored), until, "{name}, the hook is called");
            let cannot_say = answer(&stored, at(secs + 1), Verdict::CannotSay);
            let Step::Write(draft) = cannot_say else { panic!("{name}") };
            stored = written(at(secs + 1), &stored, draft);
            assert_eq!(may_execute_until(&stored), until, "{name}, the hook could not say");
        }
        // Another execution has its own time.
        let Step::Reconcile(draft) = claim(&stored, at(20)) else { panic!("{name}") };
        stored = written(at(20), &stored, draft);
        let Step::Execute(draft) = answer(&stored, at(21), Verdict::DidNotHappen) else {
            panic!("{name}")
        };
        stored = written(at(21), &stored, draft);
        assert_eq!(may_execute_until(&stored), Some(at(21 + 30 + 60 + 30)), "{name}, taken over");
    }
}

#[test]
fn a_claim_stores_its_settle_time_and_a_takeover_keeps_the_longer_one() {
    let settle = |secs| Some(Duration::from_secs(secs));
    let executes = |stored, settle| {
        let scheme = FingerprintScheme::new("test/1").unwrap();
        let claim = ClaimEvent {
            lease_id: NEW,
            own_lease_ids: &[],
            scheme: &scheme,
            fingerprint: &fingerprint("same"),
            terms: terms(OnUnknown::Reexecute),
            rehashed: &[],
            settle,
            hook: None,
            may_reconcile: true,
            adopts: false,
            quarantine: None,
            local: &[],
            description: None,
        };
        match step(&Snapshot { now: at(0), stored }, &Event::Claim(claim)) {
            Step::Execute(draft) => draft.record.extensions.settle(),
            other => panic!("{other:?}"),
        }
    };
    let stored =
        |state, secs| Some(with_settle(stored_record(state, 0, OnUnknown::Reexecute), secs));
    assert_eq!(executes(None, settle(60)), settle(60));
    assert_eq!(executes(None, None), None);
    assert_eq!(executes(stored(RecordState::Released, 90), settle(60)), settle(60));
    assert_eq!(executes(stored(RecordState::Released, 90), None), None);
    assert_eq!(executes(stored(RecordState::InFlight, 90), settle(60)), settle(90));
    assert_eq!(executes(stored(RecordState::InFlight, 60), settle(90)), settle(90));
    assert_eq!(executes(stored(RecordState::InFlight, 60), None), settle(60));
}

#[test]
fn an_operators_note_stays_in_the_record_until_another_decision() {
    let note = Some(Bytes::from_static(b"by an operator"));
    let expected = FencingToken::new(at(-10).as_micros());
    let resolve = |resolution| {
        let note = note.clone();
        Event::Resolve(Resolve {
            expected,
            force: false,
            forget: false,
            resolution,
            note,
            restart: false,
        })
    };
    let seen = |stored| Snapshot { now: at(0), stored: Some(stored) };
    let unknown = RecordState::Unknown { seen: None, reconciling: false };
    let before = stored_record(unknown, 10, OnUnknown::Block);
    for resolution in [DefiniteVerdict::DidNotHappen, DefiniteVerdict::Happened(outcome("found"))] {
        let step = step(&seen(before.clone()), &resolve(resolution));
        let Step::Write(draft) = step else { panic!("{step:?}") };
        assert_eq!(draft.record.notes.decision, note);
    }
    let mut released = stored_record(RecordState::Released, 10, OnUnknown::Block);
    released.record.notes.decision.clone_from(&note);
    released.record.notes.description = Some(Bytes::from_static(b"an earlier request"));
    let described = Bytes::from_static(b"POST /payments");
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme: &released.record.scheme.clone(),
        fingerprint: &fingerprint("same"),
        terms: terms(OnUnknown::Block),
        rehashed: &[],
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: Some(&described),
    };
    let step = step(&seen(released), &Event::Claim(claim));
    let Step::Execute(draft) = step else { panic!("{step:?}") };
    assert_eq!(draft.record.notes.decision, note);
    assert_eq!(draft.record.notes.description, Some(described));
}
