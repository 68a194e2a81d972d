//! Declarations of functions, and their errors.

use std::time::Duration;

use hapax_core::machine::HookTiming;
use hapax_core::{
    Function, FunctionBuilder, FunctionError, InFlight, OnUnknown, Policy, PolicyError,
    ReconcileCall, Verdict,
};

use super::super::World;

const HOOK: HookTiming = HookTiming { after: Duration::ZERO, timeout: Duration::from_secs(1) };

async fn cannot_say(_: ReconcileCall) -> Verdict<u8> {
    Verdict::CannotSay
}

#[tokio::test]
async fn a_declaration_without_its_guarantee_is_rejected() {
    let process = World::new().process();
    let declare = |policy| {
        let function = process.function("f").policy(policy).at_most_once();
        let built: Result<Function<u8, ()>, _> = function.build();
        built.map(drop)
    };
    assert_eq!(declare(Policy::default()), Ok(()));
    assert_eq!(
        process.function::<u8, ()>("").at_most_once().build().map(drop),
        Err(FunctionError::NoName)
    );
    let mut policy = Policy::default();
    policy.terms.lease = Duration::ZERO;
    assert_eq!(declare(policy), Err(PolicyError::NoLease.into()));
    let policy = Policy { hook: Some(HOOK), ..Policy::default() };
    assert_eq!(declare(policy), Err(FunctionError::NoReconcile));
    let no_hook = process.function::<u8, ()>("f").on_unknown(OnUnknown::Reconcile).build();
    assert_eq!(no_hook.map(drop), Err(PolicyError::NoHook.into()));
}

#[tokio::test]
async fn a_function_without_a_stated_guarantee_is_rejected() {
    let process = World::new().process();
    let function = || process.function::<u8, ()>("f").wait(Duration::from_secs(5));
    // A policy does not state a guarantee, because its default would be taken for one.
    let mut policy = Policy::default();
    policy.terms.on_unknown = OnUnknown::Reexecute;
    for unstated in [function(), function().policy(policy)] {
        assert_eq!(unstated.build().map(drop), Err(FunctionError::NoGuarantee));
    }
    for (stated, on_unknown) in [
        (function().at_most_once(), OnUnknown::Block),
        (function().at_least_once(), OnUnknown::Reexecute),
        (function().reconcile_with(HOOK, cannot_say), OnUnknown::Reconcile),
    ] {
        assert_eq!(stated.build().unwrap().policy().terms.on_unknown, on_unknown);
    }
}

#[tokio::test]
async fn settings_count_in_any_order() {
    let process = World::new().process();
    let mut policy = Policy::default();
    policy.terms.lease = Duration::from_secs(60);
    let built = |build: fn(FunctionBuilder<u8, ()>) -> FunctionBuilder<u8, ()>| {
        let [before, after] = [
            build(process.function("f")).policy(policy),
            build(process.function("f").policy(policy)),
        ];
        let policy_built = *before.build().unwrap().policy();
        assert_eq!(&policy_built, after.build().unwrap().policy());
        assert_eq!(policy_built.terms.lease, Duration::from_secs(60));
        policy_built
    };
    let block = built(|function| function.on_unknown(OnUnknown::Block));
    assert_eq!(block.terms.on_unknown, OnUnknown::Block);
    let wait = built(|function| function.at_least_once().wait(Duration::from_secs(5)));
    assert_eq!(wait.in_flight, InFlight::Wait(Duration::from_secs(5)));
    let reconciles = built(|function| function.reconcile_with(HOOK, cannot_say));
    assert_eq!((reconciles.terms.on_unknown, reconciles.hook), (OnUnknown::Reconcile, Some(HOOK)));
    let blocks =
        built(|function| function.reconcile_with(HOOK, cannot_say).on_unknown(OnUnknown::Block));
    assert_eq!(blocks.terms.on_unknown, OnUnknown::Block);
}

#[tokio::test]
async fn a_hook_that_would_never_be_called_is_rejected() {
    let process = World::new().process();
    let function = || process.function::<u8, ()>("f");
    for unused in [
        function().reconcile_with(HOOK, cannot_say).on_unknown(OnUnknown::Reexecute),
        function().on_unknown(OnUnknown::Reexecute).reconcile_with(HOOK, cannot_say),
    ] {
        assert_eq!(unused.build().map(drop), Err(FunctionError::HookNeverCalled));
    }
}

#[tokio::test]
async fn debug_shows_no_request() {
    let process = World::new().process();
    let function = process.function::<u8, ()>("charge").at_most_once().build().unwrap();
    let shown = format!("{function:?}");
    assert!(shown.starts_with("Function { name: Some(\"charge\"), policy: Policy {"), "{shown}");
}
