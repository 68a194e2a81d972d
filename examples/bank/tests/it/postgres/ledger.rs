//! Responses that clients received, and their comparison with the database.

use std::collections::{BTreeMap, HashMap};

use hapax_bank::{Transfer, TransferReceipt};
use hapax_testkit::servers::PostgresServer;

use super::client::{Answer, Reply};

/// Number of accounts, and the first balance of each.
pub(crate) const ACCOUNTS: i64 = 8;
pub(crate) const BALANCE: i64 = 500;

/// Requests and responses of all clients.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    answers: HashMap<String, (Transfer, Option<Answer>)>,
    pub(crate) violations: Vec<String>,
    pub(crate) replies: u64,
    /// Replies, out of `replies`, that require a retry.
    pub(crate) not_yet: u64,
}

impl Ledger {
    pub(crate) fn asked(&mut self, asked: &Transfer) {
        self.answers.entry(asked.reference.clone()).or_insert_with(|| (asked.clone(), None));
    }

    /// Records a reply. Returns whether the transfer is decided; if it is not and `late` is set,
    /// that is a violation.
    pub(crate) fn heard(&mut self, asked: &Transfer, reply: Reply, late: bool) -> bool {
        self.replies += 1;
        match reply {
            Reply::Final(answer) => self.answered(asked, answer),
            Reply::NotYet(_) if !late => {
                self.not_yet += 1;
                return false;
            }
            Reply::NotYet(last) => {
                self.violations.push(format!("{}: not decided, last {last:?}", asked.reference));
            }
            Reply::Unexpected(answer) => {
                self.violations.push(format!("{}: {answer:?}", asked.reference));
            }
        }
        true
    }

    fn answered(&mut self, asked: &Transfer, answer: Answer) {
        let Some((_, known)) = self.answers.get_mut(&asked.reference) else { return };
        match known {
            None => *known = Some(answer),
            Some(known) if *known == answer => {}
            Some(known) => {
                let what = format!("{}: {known:?}, and then {answer:?}", asked.reference);
                self.violations.push(what);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.answers.len()
    }

    /// Returns how many transfers happened and how many were declined.
    pub(crate) fn tally(&self) -> (usize, usize) {
        let answers = self.answers.values().filter_map(|(_, answer)| answer.as_ref());
        let done = answers.clone().filter(|answer| answer.status == 201).count();
        (done, answers.count() - done)
    }

    /// Compares every response with the ledger's lines, and the lines with the accounts.
    pub(crate) async fn judge(&mut self, server: &PostgresServer) {
        let mut lines: BTreeMap<String, Vec<(i64, i64, i64, i64)>> = BTreeMap::new();
        let mut expected = HashMap::new();
        let all = "SELECT reference, id, sender, receiver, amount FROM ledger ORDER BY id";
        for line in server.sql("postgres", all).await.lines() {
            let mut columns = line.split('|');
            let reference = columns.next().unwrap().to_owned();
            let numbers: Vec<i64> = columns.map(|column| column.parse().unwrap()).collect();
            let [id, sender, receiver, amount] = numbers[..] else { panic!("{line}") };
            *expected.entry(sender).or_insert(BALANCE) -= amount;
            *expected.entry(receiver).or_insert(BALANCE) += amount;
            lines.entry(reference).or_default().push((id, sender, receiver, amount));
        }
        for (reference, (asked, answer)) in &self.answers {
            let lines = lines.remove(reference).unwrap_or_default();
            let Some(answer) = answer else {
                self.violations.push(format!("{reference}: no response"));
                continue;
            };
            let right = match answer.status.as_u16() {
                201 => {
                    let receipt: TransferReceipt = serde_json::from_slice(&answer.body).unwrap();
                    let Transfer { sender, receiver, amount, .. } = asked;
                    lines == [(receipt.line, *sender, *receiver, *amount)]
                }
                _ => lines.is_empty(),
            };
            if !right {
                self.violations
                    .push(format!("{reference}: {answer:?}, and in the ledger {lines:?}"));
            }
        }
        for (reference, lines) in lines {
            self.violations
                .push(format!("{reference}: not requested, and in the ledger {lines:?}"));
        }
        let balances = server.sql("postgres", "SELECT id, balance FROM accounts").await;
        let mut sum = 0;
        for line in balances.lines() {
            let (id, balance) = line.split_once('|').unwrap();
            let (id, balance): (i64, i64) = (id.parse().unwrap(), balance.parse().unwrap());
            let right = expected.get(&id).copied().unwrap_or(BALANCE);
            sum += balance;
            if balance != right {
                self.violations
                    .push(format!("account {id} has {balance}, and by the ledger {right}"));
            }
        }
        if sum != ACCOUNTS * BALANCE {
            self.violations.push(format!("the accounts have {sum} in all"));
        }
        let done = "SELECT count(*) FROM hapax_cells WHERE state = 'done'";
        let done = server.sql("postgres", done).await;
        if done != self.answers.len().to_string() {
            self.violations.push(format!("{} were requested, {done} are recorded", self.len()));
        }
    }
}
