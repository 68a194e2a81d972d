//! Counters of each route.
//!
//! Names of routes come from the configuration, so they are few. But each reload can add names, and
//! a series once shown stays. Beyond [`MOST_ROUTES`] names, further routes are counted with the
//! requests that have no route.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use hapax_http::classify::OutcomeClass;
use hapax_http::problem::Code;
use hapax_http::server::{Observer, RecordStatus, RequestEvent};

use super::{Histogram, Metrics, TOOK_MS, add, head, millis};

/// Largest number of names with their own counters.
const MOST_ROUTES: usize = 1_000;

const CLASSES: [OutcomeClass; 3] =
    [OutcomeClass::Final, OutcomeClass::Retryable, OutcomeClass::Unknown];
const RECORDED: [(RecordStatus, &str); 3] = [
    (RecordStatus::Stored, "stored"),
    (RecordStatus::Pending, "pending"),
    (RecordStatus::Lost, "lost"),
];

/// Counters of one route.
#[derive(Debug, Default)]
pub(crate) struct RouteCounts {
    executed: [[AtomicU64; 3]; 3],
    took: Histogram<{ TOOK_MS.len() }>,
    retried: AtomicU64,
    replayed: AtomicU64,
    rejected: [AtomicU64; Code::ALL.len()],
    unprotected: AtomicU64,
    key_ignored: AtomicU64,
    not_retained: AtomicU64,
    invalid_override: AtomicU64,
    asked: AtomicU64,
    other_caller: AtomicU64,
    reconciled: [AtomicU64; ReconcileResult::ALL.len()],
    would: [AtomicU64; ObservedResult::ALL.len()],
    would_reject: [AtomicU64; Code::ALL.len()],
}

/// Results that protection would have had for a request on an observed route. Rejections are
/// counted by their codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ObservedResult {
    Execute,
    Replay,
    Wait,
    Reconcile,
    /// The request was not measured: there was no memory for it.
    Unmeasured,
}

impl ObservedResult {
    const ALL: [(Self, &str); 5] = [
        (Self::Execute, "execute"),
        (Self::Replay, "replay"),
        (Self::Wait, "wait"),
        (Self::Reconcile, "ask"),
        (Self::Unmeasured, "unmeasured"),
    ];
}

/// Results of requests to a reconcile URL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReconcileResult {
    Happened,
    DidNotHappen,
    /// 404 without the marker.
    NotFound,
    /// Another status.
    Other,
    /// A response that cannot be stored.
    Unusable,
    NoAnswer,
}

impl ReconcileResult {
    const ALL: [(Self, &str); 6] = [
        (Self::Happened, "happened"),
        (Self::DidNotHappen, "did-not-happen"),
        (Self::NotFound, "not-found"),
        (Self::Other, "other"),
        (Self::Unusable, "unusable"),
        (Self::NoAnswer, "no-answer"),
    ];
}

impl RouteCounts {
    /// Counts a reconcile request without a retry. The layer's observer counts the others.
    pub(crate) fn reconciles_without_retry(&self) {
        add(&self.asked);
    }

    /// Counts a response of a reconcile URL.
    pub(crate) fn reconciled(&self, verdict: ReconcileResult) {
        let index =
            ReconcileResult::ALL.iter().position(|(it, _)| *it == verdict).unwrap_or_default();
        add(&self.reconciled[index]);
    }

    /// Counts a request that was answered by a problem.
    pub(crate) fn rejected(&self, code: Code) {
        add(&self.rejected[index(code)]);
    }

    /// Counts an execution whose key and request one of another caller had.
    pub(crate) fn other_caller(&self) {
        add(&self.other_caller);
    }

    pub(crate) fn would(&self, would: ObservedResult) {
        let index = ObservedResult::ALL.iter().position(|(it, _)| *it == would).unwrap_or_default();
        add(&self.would[index]);
    }

    pub(crate) fn would_reject(&self, code: Code) {
        add(&self.would_reject[index(code)]);
    }
}

fn index(code: Code) -> usize {
    Code::ALL.iter().position(|it| *it == code).unwrap_or_default()
}

/// Counters by route; the empty name is for requests without a route.
#[derive(Debug, Default)]
pub(super) struct ByRoute {
    all: RwLock<BTreeMap<Arc<str>, Arc<RouteCounts>>>,
}

impl ByRoute {
    pub(super) fn of(&self, name: &str) -> Arc<RouteCounts> {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(counts) = all.get(name) {
            return Arc::clone(counts);
        }
        let name = if all.len() < MOST_ROUTES { name } else { "" };
        Arc::clone(all.entry(name.into()).or_default())
    }

