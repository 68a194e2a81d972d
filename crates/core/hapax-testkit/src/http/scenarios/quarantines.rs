//! Scenarios of statement 47: a quarantine of a store that may have lost records.

use hapax_core::{Clock, OnUnknown, SystemClock};
use hapax_http::server::StoreOutage;

use crate::http::{ExecutionCount, ScenarioContext, ScenarioPolicy, TestInstance, counting};

/// The laxest policy: that of others rejects no less.
fn lax() -> ScenarioPolicy {
    ScenarioPolicy {
        on_unknown: OnUnknown::Reexecute,
        store_outage: StoreOutage::Open,
        ..ScenarioPolicy::default()
    }
}

async fn is_rejected(stage: &TestInstance, key: &str) {
    let answer = stage.send(stage.post(key)).await;
    answer.is_rejected(503, "quarantined");
    let seconds: u64 = answer.header("retry-after").parse().unwrap();
    assert!((1..=60).contains(&seconds), "{key}: {seconds}");
}

pub async fn w47_in_a_quarantine_a_key_without_a_record_executes_nothing(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(lax(), counting(&runs)).await;
    stage.send(stage.post("known")).await.is_first(201, "1");
    stage.quarantine().await;
    for _ in 0..2 {
        is_rejected(&stage, "lost").await;
    }
    // A record that is there was not lost, and what has no key has none.
    stage.send(stage.post("known")).await.is_replay(201, "1");
    stage.send(stage.plain()).await.is_unmarked(201, "2");
    assert_eq!(runs.count(), 2);
    stage.end().await;
}

pub async fn w47_a_key_that_was_made_after_the_start_executes(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(lax(), counting(&runs)).await;
    stage.quarantine().await;
    // Later than the start by any clock that shows milliseconds.
    let now = SystemClock.now().as_micros() / 1000 + 1;
    for (index, key) in [uuid_v7(now), ulid(now)].iter().enumerate() {
        let run = (index + 1).to_string();
        stage.send(stage.post(key)).await.is_first(201, &run);
        stage.send(stage.post(key)).await.is_replay(201, &run);
    }
    // Before the start, and further ahead than clocks differ: such a key only looks like one that was made then.
    for millis in [now - 3_600_000, now + 3_600_000] {
        for key in [uuid_v7(millis), ulid(millis)] {
            is_rejected(&stage, &key).await;
        }
    }
    assert_eq!(runs.count(), 2);
    stage.end().await;
}

/// Returns a UUID of version 7 that was made at this time.
fn uuid_v7(millis: u64) -> String {
    format!("{:08x}-{:04x}-7cc3-98c4-dc0c0c07398f", millis >> 16, millis & 0xffff)
}

/// Returns a ULID that was made at this time.
fn ulid(millis: u64) -> String {
    const DIGITS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    let digit = |place: u32| char::from(DIGITS[(millis >> (5 * place)) as usize % 32]);
    let time: String = (0..10).rev().map(digit).collect();
    format!("{time}0123456789ABCDEF")
}
