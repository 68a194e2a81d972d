//! Which payment meets which fault: dealt like cards, by a seed.
//!
//! Dealt rather than rolled, so that even a short run meets every fault, and in the same shares
//! with every seed. What the seed does not decide is timing: which requests are under way when a
//! process is killed.

use serde::{Deserialize, Serialize};

/// What the payments service does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// It charges, and closes the connection instead of answering.
    LoseReply,
    /// It charges, and answers 500.
    FailAfterCharge,
    /// It falls asleep, and charges when everybody has given up.
    StallBeforeCharge,
    /// It charges, and falls asleep.
    StallAfterCharge,
    /// It answers 503, and does not charge.
    Refuse,
    /// It charges, says so to the demo, and gets no further: some process is killed now.
    Hold,
}

/// The faults that are dealt, each with its share of all payments in per cent.
const SHARES: [(Fault, usize); 5] = [
    (Fault::LoseReply, 12),
    (Fault::FailAfterCharge, 6),
    (Fault::StallBeforeCharge, 4),
    (Fault::StallAfterCharge, 4),
    (Fault::Refuse, 6),
];

/// The fault, if any, that the first request of each payment meets. Retries meet none.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    faults: Vec<Option<Fault>>,
}

impl Plan {
    /// The fewest payments that all faults fit into, with some left over that meet none.
    pub(crate) const MIN_PAYMENTS: u16 = 24;

    /// Deals faults to the payments of orders `0..payments`: of every fault at least one.
    pub(crate) fn deal(seed: u64, payments: u16) -> Self {
        let payments = usize::from(payments);
        let mut faults: Vec<_> = SHARES
            .iter()
            .flat_map(|&(fault, share)| {
                std::iter::repeat_n(Some(fault), (payments * share).div_ceil(100))
            })
            .collect();
        faults.resize(payments.max(faults.len()), None);
        let mut dice = Dice::new(seed);
        for last in (1..faults.len()).rev() {
            faults.swap(last, dice.below(last + 1));
        }
        Self { faults }
    }

    /// What the `arrival`th request (from 0) for `order` meets.
    pub(crate) fn fault(&self, order: u32, arrival: u32) -> Option<Fault> {
        if arrival > 0 {
            return None;
        }
        self.faults.get(usize::try_from(order).ok()?).copied().flatten()
    }
}

/// A repeatable source of numbers (SplitMix64). Spreads load and faults; guards nothing.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub(crate) const fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 for a limit of 0. The bias of the remainder does not matter here.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.roll() % limit).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(plan: &Plan, fault: Fault) -> usize {
        plan.faults.iter().filter(|dealt| **dealt == Some(fault)).count()
    }

    #[test]
    fn every_fault_is_dealt_to_the_shortest_run() {
        for seed in 0..100 {
            let plan = Plan::deal(seed, Plan::MIN_PAYMENTS);
            assert_eq!(plan.faults.len(), usize::from(Plan::MIN_PAYMENTS));
            for (fault, _) in SHARES {
                assert!(count(&plan, fault) > 0, "{fault:?} with seed {seed}");
            }
            assert!(plan.faults.iter().filter(|fault| fault.is_none()).count() >= 12);
        }
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let dealt = |seed| Plan::deal(seed, 200).faults;
        assert_eq!(dealt(7), dealt(7));
        assert_ne!(dealt(7), dealt(8));
    }

    #[test]
    fn only_first_requests_of_planned_orders_meet_a_fault() {
        let plan = Plan::deal(1, 50);
        let faulty = (0..50).find(|order| plan.fault(*order, 0).is_some()).unwrap();
        assert_eq!(plan.fault(faulty, 1), None);
        assert_eq!(plan.fault(50, 0), None);
    }
}
