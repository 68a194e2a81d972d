//! Functions: their results, errors and outages.

mod answers;
mod declared;
mod errors;
mod outages;
mod reconcile;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::{
    Function, FunctionBuilder, Idempotency, LeaseHandle, OnUnknown, OutcomeClass, Receipt,
    RunError, Scope,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize, Serializer};

use super::key;

const LEASE: Duration = Duration::from_secs(30);

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Charged {
    id: String,
    cents: u64,
    note: Option<Option<f64>>,
}

fn receipt(id: &str) -> Charged {
    Charged { id: id.into(), cents: 100, note: Some(None) }
}

/// A value that cannot be written.
#[derive(Debug, Deserialize)]
struct Unwritable;

impl Serialize for Unwritable {
    fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("this value cannot be written"))
    }
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, thiserror::Error)]
enum Refused {
    #[error("declined: {reason}")]
    Declined { reason: String },
    #[error("busy")]
    Busy,
    #[error("no answer")]
    NoAnswer,
}

fn declined() -> Refused {
    Refused::Declined { reason: "too poor".into() }
}

fn class(error: &Refused) -> OutcomeClass {
    match error {
        Refused::Declined { .. } => OutcomeClass::Final,
        Refused::Busy => OutcomeClass::Retryable,
        Refused::NoAnswer => OutcomeClass::Unknown,
    }
}

type Charge = Function<Charged, Refused>;
type ChargeResult = Result<Receipt<Charged>, RunError<Charged, Refused>>;

fn declare(process: &Idempotency) -> FunctionBuilder<Charged, Refused> {
    process.function("charge").classify(class)
}

fn charge(process: &Idempotency, on_unknown: OnUnknown) -> Charge {
    declare(process).on_unknown(on_unknown).build().unwrap()
}

/// Calls with the key and the request that all of these tests use.
async fn call<W, F>(charge: &Charge, work: W) -> ChargeResult
where
    W: FnOnce(LeaseHandle) -> F + Send + 'static,
    F: Future<Output = Result<Charged, Refused>> + Send + 'static,
{
    charge.run(&Scope::shared(), &key(), &("order", 17), work).await
}

/// Executes a function without a declaration.
async fn run<T, E, R, W, F>(
    process: &Idempotency,
    request: R,
    work: W,
) -> Result<Receipt<T>, RunError<T, E>>
where
    T: Serialize + DeserializeOwned + Send + 'static,
    E: Send + 'static,
    R: Serialize,
    W: FnOnce() -> F + Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    process.at_least_once(&(Scope::shared(), key(), request), work).await
}

/// The number of executions.
#[derive(Clone, Default)]
struct Count(Arc<AtomicUsize>);

impl Count {
    fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Returns a function that is counted and returns this result.
    fn then<T, E>(
        &self,
        result: Result<T, E>,
    ) -> impl FnOnce(LeaseHandle) -> std::future::Ready<Result<T, E>> + Send + use<T, E>
    where
        T: Send,
        E: Send,
    {
        let count = self.clone();
        move |_| {
            count.0.fetch_add(1, Ordering::SeqCst);
            std::future::ready(result)
        }
    }

    /// Returns a function that is counted and takes this long.
    fn slowly(
        &self,
        takes: Duration,
    ) -> impl FnOnce(LeaseHandle) -> futures::Boxed<Result<Charged, Refused>> + Send + use<> {
        let count = self.clone();
        move |_| {
            Box::pin(async move {
                count.0.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(takes).await;
                Ok(receipt("slow"))
            })
        }
    }
}

mod futures {
    /// A boxed future.
    pub(super) type Boxed<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;
}

/// A function that must not execute.
async fn never(_: LeaseHandle) -> Result<Charged, Refused> {
    panic!("it was executed");
}

#[track_caller]
fn replayed(charged: &ChargeResult) -> &Charged {
    match charged {
        Ok(Receipt { value, replayed: true, .. }) => value,
        other => panic!("expected a replay, got {other:?}"),
    }
}

#[track_caller]
fn executed(charged: &ChargeResult) -> &Charged {
    match charged {
        Ok(Receipt { value, replayed: false, .. }) => value,
        other => panic!("expected an execution, got {other:?}"),
    }
}

#[track_caller]
fn failed(charged: &ChargeResult) -> (&Refused, OutcomeClass, bool) {
    match charged {
        Err(RunError::Failed { error, class, replayed }) => (error, *class, *replayed),
        other => panic!("expected an error of the function, got {other:?}"),
    }
}
