//! Results of a run, for programs.

use hapax_bench_cost::Any;
use hapax_bench_cost::sample::Sample;
use serde::Serialize;

use crate::Options;
use crate::cases::{Case, GOALS, Goal, REFERENCE, TARGET_CONNECTIONS};
use crate::machine::{self, Pinning};

/// Results of a run.
#[derive(Serialize)]
pub(crate) struct Report {
    /// Time of its end, in seconds since the Unix epoch.
    pub(crate) unix_time: u64,
    pub(crate) processor: String,
    pub(crate) pinning: Pinning,
    pub(crate) load_at_start: String,
    pub(crate) load_at_end: String,
    pub(crate) seconds: f64,
    pub(crate) rounds: usize,
    pub(crate) connections: usize,
    pub(crate) cases: Vec<CaseResult>,
    pub(crate) goals: Vec<GoalResult>,
}

/// Samples of a case, one of each round.
#[derive(Serialize)]
pub(crate) struct CaseResult {
    pub(crate) name: String,
    pub(crate) samples: Vec<Sample>,
    /// Reason for which a round has no sample.
    pub(crate) failed: Option<String>,
}

impl CaseResult {
    pub(crate) fn new(case: &Case) -> Self {
        Self { name: case.name.into(), samples: Vec::new(), failed: None }
    }

    /// Returns the spread of what `value` takes of the samples.
    pub(crate) fn spread(&self, value: impl Fn(&Sample) -> f64) -> Spread {
        Spread::of(self.samples.iter().map(value).collect())
    }
}

/// Least, median and greatest of some values; zeros if there is none.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or_default();
        let last = values.len().saturating_sub(1);
        // The mean of the two in the middle, of an even number.
        let median = f64::midpoint(at(last / 2), at(last.div_ceil(2)));
        Self { min: at(0), median, max: at(last) }
    }
}

/// A goal of a case, and what it reached.
#[derive(Serialize)]
pub(crate) struct GoalResult {
    pub(crate) case: &'static str,
    pub(crate) beside: Option<&'static str>,
    /// Unit of `reached` and `target`.
    pub(crate) unit: Unit,
    pub(crate) reached: Spread,
    pub(crate) target: Option<f64>,
    /// Whether the median meets the target.
    pub(crate) met: Option<bool>,
}

impl GoalResult {
    /// Returns it without a target where targets do not apply: they are stated for one number of
    /// connections. Latency is always measured on one.
    fn at(self, connections: usize) -> Self {
        match self.unit {
            Unit::AddedMillis => self,
            _ if connections == TARGET_CONNECTIONS => self,
            _ => Self { target: None, met: None, ..self },
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    /// Requests per second, as a multiple of those beside.
    Ratio,
    /// Microseconds of processor time.
    CpuMicros,
    /// Milliseconds of latency, more than beside.
    AddedMillis,
}

impl Report {
    pub(crate) fn new(
        options: &Options,
        connections: usize,
        pinning: Pinning,
        load_at_start: String,
        cases: Vec<CaseResult>,
    ) -> Result<Self, Any> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let goals = GOALS.iter().filter_map(|(case, goal)| reached(&cases, case, *goal));
        let goals = goals.map(|goal| goal.at(connections)).collect();
        Ok(Self {
            unix_time: now.as_secs(),
            processor: machine::processor(),
            pinning,
            load_at_start,
            load_at_end: machine::load_average()?,
            seconds: options.seconds,
            rounds: options.rounds,
            connections,
            cases,
            goals,
        })
    }

    /// Returns the result of a case that was measured.
    pub(crate) fn case(&self, name: &str) -> Option<&CaseResult> {
        find(&self.cases, name)
    }

    /// Returns the names of the cases of which a round failed.
    pub(crate) fn failed(&self) -> Vec<&str> {
        let failed = self.cases.iter().filter(|case| case.failed.is_some());
        failed.map(|case| case.name.as_str()).collect()
    }

    /// Returns how far the rounds of the reference are apart, as a part of their median.
    pub(crate) fn noise(&self) -> Option<f64> {
        let rates = self.case(REFERENCE)?.spread(Sample::rate);
        Some((rates.max - rates.min) / rates.median)
    }

    /// Returns the share of the server's core that other processes had, over all samples; `None` if
    /// the server was not pinned.
    pub(crate) fn others(&self) -> Option<Spread> {
        spread_of(&self.cases, Sample::others)
    }

    /// Returns the share of the load generator's core that other processes had in the samples of
    /// the reference, which has no upstream and no database; `None` if it was not pinned.
    pub(crate) fn beside_load(&self) -> Option<Spread> {
        spread_of(self.case(REFERENCE), Sample::beside_load)
    }
}

fn spread_of<'a>(
    cases: impl IntoIterator<Item = &'a CaseResult>,
    share: impl Fn(&Sample) -> Option<f64>,
) -> Option<Spread> {
    let samples = cases.into_iter().flat_map(|case| &case.samples);
    let shares: Vec<f64> = samples.filter_map(share).collect();
    (!shares.is_empty()).then(|| Spread::of(shares))
}

