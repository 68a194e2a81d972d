//! Results of a run, for people: tables in Markdown.

use hapax_bench_cost::sample::Sample;

use crate::cases::REFERENCE;
use crate::report::{GoalResult, Report, Spread, Unit};

pub(crate) fn print(report: &Report) {
    print_cases(report);
    if !report.goals.is_empty() {
        print_goals(report);
    }
    println!();
    println!(
        "Core: the share of a core that the server had. Others: the share of that core that other \
         processes had. Ratios are taken within rounds; a target is met by the median."
    );
    println!("Processor: {}. {}.", report.processor, report.pinning.describe());
    let noise = match report.noise() {
        Some(noise) => format!("{REFERENCE} varied by {:.0} % between rounds; ", noise * 100.0),
        None => String::new(),
    };
    let percent = |share: Spread| {
        format!("{:.0} % (median; {:.0} % at most)", share.median * 100.0, share.max * 100.0)
    };
    let others = match report.others() {
        Some(share) => format!("other processes had {} of the server's core; ", percent(share)),
        None => String::new(),
    };
    let beside_load = match report.beside_load() {
        Some(share) => format!(
            "{} of the load generator's core while {REFERENCE} was measured; ",
            percent(share)
        ),
        None => String::new(),
    };
    println!(
        "Noise: {noise}{others}{beside_load}load average {} at the start, {} at the end.",
        report.load_at_start, report.load_at_end
    );
}

fn print_cases(report: &Report) {
    println!();
    println!(
        "| case | requests/s: median (min to max) | CPU µs/request | core | others | p50 ms | p99 ms |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for case in &report.cases {
        if let Some(reason) = &case.failed {
            let reason = reason.lines().next().unwrap_or_default();
            println!("| {} | failed: {reason} | | | | | |", case.name);
            continue;
        }
        let rate = case.spread(Sample::rate);
        let others = match case.samples.iter().all(|sample| sample.others().is_some()) {
            true => {
                let share = case.spread(|sample| sample.others().unwrap_or_default()).median;
                format!("{:.0} %", share * 100.0)
            }
            false => "–".into(),
        };
        let millis =
            |value: fn(&Sample) -> u32| case.spread(|sample| f64::from(value(sample)) / 1e3).median;
        println!(
            "| {} | {:.0} ({:.0} to {:.0}) | {:.1} | {:.0} % | {others} | {:.2} | {:.2} |",
            case.name,
            rate.median,
            rate.min,
            rate.max,
            case.spread(Sample::cpu_per_request).median,
            case.spread(Sample::busy).median * 100.0,
            millis(|sample| sample.p50_us),
            millis(|sample| sample.p99_us),
        );
    }
}

fn print_goals(report: &Report) {
    println!();
    println!(
        "| case | median requests/s | CPU µs/request | beside it | min / median / max | target | |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for goal in &report.goals {
        let Some(case) = report.case(goal.case) else { continue };
        println!(
            "| {} | {:.0} | {:.1} | {} | {} | {} | {} |",
            goal.case,
            case.spread(Sample::rate).median,
            case.spread(Sample::cpu_per_request).median,
            beside(report, goal),
            reached(goal),
            target(goal),
            match goal.met {
                Some(true) => "met",
                Some(false) => "missed",
                None => "",
            },
        );
    }
}

fn beside(report: &Report, goal: &GoalResult) -> String {
    let Some(peer) = goal.beside.and_then(|name| report.case(name)) else {
        return "its own CPU µs".into();
    };
    let rate = peer.spread(Sample::rate).median;
    let cpu = peer.spread(Sample::cpu_per_request).median;
    format!("{}: {rate:.0}, {cpu:.1} µs", peer.name)
}

fn reached(goal: &GoalResult) -> String {
    let spread = goal.reached;
    match goal.unit {
        Unit::CpuMicros => {
            format!("{:.1} / {:.1} / {:.1} µs", spread.min, spread.median, spread.max)
        }
        Unit::Ratio => format!("{:.2} / {:.2} / {:.2}", spread.min, spread.median, spread.max),
        Unit::AddedMillis => {
            format!("{:+.2} / {:+.2} / {:+.2} ms at p50", spread.min, spread.median, spread.max)
        }
    }
}

fn target(goal: &GoalResult) -> String {
    match (goal.target, goal.unit) {
        (None, _) => "–".into(),
        (Some(least), Unit::Ratio) => format!("≥ {least}"),
        (Some(most), Unit::CpuMicros) => format!("≤ {most} µs"),
        (Some(most), Unit::AddedMillis) => format!("≤ {most:+} ms"),
    }
}
