//! Metrics, in the text format of Prometheus.
//!
//! Every label's values come from a fixed set, so the number of series is bounded. Keys, scopes and
//! paths are never labels.

mod counts;
mod process;
mod unretried;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use hapax_core::driver::StoreCount;
use hapax_core::{Clock, Quarantine, SystemClock, Timestamp};
use hapax_operators::Undecided;

use crate::store::{OpenStore, StoreCalls};
use counts::ByRoute;
pub(crate) use counts::{ObservedResult, ReconcileResult, RouteCounts, RouteObserver};
pub(crate) use unretried::{UnretriedCounts, UnretriedResult};

/// Upper bounds of the duration of an execution, in milliseconds.
const TOOK_MS: [u64; 11] = [5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 10_000, 60_000];

/// Upper bounds of the duration of an auth request, in milliseconds.
const AUTH_MS: [u64; 9] = [1, 5, 10, 25, 50, 100, 500, 1_000, 5_000];

/// Upper bounds of the part of its retention that had passed when an outcome was replayed, in per
/// cent. Replays near the end show that clients retry for longer than the retention.
const AGE_PERCENT: [u64; 6] = [1, 10, 25, 50, 75, 90];

const TOKENS: [(TokenResult, &str); 3] = [
    (TokenResult::Verified, "verified"),
    (TokenResult::Invalid, "invalid"),
    (TokenResult::Unavailable, "unavailable"),
];

const AUTHORISED: [(AuthResult, &str); 3] = [
    (AuthResult::Allowed, "allowed"),
    (AuthResult::Denied, "denied"),
    (AuthResult::Unavailable, "unavailable"),
];

/// Results of auth requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AuthResult {
    /// The request is allowed.
    Allowed,
    /// The client got the auth server's response.
    Denied,
    /// There was no usable response.
    Unavailable,
}

/// Results of the verification of bearer tokens that name callers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TokenResult {
    Verified,
    /// The client got 401.
    Invalid,
    /// There were no keys.
    Unavailable,
}

/// Counters of one gateway since its start.
#[derive(Debug)]
pub(crate) struct Metrics {
    started: Timestamp,
    by_route: ByRoute,
    authorised: [AtomicU64; AUTHORISED.len()],
    auth_silent: AtomicBool,
    tokens: [AtomicU64; TOKENS.len()],
    /// Set while the last fetch of the keys in force has failed. Keys that a reload has replaced have another flag, and
    /// may still be fetched for requests before it.
    jwt_keys_failed: ArcSwap<AtomicBool>,
    auth_took: Histogram<{ AUTH_MS.len() }>,
    age: Histogram<{ AGE_PERCENT.len() }>,
    pub(crate) reaped: AtomicU64,
    pub(crate) unretried: UnretriedCounts,
    /// Calls of the store.
    pub(crate) calls: Arc<StoreCalls>,
}

/// Gauges, which are read when metrics are rendered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) engine: hapax_core::EngineStats,
    pub(crate) requests: usize,
    pub(crate) store_up: bool,
    pub(crate) undecided: Undecided,
    pub(crate) quarantines: Vec<Quarantine>,
}

impl Metrics {
    /// Creates counters at zero.
    pub(crate) fn new() -> Self {
        let metrics = Self {
            started: SystemClock.now(),
            by_route: ByRoute::default(),
            authorised: Default::default(),
            auth_silent: AtomicBool::default(),
            tokens: Default::default(),
            jwt_keys_failed: ArcSwap::default(),
            auth_took: Histogram::default(),
            age: Histogram::default(),
            reaped: AtomicU64::default(),
            unretried: UnretriedCounts::default(),
            calls: Arc::default(),
        };
        // The series without a route exist from the beginning.
        metrics.route("");
        metrics
    }

    /// Returns the counters of the route of this name; the empty name is for requests without a
    /// route.
    pub(crate) fn route(&self, name: &str) -> Arc<RouteCounts> {
        self.by_route.of(name)
    }

