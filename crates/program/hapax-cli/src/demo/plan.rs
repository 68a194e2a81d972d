//! The plan that assigns faults to payments, from a seed.
//!
//! Each fault gets a fixed share of the payments, so that even a short run has every fault, and in
//! the same shares with every seed. The seed does not decide the timing, such as which requests are
//! under way when a process is killed.

use serde::{Deserialize, Serialize};

/// A fault of the payments service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// The service charges, and closes the connection instead of answering.
    LoseReply,
    /// The service charges, and answers 500.
    FailAfterCharge,
    /// The service stalls, and charges after every timeout of the request.
    StallBeforeCharge,
    /// The service charges, and stalls.
    StallAfterCharge,
    /// The service answers 503, and does not charge.
    Reject,
    /// The service charges, notifies the demo and withholds the reply, while the demo kills a
    /// process.
    Hold,
}

/// A fault of a client, while the service works correctly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ClientFault {
    /// The client closes the connection once its request is sent, and retries.
    HangUp,
    /// The client sends the request twice at the same time.
    DoubleClick,
}

/// A fault of the service or of the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PlannedFault {
    Service(Fault),
    Client(ClientFault),
}

/// The planned faults, each with its share of all payments in per cent.
const SHARES: [(PlannedFault, usize); 7] = [
    (PlannedFault::Service(Fault::LoseReply), 12),
    (PlannedFault::Service(Fault::FailAfterCharge), 6),
    (PlannedFault::Service(Fault::StallBeforeCharge), 4),
    (PlannedFault::Service(Fault::StallAfterCharge), 4),
    (PlannedFault::Service(Fault::Reject), 6),
    (PlannedFault::Client(ClientFault::HangUp), 10),
    (PlannedFault::Client(ClientFault::DoubleClick), 6),
];

/// The fault, if any, of the first request of each payment. Retries have none.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    faults: Vec<Option<PlannedFault>>,
}

impl Plan {
    /// The smallest number of payments whose first third has every fault, and payments without one.
    pub(crate) const MIN_PAYMENTS: u16 = 24;

    /// Assigns faults to the payments of orders `0..payments`. The first third gets at least one of
    /// every fault: no process is killed before the first third is over, so all of these faults
    /// happen.
    pub(crate) fn new(seed: u64, payments: u16) -> Self {
        let payments = usize::from(payments);
        let mut random = Random::new(seed);
        let mut orders: Vec<_> = (0..payments).collect();
        let (early, late) = orders.split_at_mut(payments / 3);
        random.shuffle(early);
        let (first, others) = early.split_at(SHARES.len().min(early.len()));
        let mut rest = [others, late].concat();
        random.shuffle(&mut rest);
        let again = SHARES.iter().flat_map(|&(fault, share)| {
            std::iter::repeat_n(fault, (payments * share).div_ceil(100).saturating_sub(1))
        });
        let mut faults = vec![None; payments];
        let all = SHARES.iter().map(|&(fault, _)| fault).chain(again);
        for (order, fault) in first.iter().chain(&rest).zip(all) {
            faults[*order] = Some(fault);
        }
        Self { faults }
    }

    /// Returns the length of the first third: it has the orders below this number.
    pub(crate) fn early(&self) -> u32 {
        u32::try_from(self.faults.len() / 3).unwrap_or(u32::MAX)
    }

    /// Returns the number of payments of the first third with a stall.
    pub(crate) fn early_stalls(&self) -> usize {
        let stalls = [Fault::StallBeforeCharge, Fault::StallAfterCharge];
        let stalls = stalls.map(|fault| Some(PlannedFault::Service(fault)));
        let early = &self.faults[..self.faults.len() / 3];
        early.iter().filter(|fault| stalls.contains(fault)).count()
    }

    /// Returns the service's fault for the `arrival`th request (from 0) for `order`.
    pub(crate) fn fault(&self, order: u32, arrival: u32) -> Option<Fault> {
        match self.planned(order)? {
            PlannedFault::Service(fault) if arrival == 0 => Some(fault),
            PlannedFault::Service(_) | PlannedFault::Client(_) => None,
        }
    }

    /// Returns the client's fault in its first request for `order`.
    pub(crate) fn client_fault(&self, order: u32) -> Option<ClientFault> {
        match self.planned(order)? {
            PlannedFault::Client(fault) => Some(fault),
            PlannedFault::Service(_) => None,
        }
    }

    fn planned(&self, order: u32) -> Option<PlannedFault> {
        self.faults.get(usize::try_from(order).ok()?).copied().flatten()
    }
}

/// A repeatable generator of random numbers (SplitMix64), for load and faults; not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub(crate) const fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number below `limit`; 0 for a limit of 0. The bias of the remainder does not
    /// matter here.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.number() % limit).unwrap_or_default()
    }

    /// Shuffles `items`.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_its_share_and_is_in_the_first_third() {
        for payments in [Plan::MIN_PAYMENTS, 100, 101] {
            for seed in 0..50 {
                let plan = Plan::new(seed, payments);
                assert_eq!(plan.faults.len(), usize::from(payments));
                for (fault, share) in SHARES {
                    let count = |faults: &[Option<PlannedFault>]| {
                        faults.iter().filter(|planned| **planned == Some(fault)).count()
                    };
                    let early = &plan.faults[..usize::from(payments) / 3];
                    assert!(plan.early_stalls() >= 2);
                    assert!(count(early) > 0, "{fault:?} of {payments} with seed {seed}");
                    let all = (usize::from(payments) * share).div_ceil(100);
                    assert_eq!(count(&plan.faults), all, "{fault:?} of {payments}, seed {seed}");
                }
            }
        }
    }

    #[test]
    fn equal_seeds_give_equal_plans_and_others_do_not() {
        let faults = |seed| Plan::new(seed, 200).faults;
        assert_eq!(faults(7), faults(7));
        assert_ne!(faults(7), faults(8));
    }

    #[test]
    fn only_first_requests_of_planned_orders_have_a_fault() {
        let plan = Plan::new(1, 50);
        let faulty = (0..50).find(|order| plan.fault(*order, 0).is_some()).unwrap();
        assert_eq!(plan.fault(faulty, 1), None);
        assert_eq!(plan.client_fault(faulty), None);
        let client_faults = (0..50).filter(|order| plan.client_fault(*order).is_some());
        assert!(client_faults.clone().count() >= 2);
        assert!(client_faults.clone().all(|order| plan.fault(order, 0).is_none()));
        assert_eq!((plan.fault(50, 0), plan.client_fault(50)), (None, None));
    }
}
