//! Withdrawn claims, and records with redirects.

use hapax_core::Redirect;

use super::*;

fn redirect(text: &'static str, scheme: &str) -> Redirect {
    Redirect {
        scheme: FingerprintScheme::new(scheme).unwrap(),
        fingerprint: fingerprint(text),
        outcome: outcome(text),
    }
}

fn claims(
    seen: &Snapshot,
    text: &str,
    scheme: &str,
    rehashed: &[(FingerprintScheme, Fingerprint)],
) -> Step {
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme: &FingerprintScheme::new(scheme).unwrap(),
        fingerprint: &fingerprint(text),
        rehashed,
        terms: terms(OnUnknown::Block),
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: None,
    };
    step(seen, &Event::Claim(claim))
}

const ELSEWHERE: fn() -> OwnerAction =
    || OwnerAction::Redirect { outcome: outcome("same"), keep: Duration::ZERO };

#[test]
fn an_owner_redirects_where_it_could_release() {
    check_owner(
        OWN,
        GENERATION,
        ELSEWHERE(),
        "absent:gone expired:gone released:recorded live:released lapsed:released \
         lapsed-block:released lapsed-reconcile:released just-lapsed-reconcile:released \
         unknown:lost unknown-block:lost unknown-reconcile:lost reconciling:lost \
         reconciling-lapsed:lost done:lost",
    );
    check_owner(TAKEN_OVER, OTHER_GENERATION, ELSEWHERE(), &{
        let gone = rows().into_iter().map(|(row, _)| format!("{row}:gone"));
        gone.collect::<Vec<_>>().join(" ")
    });
}

#[test]
fn a_redirect_is_replayed_in_every_state_and_another_request_follows_the_table() {
    for (name, stored) in rows() {
        let Some(mut stored) = stored else { continue };
        stored.record.extensions.add_redirect(redirect("first", "test/1"));
        let seen = Snapshot { now: at(0), stored: Some(stored) };
        let first = claims(&seen, "first", "test/1", &[]);
        match name {
            "expired" => assert_eq!(word(&first), "execute#1"),
            _ => assert_eq!(first, Step::Replay(outcome("first")), "{name}"),
        }
        let without = rows().into_iter().find(|(row, _)| *row == name).unwrap().1;
        let without = Snapshot { now: at(0), stored: without };
        for text in ["same", "other"] {
            let [with, without] =
                [&seen, &without].map(|seen| word(&claims(seen, text, "test/1", &[])));
            assert_eq!(with, without, "{name}");
        }
    }
}

#[test]
fn a_redirect_stays_for_the_retention_until_the_request_that_follows_has_ended() {
    let owner = Owner { lease_id: OWN, generation: GENERATION };
    let retention = Some(terms(OnUnknown::Block).retention);
    let stored = stored_record(RecordState::InFlight, 10, OnUnknown::Block);
    let seen = Snapshot { now: at(0), stored: Some(stored.clone()) };
    let Step::Write(released) = step(&seen, &Event::Owner(owner, ELSEWHERE())) else { panic!() };
    assert_eq!((&released.record.state, released.keep), (&RecordState::Released, retention));

    let at_rest = |record| StoredRecord { record, ..stored.clone() };
    let seen = Snapshot { now: at(0), stored: Some(at_rest(released.record)) };
    assert_eq!(claims(&seen, "same", "test/1", &[]), Step::Replay(outcome("same")));
    let Step::Execute(next) = claims(&seen, "there", "test/1", &[]) else { panic!() };
    assert_eq!(next.record.fingerprint, fingerprint("there"));
    let follows = Owner { lease_id: NEW, generation: NEW };
    let seen = Snapshot { now: at(0), stored: Some(at_rest(next.record)) };
    for action in [
        OwnerAction::Complete { outcome: outcome("kept"), retention: None },
        RELEASE,
        WITHDRAW,
        ELSEWHERE(),
        OwnerAction::Abandon { seen: None },
    ] {
        let Step::Write(end) = step(&seen, &Event::Owner(follows, action.clone())) else {
            panic!()
        };
        assert!(end.keep.is_none_or(|keep| Some(keep) >= retention), "{action:?}");
        let seen = Snapshot { now: at(0), stored: Some(at_rest(end.record)) };
        assert_eq!(claims(&seen, "same", "test/1", &[]), Step::Replay(outcome("same")));
    }
}

#[test]
fn a_redirect_of_another_scheme_is_hashed_again_once_and_the_claim_keeps_its_own_scheme() {
    let scheme = |name| FingerprintScheme::new(name).unwrap();
    let mut released = stored_record(RecordState::Released, 0, OnUnknown::Block);
    for name in ["test/2", "test/3"] {
        released.record.extensions.add_redirect(redirect("first", name));
    }
    let seen = Snapshot { now: at(0), stored: Some(released) };
    let own = (scheme("test/1"), fingerprint("there"));
    assert_eq!(claims(&seen, "there", "test/1", &[]), Step::Rehash(scheme("test/2")));
    let once = [own.clone()];
    assert_eq!(claims(&seen, "first", "test/2", &once), Step::Replay(outcome("first")));
    assert_eq!(claims(&seen, "other", "test/2", &once), Step::Rehash(scheme("test/3")));
    let twice = [own, (scheme("test/2"), fingerprint("other"))];
    let Step::Execute(draft) = claims(&seen, "other", "test/3", &twice) else { panic!() };
    let Record { scheme: stored, fingerprint: compared, .. } = draft.record;
    assert_eq!((stored, compared), (scheme("test/1"), fingerprint("there")));
}

#[test]
fn a_withdrawn_claim_gives_its_attempt_back() {
    let owner = Owner { lease_id: OWN, generation: OWN };
    let withdraw = Event::Owner(owner, OwnerAction::Withdraw { keep: 10 * LEASE });
    let mut stored = stored_record(RecordState::InFlight, 10, OnUnknown::Reexecute);
    (stored.record.generation, stored.record.attempt) = (OWN, 7);
    let seen = Snapshot { now: at(0), stored: Some(stored) };
    let Step::Write(draft) = step(&seen, &withdraw) else { panic!() };
    assert_eq!((draft.record.attempt, &draft.record.state), (6, &RecordState::Released));
    assert_eq!(draft.keep, Some(10 * LEASE));
}

#[test]
fn a_withdrawn_takeover_is_taken_over_again() {
    let owner = Owner { lease_id: OWN, generation: GENERATION };
    let stored = stored_record(RecordState::InFlight, 10, OnUnknown::Reexecute);
    let (attempt, seen) =
        (stored.record.attempt, Snapshot { now: at(0), stored: Some(stored.clone()) });
    let Step::Write(draft) = step(&seen, &Event::Owner(owner, WITHDRAW)) else { panic!() };
    assert_eq!((draft.record.attempt, draft.lease), (attempt - 1, Duration::ZERO));
    let left = StoredRecord { lease_until: at(0), record: draft.record, ..stored };
    let draft = executes(&Snapshot { now: at(0), stored: Some(left) });
    let Record { lease_id, generation, checkpoint, .. } = &draft.record;
    assert_eq!((*lease_id, *generation, draft.record.attempt), (NEW, GENERATION, attempt));
    assert!(checkpoint.is_some());
}
