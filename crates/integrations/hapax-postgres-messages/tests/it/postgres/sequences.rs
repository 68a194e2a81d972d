//! The SQL functions of sequences take the steps of the state machine in the core.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::sequence::{GapAction, GapPolicy, SequenceState, SequenceStep};
use hapax_testkit::SeededEntropy;
use tokio_postgres::Client;

use super::{pool, server};

const MAX_WAITING: u32 = 2;

/// An aggregate in the core's state machine and in the database.
struct Both<'a> {
    client: &'a Client,
    aggregate: String,
    policy: GapPolicy,
    over_limit: &'static str,
    max_wait: Duration,
    state: SequenceState,
    waiting: BTreeSet<u64>,
    applied: Vec<u64>,
}

fn name(step: SequenceStep) -> &'static str {
    match step {
        SequenceStep::Apply(_) => "apply",
        SequenceStep::Duplicate => "duplicate",
        SequenceStep::Wait => "wait",
        SequenceStep::DeadLetter => "dead-letter",
        SequenceStep::Fetch { .. } => "fetch",
        SequenceStep::Skip { .. } => "skip",
        SequenceStep::Idle(_) => "nothing",
    }
}

impl Both<'_> {
    /// Returns the step of a message in the database.
    async fn sql_arrive(&self, number: u64) -> String {
        let text = "SELECT step FROM hapax_sequence('orders', $1, $2, 'm', NULL, 'x', $3, \
                    make_interval(secs => $4), $5)";
        let (number, max) = (number as i64, MAX_WAITING as i32);
        let secs = self.max_wait.as_secs_f64();
        let row = self
            .client
            .query_one(text, &[&self.aggregate, &number, &max, &secs, &self.over_limit])
            .await
            .unwrap();
        row.get(0)
    }

    async fn sql_next(&self) -> Option<(String, Option<i64>)> {
        let text = "SELECT step, number FROM hapax_sequence_next('orders', $1, \
                    make_interval(secs => $2), $3)";
        let secs = self.max_wait.as_secs_f64();
        let row =
            self.client.query_opt(text, &[&self.aggregate, &secs, &self.over_limit]).await.unwrap();
        row.map(|row| (row.get(0), row.get(1)))
    }

    async fn arrive(&mut self, number: u64) {
        loop {
            let is_waiting = self.waiting.contains(&number);
            let numbered = NonZeroU64::new(number).unwrap();
            // The time of the model stands still: a gap is over its limit at once, or never.
            let now = Timestamp::from_micros(1);
            let (mut step, mut state) = self.state.arrive(numbered, is_waiting, now, &self.policy);
            // The database skips a gap and applies the message in one call.
            if matches!(step, SequenceStep::Skip { last, .. } if last + 1 == number) {
                (step, state) = state.arrive(numbered, is_waiting, now, &self.policy);
            }
            self.state = state;
            assert_eq!(self.sql_arrive(number).await, name(step), "{number} {:?}", self.state);
            match step {
                SequenceStep::Apply(number) => self.applied.push(number),
                SequenceStep::Wait => assert!(self.waiting.insert(number)),
                _ => {}
            }
            self.drain().await;
            if !matches!(step, SequenceStep::Skip { .. }) {
                return;
            }
        }
    }

    async fn drain(&mut self) {
        loop {
            let now = Timestamp::from_micros(1);
            let lowest = self.waiting.first().copied();
            let (mut step, mut state) = self.state.next(now, &self.policy);
            // The database skips a gap and returns the message behind it in one call.
            if matches!(step, SequenceStep::Skip { .. }) {
                (step, state) = state.next(now, &self.policy);
            }
            self.state = state;
            let found = self.sql_next().await;
            match step {
                SequenceStep::Idle(_) => {
                    assert_eq!(found, None);
                    return;
                }
                SequenceStep::Fetch { first, .. } => {
                    assert_eq!(found, Some(("fetch".to_owned(), Some(first as i64))));
                    return;
                }
                step => {
                    let number = lowest.map(|lowest| lowest as i64);
                    assert_eq!(found, Some((name(step).to_owned(), number)));
                    self.waiting.pop_first();
                    if let SequenceStep::Apply(number) = step {
                        self.applied.push(number);
                    }
                    self.state.lowest_waiting = self.waiting.first().copied();
                }
            }
        }
    }
}

