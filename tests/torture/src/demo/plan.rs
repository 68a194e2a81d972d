//! Which payment meets which fault: dealt like cards, by a seed.
//!
//! Dealt rather than rolled, so that even a short run meets every fault, and in the same shares
//! with every seed. What the seed does not decide is timing: which requests are under way when a
//! process is killed.

use serde::{Deserialize, Serialize};

use crate::dice::Dice;

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

/// What a client does wrong, with a service that does its work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Slip {
    /// It hangs up once its request is sent, and asks again.
    HangUp,
    /// It sends the request twice at the same time.
    DoubleClick,
}

/// Who does something wrong, and what.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Card {
    Service(Fault),
    Client(Slip),
}

/// What is dealt, each with its share of all payments in per cent.
const SHARES: [(Card, usize); 7] = [
    (Card::Service(Fault::LoseReply), 12),
    (Card::Service(Fault::FailAfterCharge), 6),
    (Card::Service(Fault::StallBeforeCharge), 4),
    (Card::Service(Fault::StallAfterCharge), 4),
    (Card::Service(Fault::Refuse), 6),
    (Card::Client(Slip::HangUp), 10),
    (Card::Client(Slip::DoubleClick), 6),
];

/// What goes wrong, if anything, with the first request of each payment. Retries go well.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    cards: Vec<Option<Card>>,
}

impl Plan {
    /// The fewest payments whose first third has room for every fault and some without any.
    pub(crate) const MIN_PAYMENTS: u16 = 24;

    /// Deals faults to the payments of orders `0..payments`. The first third gets at least one of
    /// every fault: no process is killed before it is over, so nothing keeps them from happening.
    pub(crate) fn deal(seed: u64, payments: u16) -> Self {
        let payments = usize::from(payments);
        let mut dice = Dice::new(seed);
        let mut orders: Vec<_> = (0..payments).collect();
        let (early, late) = orders.split_at_mut(payments / 3);
        dice.shuffle(early);
        let (first, others) = early.split_at(SHARES.len().min(early.len()));
        let mut rest = [others, late].concat();
        dice.shuffle(&mut rest);
        let again = SHARES.iter().flat_map(|&(fault, share)| {
            std::iter::repeat_n(fault, (payments * share).div_ceil(100).saturating_sub(1))
        });
        let mut cards = vec![None; payments];
        let all = SHARES.iter().map(|&(fault, _)| fault).chain(again);
        for (order, fault) in first.iter().chain(&rest).zip(all) {
            cards[*order] = Some(fault);
        }
        Self { cards }
    }

    /// Orders below this number are the first third.
    pub(crate) fn early(&self) -> u32 {
        u32::try_from(self.cards.len() / 3).unwrap_or(u32::MAX)
    }

    /// How many payments of the first third meet a stall.
    pub(crate) fn early_stalls(&self) -> usize {
        let stalls = [Fault::StallBeforeCharge, Fault::StallAfterCharge];
        let stalls = stalls.map(|fault| Some(Card::Service(fault)));
        let early = &self.cards[..self.cards.len() / 3];
        early.iter().filter(|card| stalls.contains(card)).count()
    }

    /// What the `arrival`th request (from 0) for `order` meets.
    pub(crate) fn fault(&self, order: u32, arrival: u32) -> Option<Fault> {
        match self.card(order)? {
            Card::Service(fault) if arrival == 0 => Some(fault),
            Card::Service(_) | Card::Client(_) => None,
        }
    }

    /// What the client does wrong with its first request for `order`.
    pub(crate) fn slip(&self, order: u32) -> Option<Slip> {
        match self.card(order)? {
            Card::Client(slip) => Some(slip),
            Card::Service(_) => None,
        }
    }

    fn card(&self, order: u32) -> Option<Card> {
        self.cards.get(usize::try_from(order).ok()?).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_dealt_early_and_in_its_share() {
        for payments in [Plan::MIN_PAYMENTS, 100, 101] {
            for seed in 0..50 {
                let plan = Plan::deal(seed, payments);
                assert_eq!(plan.cards.len(), usize::from(payments));
                for (fault, share) in SHARES {
                    let dealt = |cards: &[Option<Card>]| {
                        cards.iter().filter(|dealt| **dealt == Some(fault)).count()
                    };
                    let early = &plan.cards[..usize::from(payments) / 3];
                    assert!(plan.early_stalls() >= 2);
                    assert!(dealt(early) > 0, "{fault:?} of {payments} with seed {seed}");
                    let all = (usize::from(payments) * share).div_ceil(100);
                    assert_eq!(dealt(&plan.cards), all, "{fault:?} of {payments}, seed {seed}");
                }
            }
        }
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let dealt = |seed| Plan::deal(seed, 200).cards;
        assert_eq!(dealt(7), dealt(7));
        assert_ne!(dealt(7), dealt(8));
    }

    #[test]
    fn only_first_requests_of_planned_orders_meet_a_fault() {
        let plan = Plan::deal(1, 50);
        let faulty = (0..50).find(|order| plan.fault(*order, 0).is_some()).unwrap();
        assert_eq!(plan.fault(faulty, 1), None);
        assert_eq!(plan.slip(faulty), None);
        let slips = (0..50).filter(|order| plan.slip(*order).is_some());
        assert!(slips.clone().count() >= 2);
        assert!(slips.clone().all(|order| plan.fault(order, 0).is_none()));
        assert_eq!((plan.fault(50, 0), plan.slip(50)), (None, None));
    }
}
