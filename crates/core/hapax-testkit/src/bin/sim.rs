//! Simulates many schedules: `sim --seeds N [--from SEED] [--threads N]`, or one: `sim --seed
//! SEED`.

use std::process::ExitCode;

use hapax_core::{Clock, SystemClock};
use hapax_testkit::sim::{self, SimFailure, Tally};

const USAGE: &str = "usage: sim [--seeds N] [--from SEED] [--threads N] | sim --seed SEED";

struct SimOptions {
    from: u64,
    seeds: u64,
    threads: u64,
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(64);
    };
    let clock = SystemClock;
    let start = clock.now();
    match run(&options) {
        Ok(tally) => {
            let seconds = clock.now().since(start).as_secs_f64();
            print!("{tally}");
            println!("{:.0} schedules/s, {seconds:.1} s", options.seeds as f64 / seconds);
            let (rarest, times) = tally.rarest();
            println!("every promise held; the rarest fault, {}: {times}", rarest.words());
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            eprintln!("again: sim --seed {}", failure.seed);
            ExitCode::FAILURE
        }
    }
}

fn options() -> Option<SimOptions> {
    let mut options = SimOptions { from: 0, seeds: 100_000, threads: 2 };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value: u64 = arguments.next()?.replace('_', "").parse().ok()?;
        match name.as_str() {
            "--seeds" => options.seeds = value,
            "--from" => options.from = value,
            "--threads" => options.threads = value.clamp(1, 64),
            "--seed" => (options.from, options.seeds, options.threads) = (value, 1, 1),
            _ => return None,
        }
    }
    Some(options)
}

/// Splits the seeds among threads. Returns the failure of the smallest seed that failed.
fn run(options: &SimOptions) -> Result<Tally, Box<SimFailure>> {
    let SimOptions { from, seeds, threads } = *options;
    let share = |thread: u64| from + seeds * thread / threads;
    let parts: Vec<_> = std::thread::scope(|scope| {
        let parts: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || sim::run(share(thread)..share(thread + 1))))
            .collect();
        parts.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
    });
    let mut sum = Tally::default();
    for part in parts {
        match part {
            Ok(tally) => sum += &tally?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
    Ok(sum)
}
