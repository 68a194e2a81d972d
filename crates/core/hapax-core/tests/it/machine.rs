//! The table of `machine`, each entry of it.

mod extensions;
mod operators;
mod quarantine;
mod releases;
mod sagas;
mod unretried;

use std::time::Duration;

use bytes::Bytes;
use hapax_core::machine::{
    Amendment, ClaimEvent, DefiniteVerdict, Event, HookTiming, LocalExecution, Owner, OwnerAction,
    Resolve, Step, Verdict, may_execute_until, step,
};
use hapax_core::store::{Draft, Snapshot, Stamp, StoredRecord};
use hapax_core::{
    Extensions, FencingToken, Fingerprint, FingerprintScheme, LeaseId, OnUnknown, Outcome, Record,
    RecordState, Terms, Timestamp, WriteId,
};

const NOW: u64 = 1_000_000_000;
const LEASE: Duration = Duration::from_secs(30);
const OWN: LeaseId = LeaseId::from_bytes([1; 16]);
const TAKEN_OVER: LeaseId = LeaseId::from_bytes([2; 16]);
const GENERATION: LeaseId = LeaseId::from_bytes([3; 16]);
const OTHER_GENERATION: LeaseId = LeaseId::from_bytes([4; 16]);
const NEW: LeaseId = LeaseId::from_bytes([5; 16]);
const WRITE_ID: WriteId = WriteId::from_bytes([6; 16]);

fn terms(on_unknown: OnUnknown) -> Terms {
    Terms { lease: LEASE, retention: Duration::from_secs(3600), on_unknown }
}

fn outcome(text: &'static str) -> Outcome {
    Outcome::new("text", text)
}

fn fingerprint(text: &str) -> Fingerprint {
    Fingerprint::builder("test").field(text.as_bytes()).finish()
}

fn at(secs: i64) -> Timestamp {
    Timestamp::from_micros(NOW.saturating_add_signed(secs * 1_000_000))
}

fn stored_record(state: RecordState, lease_secs: i64, on_unknown: OnUnknown) -> StoredRecord {
    StoredRecord {
        write_id: WRITE_ID,
        fence: FencingToken::new(at(-10).as_micros()),
        lease_until: at(lease_secs),
        keep_until: Some(at(100)),
        record: Record {
            scheme: FingerprintScheme::new("test/1").unwrap(),
            fingerprint: fingerprint("same"),
            lease_id: OWN,
            generation: GENERATION,
            attempt: 3,
            terms: terms(on_unknown),
            checkpoint: Some(Bytes::from_static(b"half way")),
            notes: hapax_core::Notes::default(),
            extensions: Extensions::default(),
            state,
        },
    }
}

const UNKNOWN: RecordState = RecordState::Unknown { seen: None, reconciling: false };
const RECONCILING: RecordState = RecordState::Unknown { seen: None, reconciling: true };

/// The rows: a name, and the stored record.
fn rows() -> Vec<(&'static str, Option<StoredRecord>)> {
    use OnUnknown::{Block, Reconcile, Reexecute};
    let expired = StoredRecord {
        keep_until: Some(at(0)),
        ..stored_record(RecordState::InFlight, 10, Reexecute)
    };
    vec![
        ("absent", None),
        ("expired", Some(expired)),
        ("released", Some(stored_record(RecordState::Released, 0, Reexecute))),
        ("live", Some(stored_record(RecordState::InFlight, 10, Reexecute))),
        ("lapsed", Some(stored_record(RecordState::InFlight, 0, Reexecute))),
        ("lapsed-block", Some(stored_record(RecordState::InFlight, 0, Block))),
        ("lapsed-reconcile", Some(stored_record(RecordState::InFlight, -60, Reconcile))),
        ("just-lapsed-reconcile", Some(stored_record(RecordState::InFlight, -59, Reconcile))),
        ("unknown", Some(stored_record(UNKNOWN, 0, Reexecute))),
        ("unknown-block", Some(stored_record(UNKNOWN, 0, Block))),
        ("unknown-reconcile", Some(stored_record(UNKNOWN, 0, Reconcile))),
        ("reconciling", Some(stored_record(RECONCILING, 1, Reconcile))),
        ("reconciling-lapsed", Some(stored_record(RECONCILING, 0, Reconcile))),
        ("done", Some(stored_record(RecordState::Done(outcome("kept")), 0, Block))),
    ]
}

