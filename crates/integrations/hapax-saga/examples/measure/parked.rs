//! Polling among many parked sagas, and sagas that become due.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, Scope};
use hapax_saga::Sagas;
use tokio::time::{Instant, sleep, sleep_until};

use crate::counted::{Calls, Counted};
use crate::place::Place;
use crate::population::{Begun, Nap, Population, nap};
use crate::{Outcome, mark};

/// Sizes of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Parked sagas, and as many that are done.
    pub(crate) parked: u64,
    /// Sagas that are due at one time.
    pub(crate) due: u64,
    /// Length of the measurement of polls.
    pub(crate) seconds: u64,
}

/// Sagas of which each becomes due alone.
const ALONE: u64 = 20;

/// Limit of the sagas that a process runs at one time: the default.
const LIMIT: usize = 64;

const DAY: Duration = Duration::from_secs(86_400);

/// Time by which a saga may begin late.
const LATE: Duration = Duration::from_millis(1_500);

/// A process that has the definition and drives what is due.
struct Process {
    sagas: Sagas,
    nap: Nap,
    store: Arc<Counted>,
    begun: Arc<Begun>,
    driver: tokio::task::JoinHandle<bool>,
}

impl Process {
    async fn start(place: &Place) -> Outcome<Self> {
        let (store, begun) = (Counted::new(place.open().await?), Arc::<Begun>::default());
        let nap = nap(&begun)?;
        let engine = Idempotency::builder(Arc::clone(&store)).build()?;
        let sagas = Sagas::builder(engine).register(&nap).max_running(LIMIT).build()?;
        let driving = sagas.clone();
        let driver = tokio::spawn(async move { driving.run(pending(), Duration::ZERO).await });
        Ok(Self { sagas, nap, store, begun, driver })
    }

