//! Rules of functions over a store: they execute once and replay their outcome.
//!
//! [`rules`] takes two engines over one store, which act as two processes do. `two_processes` (with
//! the feature `servers`) has real processes, and kills, stops and abandons them.

#![allow(
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a rule fails by panicking"
)]

#[cfg(feature = "servers")]
mod processes;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::{
    Claim, Fingerprint, FingerprintScheme, Function, Idempotency, Key, OnUnknown, OperationRequest,
    OutcomeClass, Policy, Receipt, RunError, Scope,
};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::task::JoinSet;

#[cfg(feature = "servers")]
pub use processes::{ProcessRole, two_processes};

/// Timeout of calls that wait for one another; longer than any of them takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Values that serde supports and JSON does not.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Everything {
    wide: (u128, i128),
    keyed: BTreeMap<(u8, char), Option<Option<()>>>,
    infinite: f64,
    text: String,
}

fn everything() -> Everything {
    Everything {
        wide: (u128::MAX, i128::MIN),
        keyed: BTreeMap::from([
            ((1, 'a'), Some(None)),
            ((2, 'é'), None),
            ((3, '\0'), Some(Some(()))),
        ]),
        infinite: f64::NEG_INFINITY,
        text: "\u{10ffff}\"\n".into(),
    }
}

/// An error with values in it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Refused {
    Declined { by: String, code: u128 },
    Broken,
}

fn declined() -> Refused {
    Refused::Declined { by: "the bank".into(), code: u128::MAX }
}

fn key() -> Key {
    Key::new("k-1").unwrap()
}

/// Declares a function in two processes, by a name that only one rule uses.
fn declare(
    engines: &[Idempotency; 2],
    name: &str,
    on_unknown: OnUnknown,
) -> [Function<Everything, Refused>; 2] {
    engines.each_ref().map(|engine| {
        let function = engine.function(name).on_unknown(on_unknown).wait(TIMEOUT);
        let class = |error: &Refused| match error {
            Refused::Declined { .. } => OutcomeClass::Final,
            Refused::Broken => OutcomeClass::Unknown,
        };
        function.classify(class).build().unwrap()
    })
}

async fn call<F>(
    function: &Function<Everything, Refused>,
    work: F,
) -> Result<Receipt<Everything>, RunError<Everything, Refused>>
where
    F: Future<Output = Result<Everything, Refused>> + Send + 'static,
{
    function.run(&Scope::shared(), &key(), "the request", |_| work).await
}

/// An operation that must not execute.
async fn never() -> Result<Everything, Refused> {
    panic!("it was executed")
}

/// Checks all rules of functions over any store. `engines` are two over the same store, which is
/// empty.
pub async fn rules(engines: &[Idempotency; 2]) {
    a_value_comes_back_whole(engines).await;
    one_of_many_calls_executes(engines).await;
    a_final_error_comes_back_typed(engines).await;
    what_is_unknown_goes_by_the_policy(engines).await;
    a_dropped_caller_loses_nothing(engines).await;
    a_lapsed_lease_goes_by_the_policy(engines).await;
    another_request_is_refused(engines).await;
}

async fn a_value_comes_back_whole(engines: &[Idempotency; 2]) {
    let [here, there] = declare(engines, "value", OnUnknown::Reexecute);
    let first = call(&here, async { Ok(everything()) }).await.unwrap();
    let again = call(&there, never()).await.unwrap();
    assert_eq!(first, Receipt { value: everything(), replayed: false, fence: first.fence });
    assert_eq!(again, Receipt { replayed: true, ..first });
}

async fn one_of_many_calls_executes(engines: &[Idempotency; 2]) {
    let executed = Arc::new(AtomicUsize::new(0));
    let mut calls = JoinSet::new();
    for function in declare(engines, "many", OnUnknown::Block) {
        for _ in 0..25 {
            let (function, executed) = (function.clone(), Arc::clone(&executed));
            calls.spawn(async move {
                let work = async move {
                    executed.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    Ok(everything())
                };
                call(&function, work).await.unwrap()
            });
        }
    }
    let answers = calls.join_all().await;
    assert_eq!(executed.load(Ordering::SeqCst), 1);
    assert_eq!(answers.iter().filter(|answer| !answer.replayed).count(), 1);
    assert!(answers.iter().all(|answer| answer.value == everything()));
}