    pub(super) fn totals(&self) -> serde_json::Map<String, serde_json::Value> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let sum = |of: &dyn Fn(&RouteCounts) -> u64| all.values().map(|it| of(it)).sum::<u64>();
        let class =
            |row: usize| sum(&|it| it.executed[row].iter().map(|count| count.load(Relaxed)).sum());
        let by_code = |of: &dyn Fn(&RouteCounts) -> &[AtomicU64]| {
            let count = |(index, code): (usize, &Code)| {
                let count = sum(&|it| of(it)[index].load(Relaxed));
                (code.as_str().to_owned(), serde_json::Value::from(count))
            };
            Code::ALL.iter().enumerate().map(count).collect::<serde_json::Map<_, _>>()
        };
        let would = ObservedResult::ALL.iter().enumerate().map(|(index, (_, word))| {
            let count = sum(&|it| it.would[index].load(Relaxed));
            ((*word).to_owned(), serde_json::Value::from(count))
        });
        let reconciled = ReconcileResult::ALL.iter().enumerate().map(|(index, (_, word))| {
            let count = sum(&|it| it.reconciled[index].load(Relaxed));
            ((*word).to_owned(), serde_json::Value::from(count))
        });
        let reconciled = reconciled.collect::<serde_json::Map<_, _>>();
        let mut would = would.collect::<serde_json::Map<_, _>>();
        would.insert("refuse".into(), by_code(&|it| &it.would_reject).into());
        let executed = serde_json::json!({
            "final": class(0), "retryable": class(1), "unknown": class(2),
        });
        [
            ("executed", executed),
            ("replayed", sum(&|it| it.replayed.load(Relaxed)).into()),
            ("refused", by_code(&|it| &it.rejected).into()),
            ("unprotected", sum(&|it| it.unprotected.load(Relaxed)).into()),
            ("asked", sum(&|it| it.asked.load(Relaxed)).into()),
            ("reconciled", reconciled.into()),
            ("would", would.into()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into_iter()
        .collect()
    }

    pub(super) fn write(&self, out: &mut String) -> fmt::Result {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        let mut family = |name: &str, help: &str, of: &dyn Fn(&RouteCounts) -> Series| {
            head(out, name, "counter", help)?;
            for (route, counts) in &*all {
                for (labels, count) in of(counts) {
                    write_one(out, name, route, &labels, count)?;
                }
            }
            Ok(())
        };
        let name = "hapax_executions_total";
        family(name, "Executed requests by outcome class and record status.", &|it| {
            let cell = |(row, column): (usize, usize)| {
                let (class, recorded) = (CLASSES[row].as_str(), RECORDED[column].1);
                let labels = format!("class=\"{class}\",recorded=\"{recorded}\"");
                (labels, it.executed[row][column].load(Relaxed))
            };
            (0..3).flat_map(|row| (0..3).map(move |column| (row, column))).map(cell).collect()
        })?;
        let name = "hapax_refusals_total";
        family(name, "Requests that were answered by a problem.", &|it| by_code(&it.rejected))?;
        for (name, help, of) in ONE_EACH {
            family(name, help, &|it| vec![(String::new(), of(it).load(Relaxed))])?;
        }
        let name = "hapax_reconcile_total";
        family(name, "Answers of the reconcile URL.", &|it| {
            let count = |((_, word), count): (&(ReconcileResult, &str), &AtomicU64)| {
                (format!("answer=\"{word}\""), count.load(Relaxed))
            };
            ReconcileResult::ALL.iter().zip(&it.reconciled).map(count).collect()
        })?;
        let name = "hapax_would_total";
        let help = "Requests on observed routes, by the result that protection would have had.";
        family(name, help, &|it| {
            let count = |((_, word), count): (&(ObservedResult, &str), &AtomicU64)| {
                (format!("outcome=\"{word}\""), count.load(Relaxed))
            };
            ObservedResult::ALL.iter().zip(&it.would).map(count).collect()
        })?;
        let help = "Requests on observed routes that protection would have rejected.";
        family("hapax_would_refuse_total", help, &|it| by_code(&it.would_reject))?;
        let name = "hapax_execution_seconds";
        head(out, name, "histogram", "How long executions take.")?;
        for (route, counts) in &*all {
            if route.is_empty() {
                counts.took.write(out, name, "", &TOOK_MS, 1000)?;
            } else if !counts.took.is_empty() {
                counts.took.write(out, name, &label(route), &TOOK_MS, 1000)?;
            }
        }
        Ok(())
    }
}

/// Labels and value of each series.
type Series = Vec<(String, u64)>;

type Of = fn(&RouteCounts) -> &AtomicU64;

const ONE_EACH: [(&str, &str, Of); 8] = [
    ("hapax_reexecutions_total", "Executions after the first one of a record.", |it| &it.retried),
    ("hapax_replays_total", "Outcomes that were replayed.", |it| &it.replayed),
    (
        "hapax_unprotected_total",
        "Requests that were executed without a record while the store was unavailable.",
        |it| &it.unprotected,
    ),
    (
        "hapax_ignored_keys_total",
        "Requests with a key that were executed without a record, since their method is not protected.",
        |it| &it.key_ignored,
    ),
    ("hapax_not_retained_total", "Responses too large to keep, or streamed.", |it| {
        &it.not_retained
    }),
    (
        "hapax_invalid_overrides_total",
        "Idempotency-Outcome or -Retention of the upstream that were ignored.",
        |it| &it.invalid_override,
    ),
    (
        "hapax_same_request_other_caller_total",
        "Executions whose key and request a recent one of another caller had, as far as this process remembers.",
        |it| &it.other_caller,
    ),
    ("hapax_reconcile_questions_total", "Requests to reconcile URLs.", |it| &it.asked),
];

fn by_code(counts: &[AtomicU64]) -> Series {
    let count = |(code, count): (&Code, &AtomicU64)| {
        (format!("code=\"{}\"", code.as_str()), count.load(Relaxed))
    };
    Code::ALL.iter().zip(counts).map(count).collect()
}

/// Writes one series. For a named route zeros are omitted: there may be many routes.
fn write_one(out: &mut String, name: &str, route: &str, labels: &str, count: u64) -> fmt::Result {
    match (route, labels) {
        ("", "") => writeln!(out, "{name} {count}"),
        ("", labels) => writeln!(out, "{name}{{{labels}}} {count}"),
        _ if count == 0 => Ok(()),
        (route, labels) => {
            let (route, comma) = (label(route), if labels.is_empty() { "" } else { "," });
            writeln!(out, "{name}{{{route}{comma}{labels}}} {count}")
        }
    }
}

/// Returns the label of a route.
pub(super) fn label(route: &str) -> String {
    let route = route.replace('\\', "\\\\").replace('"', "\\\"");
    format!("route=\"{route}\"")
}

/// Counts the events of a route.
#[derive(Debug)]
pub(crate) struct RouteObserver {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) counts: Arc<RouteCounts>,
    /// Retention of its outcomes, unless the upstream sets another one.
    pub(crate) retention: Duration,
}

