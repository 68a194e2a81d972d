//! `hapax keys reconcile`.

use std::process::ExitCode;

use hapax_operators::{ListQuery, StateView};
use serde::{Deserialize, Serialize};

use super::Records;
use super::args::RecordName;
use crate::exit::CliError;
use crate::output::{self, print};

/// The largest number of records for `--all`.
const MOST: u32 = 1000;

/// Result of a reconciliation.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReconcileResult {
    /// `happened`, `did-not-happen`, `cannot-say`, `not-yet`, `in-flight`, `decided`, or the code of an error.
    result: String,
    /// The time until the reconcile URL may be requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retry_in_seconds: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    because: Option<String>,
}

#[derive(Debug, Serialize)]
struct Line {
    id: String,
    #[serde(flatten)]
    found: ReconcileResult,
}

/// Reconciles one record, or all if there is no `target`. Ends with exit code 1 if the outcome of one is still unknown.
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
    let ids = match target {
        Some(target) => vec![gateway.show(target).await?.id],
        None => {
            let state = Some(StateView::Unknown);
            let list = ListQuery { state, limit: Some(MOST), ..ListQuery::default() };
            let listed = gateway.list(list).await?;
            let asked = listed.keys.into_iter().filter(|view| view.on_unknown == "reconcile");
            asked.map(|view| view.id).collect()
        }
    };
    let mut lines = Vec::new();
    for id in ids {
        let found = match gateway.reconcile(&id).await {
            Ok(found) => found,
            // It concerns this record alone.
            Err(error) if error.code() == 1 => ReconcileResult {
                result: error.name().to_owned(),
                retry_in_seconds: None,
                because: Some(error.to_string()),
            },
            Err(error) => return Err(error),
        };
        let line = Line { id, found };
        if !json {
            print(&line.text());
        }
        lines.push(line);
    }
    if json {
        print(&output::json(&lines)?);
    }
    let is_decided = |line: &&Line| {
        matches!(line.found.result.as_str(), "happened" | "did-not-happen" | "decided")
    };
    let decided = lines.iter().filter(is_decided).count();
    match lines.len() - decided {
        0 => Ok(ExitCode::SUCCESS),
        open => {
            Err(CliError::no(format!("the outcome of {open} of {} is still unknown", lines.len())))
        }
    }
}

impl Line {
    fn text(&self) -> String {
        let Self { id, found: ReconcileResult { result, retry_in_seconds, because } } = self;
        let until =
            retry_in_seconds.map_or(String::new(), |seconds| format!(", retry in {seconds} s"));
        let because = because.as_ref().map_or(String::new(), |text| format!(": {text}"));
        output::line(&format!("{id}: {result}{until}{because}")) + "\n"
    }
}
