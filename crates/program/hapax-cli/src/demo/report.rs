//! The counts of a run, and their check against the guarantees of each set-up.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde::Serialize;

use super::client::{PaymentEnd, PaymentOutcome};
use super::ledger::{Charge, LedgerEntry};
use super::plan::{ClientFault, Fault};
use super::setup::Setup;

/// Processes that were killed between a charge and its reply.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Kills {
    pub(crate) service: u32,
    pub(crate) gateway: u32,
}

/// The counts of injected faults.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize)]
pub(crate) struct Faults {
    /// Charges after which the connection was closed without a response.
    pub(crate) replies_lost: u32,
    /// Charges that were answered 500.
    pub(crate) errors_after_charging: u32,
    /// Stalls of the service before a charge.
    pub(crate) stalls_before_charging: u32,
    /// Stalls of the service after a charge.
    pub(crate) stalls_after_charging: u32,
    /// Requests that were answered 503 without a charge.
    pub(crate) refusals: u32,
    /// SIGKILLs of the payments service between a charge and its reply.
    pub(crate) service_kills: u32,
    /// SIGKILLs of the gateway between a charge and its reply.
    pub(crate) gateway_kills: u32,
    /// Clients that hung up once their request was sent.
    pub(crate) hang_ups: u32,
    /// Clients that sent their request twice at the same time.
    pub(crate) double_clicks: u32,
}

/// The counts of one set-up: a row of the table.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) setup: &'static str,
    /// Requested payments, each with its own key.
    pub(crate) payments: u32,
    /// Requests that clients sent for them.
    pub(crate) requests: u32,
    /// Charges in the ledger.
    pub(crate) charges: u32,
    /// Charges in the ledger beyond the first of each payment.
    pub(crate) duplicates: u32,
    /// Duplicates of payments in which only the client had a fault.
    pub(crate) client_side: u32,
    /// All other duplicates.
    pub(crate) server_side: u32,
    /// Payments whose client got no final answer.
    pub(crate) unknown: u32,
    /// Final answers that name no charge of that payment in the ledger.
    pub(crate) wrong_answers: u32,
    /// Reconcile requests.
    pub(crate) questions: u32,
    /// Late charges that were not made, because their fence had been rejected.
    pub(crate) stale_refused: u32,
    pub(crate) faults: Faults,
    pub(crate) seconds: f64,
}

impl Row {
    /// Counts the ledger's entries, and compares them with the answers that clients got.
    pub(crate) fn count(
        setup: Setup,
        entries: &[LedgerEntry],
        ends: &[PaymentEnd],
        sent: u32,
        kills: Kills,
        took: Duration,
    ) -> Self {
        let mut row = Self {
            setup: setup.name(),
            payments: number(ends.len()),
            requests: sent,
            charges: 0,
            duplicates: 0,
            client_side: 0,
            server_side: 0,
            unknown: 0,
            wrong_answers: 0,
            questions: 0,
            stale_refused: 0,
            faults: Faults {
                service_kills: kills.service,
                gateway_kills: kills.gateway,
                ..Faults::default()
            },
            seconds: took.as_secs_f64(),
        };
        let mut charges: HashMap<&str, Vec<&Charge>> = HashMap::new();
        // Orders with a fault behind the clients.
        let mut failed = HashSet::new();
        for entry in entries {
            match entry {
                LedgerEntry::Arrived { order, fault } => {
                    row.faults.note(*fault);
                    if fault.is_some() {
                        failed.insert(*order);
                    }
                }
                LedgerEntry::Slow { order } => drop(failed.insert(*order)),
                LedgerEntry::Charged(charge) => {
                    charges.entry(&charge.key).or_default().push(charge)
                }
                LedgerEntry::Stale { .. } => row.stale_refused += 1,
                LedgerEntry::Reconciled { .. } => row.questions += 1,
            }
        }
        for made in charges.values() {
            row.charges += number(made.len());
            row.duplicates += number(made.len() - 1);
        }
        for PaymentEnd { key, end, client_fault, during_restart } in ends {
            let made = charges.get(key.as_str()).map_or(&[][..], Vec::as_slice);
            let server_failed =
                *during_restart || made.iter().any(|charge| failed.contains(&charge.order));
            if client_fault.is_some() && !server_failed {
                row.client_side += number(made.len().saturating_sub(1));
            }
            match client_fault {
                Some(ClientFault::HangUp) => row.faults.hang_ups += 1,
                Some(ClientFault::DoubleClick) => row.faults.double_clicks += 1,
                None => {}
            }
            match end {
                PaymentOutcome::Paid(id) => {
                    row.wrong_answers += u32::from(!made.iter().any(|charge| charge.id == *id));
                }
                PaymentOutcome::Unexpected(_) => row.wrong_answers += 1,
                PaymentOutcome::Unresolved => row.unknown += 1,
            }
        }
        row.server_side = row.duplicates - row.client_side;
        row
    }
}

