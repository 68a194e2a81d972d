//! The checker accepts what an atomic store tells, and finds what none can tell.

use hapax_core::WriteId;
use hapax_testkit::SeededEntropy;
use hapax_testkit::history::{
    HistoryEntry, HistoryViolation, Invocation, MAX_OPERATIONS, StoreReply, linearizable,
};

fn write_id(number: u8) -> WriteId {
    WriteId::from_bytes([number; 16])
}

fn swap(expected: u8, to: u8) -> Invocation {
    Invocation::Swap { expected: found_tag(expected), write_id: write_id(to) }
}

/// Zero stands for nothing.
fn found_tag(number: u8) -> Option<WriteId> {
    (number > 0).then(|| write_id(number))
}

fn found(number: u8) -> StoreReply {
    StoreReply::Found(found_tag(number))
}

fn at(called: u64, returned: u64, call: Invocation, answer: StoreReply) -> HistoryEntry {
    HistoryEntry { called, returned, call, answer }
}

fn refused(history: &[HistoryEntry]) -> bool {
    matches!(linearizable(history), Err(HistoryViolation::NotLinearizable { .. }))
}

#[test]
fn sequential_operations_are_accepted() {
    let history = [
        at(0, 1, Invocation::Load, found(0)),
        at(2, 3, swap(0, 1), StoreReply::Stored),
        at(4, 5, swap(0, 2), found(1)),
        at(6, 7, swap(1, 3), StoreReply::Stored),
        at(8, 9, swap(1, 4), found(3)),
        at(10, 11, Invocation::Load, found(3)),
    ];
    assert_eq!(linearizable(&history), Ok(()));
}

#[test]
fn overlapping_operations_are_accepted_in_any_order() {
    let history = [
        at(0, 10, swap(0, 1), StoreReply::Stored),
        at(1, 9, Invocation::Load, found(0)),
        at(2, 8, Invocation::Load, found(1)),
        at(3, 7, swap(0, 2), found(1)),
    ];
    assert_eq!(linearizable(&history), Ok(()));
}

#[test]
fn an_ambiguous_swap_is_accepted_early_late_or_never() {
    let lost = at(0, 1, swap(0, 1), StoreReply::Ambiguous);
    for rest in [
        vec![at(2, 3, Invocation::Load, found(0)), at(4, 5, Invocation::Load, found(1))],
        vec![at(2, 3, Invocation::Load, found(1))],
        vec![at(2, 3, Invocation::Load, found(0))],
        vec![at(2, 3, swap(0, 1), StoreReply::Stored)],
    ] {
        let history: Vec<_> = std::iter::once(lost).chain(rest).collect();
        assert_eq!(linearizable(&history), Ok(()));
    }
}

#[test]
fn two_stored_swaps_on_one_write_id_are_found() {
    assert!(refused(&[
        at(0, 5, swap(0, 1), StoreReply::Stored),
        at(1, 6, swap(0, 2), StoreReply::Stored),
    ]));
}

#[test]
fn a_stale_read_is_found() {
    assert!(refused(&[
        at(0, 1, swap(0, 1), StoreReply::Stored),
        at(2, 3, Invocation::Load, found(0)),
    ]));
}

#[test]
fn a_lost_acknowledged_write_is_found() {
    assert!(refused(&[
        at(0, 1, swap(0, 1), StoreReply::Stored),
        at(2, 3, swap(1, 2), StoreReply::Stored),
        at(4, 5, Invocation::Load, found(1)),
    ]));
}

#[test]
fn a_rejected_write_that_happened_is_found() {
    assert!(refused(&[
        at(0, 1, swap(0, 1), StoreReply::Stored),
        at(2, 3, swap(0, 2), found(1)),
        at(4, 5, Invocation::Load, found(2)),
    ]));
}

#[test]
fn a_record_that_returns_to_an_earlier_write_is_found() {
    assert!(refused(&[
        at(0, 9, swap(0, 1), StoreReply::Ambiguous),
        at(1, 2, Invocation::Load, found(1)),
        at(3, 4, Invocation::Load, found(0)),
    ]));
}

#[test]
fn a_history_that_is_too_long_is_rejected() {
    let history = vec![at(0, 1, Invocation::Load, found(0)); MAX_OPERATIONS + 1];
    assert_eq!(linearizable(&history), Err(HistoryViolation::TooLong(MAX_OPERATIONS + 1)));
}

