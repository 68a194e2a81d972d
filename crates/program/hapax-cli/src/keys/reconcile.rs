//! `hapax keys reconcile`.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use hapax_operators::RecordView;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::args::RecordName;
use super::gateway::Remote;
use super::{Records, id};
use crate::exit::CliError;
use crate::output::{self, print};

/// Requests in a row without a verdict after which there is a pause before each one: a service that fails is not to
/// be flooded.
const MOST_FAILURES: u32 = 4;
const PAUSE: Duration = Duration::from_secs(1);

/// Reasons of records that wait for no decision of this service.
const OTHERS: [&str; 2] = ["other-namespace", "reexecute"];

/// The gateway's answer about a record.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReconcileReply {
    /// `happened`, `did-not-happen`, `cannot-say`, `not-yet`, `in-flight`, `decided`, `not-requested` or `damaged`.
    result: String,
    /// The time until the reconcile URL may be requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_in_seconds: Option<f64>,
    /// The code of the reason for which it was not requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    because: Option<String>,
}

#[derive(Debug, Serialize)]
struct Line {
    id: String,
    #[serde(flatten)]
    reply: ReconcileReply,
}

/// Results of a run.
#[derive(Debug, Default, Serialize)]
struct Summary {
    /// Records with a response that retries get from now on.
    happened: usize,
    /// Records whose keys were released.
    did_not_happen: usize,
    /// Records that were decided meanwhile.
    decided: usize,
    /// Records whose outcome is still unknown after a request, or about which it is too early for one.
    still_unknown: BTreeMap<String, usize>,
    /// Records about which no request is sent, by reason.
    not_requested: BTreeMap<String, usize>,
    damaged: usize,
}

/// The last line of a run in JSON.
#[derive(Debug, Serialize)]
struct Last<'a> {
    summary: &'a Summary,
}

/// A run through one record or all.
struct Run<'a> {
    gateway: &'a Remote,
    json: bool,
    summary: Summary,
    /// Requests in a row without a verdict.
    failures: u32,
}

/// Reconciles one record, or all if there is no `target`. Ends with exit code 1 unless the outcome of each is known.
pub(super) async fn run(
    records: &Records,
    target: Option<RecordName>,
    json: bool,
) -> Result<ExitCode, CliError> {
    let Records::Remote(gateway) = records else {
        return Err(CliError::usage(
            "expected a running gateway, which has the reconcile URL, found none that has this store open: start it, \
             or pass its address with --admin",
        ));
    };
    let is_all = target.is_none();
    let mut run = Run { gateway, json, summary: Summary::default(), failures: 0 };
    let ended = match target {
        Some(target) => run.one(&gateway.show(target).await?).await,
        None => run.all().await,
    };
    let summary = run.summary;
    if json {
        print(&output::json_line(&Last { summary: &summary })?);
    } else if is_all {
        print(&summary.text());
    }
    ended.map_err(|error| error.and("; the run ended early: run it again"))?;
    match summary.open() {
        0 => Ok(ExitCode::SUCCESS),
        1 => Err(CliError::no("the outcome of 1 record is still unknown")),
        open => Err(CliError::no(format!("the outcome of {open} records is still unknown"))),
    }
}