impl Faults {
    fn note(&mut self, fault: Option<Fault>) {
        match fault {
            Some(Fault::LoseReply) => self.replies_lost += 1,
            Some(Fault::FailAfterCharge) => self.errors_after_charging += 1,
            Some(Fault::StallBeforeCharge) => self.stalls_before_charging += 1,
            Some(Fault::StallAfterCharge) => self.stalls_after_charging += 1,
            Some(Fault::Reject) => self.refusals += 1,
            // Counted by the kill.
            Some(Fault::Hold) | None => {}
        }
    }

    /// Returns a text about the first fault that did not happen.
    fn missing(&self, gateway: bool) -> Option<&'static str> {
        let happened = [
            (self.replies_lost > 0, "no reply was lost"),
            (self.errors_after_charging > 0, "no charge was answered 500"),
            (self.stalls_before_charging > 0, "nothing stalled before a charge"),
            (self.stalls_after_charging > 0, "nothing stalled after a charge"),
            (self.refusals > 0, "no request was rejected"),
            (self.service_kills > 0, "the payments service was not killed"),
            (self.gateway_kills > 0 || !gateway, "the gateway was not killed"),
            (self.hang_ups > 0, "no client hung up"),
            (self.double_clicks > 0, "no client clicked twice"),
        ];
        happened.into_iter().find(|(happened, _)| !happened).map(|(_, missing)| missing)
    }
}

/// Returns the violated guarantees, and the reasons why the run proves nothing; empty if there are
/// none.
pub(crate) fn failings(rows: &[Row]) -> Vec<String> {
    let mut failings = Vec::new();
    for row in rows {
        let gateway = row.setup != Setup::NoGateway.name();
        let safe = row.setup == Setup::Block.name() || row.setup == Setup::Reconcile.name();
        let reconciles = row.setup == Setup::Reconcile.name();
        let mut fail = |what: &str| failings.push(format!("{}: {what}", row.setup));
        if let Some(missing) = row.faults.missing(gateway) {
            fail(missing);
        }
        if row.wrong_answers > 0 {
            fail(&format!("{} answers name a charge that was not made", row.wrong_answers));
        }
        if safe && row.duplicates > 0 {
            fail(&format!("{} duplicates were charged", row.duplicates));
        }
        if !safe && row.server_side == 0 {
            fail("no duplicates, so the faults had no effect and the run proves nothing");
        }
        if !gateway && row.client_side == 0 {
            fail("clients caused no duplicates, so the run proves nothing");
        }
        if gateway && !safe && row.client_side > 0 {
            fail(&format!("{} duplicates by clients alone were charged", row.client_side));
        }
        if row.setup == Setup::Block.name() && row.unknown == 0 {
            fail("nothing was unknown, so the run proves nothing");
        }
        if reconciles && row.questions == 0 {
            fail("no reconcile request was sent");
        }
        if reconciles && row.unknown > 0 {
            fail(&format!("{} payments were left unresolved", row.unknown));
        }
    }
    failings
}

