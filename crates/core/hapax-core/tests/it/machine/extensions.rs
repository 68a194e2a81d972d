use bytes::Bytes;
use hapax_core::machine::{Event, Owner, OwnerAction, Step, step};
use hapax_core::store::Snapshot;
use hapax_core::{Extensions, OnUnknown, RecordState};

use super::{GENERATION, LEASE, OWN, at, executes, outcome, stored_record};

#[test]
fn extensions_of_a_later_version_stay_and_those_of_the_key_outlive_its_release() {
    let (of_generation, of_key) = (77, Extensions::FIRST_OF_KEY + 77);
    let stored = |state| {
        let mut stored = stored_record(state, 0, OnUnknown::Reexecute);
        for number in [of_generation, of_key] {
            stored.record.extensions.set(number, Some(Bytes::from_static(b"later")));
        }
        Snapshot { now: at(0), stored: Some(stored) }
    };
    let numbers = |step: &Step| match step {
        Step::Execute(draft) | Step::Write(draft) => {
            draft.record.extensions.iter().map(|(number, _)| number).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let owner = Owner { lease_id: OWN, generation: GENERATION };
    for action in [
        OwnerAction::Renew { lease: LEASE },
        OwnerAction::Complete { outcome: outcome("paid"), retention: None },
        OwnerAction::Abandon { seen: None },
        OwnerAction::Release { keep: LEASE },
        OwnerAction::Withdraw { keep: LEASE },
    ] {
        let step = step(&stored(RecordState::InFlight), &Event::Owner(owner, action));
        assert_eq!(numbers(&step), [of_generation, of_key], "{step:?}");
    }
    let takeover = executes(&stored(RecordState::InFlight));
    assert_eq!(numbers(&Step::Execute(takeover)), [of_generation, of_key]);
    let anew = executes(&stored(RecordState::Released));
    assert_eq!(numbers(&Step::Execute(anew)), [of_key]);
}
