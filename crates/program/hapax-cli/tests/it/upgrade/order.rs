//! The order whose sagas are in the fixtures: an earlier release begins them, and this one continues them.
//! Both compile this file.

use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Scope;
use hapax_saga::{
    DefinitionError, FlowContext, Saga, StepContext, StepEffect, StepError, StepRetry, UndoError,
};

/// Longer than a fixture is kept.
pub(crate) const CENTURY: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Amounts of the order that waits for its signal, of the one whose charge gets no answer, of the one
/// whose process dies in its last step, and of the one that is only in the schedule.
pub(crate) const PARKED: u64 = 100;
pub(crate) const STUCK: u64 = 200;
pub(crate) const KILLED: u64 = 300;
pub(crate) const SCHEDULED: u64 = 400;

/// Name, amount and key.
type Call = (&'static str, u64, String);

/// The systems that steps call, with their calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Systems {
    pub(crate) calls: Arc<Mutex<Vec<Call>>>,
    /// Whether calls fail or get no answer.
    pub(crate) failing: bool,
}

impl Systems {
    fn call(&self, name: &'static str, cents: u64, at: &StepContext<Self>) {
        self.calls.lock().unwrap().push((name, cents, at.key().as_str().to_owned()));
    }
}

pub(crate) type Order = Saga<u64, String, String>;

pub(crate) fn scope() -> Scope {
    Scope::of([("customer", "c")])
}

async fn reserve(at: StepContext<Systems>, cents: u64) -> Result<u64, StepError<String>> {
    at.call("reserve", cents, &at);
    Ok(cents)
}

async fn free(at: StepContext<Systems>, cents: u64, _: StepEffect<u64>) -> Result<(), UndoError> {
    at.call("free", cents, &at);
    Ok(())
}

async fn charge(at: StepContext<Systems>, cents: u64) -> Result<String, StepError<String>> {
    at.call("charge", cents, &at);
    match at.failing && cents == STUCK {
        true => Err(StepError::unknown("the bank did not answer")),
        false => Ok(format!("paid {cents}")),
    }
}

async fn notify(at: StepContext<Systems>, cents: u64) -> Result<(), StepError<String>> {
    at.call("notify", cents, &at);
    if at.failing && cents == KILLED {
        pending::<()>().await;
    }
    Ok(())
}

/// A reservation with an undo, an approval for the amount of [`PARKED`], a charge that cannot be repeated,
/// and a notice.
pub(crate) fn order(systems: &Systems) -> Result<Order, DefinitionError> {
    let mut order = Saga::define("place-order", 1, systems.clone()).retention(CENTURY);
    let retry = StepRetry::within(CENTURY).tries(3);
    let reserve = order.keyed("reserve", CENTURY, reserve).retry(retry).undo(free);
    let charge = order.once("charge", charge).no_undo();
    let notify = order.keyed("notify", CENTURY, notify).retry(retry).no_undo();
    order.flow(move |op: FlowContext, cents: u64| async move {
        let cents = op.run(reserve, cents).await?;
        if cents == PARKED {
            op.signal::<()>("approval", CENTURY).await;
        }
        let paid = op.run(charge, cents).await?;
        op.run(notify, cents).await?;
        Ok::<_, String>(paid)
    })
}