/// The whole result, for JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    pub(crate) seed: u64,
    pub(crate) rows: &'a [Row],
    /// The violated guarantees; empty if there are none.
    pub(crate) failings: &'a [String],
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::ledger::Charge;
    use super::*;

    fn charged(id: u32, key: &str) -> LedgerEntry {
        LedgerEntry::Charged(Charge { id, order: 1, key: key.into(), operation: key.into() })
    }

    /// Returns a charge of an order without a fault.
    fn clean(id: u32, key: &str) -> LedgerEntry {
        LedgerEntry::Charged(Charge { id, order: 2, key: key.into(), operation: key.into() })
    }

    fn arrived(fault: Fault) -> LedgerEntry {
        LedgerEntry::Arrived { order: 1, fault: Some(fault) }
    }

    fn ended(key: &str, end: PaymentOutcome) -> PaymentEnd {
        PaymentEnd { key: key.into(), end, client_fault: None, during_restart: false }
    }

    fn with_fault(key: &str, end: PaymentOutcome, fault: ClientFault) -> PaymentEnd {
        PaymentEnd { client_fault: Some(fault), ..ended(key, end) }
    }

    /// Returns the counts of a run that keeps the guarantees of `setup`.
    fn passing(setup: Setup) -> Row {
        let faults = [
            Fault::LoseReply,
            Fault::FailAfterCharge,
            Fault::StallBeforeCharge,
            Fault::StallAfterCharge,
            Fault::Reject,
        ];
        let mut entries: Vec<_> = faults.into_iter().map(arrived).collect();
        entries.extend([charged(1, "a"), charged(2, "b"), clean(4, "c"), clean(5, "d")]);
        let mut ends = vec![
            ended("a", PaymentOutcome::Paid(1)),
            ended("b", PaymentOutcome::Paid(2)),
            with_fault("c", PaymentOutcome::Paid(4), ClientFault::HangUp),
            with_fault("d", PaymentOutcome::Paid(5), ClientFault::DoubleClick),
        ];
        match setup {
            Setup::NoGateway => entries.extend([charged(3, "b"), clean(6, "d")]),
            Setup::Reexecute => entries.push(charged(3, "b")),
            Setup::Block => ends[1].end = PaymentOutcome::Unresolved,
            Setup::Reconcile => {
                entries.push(LedgerEntry::Reconciled { operation: "b".into(), rejected: None })
            }
        }
        let kills = Kills { service: 1, gateway: u32::from(setup != Setup::NoGateway) };
        Row::count(setup, &entries, &ends, 4, kills, Duration::from_secs(1))
    }

    fn failing(setup: Setup, spoil: impl FnOnce(&mut Row)) -> String {
        let mut row = passing(setup);
        spoil(&mut row);
        let [failing] = &failings(&[row])[..] else { panic!("not one failing") };
        failing.clone()
    }

    #[test]
    fn charges_are_counted_and_compared_with_answers() {
        let entries = [charged(1, "a"), charged(2, "a"), charged(3, "b"), charged(4, "a")];
        let ends = [
            ended("a", PaymentOutcome::Paid(2)),
            ended("b", PaymentOutcome::Paid(1)),
            ended("c", PaymentOutcome::Unresolved),
            ended("d", PaymentOutcome::Unexpected("410".into())),
        ];
        let row =
            Row::count(Setup::Block, &entries, &ends, 9, Kills::default(), Duration::from_secs(1));
        assert_eq!((row.payments, row.requests, row.charges), (4, 9, 4));
        assert_eq!((row.duplicates, row.unknown, row.wrong_answers), (2, 1, 2));
    }

    #[test]
    fn a_duplicate_is_the_clients_if_only_the_client_had_a_fault() {
        let twice = [clean(1, "a"), clean(2, "a")];
        let of = |more: &[LedgerEntry], end: PaymentEnd| {
            let entries = [&twice[..], more].concat();
            let kills = Kills::default();
            let row =
                Row::count(Setup::NoGateway, &entries, &[end], 2, kills, Duration::from_secs(1));
            assert_eq!(row.duplicates, 1);
            (row.client_side, row.server_side)
        };
        let hung_up = || with_fault("a", PaymentOutcome::Paid(1), ClientFault::HangUp);
        assert_eq!(of(&[], hung_up()), (1, 0));
        assert_eq!(of(&[], ended("a", PaymentOutcome::Paid(1))), (0, 1));
        assert_eq!(of(&[], PaymentEnd { during_restart: true, ..hung_up() }), (0, 1));
        assert_eq!(of(&[LedgerEntry::Slow { order: 2 }], hung_up()), (0, 1));
        let held = LedgerEntry::Arrived { order: 2, fault: Some(Fault::Hold) };
        assert_eq!(of(&[held], hung_up()), (0, 1));
    }

    #[test]
    fn a_run_that_keeps_the_guarantees_has_no_failings() {
        assert_eq!(failings(&Setup::ALL.map(passing)), Vec::<String>::new());
    }

    #[test]
    fn duplicates_fail_a_safe_set_up_and_their_absence_fails_an_unsafe_one() {
        for setup in [Setup::Block, Setup::Reconcile] {
            assert!(failing(setup, |row| row.duplicates = 1).contains("1 duplicates were charged"));
        }
        for setup in [Setup::NoGateway, Setup::Reexecute] {
            assert!(failing(setup, |row| row.server_side = 0).contains("proves nothing"));
        }
        let none = failing(Setup::NoGateway, |row| row.client_side = 0);
        assert!(none.contains("clients caused no duplicates"), "{none}");
        let one = failing(Setup::Reexecute, |row| row.client_side = 1);
        assert!(one.contains("1 duplicates by clients alone"), "{one}");
    }

    #[test]
    fn a_run_without_one_of_its_faults_fails() {
        let spoil: [fn(&mut Faults); 9] = [
            |faults| faults.replies_lost = 0,
            |faults| faults.errors_after_charging = 0,
            |faults| faults.stalls_before_charging = 0,
            |faults| faults.stalls_after_charging = 0,
            |faults| faults.refusals = 0,
            |faults| faults.service_kills = 0,
            |faults| faults.gateway_kills = 0,
            |faults| faults.hang_ups = 0,
            |faults| faults.double_clicks = 0,
        ];
        for spoil in spoil {
            failing(Setup::Reconcile, |row| spoil(&mut row.faults));
        }
        assert!(failing(Setup::Block, |row| row.unknown = 0).contains("proves nothing"));
        assert!(
            failing(Setup::Reconcile, |row| row.questions = 0).contains("no reconcile request")
        );
    }

    #[test]
    fn a_wrong_answer_and_an_unresolved_payment_fail() {
        assert!(failing(Setup::Reexecute, |row| row.wrong_answers = 1).contains("not made"));
        assert!(failing(Setup::Reconcile, |row| row.unknown = 2).contains("2 payments"));
    }

    #[test]
    fn the_table_is_aligned() {
        let table = super::super::text::table(&Setup::ALL.map(passing));
        let widths: Vec<_> = table.lines().map(str::len).collect();
        assert_eq!(widths, [62, 72, 72, 72, 72, 72]);
        assert!(table.lines().nth(5).unwrap().starts_with("reconcile "));
    }
}
