//! A payment at a provider that accepts idempotency keys, and that a hook queries if the outcome is
//! unknown.
//!
//! ```text
//! cargo run -p hapax --example payment
//! ```

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::machine::HookTiming;
use hapax_core::{
    Function, Idempotency, MemoryStore, NaturalKey, OutcomeClass, ReconcileCall, RunError, Scope,
    Verdict,
};
use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize, Deserialize)]
struct Payment {
    order: String,
    cents: u64,
}

#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
enum PayError {
    #[error("the card was declined")]
    Declined,
    #[error("the provider could not be reached")]
    NotReached,
    #[error("the provider did not answer")]
    NoAnswer,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run(|line| println!("{line}")).await
}

pub(crate) async fn run(print: impl Fn(String)) -> Result<(), Box<dyn Error>> {
    let idempotency = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
    let provider = Provider::default();
    let pay = declare(&idempotency, &provider)?;

    for (order, cents) in [("o-1", 500), ("o-1", 500), ("o-2", 0), ("o-2", 0), ("o-3", 700)] {
        let line = match charge(&pay, &provider, order, cents).await {
            Ok((charge, false)) => format!("charged {charge}"),
            Ok((charge, true)) => format!("charged before: {charge}"),
            Err(RunError::Failed { error, class, replayed: false }) => {
                format!("{error}: {class:?}")
            }
            Err(RunError::Failed { error, .. }) => format!("{error}, as before"),
            Err(other) => return Err(other.into()),
        };
        print(format!("{order}: {line}"));
    }

    // The provider charges, and its reply is lost, so the outcome is unknown. The next call queries
    // the provider, and returns the outcome without a second charge.
    provider.lose_next_reply();
    for _ in 0..2 {
        match charge(&pay, &provider, "o-4", 900).await {
            Ok((charge, replayed)) => print(format!("o-4: {charge}, replayed: {replayed}")),
            Err(error) => print(format!("o-4: {error}")),
        }
    }
    print(format!("the provider charged {} times", provider.charges()));
    Ok(())
}

fn declare(
    idempotency: &Idempotency,
    provider: &Provider,
) -> Result<Function<String, PayError>, Box<dyn Error>> {
    // The request of a crashed process may still be in progress to the provider: after a lapse the
    // hook is called only when it must have arrived.
    let hook = HookTiming { after: Duration::from_secs(60), timeout: Duration::from_secs(5) };
    let provider = provider.clone();
    let hook_call = move |call: ReconcileCall| {
        let provider = provider.clone();
        async move {
            // `DidNotHappen` promises that the charge never will happen. So the provider has to
            // reject this key from now on, for all fences up to this one.
            match provider.find_or_reject(call.downstream.as_str(), call.fence.get()) {
                Some(charge) => Verdict::Happened(charge),
                None => Verdict::DidNotHappen,
            }
        }
    };
    let pay =
        idempotency.function("pay").reconcile_with(hook, hook_call).classify(|error| match error {
            PayError::Declined => OutcomeClass::Final,
            PayError::NotReached => OutcomeClass::Retryable,
            PayError::NoAnswer => OutcomeClass::Unknown,
        });
    Ok(pay.build()?)
}

/// Returns the charge, and true if an earlier call made it.
async fn charge(
    pay: &Function<String, PayError>,
    provider: &Provider,
    order: &str,
    cents: u64,
) -> Result<(String, bool), RunError<String, PayError>> {
    let payment = Payment { order: order.into(), cents };
    let key = NaturalKey::payment(order).key();
    let customer = Scope::of([("customer", "c-1")]);
    let (provider, request) = (provider.clone(), payment.clone());
    let answer = pay
        .run(&customer, &key, &payment, |lease| async move {
            // Not under `key`: for the provider all our customers are one, and two of them may have
            // an order of the same name.
            provider.charge(lease.downstream().as_str(), lease.fence().get(), &request)
        })
        .await?;
    Ok((answer.value, answer.replayed))
}

/// A provider that makes one charge for each key. This one also accepts a fence.
#[derive(Clone, Default)]
struct Provider(Arc<Mutex<Ledger>>);

#[derive(Default)]
struct Ledger {
    charges: BTreeMap<String, String>,
    rejected: BTreeMap<String, u64>,
    loses_reply: bool,
}

impl Provider {
    fn charge(&self, key: &str, fence: u64, payment: &Payment) -> Result<String, PayError> {
        let mut ledger = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Ledger { charges, rejected, loses_reply } = &mut *ledger;
        if rejected.get(key).is_some_and(|until| fence <= *until) {
            return Err(PayError::NotReached);
        }
        if payment.cents == 0 {
            return Err(PayError::Declined);
        }
        let next = format!("ch_{} for {}", charges.len() + 1, payment.order);
        let charge = charges.entry(key.to_owned()).or_insert(next).clone();
        if std::mem::take(loses_reply) { Err(PayError::NoAnswer) } else { Ok(charge) }
    }

    fn find_or_reject(&self, key: &str, fence: u64) -> Option<String> {
        let mut ledger = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = ledger.charges.get(key).cloned();
        if found.is_none() {
            ledger.rejected.insert(key.to_owned(), fence);
        }
        found
    }

    fn lose_next_reply(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).loses_reply = true;
    }

    fn charges(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).charges.len()
    }
}
