//! Records of sagas, which other processes continue.

use super::*;

#[test]
fn an_operator_can_only_forget_the_record_of_a_saga_that_has_ended() {
    for (name, stored) in rows() {
        let Some(mut stored) = stored else { continue };
        stored.record.scheme = FingerprintScheme::new("saga/1").unwrap();
        let expected = stored.fence;
        for resolution in
            [DefiniteVerdict::DidNotHappen, DefiniteVerdict::Happened(outcome("found"))]
        {
            let forgets = name == "done" && resolution == DefiniteVerdict::DidNotHappen;
            let resolve = Resolve {
                expected,
                force: true,
                forget: true,
                resolution,
                note: None,
                restart: false,
            };
            let seen = Snapshot { now: at(0), stored: Some(stored.clone()) };
            let found = word(&step(&seen, &Event::Resolve(resolve)));
            let absent = ["expired", "released"].contains(&name);
            let rejected = if absent { "not-found" } else { "saga" };
            assert_eq!(found, if forgets { "released" } else { rejected }, "{name}");
        }
    }
}

#[test]
fn an_amendment_changes_the_in_flight_record_that_was_read() {
    let rest = "unknown:changed unknown-block:changed unknown-reconcile:changed \
                reconciling:changed reconciling-lapsed:changed done:changed";
    let nothing = "absent:not-found expired:not-found released:not-found";
    let flight = |word: &str| {
        let rows = ["live", "lapsed", "lapsed-block", "lapsed-reconcile", "just-lapsed-reconcile"];
        rows.map(|row| format!("{row}:{word}")).join(" ")
    };
    let checkpoint = Some(Bytes::from_static(b"decided"));
    let amendment = Amendment { expected: WRITE_ID, checkpoint, lease: Duration::ZERO };
    let expected = format!("{nothing} {} {rest}", flight("in-flight"));
    check("read", &Event::Amend(amendment.clone()), &expected);
    let stale = Amendment { expected: WriteId::from_bytes([9; 16]), ..amendment.clone() };
    let expected = format!("{nothing} {} {rest}", flight("changed"));
    check("stale", &Event::Amend(stale), &expected);

    let stored = stored_record(RecordState::InFlight, 10, OnUnknown::Reexecute);
    let seen = Snapshot { now: at(0), stored: Some(stored.clone()) };
    let Step::Write(draft) = step(&seen, &Event::Amend(amendment.clone())) else {
        panic!("it is written")
    };
    assert_eq!((draft.lease, draft.stamp), (Duration::ZERO, Stamp::Keep));
    assert_eq!(draft.record.checkpoint, amendment.checkpoint);
    let kept = Amendment { checkpoint: None, ..amendment };
    let Step::Write(draft) = step(&seen, &Event::Amend(kept)) else { panic!("it is written") };
    // The owner, which has parked the record, cannot replace the amendment.
    let amended = Record { lease_id: draft.record.lease_id, ..stored.record.clone() };
    assert_eq!(draft.record, amended);
    assert_ne!(amended.lease_id, stored.record.lease_id);
    let Record { lease_id, generation, .. } = stored.record;
    let late = Event::Owner(Owner { lease_id, generation }, OwnerAction::Renew { lease: LEASE });
    let seen = Snapshot { now: at(0), stored: Some(StoredRecord { record: amended, ..stored }) };
    assert_eq!(step(&seen, &late), Step::Lost);
}

#[test]
fn a_claim_that_adopts_creates_no_record() {
    let scheme = FingerprintScheme::new("test/1").unwrap();
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme: &scheme,
        fingerprint: &fingerprint("same"),
        rehashed: &[],
        terms: terms(OnUnknown::Reexecute),
        settle: None,
        description: None,
        hook: None,
        may_reconcile: false,
        local: &[],
        adopts: true,
        quarantine: None,
    };
    let expected = "absent:not-found expired:not-found released:not-found live:busy \
                    lapsed:execute#4 lapsed-block:blocked lapsed-reconcile:blocked \
                    just-lapsed-reconcile:blocked unknown:execute#4 unknown-block:blocked \
                    unknown-reconcile:blocked reconciling:blocked reconciling-lapsed:blocked \
                    done:replay";
    check("adopt", &Event::Claim(claim), expected);
}