    /// Returns the number of sagas that are done.
    fn done(&self) -> u64 {
        self.sagas.stats().definitions.iter().map(|definition| definition.done).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

pub(crate) async fn measure(place: &Place, sizes: Sizes) -> Outcome<()> {
    println!("{}: {} parked sagas and as many done", place.name, sizes.parked);
    let population = Population::new(place.open().await?).await?;
    let begin = Instant::now();
    population.end(sizes.parked).await?;
    let spread = move |number: u64| DAY + DAY.mul_f64((number % 1_000) as f64 / 1_000.0);
    population.park("parked", sizes.parked, spread).await?;
    println!("  inserted in {:.0?}", begin.elapsed());
    place.settle().await;
    polls(place, sizes.seconds).await?;
    alone(place, &population).await?;
    at_once(place, &population, sizes.due).await
}

/// Measures a process that has nothing to do.
async fn polls(place: &Place, seconds: u64) -> Outcome<()> {
    let process = Process::start(place).await?;
    sleep(Duration::from_secs(3)).await;
    process.store.take();
    let (begin, before) = (Instant::now(), cpu_time()?);
    sleep(Duration::from_secs(seconds)).await;
    let span = begin.elapsed().as_secs_f64();
    let calls: Calls = process.store.take();
    let share = cpu_time()?.saturating_sub(before).as_secs_f64() / span;
    let rate = calls.all() as f64 / span;
    println!(
        "  polling: {:.2} % of a core, target 1 %{}; {rate:.2} statements a second, target 2{}",
        share * 100.0,
        mark(share < 0.01),
        mark(rate <= 2.0),
    );
    Ok(())
}

/// Measures the delays of sagas that become due at different times: copies, and others that a process
/// starts, which are parked for less than a lease.
async fn alone(place: &Place, population: &Population) -> Outcome<()> {
    let due_in = |number: u64| Duration::from_millis(5_000 + number * 370);
    let process = Process::start(place).await?;
    let begin = Instant::now();
    population.park("alone", ALONE, due_in).await?;
    let inserted = begin.elapsed();
    let copies = delays(&process, ALONE, |number| begin + due_in(number)).await?;
    report("copies become due", &copies, inserted);
    // Not beside the next one.
    drop(process);

    let process = Process::start(place).await?;
    // Longer than the ten seconds for which a saga waits without being parked.
    let due_in = |number: u64| Duration::from_millis(11_000 + number * 370);
    let begin = Instant::now();
    for number in 0..ALONE {
        let (key, millis) =
            (format!("own-{number}").parse()?, u64::try_from(due_in(number).as_millis())?);
        process.sagas.start(&process.nap, &Scope::shared(), &key, &millis).await?;
    }
    let inserted = begin.elapsed();
    let own = delays(&process, ALONE, |number| begin + due_in(number)).await?;
    report("sagas end a pause", &own, inserted);
    Ok(())
}

/// Waits until `count` steps have begun. Returns how late each did, in the order of the due times.
async fn delays(
    process: &Process,
    count: u64,
    due: impl Fn(u64) -> Instant,
) -> Outcome<Vec<Duration>> {
    while process.done() < count {
        sleep(Duration::from_millis(20)).await;
    }
    let (begins, is_once) = process.begun.read();
    if !is_once || begins.len() as u64 != count {
        return Err(format!("expected {count} steps, each called once, found others").into());
    }
    let late = |(number, begin): (u64, Instant)| begin.saturating_duration_since(due(number));
    Ok((0..).zip(begins).map(late).collect())
}

/// Prints delays. They may be longer than in truth by the time that the insertions took.
fn report(what: &str, delays: &[Duration], inserted: Duration) {
    let latest = delays.iter().max().copied().unwrap_or_default();
    println!(
        "  {what}: the latest of {} begins after {latest:.0?} (inserted within {inserted:.0?}), target {LATE:?}{}",
        delays.len(),
        mark(latest <= LATE),
    );
}

/// Lets several processes run sagas that are due at one time.
async fn at_once(place: &Place, population: &Population, count: u64) -> Outcome<()> {
    let mut processes = Vec::new();
    for _ in 0..place.processes() {
        processes.push(Process::start(place).await?);
    }
    // Time for the insertions, at a low rate.
    let due = Instant::now() + Duration::from_secs(10 + count / 500);
    let due_in = move |_| due.saturating_duration_since(Instant::now());
    population.park("at-once", count, due_in).await?;
    if Instant::now() >= due {
        return Err("expected all sagas to be inserted before they are due: insert fewer".into());
    }
    sleep_until(due).await;
    while processes.iter().map(Process::done).sum::<u64>() < count {
        sleep(Duration::from_millis(5)).await;
    }
    let ended = due.elapsed();
    let (mut begins, mut shares, mut most, mut is_once) = (Vec::new(), Vec::new(), 0, true);
    for process in &processes {
        let (own, own_once) = process.begun.read();
        shares.push(own.len());
        begins.extend(own);
        is_once &= own_once;
        most = most.max(process.begun.most());
    }
    is_once &= begins.len() as u64 == count;
    let [first, last] = [begins.iter().min(), begins.iter().max()]
        .map(|it| it.map_or(Duration::ZERO, |it| it.saturating_duration_since(due)));
    println!(
        "  {count} due at once, {} processes: first begins after {first:.0?}, last after {last:.0?}, all \
         end after {ended:.0?}, {:.0} a second; by process {shares:?}; at most {most} at one time, \
         limit {LIMIT}{}; each once{}",
        processes.len(),
        count as f64 / ended.as_secs_f64(),
        mark(most <= LIMIT),
        mark(is_once),
    );
    Ok(())
}

/// Returns the processor time of this process: user and system.
fn cpu_time() -> Outcome<Duration> {
    // Ticks of `/proc`: a hundred a second, on every Linux.
    const TICK: Duration = Duration::from_millis(10);
    let text = std::fs::read_to_string("/proc/self/stat")?;
    // The name before the state is in brackets and may contain anything.
    let (_, fields) = text.rsplit_once(')').ok_or("expected a name in /proc/self/stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: Result<Vec<u32>, _> = ticks.map(str::parse).collect();
    Ok(TICK * ticks?.iter().sum::<u32>())
}