/// Returns one word for a step, and for the state that a draft writes.
fn word(step: &Step) -> String {
    match step {
        Step::Execute(draft) => format!("execute#{}", draft.record.attempt),
        Step::Write(draft) => match draft.record.state {
            RecordState::InFlight => "in-flight",
            RecordState::Unknown { .. } => "unknown",
            RecordState::Done(_) => "done",
            RecordState::Released => "released",
        }
        .into(),
        Step::Own(_) => "own".into(),
        Step::Reconcile(_) => "reconcile".into(),
        Step::Replay(_) => "replay".into(),
        Step::InFlight { .. } => "busy".into(),
        Step::Mismatch => "mismatch".into(),
        Step::Rehash(_) => "rehash".into(),
        Step::Unknown { .. } => "blocked".into(),
        Step::Recorded => "recorded".into(),
        Step::Lost => "lost".into(),
        Step::Gone => "gone".into(),
        Step::Quarantined { .. } => "quarantined".into(),
        Step::NotFound => "not-found".into(),
        Step::Rejected => "rejected".into(),
        Step::MayExecute { .. } => "may-execute".into(),
        Step::Saga => "saga".into(),
        Step::Changed => "changed".into(),
    }
}

fn check(name: &str, event: &Event<'_>, expected: &str) {
    let found: Vec<String> = rows()
        .into_iter()
        .map(|(row, stored)| {
            let step = step(&Snapshot { now: at(0), stored }, event);
            format!("{row}:{}", word(&step))
        })
        .collect();
    let expected: Vec<&str> = expected.split_whitespace().collect();
    assert_eq!(found, expected, "{name}");
}

fn claim_event<'a>(
    scheme: &'a FingerprintScheme,
    fingerprint: &'a Fingerprint,
    terms: Terms,
) -> ClaimEvent<'a> {
    ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme,
        fingerprint,
        rehashed: &[],
        terms,
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: None,
    }
}

fn claim_as(text: &str, on_unknown: OnUnknown, hook: Option<HookTiming>, expected: &str) {
    let scheme = FingerprintScheme::new("test/1").unwrap();
    let (fingerprint, terms) = (fingerprint(text), terms(on_unknown));
    let claim = ClaimEvent { hook, ..claim_event(&scheme, &fingerprint, terms) };
    check("claim", &Event::Claim(claim), expected);
}

const HOOK: Option<HookTiming> =
    Some(HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) });

#[test]
fn a_claim_of_the_same_request() {
    claim_as(
        "same",
        OnUnknown::Reexecute,
        None,
        "absent:execute#1 expired:execute#1 released:execute#4 live:busy lapsed:execute#4 \
         lapsed-block:blocked lapsed-reconcile:blocked just-lapsed-reconcile:blocked \
         unknown:execute#4 unknown-block:blocked unknown-reconcile:blocked reconciling:blocked \
         reconciling-lapsed:blocked done:replay",
    );
}

#[test]
fn a_claim_with_a_hook() {
    claim_as(
        "same",
        OnUnknown::Reconcile,
        HOOK,
        "absent:execute#1 expired:execute#1 released:execute#4 live:busy lapsed:blocked \
         lapsed-block:blocked lapsed-reconcile:reconcile just-lapsed-reconcile:blocked \
         unknown:reconcile unknown-block:blocked unknown-reconcile:reconcile reconciling:blocked \
         reconciling-lapsed:reconcile done:replay",
    );
}

#[test]
fn a_claim_that_blocks_is_stricter_than_any_record() {
    claim_as(
        "same",
        OnUnknown::Block,
        HOOK,
        "absent:execute#1 expired:execute#1 released:execute#4 live:busy lapsed:blocked \
         lapsed-block:blocked lapsed-reconcile:blocked just-lapsed-reconcile:blocked \
         unknown:blocked unknown-block:blocked unknown-reconcile:blocked reconciling:blocked \
         reconciling-lapsed:blocked done:replay",
    );
}

#[test]
fn a_claim_of_another_request() {
    claim_as(
        "other",
        OnUnknown::Reexecute,
        None,
        "absent:execute#1 expired:execute#1 released:execute#4 live:mismatch lapsed:mismatch \
         lapsed-block:mismatch lapsed-reconcile:mismatch just-lapsed-reconcile:mismatch \
         unknown:mismatch unknown-block:mismatch unknown-reconcile:mismatch \
         reconciling:mismatch reconciling-lapsed:mismatch done:mismatch",
    );
}

