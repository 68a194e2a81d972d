//! An order of several steps, each a function with the key of the order. If a step fails, the next
//! call executes only the steps that were not done.
//!
//! The order may execute again, because its steps do not. If the outcome of a step is unknown, an
//! operator decides it.
//!
//! ```text
//! cargo run -p hapax --example order
//! ```

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hapax_core::{
    Function, FunctionError, Idempotency, Key, MemoryStore, NaturalKey, OutcomeClass, Receipt,
    RunError, Scope,
};
use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize, Deserialize)]
struct Order {
    customer: String,
    cart: String,
    apples: u32,
}

#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
enum OrderError {
    #[error("only {left} apples are left")]
    SoldOut { left: u32 },
    #[error("the till is locked")]
    Locked,
    #[error("{0}")]
    Step(String),
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run(|line| println!("{line}")).await
}

pub(crate) async fn run(print: impl Fn(String)) -> Result<(), Box<dyn Error>> {
    let idempotency = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
    let shop = Arc::new(Shop::open(&idempotency)?);

    // The cart makes the key: another tap on the button is the same order.
    let order = Order { customer: "c-1".into(), cart: "cart-9".into(), apples: 3 };
    for tap in 1..=3 {
        match shop.place(&order).await {
            Ok(Receipt { value, replayed, .. }) => print(format!("tap {tap}: {value}, {replayed}")),
            Err(error) => print(format!("tap {tap}: {error}")),
        }
    }
    let large = Order { cart: "cart-10".into(), apples: 30, ..order };
    for _ in 0..2 {
        if let Err(error) = shop.place(&large).await {
            print(format!("large: {error}"));
        }
    }
    let (apples, charges) = shop.books();
    print(format!("{apples} apples left, {charges} charge"));
    Ok(())
}

struct Shop {
    place: Function<String, OrderError>,
    reserve: Function<u32, OrderError>,
    charge: Function<String, OrderError>,
    books: Mutex<(u32, u32)>,
    charges_tried: AtomicU32,
}

impl Shop {
    fn open(idempotency: &Idempotency) -> Result<Self, FunctionError> {
        // `SoldOut` is a final outcome. `Locked` means that nothing was charged.
        let class = |error: &OrderError| match error {
            OrderError::SoldOut { .. } => OutcomeClass::Final,
            OrderError::Locked => OutcomeClass::Retryable,
            OrderError::Step(_) => OutcomeClass::Unknown,
        };
        Ok(Self {
            // It only calls the other functions, which do not execute again.
            place: idempotency.function("place order").at_least_once().classify(class).build()?,
            // If a process crashed during one of these, another execution could take the apples, or
            // the money, twice.
            reserve: idempotency.function("reserve").at_most_once().classify(class).build()?,
            charge: idempotency.function("charge").at_most_once().classify(class).build()?,
            books: Mutex::new((10, 0)),
            charges_tried: AtomicU32::new(0),
        })
    }

    async fn place(
        self: &Arc<Self>,
        order: &Order,
    ) -> Result<Receipt<String>, RunError<String, OrderError>> {
        let scope = Scope::of([("customer", &order.customer)]);
        let key = NaturalKey::order(&order.customer, &order.cart).key();
        let (shop, order_, scope_, key_) =
            (Arc::clone(self), order.clone(), scope.clone(), key.clone());
        let steps = |_| async move { shop.steps(&scope_, &key_, order_).await };
        self.place.run(&scope, &key, order, steps).await
    }

    /// Each step has a separate record under the same key, because its function has another name.
    async fn steps(
        self: &Arc<Self>,
        scope: &Scope,
        key: &Key,
        order: Order,
    ) -> Result<String, OrderError> {
        let (shop, apples) = (Arc::clone(self), order.apples);
        let reserve = move |_| async move { shop.take(apples) };
        let left = match self.reserve.run(scope, key, &apples, reserve).await {
            Ok(answer) => answer.value,
            Err(RunError::Failed { error, .. }) => return Err(error),
            Err(other) => return Err(OrderError::Step(other.to_string())),
        };
        let shop = Arc::clone(self);
        let charge = |_| async move { shop.collect() };
        match self.charge.run(scope, key, &order, charge).await {
            Ok(answer) => Ok(format!("{} ({left} left)", answer.value)),
            Err(RunError::Failed { error, .. }) => Err(error),
            Err(other) => Err(OrderError::Step(other.to_string())),
        }
    }

    fn take(&self, apples: u32) -> Result<u32, OrderError> {
        let (left, _) = &mut *self.books.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.checked_sub(apples).ok_or(OrderError::SoldOut { left: *left })?;
        Ok(*left)
    }

    /// Fails the first time, before it charges.
    fn collect(&self) -> Result<String, OrderError> {
        if self.charges_tried.fetch_add(1, Ordering::SeqCst) == 0 {
            return Err(OrderError::Locked);
        }
        let (_, charges) = &mut *self.books.lock().unwrap_or_else(PoisonError::into_inner);
        *charges += 1;
        Ok(format!("ch_{charges}"))
    }

    fn books(&self) -> (u32, u32) {
        *self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
