//! The hook that is asked what became of a call.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::machine::Hook;
use hapax::{Doubt, FencingToken, Reconciled, RunError};

use super::super::World;
use super::{Charge, Count, Receipt, Refused, call, declare, executed, never, receipt, replayed};

const HOOK: Hook = Hook { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };

/// A function whose hook answers this, and what the hook was asked.
fn asking<F, A>(world: &World, answer: F) -> (Charge, Arc<Mutex<Vec<FencingToken>>>)
where
    F: Fn(Doubt) -> A + Send + Sync + 'static,
    A: Future<Output = Reconciled<Receipt>> + Send + 'static,
{
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let ask = move |doubt: Doubt| {
        seen.lock().unwrap().push(doubt.fence);
        assert_eq!(doubt.request::<(String, u8)>().unwrap(), ("order".to_owned(), 17));
        assert_eq!(doubt.key.as_str(), "k-1");
        answer(doubt)
    };
    (declare(&world.process()).reconcile(HOOK, ask).build().unwrap(), asked)
}

async fn doubtful(charge: &Charge) {
    call(charge, Count::default().then(Err(Refused::NoAnswer))).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn what_the_hook_says_happened_is_the_answer() {
    let world = World::new();
    let (charge, asked) = asking(&world, |_| async { Reconciled::Happened(receipt("found")) });
    doubtful(&charge).await;
    for _ in 0..2 {
        assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
    }
    assert_eq!(asked.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_the_hook_says_did_not_happen_is_executed() {
    let world = World::new();
    let (charge, asked) = asking(&world, |_| async { Reconciled::DidNotHappen });
    doubtful(&charge).await;
    let answer = call(&charge, Count::default().then(Ok(receipt("second")))).await;
    assert_eq!(executed(&answer), &receipt("second"));
    assert!(asked.lock().unwrap()[0] < answer.unwrap().fence);
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_cannot_say_panics_or_hangs_leaves_it_unknown() {
    let world = World::new();
    let (charge, asked) = asking(&world, |_| async { Reconciled::CannotSay });
    doubtful(&charge).await;
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    let (panics, _) = asking(&world, |_| async { panic!("in the hook") });
    assert!(matches!(call(&panics, never).await, Err(RunError::OutcomeUnknown)));
    let (hangs, _) = asking(&world, |_| std::future::pending());
    assert!(matches!(call(&hangs, never).await, Err(RunError::OutcomeUnknown)));
    // The next call asks again.
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    assert_eq!(asked.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_panic_leads_to_the_hook_too() {
    let world = World::new();
    let (charge, _) = asking(&world, |_| async { Reconciled::Happened(receipt("found")) });
    assert!(matches!(call(&charge, never).await, Err(RunError::Panicked)));
    assert_eq!(replayed(&call(&charge, never).await), &receipt("found"));
}
