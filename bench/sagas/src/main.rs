//! Sagas beside workflows of durare, a library of durable execution, on one PostgreSQL server, which
//! syncs: callers at one time, five steps each that do nothing, in alternation.
//!
//!     cargo run --release --manifest-path bench/sagas/Cargo.toml --target-dir target -- [ROUNDS] [SECONDS] [CALLERS]
//!
//! Prints the sagas and workflows that ended in a second, in each round, and the median of the ratios.
//! durare runs twice: with its default pool of eight connections, and with one of 32. The promises
//! differ: durare has one process for each workflow at a time and no lease, and a start writes one row.

use std::error::Error;
use std::future::pending;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use durare::{DurableContext, DurableEngine, PostgresProvider, WorkflowOptions};
use hapax_core::{Idempotency, Scope};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_saga::{StepContext, Saga, Sagas, StepError};
use hapax_testkit::servers::{PostgresServer, PostgresServerOptions};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const STEPS: u32 = 5;

/// Number of the next saga or workflow: names are never repeated.
static NEXT: AtomicU64 = AtomicU64::new(0);

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |it| it.parse());
    let (rounds, seconds) = (number(0, 5)?.max(1), number(1, 5)?.max(1));
    let callers = number(2, 64)?.max(1);
    let options = PostgresServerOptions::new()
        .set("fsync", "on")
        .set("shared_buffers", "256MB")
        .set("max_wal_size", "4GB");
    let server = PostgresServer::start_with(options).await;
    server.create_database("durare").await;

    let saga = five()?;
    let options: PostgresOptions = server.url("postgres").parse()?;
    let engine = Idempotency::builder(PostgresStore::connect(options).await?).namespace("").build()?;
    let sagas = Sagas::builder(engine).register(&saga).build()?;
    let driving = sagas.clone();
    tokio::spawn(async move { driving.run(pending(), Duration::ZERO).await });

    let default = PostgresProvider::connect(&server.url("durare")).await?;
    let pool = PgPoolOptions::new().max_connections(32);
    let options = PgConnectOptions::from_str(&server.url("durare"))?;
    let pool = pool.connect_with(options.options([("search_path", "dbos")])).await?;
    let default = engine_of(default).await?;
    let wide = engine_of(PostgresProvider::from_pool(pool)).await?;

    println!("{callers} callers, {STEPS} steps; sagas, durare with 8 and with 32 connections, a second:");
    let span = Duration::from_secs(seconds);
    let (mut beside_default, mut beside_wide) = (Vec::new(), Vec::new());
    // The first round, which is not counted, fills caches.
    for round in 0..=rounds {
        let ours = drive(callers, span, || one_saga(sagas.clone(), saga.clone())).await?;
        let eight = drive(callers, span, || one_workflow(Arc::clone(&default))).await?;
        let many = drive(callers, span, || one_workflow(Arc::clone(&wide))).await?;
        println!("  {ours:7.0} {eight:7.0} {many:7.0}{}", if round == 0 { "  warm-up" } else { "" });
        if round > 0 {
            beside_default.push(ours / eight);
            beside_wide.push(ours / many);
        }
    }
    let (default, wide) = (median(&mut beside_default), median(&mut beside_wide));
    println!("median of the ratios, sagas to workflows: {default:.2} and {wide:.2}");
    Ok(())
}

fn median(ratios: &mut [f64]) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

fn five() -> Outcome<Saga<u32, u32, String>> {
    let mut saga = Saga::define("five", 1, ());
    let step = saga.again("step", async |_: StepContext<()>, n: u32| Ok::<_, StepError<String>>(n + 1));
    let step = step.no_undo();
    Ok(saga.flow(move |op, mut n: u32| async move {
        for nth in 0..STEPS {
            n = op.run(step.nth(nth), n).await?;
        }
        Ok(n)
    })?)
}

async fn one_saga(sagas: Sagas, saga: Saga<u32, u32, String>) -> Outcome<()> {
    let key = format!("saga-{}", NEXT.fetch_add(1, Ordering::Relaxed)).parse()?;
    let started = sagas.start(&saga, &Scope::shared(), &key, &0).await?;
    match started.outcome().await {
        Ok(STEPS) => Ok(()),
        other => Err(format!("expected {STEPS}, found {other:?}").into()),
    }
}

#[durare::step]
async fn step(ctx: &DurableContext, n: u32) -> durare::Result<u32> {
    Ok(n + 1)
}

#[durare::workflow]
async fn five_steps(ctx: DurableContext, n: u32) -> durare::Result<u32> {
    let mut n = n;
    for _ in 0..STEPS {
        n = step(&ctx, n).await?;
    }
    Ok(n)
}

async fn engine_of(provider: PostgresProvider) -> Outcome<Arc<DurableEngine>> {
    let engine = DurableEngine::builder(Arc::new(provider)).build().await?;
    engine.recover().await?;
    Ok(Arc::new(engine))
}

async fn one_workflow(engine: Arc<DurableEngine>) -> Outcome<()> {
    let id = format!("workflow-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let handle = engine.start_with(FiveSteps, 0, WorkflowOptions::with_id(&id)).await?;
    match handle.await {
        Ok(STEPS) => Ok(()),
        other => Err(format!("expected {STEPS}, found {other:?}").into()),
    }
}

/// Lets callers repeat `run` for a time. Returns the rate.
async fn drive<F>(callers: u64, span: Duration, run: impl Fn() -> F) -> Outcome<f64>
where
    F: Future<Output = Outcome<()>> + Send + 'static,
{
    let begin = Instant::now();
    let (mut running, mut ended) = (JoinSet::new(), 0_u64);
    for _ in 0..callers {
        running.spawn(run());
    }
    while let Some(run_ended) = running.join_next().await {
        run_ended??;
        ended += 1;
        if begin.elapsed() < span {
            running.spawn(run());
        }
    }
    Ok(ended as f64 / begin.elapsed().as_secs_f64())
}
