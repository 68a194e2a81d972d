//! Many decisions from one file: `hapax keys resolve --from-file`.
//!
//! 1. The whole file is read before anything is decided.
//! 2. Each line names a record by id and fence. There is no `force`: a line whose request may still execute is
//!    rejected if it says *did not happen*.
//! 3. A line whose decision holds already is skipped, so that an interrupted run can be repeated.
//! 4. Each decision is one of the operators' API, with its own lines in the audit file.

mod parse;
mod released;

use std::process::ExitCode;

use hapax_core::FingerprintScheme;
use hapax_operators::{OperatorVerdict, RecordList, RecordView, ResponseView, StateView};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::args::RecordName;
use super::{Records, render};
use crate::exit::CliError;
use crate::output::{self, print};
use parse::DecisionLine;
pub(super) use parse::{Common, DecisionFile};
use released::Released;

/// The columns of a list. Those after `may_execute_until` are for the operator; of the others, `id` and `fence` are
/// read again.
const COLUMNS: [&str; 15] = [
    "id",
    "fence",
    "state",
    "reason",
    "route",
    "method",
    "path",
    "key",
    "caller",
    "minute",
    "may_execute_until",
    "outcome",
    "status",
    "body",
    "body_file",
];

/// Precedes a fence: spreadsheets round a number of 16 digits.
const FENCE_SIGN: char = 'f';

/// Kinds of results.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Fate {
    Decided,
    WouldBeDecided,
    Skipped,
    Rejected,
}

/// The result of a line.
#[derive(Debug, Serialize)]
struct LineResult {
    line: u64,
    id: String,
    outcome: OperatorVerdict,
    result: Fate,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    because: Option<String>,
}

/// The results of a file.
#[derive(Debug, Default, Serialize)]
struct Summary {
    decided: usize,
    would_be_decided: usize,
    skipped: usize,
    rejected: usize,
    /// Lines without an outcome.
    open: usize,
    lines: Vec<LineResult>,
}

