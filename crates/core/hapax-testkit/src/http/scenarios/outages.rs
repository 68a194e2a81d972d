//! Scenarios of statement 20: the store is unavailable. Group `outages`, except for policies that
//! are rejected at the start.

use std::time::Duration;

use hapax_core::OnUnknown;
use hapax_http::server::{CompletionOutage, StoreOutage};

use super::execution::held;
use crate::http::{
    ExecutionCount, HandlerGate, ScenarioContext, ScenarioPolicy, TestInstance, counting,
};

fn brisk() -> ScenarioPolicy {
    ScenarioPolicy { store_timeout: Duration::from_secs(2), ..ScenarioPolicy::default() }
}

pub async fn w20_closed_executes_nothing(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let stage = arena.start(brisk(), counting(&runs)).await;
    stage.send(stage.post("before")).await.is_first(201, "1");
    stage.cut().await;
    for key in ["before", "new"] {
        let answer = stage.send(stage.post(key)).await;
        answer.is_rejected(503, "store-unavailable");
        assert_eq!(answer.header("retry-after"), "1");
    }
    stage.send(stage.plain()).await.is_unmarked(201, "2");
    stage.mend().await;
    let back = stage.until(&stage.post("new"), |answer| answer.status == 201).await;
    back.is_first(201, "3");
    stage.send(stage.post("before")).await.is_replay(201, "1");
    assert_eq!(runs.count(), 3);
}

/// Group `outages`.
pub async fn w21_a_page_may_read_the_rejection_during_an_outage(arena: ScenarioContext) {
    let policy = ScenarioPolicy { cors: Some("https://shop.example"), ..brisk() };
    let stage = arena.start(policy, counting(&ExecutionCount::new())).await;
    stage.cut().await;
    let answer = stage.send(stage.post("k").header("origin", "https://shop.example")).await;
    answer.is_rejected(503, "store-unavailable");
    assert_eq!(answer.header("access-control-allow-origin"), "https://shop.example");
}

pub async fn w20_open_executes_unprotected(arena: ScenarioContext) {
    let runs = ExecutionCount::new();
    let (store_outage, on_unknown) = (StoreOutage::Open, OnUnknown::Reexecute);
    let policy = ScenarioPolicy { store_outage, on_unknown, ..brisk() };
    let stage = arena.start(policy, counting(&runs)).await;
    stage.cut().await;
    for run in ["1", "2"] {
        let answer = stage.send(stage.post("k")).await;
        assert_eq!((answer.status.as_u16(), answer.text()), (201, run));
        assert_eq!(answer.header("idempotency-protected"), "false");
        assert_eq!(answer.header("idempotency-replayed"), "");
    }
}

/// Group `any`.
pub async fn w20_open_with_block_is_rejected(arena: ScenarioContext) {
    // Under `block`, which is the default.
    let policy = ScenarioPolicy { store_outage: StoreOutage::Open, ..ScenarioPolicy::default() };
    let said = arena.refused(policy, counting(&ExecutionCount::new())).await;
    assert!(said.contains("open") && said.contains("block"), "{said}");
}

/// Executes an operation whose store becomes unreachable before it ends.
async fn in_between(
    arena: &ScenarioContext,
    completion_outage: CompletionOutage,
) -> (TestInstance, ExecutionCount, crate::http::TestResponse) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let policy = ScenarioPolicy { completion_outage, ..brisk() };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    stage.cut().await;
    gate.open();
    let answer = first.await.unwrap();
    (stage, runs, answer)
}

