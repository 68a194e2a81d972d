//! The bank as a process, with settings from its environment. In tests it kills itself at a given
//! step.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `BANK_LISTEN` | address to listen on, such as `127.0.0.1:3000` |
//! | `BANK_STORE` | URL of the database, for records |
//! | `BANK_POOL` | URL of the same database, for transfers, if it has another address |
//! | `BANK_DIE` | average number of steps to SIGKILL; prints the step on standard error |
//! | `BANK_SEED` | seed of that choice |
//! | `BANK_BUG` | planted bug: `outside`, `early` |

mod deadly;

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, Pool, Runtime};
use hapax_bank::{Bank, app};
use hapax_core::transaction::{TransactionBackend, TxOptions};
use hapax_core::{Idempotency, InFlight, OnUnknown, Policy};
use hapax_postgres::{PgTransactions, PostgresStore};
use tokio_postgres::{Config, NoTls};

use deadly::{Deadly, Death};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("BANK_STORE")?;
    let config: Config = env::var("BANK_POOL").as_ref().unwrap_or(&url).parse()?;
    let death = Arc::new(Death::of_environment()?);
    let second = Duration::from_secs(1);
    let terms = TxOptions { commit_check: second, ..TxOptions::default() };

    let store = Arc::new(PostgresStore::connect(url.parse()?).await?);
    let pool = Pool::builder(Manager::new(config, NoTls))
        .max_size(2)
        .wait_timeout(Some(terms.begin))
        .runtime(Runtime::Tokio1)
        .build()?;
    let transactions = PgTransactions::new(
        Arc::clone(&store),
        move || {
            let pool = pool.clone();
            async move { pool.get().await }
        },
        |connection| connection,
    );
    let transactions = transactions.idle(second);
    let (store, transactions) = deadly::both(store, transactions, death);
    let bank = Bank {
        engine: Idempotency::builder(store).namespace("bank").build()?,
        backend: TransactionBackend { terms, ..TransactionBackend::<Deadly>::new(transactions) },
        policy: policy(),
    };
    let listener = tokio::net::TcpListener::bind(env::var("BANK_LISTEN")?).await?;
    let engine = bank.engine.clone();
    let ended = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    axum::serve(listener, app(Arc::new(bank))?).with_graceful_shutdown(ended).await?;
    // Outcomes that are only in memory would end with the process.
    engine.drain().await;
    Ok(())
}

/// Returns a policy with a short lease, so that a retry soon takes over from a crashed process.
fn policy() -> Policy {
    let mut policy = Policy::default();
    policy.terms.lease = Duration::from_secs(1);
    // A transfer that crashed was rolled back, so that a second execution has no second effect.
    policy.terms.on_unknown = OnUnknown::Reexecute;
    policy.in_flight = InFlight::Wait(Duration::from_secs(2));
    policy
}