#[test]
fn a_claim_with_another_scheme_is_hashed_again() {
    let scheme = FingerprintScheme::new("test/2").unwrap();
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme: &scheme,
        fingerprint: &fingerprint("same"),
        rehashed: &[],
        terms: terms(OnUnknown::Reexecute),
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: None,
    };
    let seen = Snapshot {
        now: at(0),
        stored: Some(stored_record(RecordState::InFlight, 10, OnUnknown::Block)),
    };
    assert_eq!(
        step(&seen, &Event::Claim(claim.clone())),
        Step::Rehash(FingerprintScheme::new("test/1").unwrap())
    );
    let released = stored_record(RecordState::Released, 0, OnUnknown::Block);
    let seen = Snapshot { now: at(0), stored: Some(released) };
    assert_eq!(
        word(&step(&seen, &Event::Claim(claim))),
        "execute#4",
        "a released record has no fingerprint"
    );
}

#[test]
fn a_claim_that_finds_its_own_earlier_lease_id_owns_the_key() {
    let scheme = FingerprintScheme::new("test/1").unwrap();
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[OWN],
        scheme: &scheme,
        fingerprint: &fingerprint("same"),
        rehashed: &[],
        terms: terms(OnUnknown::Block),
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: None,
    };
    let expected = "absent:execute#1 expired:execute#1 released:execute#4 live:own lapsed:own \
                    lapsed-block:own lapsed-reconcile:own just-lapsed-reconcile:own \
                    unknown:blocked unknown-block:blocked unknown-reconcile:blocked \
                    reconciling:blocked reconciling-lapsed:blocked done:replay";
    check("own claim", &Event::Claim(claim), expected);
}

#[test]
fn a_claim_in_the_process_that_still_executes_the_record_finds_it_in_flight() {
    let scheme = FingerprintScheme::new("test/1").unwrap();
    let fingerprint = fingerprint("same");
    let claim = |own_lease_ids, local| ClaimEvent {
        lease_id: NEW,
        own_lease_ids,
        scheme: &scheme,
        fingerprint: &fingerprint,
        rehashed: &[],
        terms: terms(OnUnknown::Reexecute),
        settle: None,
        hook: HOOK,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local,
        description: None,
    };
    let others = "expired:busy released:execute#4 live:busy lapsed:busy lapsed-block:busy \
                  lapsed-reconcile:busy just-lapsed-reconcile:busy unknown:busy \
                  unknown-block:busy unknown-reconcile:busy reconciling:busy \
                  reconciling-lapsed:busy done:replay";
    let executing = [LocalExecution { lease_id: OWN, executes: true }];
    check("executing", &Event::Claim(claim(&[], &executing)), &format!("absent:busy {others}"));
    let claiming = [LocalExecution { lease_id: OWN, executes: false }];
    let expected = format!("absent:execute#1 {others}");
    check("claiming", &Event::Claim(claim(&[], &claiming)), &expected);
    let another = [LocalExecution { lease_id: TAKEN_OVER, executes: false }];
    let seen = Snapshot {
        now: at(0),
        stored: Some(stored_record(RecordState::InFlight, 0, OnUnknown::Reexecute)),
    };
    assert_eq!(word(&step(&seen, &Event::Claim(claim(&[], &another)))), "execute#4");
    assert_eq!(word(&step(&seen, &Event::Claim(claim(&[OWN], &claiming)))), "own");
}

const RELEASE: OwnerAction = OwnerAction::Release { keep: Duration::ZERO };
const WITHDRAW: OwnerAction = OwnerAction::Withdraw { keep: Duration::ZERO };

/// Returns the draft of a claim of the same request that executes.
fn executes(seen: &Snapshot) -> Draft {
    let scheme = FingerprintScheme::new("test/1").unwrap();
    let claim = ClaimEvent {
        lease_id: NEW,
        own_lease_ids: &[],
        scheme: &scheme,
        fingerprint: &fingerprint("same"),
        rehashed: &[],
        terms: terms(OnUnknown::Reexecute),
        settle: None,
        hook: None,
        may_reconcile: true,
        adopts: false,
        quarantine: None,
        local: &[],
        description: None,
    };
    let Step::Execute(draft) = step(seen, &Event::Claim(claim)) else { panic!() };
    draft
}

fn check_owner(lease_id: LeaseId, generation: LeaseId, action: OwnerAction, expected: &str) {
    check("owner", &Event::Owner(Owner { lease_id, generation }, action), expected);
}

