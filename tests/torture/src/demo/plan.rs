//! The plan of faults, which a seed distributes to payments.
//!
//! Faults are shuffled, not drawn independently, so that even a short run has every fault, with the
//! same shares for every seed. The seed does not decide timing: the requests that are in progress
//! when a process is killed.

use serde::{Deserialize, Serialize};

use crate::dice::Dice;

/// Faults of the payments service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// Charges, and closes the connection without a response.
    LoseReply,
    /// Charges, and responds 500.
    FailAfterCharge,
    /// Stalls, and charges after its callers have timed out.
    StallBeforeCharge,
    /// Charges, and stalls.
    StallAfterCharge,
    /// Responds 503 without a charge.
    Refuse,
    /// Charges, reports it to the demo and responds nothing: a process is killed now.
    Hold,
}

/// Mistakes of a client, with a service that works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Slip {
    /// Disconnects once its request is sent, and retries.
    HangUp,
    /// Sends the request twice at the same time.
    DoubleClick,
}

/// A fault or a mistake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Card {
    Service(Fault),
    Client(Slip),
}

/// The share of each card, in per cent of all payments.
const SHARES: [(Card, usize); 7] = [
    (Card::Service(Fault::LoseReply), 12),
    (Card::Service(Fault::FailAfterCharge), 6),
    (Card::Service(Fault::StallBeforeCharge), 4),
    (Card::Service(Fault::StallAfterCharge), 4),
    (Card::Service(Fault::Refuse), 6),
    (Card::Client(Slip::HangUp), 10),
    (Card::Client(Slip::DoubleClick), 6),
];

/// The fault of the first request of each payment, if any. Retries have none.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    cards: Vec<Option<Card>>,
}

impl Plan {
    /// The lowest number of payments whose first third has every fault and some payments without
    /// any.
    pub(crate) const MIN_PAYMENTS: u16 = 24;

    /// Distributes faults to the payments of orders `0..payments`. The first third gets at least
    /// one of every fault: no process is killed before it is over, so that all of them happen.
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

    /// Returns the number of orders in the first third.
    pub(crate) fn early(&self) -> u32 {
        u32::try_from(self.cards.len() / 3).unwrap_or(u32::MAX)
    }

    /// Returns the number of payments in the first third that have a stall.
    pub(crate) fn early_stalls(&self) -> usize {
        let stalls = [Fault::StallBeforeCharge, Fault::StallAfterCharge];
        let stalls = stalls.map(|fault| Some(Card::Service(fault)));
        let early = &self.cards[..self.cards.len() / 3];
        early.iter().filter(|card| stalls.contains(card)).count()
    }

    /// Returns the fault of the `arrival`th request (from 0) for `order`.
    pub(crate) fn fault(&self, order: u32, arrival: u32) -> Option<Fault> {
        match self.card(order)? {
            Card::Service(fault) if arrival == 0 => Some(fault),
            Card::Service(_) | Card::Client(_) => None,
        }
    }

    /// Returns the client's mistake in its first request for `order`.
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
