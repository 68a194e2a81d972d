//! A transfer whose rows commit in one transaction with the record of its outcome, on an sqlx pool.
//!
//!     cargo run -p hapax-postgres --features sqlx --example transact -- postgres://app@127.0.0.1/bank

use std::sync::Arc;

use hapax_core::transaction::{OperationError, TransactionBackend, Tx};
use hapax_core::{Idempotency, Key, OnUnknown, Policy, Scope};
use hapax_postgres::{PostgresStore, SqlxTransactions};

const TABLE: &str = "CREATE TABLE IF NOT EXISTS accounts (id int PRIMARY KEY, balance bigint);
    INSERT INTO accounts VALUES (1, 1000), (2, 1000) ON CONFLICT DO NOTHING";

const TRANSFER: &str =
    "UPDATE accounts SET balance = balance + CASE id WHEN 1 THEN -100 ELSE 100 END
    WHERE id IN (1, 2)";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("expected the URL of a database")?;
    let pool = sqlx::PgPool::connect(&url).await?;
    sqlx::raw_sql(TABLE).execute(&pool).await?;
    let store = Arc::new(PostgresStore::from_pool(pool.clone()).await?);
    let backend = TransactionBackend::new(Arc::new(SqlxTransactions::new(store.clone(), pool)));
    let engine = Idempotency::builder(store).namespace("orders").build()?;
    let mut policy = Policy::default();
    // A transaction that did not commit was rolled back, so it may run again.
    policy.terms.on_unknown = OnUnknown::Reexecute;
    let (scope, key) = (Scope::of([("customer", "c-1")]), Key::new("transfer-1")?);
    for _ in 0..2 {
        let receipt = engine
            .transact(&backend, (&scope, &key), "1 to 2: 100", &policy, |tx, _| transfer(tx))
            .await?;
        println!("{}, replayed: {}", receipt.value, receipt.replayed);
    }
    Ok(())
}

async fn transfer(
    mut tx: Tx<sqlx::Transaction<'static, sqlx::Postgres>>,
) -> Result<String, OperationError<String>> {
    sqlx::query(TRANSFER).execute(&mut **tx).await?;
    Ok("100 moved".to_owned())
}