    /// Counts an auth request with its result and duration.
    pub(crate) fn authorised(&self, outcome: AuthResult, took: Duration) {
        if let Some(index) = AUTHORISED.iter().position(|(it, _)| *it == outcome) {
            add(&self.authorised[index]);
        }
        self.auth_silent.store(outcome == AuthResult::Unavailable, Relaxed);
        self.auth_took.observe(&AUTH_MS, millis(took));
    }

    /// Returns whether the last auth request got a usable response, or there was none yet.
    pub(crate) fn auth_is_up(&self) -> bool {
        !self.auth_silent.load(Relaxed)
    }

    /// Counts a bearer token that names a caller.
    pub(crate) fn token(&self, result: TokenResult) {
        if let Some(index) = TOKENS.iter().position(|(it, _)| *it == result) {
            add(&self.tokens[index]);
        }
    }

    /// Replaces the flag that is set while the last fetch of the keys of bearer tokens has failed.
    pub(crate) fn jwt_keys(&self, failed: Arc<AtomicBool>) {
        self.jwt_keys_failed.store(failed);
    }

    /// Returns whether the keys of bearer tokens could be read at the last time, or none were needed.
    pub(crate) fn jwt_keys_are_up(&self) -> bool {
        !self.jwt_keys_failed.load().load(Relaxed)
    }

    /// Returns the totals of all routes, for the API.
    pub(crate) fn totals(&self) -> serde_json::Value {
        let authorised: serde_json::Map<_, _> = AUTHORISED
            .iter()
            .zip(&self.authorised)
            .map(|((_, outcome), count)| ((*outcome).to_owned(), count.load(Relaxed).into()))
            .collect();
        let mut totals = self.by_route.totals();
        totals.insert("authorised".into(), authorised.into());
        totals.insert("reaped".into(), self.reaped.load(Relaxed).into());
        totals.into()
    }

    /// Renders all metrics as text, with those of the store.
    pub(crate) fn render(&self, gauges: Gauges, store: &OpenStore) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text, gauges).and_then(|()| self.write_store(&mut text, store));
        text
    }

    fn write_store(&self, out: &mut String, store: &OpenStore) -> fmt::Result {
        self.calls.write(out)?;
        for StoreCount { name, help, value } in store.counts() {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let name = format!("hapax_store_{name}");
            head(out, &name, kind, help)?;
            writeln!(out, "{name} {value}")?;
        }
        Ok(())
    }

    fn write(&self, out: &mut String, gauges: Gauges) -> fmt::Result {
        self.by_route.write(out)?;
        self.unretried.write(out)?;
        let name = "hapax_auth_questions_total";
        head(out, name, "counter", "Auth requests by result.")?;
        for ((_, outcome), count) in AUTHORISED.iter().zip(&self.authorised) {
            writeln!(out, "{name}{{outcome=\"{outcome}\"}} {}", count.load(Relaxed))?;
        }
        let name = "hapax_tokens_total";
        head(out, name, "counter", "Bearer tokens that were to name a caller, by result.")?;
        for ((_, outcome), count) in TOKENS.iter().zip(&self.tokens) {
            writeln!(out, "{name}{{outcome=\"{outcome}\"}} {}", count.load(Relaxed))?;
        }
        let name = "hapax_reaped_total";
        head(out, name, "counter", "Expired records that were removed.")?;
        writeln!(out, "{name} {}", self.reaped.load(Relaxed))?;
        for (name, help, value) in [
            ("hapax_in_flight", "Executions in progress.", gauges.engine.in_flight),
            ("hapax_waiting", "Duplicates that wait for an execution.", gauges.engine.waiting),
            (
                "hapax_held_back",
                "Deferred writes: outcomes that the store has not accepted yet.",
                gauges.engine.deferred,
            ),
            ("hapax_held_back_bytes", "Bytes of deferred writes.", gauges.engine.deferred_bytes),
            ("hapax_requests", "Requests that are being answered.", gauges.requests),
            ("hapax_store_up", "Whether the store answers.", usize::from(gauges.store_up)),
            (
                "hapax_store_writable",
                "Whether the store took what was last written.",
                usize::from(self.calls.are_written()),
            ),
            (
                "hapax_auth_up",
                "Whether the auth URL answered when last asked.",
                usize::from(self.auth_is_up()),
            ),
            (
                "hapax_jwt_keys_up",
                "Whether the keys of bearer tokens could be read at the last time.",
                usize::from(self.jwt_keys_are_up()),
            ),
        ] {
            head(out, name, "gauge", help)?;
            writeln!(out, "{name} {value}")?;
        }
        process::write(out, self.started)?;
        undecided(out, &gauges.undecided)?;
        let name = "hapax_quarantine_end_seconds";
        head(
            out,
            name,
            "gauge",
            "End of a quarantine by the store's clock, in seconds since 1970.",
        )?;
        let mut ends = BTreeMap::new();
        for Quarantine { route, until, .. } in &gauges.quarantines {
            let end = ends.entry(route.as_deref().unwrap_or_default()).or_insert(*until);
            *end = (*end).max(*until);
        }
        for (route, until) in ends {
            let route = counts::label(route);
            writeln!(out, "{name}{{{route}}} {}", until.as_micros() / 1_000_000)?;
        }
        let name = "hapax_auth_seconds";
        head(out, name, "histogram", "How long auth answers take.")?;
        self.auth_took.write(out, name, "", &AUTH_MS, 1000)?;
        let name = "hapax_replay_age_ratio";
        head(out, name, "histogram", "Part of the retention that had passed at a replay.")?;
        self.age.write(out, name, "", &AGE_PERCENT, 100)
    }
}

