//! A resource that is created once for any client and device: its identifier makes the key.
//!
//! ```text
//! cargo run -p hapax --example resource
//! ```

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_core::{Function, Idempotency, MemoryStore, NaturalKey, OutcomeClass, RunError, Scope};
use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize)]
struct NewAccount {
    email: String,
    plan: &'static str,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Account {
    id: u64,
    email: String,
}

#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
enum CreateError {
    #[error("{0} is not an address")]
    NoAddress(String),
    #[error("the database is busy")]
    Busy,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    run(|line| println!("{line}")).await
}

pub(crate) async fn run(print: impl Fn(String)) -> Result<(), Box<dyn Error>> {
    let idempotency = Idempotency::builder(Arc::new(MemoryStore::default())).build()?;
    let accounts = Accounts::default();
    let create: Function<Account, CreateError> = idempotency
        .function("create account")
        .at_most_once()
        .wait(Duration::from_secs(10))
        .classify(|error| match error {
            CreateError::NoAddress(_) => OutcomeClass::Final,
            // The statement failed before it wrote anything.
            CreateError::Busy => OutcomeClass::Retryable,
        })
        .build()?;

    accounts.be_busy_once();
    let first = create_account(&create, &accounts, "me@example.com", "free").await;
    print(format!(
        "at first: {}",
        first.map_or_else(|error| error.to_string(), |a| a.id.to_string())
    ));

    // The phone and the browser of one person, at the same time.
    let (phone, browser) = tokio::join!(
        create_account(&create, &accounts, "me@example.com", "free"),
        create_account(&create, &accounts, "Me@Example.com ", "free"),
    );
    let (phone, browser) = (phone?, browser?);
    print(format!("phone: {}, browser: {}", phone.id, browser.id));

    match create_account(&create, &accounts, "me@example.com", "gold").await {
        Err(error @ RunError::KeyReused) => print(format!("another plan: {error}")),
        other => return Err(format!("not rejected: {other:?}").into()),
    }
    for _ in 0..2 {
        match create_account(&create, &accounts, "someone", "free").await {
            Err(RunError::Failed { error, replayed, .. }) => {
                print(format!("{error}, replayed: {replayed}"));
            }
            other => return Err(format!("not rejected: {other:?}").into()),
        }
    }
    print(format!("there is {} account", accounts.count()));
    Ok(())
}

async fn create_account(
    create: &Function<Account, CreateError>,
    accounts: &Accounts,
    email: &str,
    plan: &'static str,
) -> Result<Account, RunError<Account, CreateError>> {
    // Natural keys are compared byte by byte, so the address is normalized here.
    let new = NewAccount { email: email.trim().to_lowercase(), plan };
    let key = NaturalKey::new("account").part("email", &new.email).key();
    let (accounts, row) = (accounts.clone(), new.clone());
    let insert = |_| async move { accounts.insert(&row) };
    Ok(create.run(&Scope::shared(), &key, &new, insert).await?.value)
}

/// A table that numbers its rows and does not detect duplicates.
#[derive(Clone, Default)]
struct Accounts(Arc<Mutex<(Vec<Account>, bool)>>);

impl Accounts {
    fn insert(&self, new: &NewAccount) -> Result<Account, CreateError> {
        let (rows, busy) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(busy) {
            return Err(CreateError::Busy);
        }
        if !new.email.contains('@') {
            return Err(CreateError::NoAddress(new.email.clone()));
        }
        rows.push(Account { id: rows.len() as u64 + 1, email: new.email.clone() });
        rows.last().cloned().ok_or(CreateError::Busy)
    }

    fn be_busy_once(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.len()
    }
}
