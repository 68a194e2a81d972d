//! Scenarios of statement 46: reconciliation without a retry.

use std::time::Duration;

use hapax_core::OnUnknown;

use crate::http::{
    ExecutionCount, Hook, HookVerdict, ScenarioContext, ScenarioPolicy, TestInstance, handler,
    reply,
};

/// Leaves an operation with an unknown outcome. Returns the instance, and the numbers of executions and of calls of the
/// hook.
async fn undecided(
    arena: &ScenarioContext,
    verdict: HookVerdict,
) -> (TestInstance, ExecutionCount, ExecutionCount) {
    let (runs, calls) = (ExecutionCount::new(), ExecutionCount::new());
    let (executed, called) = (runs.clone(), calls.clone());
    let service = handler(move |_| {
        let run = executed.next();
        async move { reply(if run == 1 { 500 } else { 201 }, run.to_string()) }
    });
    let hook = Hook::of_request(move |asked| {
        assert_eq!((asked.key, asked.attempt), ("a key", 1));
        called.next();
        verdict.clone()
    });
    let policy = ScenarioPolicy {
        on_unknown: OnUnknown::Reconcile,
        hook: Some(hook),
        reconcile_every: Duration::from_millis(40),
        ..ScenarioPolicy::default()
    };
    let stage = arena.start(policy, service).await;
    stage.send(stage.post("\"a key\"")).await.is_first(500, "1");
    (stage, runs, calls)
}

pub async fn w46_what_happened_is_known_without_a_retry(arena: ScenarioContext) {
    let (stage, runs, calls) = undecided(&arena, HookVerdict::Happened(201, "charged")).await;
    calls.reach(1).await;
    let replay = stage.until(&stage.post("\"a key\""), |answer| answer.status == 201).await;
    replay.is_replay(201, "charged");
    assert_eq!((runs.count(), calls.count()), (1, 1));
    stage.end().await;
}

pub async fn w46_what_did_not_happen_releases_its_key_without_a_retry(arena: ScenarioContext) {
    let (stage, runs, calls) = undecided(&arena, HookVerdict::DidNotHappen).await;
    calls.reach(1).await;
    assert_eq!(runs.count(), 1, "nothing executes without a client");
    // A request that is no retry does not call the hook, and executes once the key is free.
    let other = stage.post("\"a key\"").body("{\"amount\":7}");
    stage.until(&other, |answer| answer.status == 201).await.is_first(201, "2");
    assert_eq!((runs.count(), calls.count()), (2, 1));
    stage.end().await;
}

pub async fn w46_without_a_verdict_the_outcome_stays_unknown(arena: ScenarioContext) {
    let (stage, runs, calls) = undecided(&arena, HookVerdict::CannotSay).await;
    calls.reach(2).await;
    stage.send(stage.post("\"a key\"")).await.is_rejected(409, "outcome-unknown");
    assert_eq!(runs.count(), 1);
    stage.end().await;
}