#[test]
fn an_owner_renews_or_saves_a_checkpoint() {
    let checkpoint = OwnerAction::Checkpoint { checkpoint: Bytes::new(), lease: LEASE };
    for action in [OwnerAction::Renew { lease: LEASE }, checkpoint] {
        check_owner(
            OWN,
            GENERATION,
            action,
            "absent:gone expired:gone released:gone live:in-flight lapsed:in-flight \
             lapsed-block:in-flight lapsed-reconcile:in-flight just-lapsed-reconcile:in-flight \
             unknown:lost unknown-block:lost unknown-reconcile:lost reconciling:lost \
             reconciling-lapsed:lost done:lost",
        );
    }
}

#[test]
fn an_owner_completes() {
    let complete = |text| OwnerAction::Complete { outcome: outcome(text), retention: None };
    let rest = "absent:gone expired:gone released:gone live:done lapsed:done lapsed-block:done \
                lapsed-reconcile:done just-lapsed-reconcile:done unknown:done unknown-block:done \
                unknown-reconcile:done reconciling:done reconciling-lapsed:done";
    check_owner(OWN, GENERATION, complete("kept"), &format!("{rest} done:recorded"));
    check_owner(OWN, GENERATION, complete("other"), &format!("{rest} done:lost"));
}

#[test]
fn an_owner_releases() {
    check_owner(
        OWN,
        GENERATION,
        RELEASE,
        "absent:gone expired:gone released:recorded live:released lapsed:released \
         lapsed-block:released lapsed-reconcile:released just-lapsed-reconcile:released \
         unknown:lost unknown-block:lost unknown-reconcile:lost reconciling:lost \
         reconciling-lapsed:lost done:lost",
    );
}

#[test]
fn an_owner_withdraws_its_claim() {
    // A takeover of an operation that may execute again leaves its record in flight.
    check_owner(
        OWN,
        GENERATION,
        WITHDRAW,
        "absent:gone expired:gone released:recorded live:in-flight lapsed:in-flight \
         lapsed-block:released lapsed-reconcile:released just-lapsed-reconcile:released \
         unknown:lost unknown-block:lost unknown-reconcile:lost reconciling:lost \
         reconciling-lapsed:lost done:lost",
    );
}

#[test]
fn an_owner_abandons() {
    check_owner(
        OWN,
        GENERATION,
        OwnerAction::Abandon { seen: Some(outcome("500")) },
        "absent:gone expired:gone released:gone live:unknown lapsed:unknown lapsed-block:unknown \
         lapsed-reconcile:unknown just-lapsed-reconcile:unknown unknown:recorded \
         unknown-block:recorded unknown-reconcile:recorded reconciling:recorded \
         reconciling-lapsed:recorded done:lost",
    );
}

#[test]
fn an_owner_taken_over_is_lost_and_another_generation_is_gone() {
    let acts = [
        OwnerAction::Renew { lease: LEASE },
        OwnerAction::Complete { outcome: outcome("kept"), retention: None },
        OwnerAction::Abandon { seen: None },
        RELEASE,
        WITHDRAW,
    ];
    for action in acts {
        for (generation, word) in [(GENERATION, "lost"), (OTHER_GENERATION, "gone")] {
            let nothing = ["absent", "expired", "released"];
            let expected: Vec<String> = rows()
                .iter()
                .map(|(row, _)| match nothing.contains(row) {
                    true => format!("{row}:gone"),
                    false => format!("{row}:{word}"),
                })
                .collect();
            check_owner(TAKEN_OVER, generation, action.clone(), &expected.join(" "));
        }
    }
}

#[test]
fn a_verdict_counts_only_for_the_write_that_announced_it() {
    let answer = |announced, verdict| Event::Reconciled {
        announced,
        lease_id: NEW,
        terms: terms(OnUnknown::Reconcile),
        settle: None,
        description: None,
        verdict,
    };
    let others = "absent:changed expired:changed released:changed live:changed lapsed:changed \
                  lapsed-block:changed lapsed-reconcile:changed just-lapsed-reconcile:changed";
    let five = |word: &str| {
        let rows =
            ["unknown", "unknown-block", "unknown-reconcile", "reconciling", "reconciling-lapsed"];
        rows.map(|row| format!("{row}:{word}")).join(" ")
    };
    for (verdict, word) in [
        (Verdict::Happened(outcome("found")), "done"),
        (Verdict::DidNotHappen, "execute#4"),
        (Verdict::CannotSay, "unknown"),
    ] {
        let expected = format!("{others} {} done:changed", five(word));
        check("answer", &answer(WRITE_ID, verdict.clone()), &expected);
        let expected = format!("{others} {} done:changed", five("changed"));
        check("late answer", &answer(WriteId::from_bytes([9; 16]), verdict), &expected);
    }
}