fn find<'a>(cases: &'a [CaseResult], name: &str) -> Option<&'a CaseResult> {
    cases.iter().find(|case| case.name == name && case.failed.is_none())
}

/// Returns what a case reached of a goal; `None` unless it and the case beside it were measured.
fn reached(cases: &[CaseResult], name: &'static str, goal: Goal) -> Option<GoalResult> {
    let case = find(cases, name)?;
    let within_rounds = |value: fn(&Sample, &Sample) -> f64| {
        let beside = find(cases, goal.beside()?)?;
        let pairs = case.samples.iter().zip(&beside.samples);
        Some(Spread::of(pairs.map(|(own, beside)| value(own, beside)).collect()))
    };
    let ratio = |own: &Sample, beside: &Sample| own.rate() / beside.rate();
    let added =
        |own: &Sample, beside: &Sample| (f64::from(own.p50_us) - f64::from(beside.p50_us)) / 1e3;
    let (unit, reached, target) = match goal {
        Goal::Rate { least, .. } => (Unit::Ratio, within_rounds(ratio)?, Some(least)),
        Goal::Beside { .. } => (Unit::Ratio, within_rounds(ratio)?, None),
        Goal::Latency { most, .. } => (Unit::AddedMillis, within_rounds(added)?, Some(most)),
        Goal::Cpu { most } => (Unit::CpuMicros, case.spread(Sample::cpu_per_request), Some(most)),
    };
    let met = target.map(|target| match unit {
        Unit::Ratio => reached.median >= target,
        Unit::CpuMicros | Unit::AddedMillis => reached.median <= target,
    });
    Some(GoalResult { case: name, beside: goal.beside(), unit, reached, target, met })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(name: &str, requests: &[u64]) -> CaseResult {
        let sample = |requests: &u64| Sample {
            requests: *requests,
            seconds: 1.0,
            p50_us: 100,
            p99_us: 200,
            cpu_us: requests * 20,
            load_cpu_us: 0,
            core_us: None,
            load_core_us: None,
        };
        let samples = requests.iter().map(sample).collect();
        CaseResult { name: name.into(), samples, failed: None }
    }

    #[test]
    fn a_ratio_is_taken_within_a_round() {
        let cases = [result("a", &[10, 40, 90]), result("b", &[10, 20, 30])];
        let goal = Goal::Rate { beside: "b", least: 2.5 };
        let reached = reached(&cases, "a", goal).expect("both were measured");
        assert_eq!(reached.reached, Spread { min: 1.0, median: 2.0, max: 3.0 });
        assert_eq!(reached.met, Some(false));
    }

    #[test]
    fn processor_time_must_stay_below_its_target() {
        let cases = [result("a", &[10])];
        let met = |most| reached(&cases, "a", Goal::Cpu { most }).and_then(|result| result.met);
        assert_eq!((met(20.0), met(19.0)), (Some(true), Some(false)));
    }
}