/// States of records that wait for a decision, in the order of [`Undecided::by_route`].
const UNDECIDED: [&str; 2] = ["unknown", "lapsed"];

/// Writes the records that wait for a decision. Those without a named route have no route label.
fn undecided(out: &mut String, found: &Undecided) -> fmt::Result {
    let name = "hapax_undecided";
    head(out, name, "gauge", "Records that wait for a decision, as of the last census and since.")?;
    let mut rest = [found.unknown, found.lapsed];
    for (route, counts) in &found.by_route {
        for (at, state) in UNDECIDED.into_iter().enumerate() {
            rest[at] = rest[at].saturating_sub(counts[at]);
            writeln!(out, "{name}{{{},state=\"{state}\"}} {}", counts::label(route), counts[at])?;
        }
    }
    for (state, count) in UNDECIDED.into_iter().zip(rest) {
        writeln!(out, "{name}{{state=\"{state}\"}} {count}")?;
    }
    let now = SystemClock.now();
    let age = found.oldest.map_or(0, |began| now.since(began).as_secs());
    let name = "hapax_undecided_oldest_seconds";
    head(out, name, "gauge", "Age of the oldest of them; 0 where there is none.")?;
    writeln!(out, "{name} {age}")?;
    let age = found.as_of.map_or(-1, |at| i64::try_from(now.since(at).as_secs()).unwrap_or(-1));
    let name = "hapax_census_age_seconds";
    head(out, name, "gauge", "Time since the last whole census began; -1 during the first.")?;
    writeln!(out, "{name} {age}")
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

fn millis(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn micros(took: Duration) -> u64 {
    u64::try_from(took.as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn head(out: &mut String, name: &str, kind: &str, help: &str) -> fmt::Result {
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}")
}

/// Counters by upper bound, in whole units.
#[derive(Debug)]
pub(crate) struct Histogram<const N: usize> {
    within: [AtomicU64; N],
    count: AtomicU64,
    sum: AtomicU64,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Self {
            within: std::array::from_fn(|_| AtomicU64::default()),
            count: AtomicU64::default(),
            sum: AtomicU64::default(),
        }
    }
}

impl<const N: usize> Histogram<N> {
    pub(crate) fn observe(&self, bounds: &[u64; N], value: u64) {
        if let Some(index) = bounds.iter().position(|bound| value <= *bound) {
            add(&self.within[index]);
        }
        add(&self.count);
        self.sum.fetch_add(value, Relaxed);
    }

    /// Returns whether nothing was counted.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Writes the histogram with these labels, in units of a `per`-th.
    pub(crate) fn write(
        &self,
        out: &mut String,
        name: &str,
        labels: &str,
        bounds: &[u64; N],
        per: u64,
    ) -> fmt::Result {
        let mut below = 0;
        let comma = if labels.is_empty() { "" } else { "," };
        let braced = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        for (bound, count) in bounds.iter().zip(&self.within) {
            below += count.load(Relaxed);
            let bound = *bound as f64 / per as f64;
            writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {below}")?;
        }
        // Read once, and never below a bucket: other threads count meanwhile.
        let count = self.count.load(Relaxed).max(below);
        writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {count}")?;
        writeln!(out, "{name}_sum{braced} {}", self.sum.load(Relaxed) as f64 / per as f64)?;
        writeln!(out, "{name}_count{braced} {count}")
    }
}

#[cfg(test)]
mod tests {
    use hapax_http::classify::OutcomeClass;
    use hapax_http::problem::Code;
    use hapax_http::server::{Observer, RecordStatus, RequestEvent};

    use super::*;

    #[test]
    fn metrics_of_observed_routes_are_rendered() {
        let metrics = Arc::new(Metrics::new());
        let seen = RouteObserver {
            metrics: Arc::clone(&metrics),
            counts: metrics.route(""),
            retention: Duration::from_secs(100),
        };
        let took = Duration::from_millis(30);
        seen.observe(
            "",
            RequestEvent::Executed {
                class: OutcomeClass::Unknown,
                recorded: RecordStatus::Pending,
                attempt: 2,
                took,
            },
        );
        seen.observe("", RequestEvent::Rejected(Code::KeyReused));
        seen.observe("", RequestEvent::Replayed { expires_in: Some(Duration::from_secs(60)) });
        metrics.authorised(AuthResult::Denied, Duration::from_millis(7));
        metrics.authorised(AuthResult::Unavailable, Duration::from_secs(2));
        let opened = OpenStore::new(Arc::new(hapax_core::MemoryStore::default()), None);
        let gauges = Gauges { requests: 3, store_up: true, ..Gauges::default() };
        let text = metrics.render(gauges, &opened);
        for line in [
            "hapax_executions_total{class=\"unknown\",recorded=\"pending\"} 1",
            "hapax_executions_total{class=\"final\",recorded=\"stored\"} 0",
            "hapax_refusals_total{code=\"key-reused\"} 1",
            "hapax_reexecutions_total 1",
            "hapax_replays_total 1",
            "hapax_requests 3",
            "hapax_store_up 1",
            "hapax_auth_questions_total{outcome=\"allowed\"} 0",
            "hapax_auth_questions_total{outcome=\"denied\"} 1",
            "hapax_auth_questions_total{outcome=\"unavailable\"} 1",
            "hapax_auth_up 0",
            "hapax_auth_seconds_bucket{le=\"0.005\"} 0",
            "hapax_auth_seconds_bucket{le=\"0.01\"} 1",
            "hapax_auth_seconds_sum 2.007",
            "hapax_execution_seconds_bucket{le=\"0.025\"} 0",
            "hapax_execution_seconds_bucket{le=\"0.05\"} 1",
            "hapax_execution_seconds_bucket{le=\"+Inf\"} 1",
            "hapax_execution_seconds_sum 0.03",
            "hapax_replay_age_ratio_bucket{le=\"0.25\"} 0",
            "hapax_replay_age_ratio_bucket{le=\"0.5\"} 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
    }
}