impl Observer for RouteObserver {
    fn observe(&self, _: &str, event: RequestEvent) {
        let counts = &self.counts;
        match event {
            RequestEvent::Executed { class, recorded, attempt, took } => {
                let row = CLASSES.iter().position(|it| *it == class).unwrap_or_default();
                let column = RECORDED.iter().position(|(it, _)| *it == recorded);
                add(&counts.executed[row][column.unwrap_or_default()]);
                if attempt > 1 {
                    add(&counts.retried);
                }
                counts.took.observe(&TOOK_MS, millis(took));
            }
            RequestEvent::Replayed { expires_in } => {
                add(&counts.replayed);
                if let Some(left) = expires_in {
                    self.metrics.replayed(self.retention, left);
                }
            }
            RequestEvent::Rejected(code) => counts.rejected(code),
            RequestEvent::Unprotected => add(&counts.unprotected),
            RequestEvent::KeyIgnored => add(&counts.key_ignored),
            RequestEvent::NotRetained => add(&counts.not_retained),
            RequestEvent::InvalidOverride => add(&counts.invalid_override),
            RequestEvent::ReconcileStarted => add(&counts.asked),
            RequestEvent::OtherCaller => counts.other_caller(),
            // Later versions of the layer may emit more events.
            _ => {}
        }
    }
}

impl Metrics {
    fn replayed(&self, retention: Duration, left: Duration) {
        let age = retention.saturating_sub(left).as_secs_f64();
        let percent = 100.0 * age / retention.as_secs_f64().max(f64::MIN_POSITIVE);
        self.age.observe(&super::AGE_PERCENT, percent.ceil() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_have_separate_counters_up_to_a_limit() {
        let by_route = ByRoute::default();
        by_route.of("").rejected(Code::InFlight);
        by_route.of("/a\"b").would(ObservedResult::Replay);
        by_route.of("pay").reconciled(ReconcileResult::NotFound);
        by_route.of("/a\"b").would_reject(Code::KeyReused);
        by_route.of("/a\"b").took.observe(&TOOK_MS, 30);
        let mut text = String::new();
        by_route.write(&mut text).unwrap();
        for line in [
            "hapax_refusals_total{code=\"in-flight\"} 1",
            "hapax_would_total{outcome=\"replay\"} 0",
            "hapax_reconcile_total{answer=\"did-not-happen\"} 0",
            "hapax_reconcile_total{route=\"pay\",answer=\"not-found\"} 1",
            "hapax_would_total{route=\"/a\\\"b\",outcome=\"replay\"} 1",
            "hapax_would_refuse_total{route=\"/a\\\"b\",code=\"key-reused\"} 1",
            "hapax_execution_seconds_bucket{route=\"/a\\\"b\",le=\"0.025\"} 0",
            "hapax_execution_seconds_bucket{route=\"/a\\\"b\",le=\"0.05\"} 1",
            "hapax_execution_seconds_count{route=\"/a\\\"b\"} 1",
            "hapax_execution_seconds_count 0",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("hapax_replays_total{route"), "{text}");
        assert!(!text.contains("hapax_execution_seconds_count{route=\"pay"), "{text}");
        assert_eq!(by_route.totals()["would"]["refuse"]["key-reused"], 1);
        for route in 0..2 * MOST_ROUTES {
            add(&by_route.of(&format!("/{route}")).replayed);
        }
        assert_eq!(by_route.all.read().unwrap().len(), MOST_ROUTES);
        assert_eq!(by_route.totals()["replayed"], 2 * MOST_ROUTES);
    }
}