/// Reasons for which a line is not decided.
enum Objection {
    /// The decision holds already.
    Holds(&'static str),
    /// The line is rejected.
    Rejected(CliError),
}

/// Decides the records of a file, or prints what would be decided. Ends with exit code 1 if a line was rejected.
/// An error that does not concern one record, such as an outage, ends the run.
pub(super) async fn run(
    records: &Records,
    file: &DecisionFile,
    dry_run: bool,
    json: bool,
) -> Result<ExitCode, CliError> {
    let mut released = Released::open(file, dry_run)?;
    let mut summary = Summary { open: file.open, ..Summary::default() };
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len} lines, {eta} left");
    // It is drawn on a terminal only.
    let bar = ProgressBar::new(file.lines.len() as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    for line in &file.lines {
        let result = match decide(records, line, &mut released, dry_run).await {
            Ok(result) => result,
            Err(error) => {
                bar.finish_and_clear();
                print(&if json { output::json(&summary)? } else { summary.text() });
                let more = format!("; the run ended at line {}: run it again", line.number);
                return Err(error.and(&more));
            }
        };
        if !json {
            bar.suspend(|| print(&result.text()));
        }
        summary.add(result);
        bar.inc(1);
    }
    bar.finish_and_clear();
    print(&if json { output::json(&summary)? } else { summary.text() });
    match summary.rejected {
        0 => Ok(ExitCode::SUCCESS),
        1 => Err(CliError::no("1 line was rejected")),
        count => Err(CliError::no(format!("{count} lines were rejected"))),
    }
}

/// Decides one line. If the future is dropped, the decision is completed nevertheless, or was not begun.
async fn decide(
    records: &Records,
    line: &DecisionLine,
    released: &mut Released,
    dry_run: bool,
) -> Result<LineResult, CliError> {
    let DecisionLine { id, decision, .. } = line;
    let was_begun = releases(line) && released.has(id, decision.fence);
    let objection = match records.show(RecordName::Id(id.to_string())).await {
        Ok(view) => objection(line, &view, was_begun),
        Err(error) if error.name() == "not-found" && was_begun => {
            Some(Objection::Holds("an earlier run released the key, and its record has expired"))
        }
        Err(error) if error.name() == "not-found" => {
            let text = "expected a record with this id, found none, or it has expired: check the id and the store";
            Some(Objection::Rejected(CliError::no(text).named("not-found")))
        }
        Err(error) if concerns_record(&error) => Some(Objection::Rejected(error)),
        Err(error) => return Err(error),
    };
    Ok(match objection {
        Some(Objection::Holds(because)) => line.result(Fate::Skipped, None, Some(because.into())),
        Some(Objection::Rejected(error)) => line.rejected(&error),
        None if dry_run => line.result(Fate::WouldBeDecided, None, None),
        None => {
            if releases(line) {
                released.add(id, decision.fence).map_err(CliError::unavailable)?;
            }
            match records.resolve(id, decision.clone()).await {
                Ok(_) => line.result(Fate::Decided, None, None),
                Err(error) if concerns_record(&error) => line.rejected(&error),
                Err(error) => return Err(error),
            }
        }
    })
}

/// Returns whether an error is about the record alone, so that the run goes on.
fn concerns_record(error: &CliError) -> bool {
    error.code() == 1 || matches!(error.name(), "bad-request" | "corrupt")
}

fn releases(line: &DecisionLine) -> bool {
    line.decision.outcome == OperatorVerdict::DidNotHappen
}

/// Returns why the line cannot be decided about the record as it is; `None` if it can. The decision itself is
/// checked again, by the engine.
fn objection(line: &DecisionLine, view: &RecordView, was_begun: bool) -> Option<Objection> {
    let no = |code: &'static str, text: String| {
        Some(Objection::Rejected(CliError::no(text).named(code)))
    };
    if view.state == StateView::Expired {
        return match was_begun {
            true => Some(Objection::Holds("an earlier run released the key")),
            false => no("not-found", "expected a record, found one that has expired".to_owned()),
        };
    }
    if view.fence != line.decision.fence {
        // The earlier run may have ended before the release: an undecided record is not released.
        if was_begun && view.state != StateView::Unknown {
            return Some(Objection::Holds(
                "an earlier run released the key, and a request with it executed since",
            ));
        }
        let RecordView { state, fence, .. } = view;
        return no(
            "changed",
            format!(
                "expected the fence of the line, found {fence}, {state}: list again, and decide anew"
            ),
        );
    }
    let scheme = FingerprintScheme::new(view.scheme.as_str()).ok();
    if !scheme.is_some_and(|scheme| scheme.of_request().starts_with("http/")) {
        let text = format!(
            "expected the record of an HTTP request, found another kind ({}): decide about it by its id alone",
            view.scheme
        );
        return no("other-kind", text);
    }
    match (view.state, releases(line)) {
        (StateView::Released, true) => Some(Objection::Holds("the key is released")),
        (StateView::Released | StateView::Expired, _) => no(
            "released",
            "expected an undecided record, found that its key was released".to_owned(),
        ),
        (StateView::Done, false) if is_response(line, view.response.as_ref()) => {
            Some(Objection::Holds("retries get this response"))
        }
        (StateView::Done, _) => {
            let status = view.response.as_ref().map_or(0, |response| response.status);
            let text = format!(
                "expected an undecided record, found a completed one with status {status}: retries get that response"
            );
            no("done", text)
        }
        (StateView::InFlight, _) => {
            let text = "expected an undecided record, found one in flight: run the file again after its end";
            no("in-flight", text.to_owned())
        }
        (StateView::Unknown, true) => view.may_execute_until.as_ref().and_then(|until| {
            no(
                "may-execute",
                format!("its request may still execute until {until}: run the file again then"),
            )
        }),
        (StateView::Unknown, false) => None,
    }
}

/// Returns whether a stored response is that of the line.
fn is_response(line: &DecisionLine, response: Option<&ResponseView>) -> bool {
    let Some(ResponseView { status, retained: true, headers, body, body_base64, .. }) = response
    else {
        return false;
    };
    let decision = &line.decision;
    let lower = |(name, value): &(String, String)| (name.to_ascii_lowercase(), value.clone());
    let given = decision.headers.iter().map(lower);
    *status == decision.status.unwrap_or(200)
        && given.eq(headers.iter().map(lower))
        && body.as_deref().unwrap_or_default() == decision.body.as_deref().unwrap_or_default()
        && *body_base64 == decision.body_base64
}

impl DecisionLine {
    fn result(&self, result: Fate, code: Option<String>, because: Option<String>) -> LineResult {
        let (line, id, outcome) = (self.number, self.id.to_string(), self.decision.outcome);
        LineResult { line, id, outcome, result, code, because }
    }

