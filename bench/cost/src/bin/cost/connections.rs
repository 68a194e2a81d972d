//! Layers and the gateway by the number of connections: rate, latency and processor time.

use std::path::{Path, PathBuf};

use hapax_bench_cost::Any;
use hapax_bench_cost::sample::Sample;
use serde::Serialize;

use crate::Options;
use crate::cases::{self, Case};
use crate::machine::{self, Pinning};
use crate::measure::Bench;
use crate::plot::{self, Line, Panel};
use crate::report::Spread;

/// The cases that are measured, unless the caller names others.
const CASES: [&str; 7] = [
    "axum",
    "layer-memory",
    "layer-redis",
    "layer-file",
    "layer-postgres",
    "hyper-proxy",
    "gateway-memory",
];

const CONNECTIONS: [usize; 5] = [1, 4, 16, 64, 256];

/// Samples of a case, one of each round, by the number of connections.
#[derive(Serialize)]
struct Curve {
    case: &'static str,
    points: Vec<(usize, Vec<Sample>)>,
}

fn median(samples: &[Sample], value: fn(&Sample) -> f64) -> f64 {
    Spread::of(samples.iter().map(value).collect()).median
}

fn millis(micros: u32) -> f64 {
    f64::from(micros) / 1e3
}

/// Measures the cases and prints a table.
pub(crate) async fn run(options: &Options, hapax: PathBuf, plot: Option<&Path>) -> Result<(), Any> {
    let is_chosen = |case: &&Case| match options.only.as_slice() {
        [] => CASES.contains(&case.name),
        only => only.iter().any(|name| name == case.name),
    };
    cases::choose(cases::HTTP, &options.only)?;
    let pinning = Pinning::of_this_machine()?;
    let bench = Bench::start(hapax, pinning, options.seconds, 0).await?;
    let mut curves = Vec::new();
    for case in cases::HTTP.iter().filter(is_chosen) {
        let mut points = Vec::new();
        for connections in CONNECTIONS {
            let mut samples = Vec::new();
            for _ in 0..options.rounds {
                let sample = bench.measure_at(case, connections).await?;
                eprintln!("{:16} {connections:4} {:9.0} requests/s", case.name, sample.rate());
                samples.push(sample);
            }
            points.push((connections, samples));
        }
        curves.push(Curve { case: case.name, points });
    }
    print(&curves, pinning)?;
    if let Some(path) = plot {
        let panel = |title: &str, value: fn(&Sample) -> f64| Panel {
            title: format!("{title} by connections"),
            x: "connections".into(),
            lines: curves.iter().map(|curve| curve.line(value)).collect(),
        };
        let rate = panel("requests/s", Sample::rate);
        plot::draw(&[rate, panel("p99, ms", |sample| millis(sample.p99_us))], path)?;
    }
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_string_pretty(&curves)?)?;
    }
    Ok(())
}

impl Curve {
    fn line(&self, value: fn(&Sample) -> f64) -> Line {
        let points = self.points.iter();
        let points = points.map(|(count, samples)| (*count as f64, median(samples, value)));
        Line { name: self.case.into(), points: points.collect() }
    }
}

fn print(curves: &[Curve], pinning: Pinning) -> Result<(), Any> {
    println!();
    println!("| case | connections | requests/s | CPU µs/request | p50 ms | p99 ms |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for curve in curves {
        for (connections, samples) in &curve.points {
            println!(
                "| {} | {connections} | {:.0} | {:.1} | {:.2} | {:.2} |",
                curve.case,
                median(samples, Sample::rate),
                median(samples, Sample::cpu_per_request),
                median(samples, |sample| millis(sample.p50_us)),
                median(samples, |sample| millis(sample.p99_us)),
            );
        }
    }
    println!();
    println!("Processor: {}. {}.", machine::processor(), pinning.describe());
    println!("Load average at the end: {}.", machine::load_average()?);
    Ok(())
}