async fn a_final_error_comes_back_typed(engines: &[Idempotency; 2]) {
    let [here, there] = declare(engines, "error", OnUnknown::Reexecute);
    for (answer, again) in
        [(call(&here, async { Err(declined()) }).await, false), (call(&there, never()).await, true)]
    {
        let Err(RunError::Failed { error, class: OutcomeClass::Final, replayed }) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!((error, replayed), (declined(), again));
    }
}

async fn what_is_unknown_goes_by_the_policy(engines: &[Idempotency; 2]) {
    let [here, there] = declare(engines, "again", OnUnknown::Reexecute);
    let panicked = call(&here, never()).await;
    assert!(matches!(panicked, Err(RunError::Panicked)), "{panicked:?}");
    assert!(!call(&there, async { Ok(everything()) }).await.unwrap().replayed);
    let [here, there] = declare(engines, "blocked", OnUnknown::Block);
    let broken = call(&here, async { Err(Refused::Broken) }).await;
    let unknown = |answer: &_| {
        matches!(
            answer,
            Err(RunError::Failed { class: OutcomeClass::Unknown, replayed: false, .. })
        )
    };
    assert!(unknown(&broken), "{broken:?}");
    for function in [here, there] {
        let blocked = call(&function, never()).await;
        assert!(matches!(blocked, Err(RunError::OutcomeUnknown)), "{blocked:?}");
    }
}

async fn a_dropped_caller_loses_nothing(engines: &[Idempotency; 2]) {
    let [here, there] = declare(engines, "dropped", OnUnknown::Block);
    let ((begin, begun), (end, ended)) = (oneshot::channel(), oneshot::channel::<()>());
    let work = async move {
        begin.send(()).unwrap();
        ended.await.unwrap();
        Ok(everything())
    };
    let caller = tokio::spawn(async move { call(&here, work).await });
    begun.await.unwrap();
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    let copy = tokio::spawn(async move { call(&there, never()).await });
    end.send(()).unwrap();
    assert!(copy.await.unwrap().unwrap().replayed);
}

/// A request that can be claimed without a function, as by a process that crashes during an
/// execution.
struct Same;

impl OperationRequest for Same {
    fn scheme(&self) -> FingerprintScheme {
        FingerprintScheme::new("same/1").unwrap()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        (*scheme == self.scheme()).then(|| Fingerprint::builder("same/1").finish())
    }
}

async fn a_lapsed_lease_goes_by_the_policy(engines: &[Idempotency; 2]) {
    for on_unknown in [OnUnknown::Reexecute, OnUnknown::Block] {
        let [_, there] = declare(engines, &format!("lapsed {on_unknown:?}"), on_unknown);
        let mut policy = *there.policy();
        policy.terms.lease = Policy::MIN_LEASE;
        let scope = there.scope(&Scope::shared());
        let claimed = engines[0].claim(&scope, &key(), &Same, &policy).await.unwrap();
        assert!(matches!(claimed, Claim::Execute(_)));
        drop(claimed);
        let work = |lease: hapax_core::LeaseHandle| async move {
            assert_eq!(lease.attempt(), 2);
            Ok(everything())
        };
        let next = there.run_request(&Scope::shared(), &key(), &Same, work).await;
        match on_unknown {
            OnUnknown::Block => assert!(matches!(next, Err(RunError::OutcomeUnknown)), "{next:?}"),
            _ => assert!(!next.unwrap().replayed),
        }
    }
}

async fn another_request_is_refused(engines: &[Idempotency; 2]) {
    let [here, there] = declare(engines, "reused", OnUnknown::Reexecute);
    call(&here, async { Ok(everything()) }).await.unwrap();
    let other = there.run(&Scope::shared(), &key(), "another request", |_| never()).await;
    assert!(matches!(other, Err(RunError::KeyReused)), "{other:?}");
}