impl Run<'_> {
    /// Walks through the store. A record that is written meanwhile may be visited twice.
    async fn all(&mut self) -> Result<(), CliError> {
        let (mut from, mut visited) = (None, HashSet::new());
        loop {
            let page = self.gateway.undecided(from.as_deref()).await?;
            for (damaged, because) in page.damaged {
                if visited.insert(id(&damaged)?) {
                    self.add(damaged, ReconcileReply::new("damaged", None, Some(because)))?;
                }
            }
            for view in &page.keys {
                if visited.insert(id(&view.id)?) {
                    self.one(view).await?;
                }
            }
            from = page.next;
            if from.is_none() {
                return Ok(());
            }
        }
    }

    /// Reconciles one record. An error that concerns no single record, such as an outage, ends the run.
    async fn one(&mut self, view: &RecordView) -> Result<(), CliError> {
        if view.on_unknown == "reexecute" {
            let because = "its next request executes".to_owned();
            let reply = ReconcileReply::new("not-requested", Some("reexecute"), Some(because));
            return self.add(view.id.clone(), reply);
        }
        if self.failures >= MOST_FAILURES {
            sleep(PAUSE).await;
        }
        let reply = match self.gateway.reconcile(&view.id).await {
            Ok(reply) => reply,
            Err(error) if error.name() == "not-found" => {
                return Err(CliError::usage(
                    "expected a gateway, which has the reconcile URL, found another process or an earlier version at its \
                     address: pass the address of the gateway with --admin",
                ));
            }
            Err(error) if error.name() == "corrupt" => {
                ReconcileReply::new("damaged", None, Some(error.to_string()))
            }
            Err(error) => return Err(error),
        };
        match reply.result.as_str() {
            "happened" | "did-not-happen" => self.failures = 0,
            "cannot-say" => self.failures += 1,
            _ => {}
        }
        self.add(view.id.clone(), reply)
    }

    /// Counts and prints the result of a record. Nothing of it is kept: there may be millions.
    fn add(&mut self, id: String, reply: ReconcileReply) -> Result<(), CliError> {
        let line = Line { id, reply };
        self.summary.count(&line.reply);
        print(&if self.json { output::json_line(&line)? } else { line.text() });
        Ok(())
    }
}

impl ReconcileReply {
    fn new(result: &str, reason: Option<&str>, because: Option<String>) -> Self {
        let reason = reason.map(str::to_owned);
        Self { result: result.to_owned(), retry_in_seconds: None, reason, because }
    }
}

impl Line {
    fn text(&self) -> String {
        let Self { id, reply: ReconcileReply { result, retry_in_seconds, reason, because } } = self;
        let mut text = format!("{id}: {result}");
        if let Some(seconds) = retry_in_seconds {
            // Writing to a string cannot fail.
            let _ = write!(text, ", retry in {seconds} s");
        }
        for more in [reason, because].into_iter().flatten() {
            let _ = write!(text, ": {more}");
        }
        output::line(&text) + "\n"
    }
}

impl Summary {
    fn count(&mut self, reply: &ReconcileReply) {
        let count = match (reply.result.as_str(), &reply.reason) {
            ("happened", _) => &mut self.happened,
            ("did-not-happen", _) => &mut self.did_not_happen,
            ("decided", _) => &mut self.decided,
            ("damaged", _) => &mut self.damaged,
            ("not-requested", reason) => {
                self.not_requested.entry(reason.clone().unwrap_or_default()).or_default()
            }
            (result, _) => self.still_unknown.entry(result.to_owned()).or_default(),
        };
        *count += 1;
    }

    /// Returns the number of records of this service whose outcome is not known.
    fn open(&self) -> usize {
        let mine =
            self.not_requested.iter().filter(|(reason, _)| !OTHERS.contains(&reason.as_str()));
        let waiting = mine.map(|(_, count)| count);
        waiting.chain(self.still_unknown.values()).sum::<usize>() + self.damaged
    }

    fn text(&self) -> String {
        let Self { happened, did_not_happen, decided, damaged, .. } = self;
        let unknown = sum(&self.still_unknown, "still unknown");
        let not_requested = sum(&self.not_requested, "not requested");
        format!(
            "{happened} happened, {did_not_happen} did not happen, {decided} decided meanwhile, {unknown}, \
             {not_requested}, {damaged} damaged\n"
        )
    }
}

/// Returns the sum of counts with what it counts, and each with its name.
fn sum(counts: &BTreeMap<String, usize>, what: &str) -> String {
    let parts: Vec<_> = counts.iter().map(|(name, count)| format!("{name}: {count}")).collect();
    let parts = if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
    let sum: usize = counts.values().sum();
    // Names may be those of a later gateway.
    output::line(&format!("{sum} {what}{parts}"))
}