#[test]
fn an_unknown_step_states_when_a_hook_may_be_called() {
    use OnUnknown::{Block, Reconcile};
    let secs = |seconds| Some(Duration::from_secs(seconds));
    let scheme = FingerprintScheme::new("test/1").unwrap();
    for (stored, hook, may_reconcile, reconcile_in) in [
        // The lease lapsed 59 s ago; the hook may be called 60 s after the lapse.
        (stored_record(RecordState::InFlight, -59, Reconcile), HOOK, true, secs(1)),
        (stored_record(RECONCILING, 1, Reconcile), HOOK, true, secs(1)),
        // The hook of another claim returned `CannotSay`.
        (stored_record(UNKNOWN, 0, Reconcile), HOOK, false, secs(0)),
        (stored_record(UNKNOWN, 0, Reconcile), None, true, None),
        (stored_record(UNKNOWN, 0, Block), HOOK, true, None),
        (stored_record(RecordState::InFlight, -90, Block), HOOK, true, None),
    ] {
        let claim = ClaimEvent {
            lease_id: NEW,
            own_lease_ids: &[],
            local: &[],
            scheme: &scheme,
            fingerprint: &fingerprint("same"),
            rehashed: &[],
            terms: terms(Reconcile),
            settle: None,
            hook,
            may_reconcile,
            adopts: false,
            quarantine: None,
            description: None,
        };
        let seen = Snapshot { now: at(0), stored: Some(stored) };
        assert_eq!(step(&seen, &Event::Claim(claim)), Step::Unknown { reconcile_in });
    }
}

#[test]
fn an_undecided_record_never_expires_under_block_and_reconcile() {
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Reconcile, OnUnknown::Block] {
        let stored = stored_record(RecordState::InFlight, 10, on_unknown);
        let seen = Snapshot { now: at(0), stored: Some(stored) };
        let owner = Owner { lease_id: OWN, generation: GENERATION };
        let hour = Some(Duration::from_secs(3600));
        let unfinished = if on_unknown == OnUnknown::Reexecute { hour } else { None };
        let complete = OwnerAction::Complete { outcome: outcome("kept"), retention: None };
        for (action, keep) in [
            (OwnerAction::Renew { lease: LEASE }, unfinished),
            (OwnerAction::Abandon { seen: None }, unfinished),
            (complete, hour),
            (RELEASE, Some(LEASE)),
            (OwnerAction::Release { keep: 10 * LEASE }, Some(10 * LEASE)),
        ] {
            let Step::Write(draft) = step(&seen, &Event::Owner(owner, action)) else { panic!() };
            assert_eq!(draft.keep, keep);
        }
    }
}

#[test]
fn a_takeover_keeps_generation_checkpoint_and_the_stricter_policy() {
    let stored = stored_record(RecordState::InFlight, 0, OnUnknown::Reexecute);
    let seen = Snapshot { now: at(0), stored: Some(stored) };
    let draft = executes(&seen);
    assert_eq!((draft.record.lease_id, draft.record.generation), (NEW, GENERATION));
    assert_eq!(draft.record.checkpoint, Some(Bytes::from_static(b"half way")));
    assert_eq!(draft.record.terms.on_unknown, OnUnknown::Reexecute);

    for (theirs, ours) in
        [(OnUnknown::Reexecute, OnUnknown::Reconcile), (OnUnknown::Reconcile, OnUnknown::Reexecute)]
    {
        let seen = Snapshot { now: at(0), stored: Some(stored_record(RECONCILING, 1, theirs)) };
        let verdict = Verdict::DidNotHappen;
        let answer = Event::Reconciled {
            announced: WRITE_ID,
            lease_id: NEW,
            terms: terms(ours),
            settle: None,
            description: None,
            verdict,
        };
        let Step::Execute(draft) = step(&seen, &answer) else { panic!() };
        assert_eq!(draft.record.terms.on_unknown, OnUnknown::Reconcile);
    }
}
