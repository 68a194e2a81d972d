//! What is refused when a function is declared.

use std::time::Duration;

use hapax::machine::Hook;
use hapax::{Function, FunctionError, OnUnknown, Policy, PolicyError};

use super::super::World;

#[tokio::test]
async fn what_would_break_a_promise_is_refused() {
    let process = World::new().process();
    let declare = |policy| {
        let built: Result<Function<u8, ()>, _> = process.function("f").policy(policy).build();
        built.map(drop)
    };
    assert_eq!(declare(Policy::default()), Ok(()));
    assert_eq!(process.function::<u8, ()>("").build().map(drop), Err(FunctionError::NoName));
    let mut policy = Policy::default();
    policy.terms.lease = Duration::ZERO;
    assert_eq!(declare(policy), Err(PolicyError::NoLease.into()));
    let hook = Hook { after: Duration::ZERO, timeout: Duration::from_secs(1) };
    let policy = Policy { hook: Some(hook), ..Policy::default() };
    assert_eq!(declare(policy), Err(FunctionError::NoReconcile));
    let nobody = process.function::<u8, ()>("f").on_unknown(OnUnknown::Reconcile).build();
    assert_eq!(nobody.map(drop), Err(PolicyError::NoHook.into()));
}

#[tokio::test]
async fn nothing_that_was_asked_is_shown() {
    let process = World::new().process();
    let function = process.function::<u8, ()>("charge").build().unwrap();
    let shown = format!("{function:?}");
    assert!(shown.starts_with("Function { name: Some(\"charge\"), policy: Policy {"), "{shown}");
}