pub async fn w20_without_a_store_at_completion_the_response_is_delivered_as_pending(
    arena: ScenarioContext,
) {
    let (stage, runs, answer) = in_between(&arena, CompletionOutage::Deliver).await;
    answer.is_first(201, "1");
    assert_eq!(answer.header("idempotency-recorded"), "pending");
    // A duplicate in this process is answered from the deferred write.
    let copy = stage.send(stage.post("k")).await;
    copy.is_replay(201, "1");
    assert_eq!(copy.header("idempotency-recorded"), "pending");
    stage.mend().await;
    let recorded =
        |answer: &crate::http::TestResponse| answer.header("idempotency-recorded").is_empty();
    stage.until(&stage.post("k"), recorded).await.is_replay(201, "1");
    // The outcome is in the store, so that another process finds it.
    stage.end().await;
    let stage = arena.start(brisk(), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

pub async fn w20_without_a_store_at_completion_the_response_may_be_withheld(
    arena: ScenarioContext,
) {
    let (stage, runs, answer) = in_between(&arena, CompletionOutage::Withhold).await;
    answer.is_rejected(503, "outcome-pending");
    assert_ne!(answer.header("retry-after"), "");
    let duplicate = stage.send(stage.post("k")).await;
    duplicate.is_rejected(503, "outcome-pending");
    assert_eq!(duplicate.header("retry-after"), "1");
    stage.send(stage.post("k").body("another")).await.is_rejected(422, "key-reused");
    stage.mend().await;
    stage.until(&stage.post("k"), |answer| answer.status == 201).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

/// The store returns during the drain: the outcome does not end with the process.
pub async fn w20_a_drain_waits_until_a_deferred_outcome_is_stored(arena: ScenarioContext) {
    let (stage, runs, answer) = in_between(&arena, CompletionOutage::Deliver).await;
    assert_eq!(answer.header("idempotency-recorded"), "pending");
    let mut drained = tokio::spawn(stage.instance().drain());
    let early = tokio::time::timeout(brisk().store_timeout * 3 / 2, &mut drained).await;
    assert!(early.is_err(), "the drain ended without the outcome");
    stage.mend().await;
    tokio::time::timeout(crate::http::TIMEOUT, drained).await.unwrap().unwrap();
    drop(stage);
    let stage = arena.start(brisk(), counting(&runs)).await;
    stage.send(stage.post("k")).await.is_replay(201, "1");
    assert_eq!(runs.count(), 1);
}

/// Groups `outages` and `several`.
pub async fn w20_after_a_completion_deferred_beyond_the_lease_the_policy_applies(
    arena: ScenarioContext,
) {
    for (on_unknown, again) in [(OnUnknown::Reexecute, true), (OnUnknown::Block, false)] {
        let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
        let lease = Duration::from_secs(1);
        let policy = ScenarioPolicy { lease, on_unknown, ..brisk() };
        let cut_off = arena.start(policy.clone(), held(&runs, &gate)).await;
        let other = arena.start(policy, counting(&runs)).await;
        let key = format!("{on_unknown:?}");
        let first = cut_off.begin(cut_off.post(&key));
        runs.reach(1).await;
        cut_off.cut().await;
        gate.open();
        assert_eq!(first.await.unwrap().header("idempotency-recorded"), "pending");
        let in_flight =
            |answer: &crate::http::TestResponse| answer.header("retry-after").is_empty();
        let answer = other.until(&other.post(&key), in_flight).await;
        if again {
            answer.is_first(201, "2");
        } else {
            answer.is_rejected(409, "outcome-unknown");
        }
    }
}

/// Group `outages`.
pub async fn w23_a_lapsed_lease_without_a_takeover_is_renewed(arena: ScenarioContext) {
    let (runs, gate) = (ExecutionCount::new(), HandlerGate::closed());
    let lease = Duration::from_secs(1);
    let policy = ScenarioPolicy { lease, on_unknown: OnUnknown::Block, ..brisk() };
    let stage = arena.start(policy, held(&runs, &gate)).await;
    let first = stage.begin(stage.post("k"));
    runs.reach(1).await;
    stage.cut().await;
    // Twice the lease: it has lapsed by the store's clock.
    tokio::time::sleep(lease * 2).await;
    stage.mend().await;
    let renewed = |answer: &crate::http::TestResponse| answer.rejection().1 == "in-flight";
    stage.until(&stage.post("k"), renewed).await;
    gate.open();
    first.await.unwrap().is_first(201, "1");
    stage.send(stage.post("k")).await.is_replay(201, "1");
}
