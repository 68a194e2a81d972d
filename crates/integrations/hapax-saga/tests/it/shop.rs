//! A shop whose order is a saga of three steps, and the systems that it calls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_saga::{Saga, StepContext, StepEffect, StepError, StepRetry, UndoError};
use serde::{Deserialize, Serialize};

pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A request of an order.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Cart {
    pub(crate) card: String,
    pub(crate) cents: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Refusal {
    SoldOut,
    Declined,
}

/// A call that a system received: its name, and the step's key.
pub(crate) type Call = (String, String);

/// The systems that the steps call. Each answer can be prepared; the default succeeds.
#[derive(Clone, Default)]
pub(crate) struct Systems(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    calls: Vec<Call>,
    answers: BTreeMap<String, Vec<Answer>>,
}

/// A prepared answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Reject,
    NotSent,
    Unknown,
    Hang,
    Panic,
}

impl Systems {
    pub(crate) fn answer(&self, name: &str, answers: &[Answer]) {
        self.0.lock().unwrap().answers.insert(name.into(), answers.to_vec());
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.0.lock().unwrap().calls.clone()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.calls().into_iter().map(|(name, _)| name).collect()
    }

    pub(crate) fn note(&self, name: &str, key: &str) {
        self.0.lock().unwrap().calls.push((name.into(), key.into()));
    }

    /// Returns whether an answer was prepared, and takes it.
    pub(crate) fn answered(&self, name: &str) -> bool {
        let mut inner = self.0.lock().unwrap();
        let answers = inner.answers.get_mut(name).filter(|answers| !answers.is_empty());
        answers.map(|answers| answers.remove(0)).is_some()
    }

    async fn call(&self, name: &str, key: &str) -> Result<(), StepError<()>> {
        let answer = {
            let mut inner = self.0.lock().unwrap();
            inner.calls.push((name.into(), key.into()));
            let answers = inner.answers.get_mut(name).filter(|answers| !answers.is_empty());
            answers.map(|answers| answers.remove(0))
        };
        match answer {
            None => Ok(()),
            Some(Answer::Reject) => Err(StepError::Rejected(())),
            Some(Answer::NotSent) => Err(StepError::not_sent("connection refused")),
            Some(Answer::Unknown) => Err(StepError::unknown("connection reset")),
            Some(Answer::Hang) => std::future::pending().await,
            Some(Answer::Panic) => panic!("a step panics on purpose"),
        }
    }
}

async fn reserve(at: StepContext<Systems>, cart: Cart) -> Result<u64, StepError<Refusal>> {
    at.call("reserve", at.key().as_str()).await.map_err(|error| map(error, Refusal::SoldOut))?;
    Ok(cart.cents)
}

async fn free(at: StepContext<Systems>, _: Cart, _: StepEffect<u64>) -> Result<(), UndoError> {
    undo(&at, "free").await
}

async fn charge(
    at: StepContext<Systems>,
    (card, cents): (String, u64),
) -> Result<String, StepError<Refusal>> {
    at.call("charge", at.key().as_str()).await.map_err(|error| map(error, Refusal::Declined))?;
    Ok(format!("{card}:{cents}"))
}

async fn refund(
    at: StepContext<Systems>,
    _: (String, u64),
    result: StepEffect<String>,
) -> Result<(), UndoError> {
    match result {
        StepEffect::Happened(_) => undo(&at, "refund").await,
        StepEffect::Unknown => undo(&at, "void").await,
    }
}

async fn notify(at: StepContext<Systems>, _: String) -> Result<(), StepError<Refusal>> {
    at.call("notify", at.key().as_str()).await.map_err(|error| map(error, Refusal::Declined))
}

async fn undo(at: &StepContext<Systems>, name: &str) -> Result<(), UndoError> {
    at.call(name, at.key().as_str()).await.map_err(|error| match error {
        StepError::Rejected(()) => "rejected".into(),
        StepError::NotSent(error) | StepError::Unknown(error) => error.into(),
        error => panic!("no system answers {error:?}"),
    })
}

fn map(error: StepError<()>, refusal: Refusal) -> StepError<Refusal> {
    match error {
        StepError::Rejected(()) => StepError::Rejected(refusal),
        StepError::NotSent(error) => StepError::NotSent(error),
        StepError::Unknown(error) => StepError::Unknown(error),
        error => panic!("no system answers {error:?}"),
    }
}

/// Returns the saga of an order over these systems.
pub(crate) fn order(systems: &Systems) -> Saga<Cart, String, Refusal> {
    let mut order = Saga::define("place-order", 1, systems.clone());
    let reserve = order.keyed("reserve", DAY, reserve).undo(free);
    let charge =
        order.keyed("charge", DAY, charge).retry(StepRetry::default().tries(5)).undo(refund);
    let notify = order.once("notify", notify).no_undo();
    order
        .flow(move |op, cart: Cart| async move {
            let cents = op.run(reserve, cart.clone()).await?;
            let paid = op.run(charge, (cart.card, cents)).await?;
            op.run(notify, paid.clone()).await?;
            Ok::<_, Refusal>(paid)
        })
        .unwrap()
}

pub(crate) fn cart() -> Cart {
    Cart { card: "visa".into(), cents: 1999 }
}
