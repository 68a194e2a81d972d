//! Scenarios of statement 18: duplicates of a request in flight.

use std::time::Duration;

use hapax_core::InFlight;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::execution::held;
use crate::http::{
    ExecutionCount, HandlerGate, ScenarioContext, ScenarioPolicy, TestInstance, TestResponse,
    handler, reply,
};

fn wait(patience: Duration) -> ScenarioPolicy {
    // Many requests arrive at once, and this does not test the store's speed.
    let store_timeout = crate::http::TIMEOUT;
    ScenarioPolicy {
        in_flight: InFlight::Wait(patience),
        store_timeout,
        ..ScenarioPolicy::default()
    }
}

pub async fn w18_a_duplicate_in_flight_gets_retry_after(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let stage = arena.start(ScenarioPolicy::default(), held(&runs, &gate)).await;
    let began = Instant::now();
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let seconds = |answer: TestResponse| {
        answer.is_rejected(409, "in-flight");
        let seconds = answer.problem()["retry_after"].as_u64().unwrap();
        assert_eq!(answer.header("retry-after"), seconds.to_string());
        seconds
    };
    // At most as long as the first has been executing, but at least 1.
    let asked = seconds(stage.send(stage.post("k")).await);
    assert!((1..=began.elapsed().as_secs() + 1).contains(&asked), "{asked}");
    let later = stage.until(&stage.post("k"), |answer| answer.header("retry-after") != "1").await;
    let later = seconds(later);
    assert!(later > 1 && later <= began.elapsed().as_secs() + 1, "{later}");
    gate.open();
    first.await.unwrap().is_first(201, "1");
}

pub async fn w18_retry_after_ends_with_the_lease(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let lease = Duration::from_secs(4);
    let stage = arena
        .start(ScenarioPolicy { lease, ..ScenarioPolicy::default() }, held(&runs, &gate))
        .await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    // Longer than the limit that the elapsed time alone would set.
    let until = Instant::now() + lease * 2;
    while Instant::now() < until {
        let copy = stage.send(stage.post("k")).await;
        copy.is_rejected(409, "in-flight");
        assert!(["1", "2", "3", "4"].contains(&copy.header("retry-after")), "{copy:?}");
        // Often enough to observe the last second of the lease.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    gate.open();
    first.await.unwrap().is_first(201, "1");
}

pub async fn w18_waiters_get_the_replay(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy { waiters_per_key: 20, ..wait(crate::http::TIMEOUT) };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let mut copies = all_waiting(&stage, 20).await;
    gate.open();
    first.await.unwrap().is_first(201, "1");
    while let Some(copy) = copies.join_next().await {
        copy.unwrap().is_replay(201, "1");
    }
    assert_eq!(runs.count(), 1);
}

/// Starts `count` waiters of `k`, which must be the limit, and one more duplicate. That one is
/// rejected, but only once all others wait.
async fn all_waiting(stage: &TestInstance, count: usize) -> JoinSet<TestResponse> {
    let mut copies = JoinSet::new();
    for _ in 0..=count {
        let copy = stage.begin(stage.post("k"));
        copies.spawn(async move { copy.await.unwrap() });
    }
    copies.join_next().await.unwrap().unwrap().is_rejected(409, "in-flight");
    copies
}

pub async fn w18_a_waiter_is_promoted_when_the_owner_releases(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let held = (runs.clone(), gate.clone());
    let failing = handler(move |_| {
        let (runs, gate) = held.clone();
        async move {
            let run = runs.next();
            gate.pass().await;
            reply(if run == 1 { 429 } else { 201 }, run.to_string())
        }
    });
    let policy = ScenarioPolicy { waiters_per_key: 10, ..wait(crate::http::TIMEOUT) };
    let stage = arena.start(policy, failing).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let mut copies = all_waiting(&stage, 10).await;
    gate.open();
    first.await.unwrap().is_first(429, "1");
    let mut executed = 0;
    while let Some(copy) = copies.join_next().await {
        let copy = copy.unwrap();
        if copy.header("idempotency-replayed") == "false" {
            copy.is_first(201, "2");
            executed += 1;
        } else {
            copy.is_replay(201, "2");
        }
    }
    assert_eq!((executed, runs.count()), (1, 2));
}

pub async fn w18_a_waiter_gets_409_after_its_timeout(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let patience = Duration::from_millis(700);
    let stage = arena.start(wait(patience), held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let began = Instant::now();
    stage.send(stage.post("k")).await.is_rejected(409, "in-flight");
    let waited = began.elapsed();
    assert!((patience..crate::http::TIMEOUT / 2).contains(&waited), "{waited:?}");
    gate.open();
    first.await.unwrap().is_first(201, "1");
}

pub async fn w18_the_number_of_waiters_is_limited(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy { waiters_per_key: 5, ..wait(crate::http::TIMEOUT) };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    let began = Instant::now();
    let mut copies = JoinSet::new();
    for _ in 0..15 {
        let copy = stage.begin(stage.post("k"));
        copies.spawn(async move { copy.await.unwrap() });
    }
    // Ten are rejected at once, while the others wait.
    for _ in 0..10 {
        copies.join_next().await.unwrap().unwrap().is_rejected(409, "in-flight");
    }
    assert!(began.elapsed() < crate::http::TIMEOUT / 2);
    gate.open();
    while let Some(copy) = copies.join_next().await {
        copy.unwrap().is_replay(201, "1");
    }
    first.await.unwrap().is_first(201, "1");
}