    fn rejected(&self, error: &CliError) -> LineResult {
        self.result(Fate::Rejected, Some(error.name().to_owned()), Some(error.to_string()))
    }
}

impl LineResult {
    fn text(&self) -> String {
        let outcome = match self.outcome {
            OperatorVerdict::Happened => "happened",
            OperatorVerdict::DidNotHappen => "did-not-happen",
        };
        let result = match self.result {
            Fate::Decided => "decided",
            Fate::WouldBeDecided => "would be decided",
            Fate::Skipped => "skipped",
            Fate::Rejected => "rejected",
        };
        let because = self.because.as_ref().map_or(String::new(), |text| format!(": {text}"));
        output::line(&format!("line {}: {} {outcome}: {result}{because}", self.line, self.id))
            + "\n"
    }
}

impl Summary {
    fn add(&mut self, result: LineResult) {
        *match result.result {
            Fate::Decided => &mut self.decided,
            Fate::WouldBeDecided => &mut self.would_be_decided,
            Fate::Skipped => &mut self.skipped,
            Fate::Rejected => &mut self.rejected,
        } += 1;
        self.lines.push(result);
    }

    fn text(&self) -> String {
        let Self { decided, would_be_decided, skipped, rejected, open, lines } = self;
        if lines.is_empty() && *open == 0 {
            return "the file has no lines after its header: nothing to decide\n".to_owned();
        }
        let decided = match would_be_decided {
            0 => format!("{decided} decided"),
            count => format!("{count} would be decided"),
        };
        format!("{decided}, {skipped} skipped, {rejected} rejected, {open} without an outcome\n")
    }
}

/// Returns records as CSV, with empty columns for decisions.
pub(super) fn template(views: &[RecordView], has_header: bool) -> Result<String, CliError> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    let failed = |error: csv::Error| CliError::unavailable(error);
    if has_header {
        writer.write_record(COLUMNS).map_err(failed)?;
    }
    for view in views {
        let described = view.described.as_ref();
        let of = |part: Option<&String>| cell(part.map_or("", String::as_str));
        let target = described.and_then(|it| it.target.as_ref().or(it.function.as_ref()));
        let row = [
            view.id.clone(),
            format!("{FENCE_SIGN}{}", view.fence),
            view.state.as_str().to_owned(),
            cell(view.reason.as_deref().unwrap_or_default()),
            of(described.and_then(|it| it.route.as_ref())),
            of(described.and_then(|it| it.method.as_ref())),
            of(target),
            of(described.map(|it| &it.key)),
            cell(&described.map_or(String::new(), render::caller)),
            view.minute(),
            view.may_execute_until.clone().unwrap_or_default(),
        ];
        let empty = std::iter::repeat_n(String::new(), COLUMNS.len() - row.len());
        writer.write_record(row.into_iter().chain(empty)).map_err(failed)?;
    }
    let bytes = writer.into_inner().map_err(CliError::unavailable)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Prints a list as CSV.
pub(super) fn print_template(listed: &RecordList) -> Result<ExitCode, CliError> {
    print(&template(&listed.keys, true)?);
    for (id, reason) in &listed.damaged {
        eprintln!("hapax: damaged: {id}: {}", output::line(reason));
    }
    if listed.more || listed.next.is_some() {
        let next = listed.next.as_ref().map(|next| format!(" by --after {next}"));
        eprintln!(
            "hapax: there are more records: decide these first, or list on{}",
            next.unwrap_or_default()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a text of a client as a cell that no spreadsheet takes for a formula, also not after a semicolon, at which
/// some of them divide cells whatever the quotes are.
fn cell(text: &str) -> String {
    let part = |part: &str| {
        if part.starts_with(['=', '+', '-', '@']) { format!("'{part}") } else { part.to_owned() }
    };
    output::line(text).split(';').map(part).collect::<Vec<_>>().join(";")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_a_cell_is_a_formula() {
        for (text, expected) in [
            ("=1+1", "'=1+1"),
            ("x;=cmd|'/C calc'!A0;y", "x;'=cmd|'/C calc'!A0;y"),
            ("/pay?x=1", "/pay?x=1"),
            ("@a;-1;b", "'@a;'-1;b"),
        ] {
            assert_eq!(cell(text), expected);
        }
    }
}