/// A run of concurrent callers against a model store that is atomic, or checks and then sets.
fn run(seed: u64, atomic: bool) -> Vec<HistoryEntry> {
    let entropy = SeededEntropy::new(seed);
    let mut stored = None;
    let mut time = 0;
    let mut in_progress: Vec<(u64, Invocation, Option<StoreReply>)> = Vec::new();
    let mut history = Vec::new();
    let mut last = [None; 5];
    while history.len() < 55 {
        time += 1;
        if in_progress.len() < 5 {
            let expected = last[entropy.below(5) as usize];
            let call = match entropy.below(4) {
                0 => Invocation::Load,
                _ => Invocation::Swap { expected, write_id: WriteId::fresh(&entropy).unwrap() },
            };
            in_progress.push((time, call, None));
            continue;
        }
        let which = entropy.below(5) as usize;
        let (called, call, answer) = in_progress[which];
        match (call, answer) {
            (Invocation::Load, None) => in_progress[which].2 = Some(StoreReply::Found(stored)),
            (Invocation::Swap { expected, write_id }, None) if expected == stored => {
                if atomic {
                    stored = Some(write_id);
                }
                in_progress[which].2 = Some(StoreReply::Stored);
            }
            (Invocation::Swap { .. }, None) => {
                in_progress[which].2 = Some(StoreReply::Found(stored))
            }
            (_, Some(answer)) => {
                if let (false, Invocation::Swap { write_id, .. }, StoreReply::Stored) =
                    (atomic, call, answer)
                {
                    stored = Some(write_id);
                }
                last[which] = stored;
                let lost = entropy.below(6) == 0;
                let answer = if lost { StoreReply::Ambiguous } else { answer };
                history.push(at(called, time, call, answer));
                in_progress.remove(which);
            }
        }
    }
    // What was not answered by the end may have happened.
    history.extend(
        in_progress
            .into_iter()
            .map(|(called, call, _)| at(called, time, call, StoreReply::Ambiguous)),
    );
    history
}

#[test]
fn a_store_that_checks_and_then_sets_is_found() {
    let refusals = |atomic| (0..200).filter(|seed| refused(&run(*seed, atomic))).count();
    assert_eq!(refusals(true), 0);
    assert!(refusals(false) > 150, "{} of 200", refusals(false));
}

#[test]
fn a_history_with_many_lost_replies_is_checked_quickly() {
    let fresh = |number: u8| Invocation::Swap {
        expected: None,
        write_id: WriteId::from_bytes([number; 16]),
    };
    let mut history: Vec<_> =
        (10..50).map(|number| at(0, 1, fresh(number), StoreReply::Ambiguous)).collect();
    for time in 1..20 {
        history.push(at(
            time * 2,
            time * 2 + 1,
            Invocation::Load,
            found(if time < 10 { 0 } else { 17 }),
        ));
    }
    assert_eq!(linearizable(&history), Ok(()));
    // Once it is met, it stays; trying everything would not end within a lifetime.
    history.push(at(98, 99, Invocation::Load, found(18)));
    assert!(refused(&history));
}

/// Whether any order at all makes every answer right.
fn any_order(left: &[HistoryEntry], write_id: Option<WriteId>) -> bool {
    if left.iter().all(|operation| operation.answer == StoreReply::Ambiguous) {
        return true;
    }
    (0..left.len()).any(|first| {
        let HistoryEntry { called, call, answer, .. } = left[first];
        let answered = |other: &HistoryEntry| other.answer != StoreReply::Ambiguous;
        if left.iter().any(|other| answered(other) && other.returned < called) {
            return false;
        }
        let (next, right) = match call {
            Invocation::Load => (write_id, StoreReply::Found(write_id)),
            Invocation::Swap { write_id: new, .. } if write_id == Some(new) => {
                (write_id, StoreReply::Stored)
            }
            Invocation::Swap { expected, write_id: new } if write_id == expected => {
                (Some(new), StoreReply::Stored)
            }
            Invocation::Swap { .. } => (write_id, StoreReply::Found(write_id)),
        };
        let rest = [&left[..first], &left[first + 1..]].concat();
        (answer == StoreReply::Ambiguous || answer == right) && any_order(&rest, next)
    })
}

#[test]
fn the_fast_search_agrees_with_the_exhaustive_one() {
    let dice = SeededEntropy::new(1);
    let (mut right, mut wrong) = (0, 0);
    for _ in 0..20_000 {
        let length = 2 + dice.below(5);
        let history: Vec<_> = (0..length)
            .map(|_| {
                let called = dice.below(12);
                let (one, other, third) = (dice.below(4), 1 + dice.below(3), dice.below(4));
                let (call, answer) = match dice.below(6) {
                    0 | 1 => (Invocation::Load, found(one as u8)),
                    2 => (swap(one as u8, other as u8), found(third as u8)),
                    3 | 4 => (swap(one as u8, other as u8), StoreReply::Stored),
                    _ => (swap(one as u8, other as u8), StoreReply::Ambiguous),
                };
                at(called, called + 1 + dice.below(8), call, answer)
            })
            .collect();
        let found = !refused(&history);
        assert_eq!(found, any_order(&history, None), "{history:?}");
        if found { right += 1 } else { wrong += 1 }
    }
    assert!(right > 1_000 && wrong > 1_000, "{right} right, {wrong} wrong");
}
