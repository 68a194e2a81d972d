//! Growth: the swaps of a store with many records, beside those of the same store with few.
//!
//! The large stores are filled once and kept; a measurement adds less than a hundredth to them. The
//! small ones are filled anew for each round.

use std::path::Path;

use hapax_bench_cost::Any;
use hapax_bench_cost::sample::Sample;
use serde::Serialize;

use crate::Options;
use crate::cases::{Backing, TARGET_CONNECTIONS};
use crate::machine::{self, Pinning};
use crate::measure::{Records, beside, sample_of};
use crate::plot::{self, Line, Panel};
use crate::report::Spread;

/// Records of a small store when a measurement begins.
const FEW: u64 = 10_000;

/// Callers that fill a store: enough for the largest batches.
const FILLERS: &str = "512";

/// The least rate of a large store and the greatest p99, as multiples of those of a small one.
const RATE: f64 = 0.8;
const P99: f64 = 1.3;

const STORES: [(&str, Backing); 2] = [("file", Backing::File), ("postgres", Backing::Postgres)];

/// Samples of one store: of each round one with few records and one with many.
#[derive(Serialize)]
struct Growth {
    store: &'static str,
    records: u64,
    few: Vec<Sample>,
    many: Vec<Sample>,
}

impl Growth {
    /// Returns the medians of both sizes.
    fn line(&self, value: fn(&Sample) -> f64) -> Line {
        let of = |samples: &[Sample]| Spread::of(samples.iter().map(value).collect()).median;
        let points = vec![(FEW as f64, of(&self.few)), (self.records as f64, of(&self.many))];
        Line { name: self.store.into(), points }
    }

    fn spread(&self, value: impl Fn(&Sample, &Sample) -> f64) -> Spread {
        let pairs = self.many.iter().zip(&self.few);
        Spread::of(pairs.map(|(many, few)| value(many, few)).collect())
    }
}

/// Measures both stores, or those that `options` names, and prints a table.
pub(crate) async fn run(options: &Options, records: u64, plot: Option<&Path>) -> Result<(), Any> {
    let is_chosen =
        |name: &str| options.only.is_empty() || options.only.iter().any(|it| it == name);
    if let Some(unknown) = options.only.iter().find(|it| STORES.iter().all(|(name, _)| name != it))
    {
        return Err(format!("no store {unknown:?}: expected file, postgres").into());
    }
    let pinning = Pinning::of_this_machine()?;
    let folder = tempfile::Builder::new().prefix("hapax-growth-").tempdir()?;
    let mut results = Vec::new();
    for (store, backing) in STORES.into_iter().filter(|(name, _)| is_chosen(name)) {
        results.push(measure(options, store, backing, records, pinning, folder.path()).await?);
    }
    print(&results, pinning)?;
    if let Some(path) = plot {
        draw(&results, path)?;
    }
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

async fn measure(
    options: &Options,
    store: &'static str,
    backing: Backing,
    records: u64,
    pinning: Pinning,
    folder: &Path,
) -> Result<Growth, Any> {
    let folder_of = |name: String| {
        let folder = folder.join(name);
        std::fs::create_dir(&folder).map(|()| folder)
    };
    eprintln!("{store}: {records} records are added");
    let large = Records::start(Some(backing), &folder_of(format!("{store}-many"))?).await;
    fill(&large, records)?;
    let mut growth = Growth { store, records, few: Vec::new(), many: Vec::new() };
    for round in 1..=options.rounds {
        let small = folder_of(format!("{store}-few-{round}"))?;
        let small = Records::start(Some(backing), &small).await;
        fill(&small, FEW)?;
        for (records, samples) in [(&small, &mut growth.few), (&large, &mut growth.many)] {
            let mut command = pinning.server(beside("cost-swaps")?);
            command.args(records.words()).args(pinning.words());
            command.args(["--callers", &TARGET_CONNECTIONS.to_string()]);
            let sample = sample_of(command.args(["--seconds", &options.seconds.to_string()]))?;
            eprintln!("round {round}: {store} {:9.0} requests/s", sample.rate());
            samples.push(sample);
        }
    }
    Ok(growth)
}

fn fill(store: &Records, records: u64) -> Result<(), Any> {
    let mut command = std::process::Command::new(beside("cost-swaps")?);
    command.args(store.words()).args(["--callers", FILLERS, "--fill", &records.to_string()]);
    match command.status()? {
        status if status.success() => Ok(()),
        status => Err(format!("{command:?}: {status}").into()),
    }
}

fn print(results: &[Growth], pinning: Pinning) -> Result<(), Any> {
    println!();
    println!("| store | records | requests/s: median (min to max) | p50 ms | p99 ms |");
    println!("| --- | --- | --- | --- | --- |");
    for growth in results {
        for (records, samples) in [(FEW, &growth.few), (growth.records, &growth.many)] {
            let of = |value: fn(&Sample) -> f64| Spread::of(samples.iter().map(value).collect());
            let rate = of(Sample::rate);
            println!(
                "| {} | {records} | {:.0} ({:.0} to {:.0}) | {:.2} | {:.2} |",
                growth.store,
                rate.median,
                rate.min,
                rate.max,
                of(|it| f64::from(it.p50_us)).median / 1e3,
                of(|it| f64::from(it.p99_us)).median / 1e3,
            );
        }
    }
    println!();
    println!("| store | many records beside few | min / median / max | target | |");
    println!("| --- | --- | --- | --- | --- |");
    for growth in results {
        let rate = growth.spread(|many, few| many.rate() / few.rate());
        let p99 = growth.spread(|many, few| f64::from(many.p99_us) / f64::from(few.p99_us));
        let rows = [
            ("requests/s", rate, format!("≥ {RATE}"), rate.median >= RATE),
            ("p99", p99, format!("≤ {P99}"), p99.median <= P99),
        ];
        for (name, spread, target, is_met) in rows {
            let Spread { min, median, max } = spread;
            let met = if is_met { "met" } else { "missed" };
            let store = growth.store;
            println!("| {store} | {name} | {min:.2} / {median:.2} / {max:.2} | {target} | {met} |");
        }
    }
    println!();
    println!("Processor: {}. {}.", machine::processor(), pinning.describe());
    println!("Load average at the end: {}.", machine::load_average()?);
    Ok(())
}

fn draw(results: &[Growth], path: &Path) -> Result<(), Any> {
    let panel = |name: &str, value: fn(&Sample) -> f64| Panel {
        title: format!("{name} by records"),
        x: "records".into(),
        lines: results.iter().map(|growth| growth.line(value)).collect(),
    };
    let rate = panel("requests/s", Sample::rate);
    plot::draw(&[rate, panel("p99, ms", |sample| f64::from(sample.p99_us) / 1e3)], path)
}