#[tokio::test]
async fn the_functions_take_the_steps_of_the_state_machine() {
    let server = server().await;
    let client = pool(&server).get().await.unwrap();
    let dice = SeededEntropy::new(3);
    let mut applied = 0;
    for round in 0..60 {
        let (then, over_limit) = [
            (GapAction::Fetch, "fetch"),
            (GapAction::DeadLetter, "dead-letter"),
            (GapAction::Accept, "accept"),
        ][round % 3];
        let max_wait = [Duration::ZERO, Duration::from_secs(3600)][round / 3 % 2];
        let mut both = Both {
            client: &client,
            aggregate: format!("cart-{round}"),
            policy: GapPolicy::new(MAX_WAITING, max_wait, then),
            over_limit,
            max_wait,
            state: SequenceState::default(),
            waiting: BTreeSet::new(),
            applied: Vec::new(),
        };
        for _ in 0..12 {
            both.arrive(1 + dice.below(7)).await;
        }
        assert!(both.applied.is_sorted_by(|one, other| one < other), "{:?}", both.applied);
        let stored = "SELECT applied, waiting FROM hapax_sequences WHERE aggregate = $1";
        let row = client.query_one(stored, &[&both.aggregate]).await.unwrap();
        let stored = (row.get::<_, i64>(0) as u64, row.get::<_, i32>(1) as u32);
        assert_eq!(stored, (both.state.applied, both.state.waiting));
        applied += both.applied.len();
    }
    assert!(applied > 100);
}

#[tokio::test]
async fn a_gap_is_listed_and_stops_only_its_aggregate() {
    let server = server().await;
    let sql = async |text: &str| server.sql("postgres", text).await;
    let arrive = |aggregate: &str, number: u32| {
        format!(
            "SELECT step FROM hapax_sequence('orders', '{aggregate}', {number}, 'm', NULL, 'x', 10, \
             '1 h', 'dead-letter')"
        )
    };
    assert_eq!(sql(&arrive("a", 2)).await, "wait");
    assert_eq!(sql(&arrive("b", 1)).await, "apply");
    assert_eq!(sql(&arrive("b", 2)).await, "apply");
    let gaps = "SELECT aggregate, missing, waiting FROM hapax_sequence_gaps";
    assert_eq!(sql(gaps).await, "a|1|1");
    assert_eq!(sql(&arrive("a", 1)).await, "apply");
    let next = "SELECT step, number FROM hapax_sequence_next('orders', 'a', '1 h', 'dead-letter')";
    assert_eq!(sql(next).await, "apply|2");
    assert_eq!(sql(gaps).await, "");
}

#[tokio::test]
async fn two_consumers_of_one_message_apply_it_once() {
    let server = server().await;
    let pool = pool(&server);
    let (mut one, other) = (pool.get().await.unwrap(), pool.get().await.unwrap());
    let arrive =
        "SELECT step FROM hapax_sequence('orders', 'a', 1, 'm', NULL, 'x', 10, '1 h', 'fetch')";
    let transaction = one.transaction().await.unwrap();
    let step: String = transaction.query_one(arrive, &[]).await.unwrap().get(0);
    assert_eq!(step, "apply");
    // It waits for the open transaction, for as long as the function's own limit.
    let waits = other.query_one(arrive, &[]).await.unwrap_err();
    assert_eq!(waits.code().unwrap().code(), "55P03");
    transaction.rollback().await.unwrap();
    let step: String = other.query_one(arrive, &[]).await.unwrap().get(0);
    assert_eq!(step, "apply");
}
