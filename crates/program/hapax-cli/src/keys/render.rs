//! Records and decisions as text.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hapax_operators::{
    AccessHashes, CallerView, DecisionNote as Note, OperationDescription, OperatorVerdict,
    RecordBefore, RecordList, RecordView, ResponseView, StateView, UndecidedGroup, UndecidedGroups,
};
use serde::Serialize;

use crate::output::{block, line};

/// Returns the body of a decision as text if it is UTF-8, else as base64.
pub(super) fn body(bytes: Option<Vec<u8>>) -> (Option<String>, Option<String>) {
    match bytes.map(String::from_utf8) {
        None => (None, None),
        Some(Ok(text)) => (Some(text), None),
        Some(Err(error)) => (None, Some(STANDARD.encode(error.as_bytes()))),
    }
}

pub(super) fn list(listed: &RecordList) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_list(&mut text, listed);
    text
}

fn write_list(out: &mut String, listed: &RecordList) -> std::fmt::Result {
    if listed.keys.is_empty() && listed.damaged.is_empty() {
        out.push_str("no records\n");
    } else {
        write_rows(out, &listed.keys, true)?;
    }
    if let Some(as_of) = &listed.as_of {
        writeln!(out, "as of {as_of}, with what the gateway saw since")?;
    }
    for (id, reason) in &listed.damaged {
        writeln!(out, "{:<9} {}: {id}", "damaged", line(reason))?;
    }
    if let Some(next) = &listed.next {
        writeln!(out, "there may be more: --after {next}")?;
    }
    if listed.more {
        writeln!(out, "there are more: decide the oldest first, or raise --limit")?;
    }
    Ok(())
}

/// Returns records as a table, or as further rows of one.
pub(super) fn rows(views: &[RecordView], has_header: bool) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_rows(&mut text, views, has_header);
    text
}

fn write_rows(out: &mut String, views: &[RecordView], has_header: bool) -> std::fmt::Result {
    if has_header {
        writeln!(out, "{:<9} {:>7}  {:<24}  {:<24}  ID", "STATE", "ATTEMPT", "BEGAN", "EXPIRES")?;
    }
    for key in views {
        let RecordView { id, attempt, began, keep_until, .. } = key;
        let (state, expires) = (key.state.as_str(), keep_until.as_deref().unwrap_or("never"));
        writeln!(out, "{state:<9} {attempt:>7}  {began:<24}  {expires:<24}  {id}")?;
        if let Some(described) = &key.described {
            writeln!(out, "          {}", described_line(described))?;
        }
        if let Some(until) = &key.may_execute_until {
            writeln!(out, "          may still execute until {until}")?;
        }
    }
    Ok(())
}

/// Returns the hashes of the access log, under their names there.
pub(super) fn hashes(hashes: &AccessHashes) -> String {
    let AccessHashes { key_hash, caller_hash } = hashes;
    let named = [("key_hash", key_hash), ("caller_hash", caller_hash)];
    let lines = named.into_iter().filter_map(|(name, hash)| {
        let hash = hash.as_deref()?;
        Some(format!("{name:<12} {hash}\n"))
    });
    lines.collect()
}

/// Returns the groups as a table.
pub(super) fn count(counted: &UndecidedGroups) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_count(&mut text, counted);
    text
}

fn write_count(out: &mut String, counted: &UndecidedGroups) -> std::fmt::Result {
    if !counted.groups.is_empty() {
        writeln!(out, "{:>7}  {:<17}  {:<12}  ROUTE", "RECORDS", "MINUTE", "REASON")?;
    }
    for group in &counted.groups {
        let UndecidedGroup { operation, reason, minute, records, may_execute_until } = group;
        let operation = operation.as_deref().map_or("-".into(), line);
        writeln!(out, "{records:>7}  {minute:<17}  {reason:<12}  {operation}")?;
        if let Some(until) = may_execute_until {
            writeln!(out, "         may still execute until {until}")?;
        }
    }
    let full = if counted.more { " at least" } else { "" };
    writeln!(out, "waiting for a decision:{full} {}", counted.records)?;
    match &counted.as_of {
        Some(as_of) => writeln!(out, "as of {as_of}, with what the gateway saw since"),
        None => Ok(()),
    }
}

/// Returns an operation in one line: request, key, caller.
fn described_line(described: &OperationDescription) -> String {
    let OperationDescription { key, function, method, target, caller, .. } = described;
    let request = [method, target, function].into_iter().flatten();
    let mut words: Vec<String> = request.cloned().collect();
    words.push(format!("key {key}"));
    words.extend((!caller.is_empty()).then(|| self::caller(described)));
    line(&words.join("  "))
}

/// Returns the headers of an operation's scope, with the hashes of those that may be credentials.
pub(super) fn caller(described: &OperationDescription) -> String {
    let header = |CallerView { header, value, hash }: &CallerView| match (value, hash) {
        (Some(value), _) => format!("{header}: {value}"),
        (None, hash) => format!("{header} #{}", hash.as_deref().unwrap_or_default()),
    };
    described.caller.iter().map(header).collect::<Vec<_>>().join("  ")
}

pub(super) fn show(view: &RecordView) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_show(&mut text, view);
    text
}

fn write_show(out: &mut String, view: &RecordView) -> std::fmt::Result {
    let expires = view.keep_until.as_deref().unwrap_or("never");
    for (name, value) in [
        ("id", view.id.as_str()),
        ("state", view.state.as_str()),
        ("fence", &view.fence.to_string()),
        ("attempt", &view.attempt.to_string()),
        ("on unknown", &view.on_unknown),
        ("began", &view.began),
        ("ended", view.ended.as_deref().unwrap_or("not yet")),
        ("lease until", &view.lease_until),
        ("expires", expires),
        ("now", &view.now),
        ("fingerprint", &view.fingerprint),
        ("scheme", &view.scheme),
    ] {
        writeln!(out, "{name:<12} {value}")?;
    }
    if let Some(until) = &view.may_execute_until {
        writeln!(
            out,
            "{:<12} until {until}: the service may work on after its caller has gone, so look for the \
             effect after that",
            "may execute"
        )?;
    }
    if let Some(described) = &view.described {
        writeln!(out, "{:<12} {}", "operation", described_line(described))?;
    }
    if let Some(decided) = &view.decision {
        let Note { at, who, from, outcome, why, .. } = decided;
        let [who, from, why] = [who, from, why].map(|text| line(text));
        let outcome = match outcome {
            OperatorVerdict::Happened => "happened",
            OperatorVerdict::DidNotHappen => "did not happen",
        };
        writeln!(out, "{:<12} {outcome}, decided by {who} from {from} at {at}: {why}", "decision")?;
    }
    match &view.response {
        None => Ok(()),
        Some(response) => write_response(out, response),
    }
}

fn write_response(out: &mut String, response: &ResponseView) -> std::fmt::Result {
    if !response.retained {
        return writeln!(out, "{:<12} {}, its content is not stored", "response", response.status);
    }
    writeln!(out, "{:<12} {}, {} bytes", "response", response.status, response.body_bytes)?;
    for (name, value) in &response.headers {
        writeln!(out, "  {}: {}", line(name), line(value))?;
    }
    match (&response.body, &response.body_base64) {
        (Some(body), _) if !body.is_empty() => writeln!(out, "\n{}", block(body)),
        (None, Some(coded)) => writeln!(out, "\n{coded}"),
        _ => Ok(()),
    }
}

/// Prints a decision about a record.
#[derive(Debug, Serialize)]
pub(super) struct DecisionOutput {
    pub(super) id: String,
    pub(super) outcome: OperatorVerdict,
    pub(super) was: RecordBefore,
}

impl DecisionOutput {
    pub(super) fn released(&self, forget: bool) -> String {
        let although = match self.was.state {
            StateView::Unknown => ", although its outcome is unknown".to_owned(),
            _ => although(&self.was),
        };
        let until = if forget { "; with a cache, after at most a minute" } else { "" };
        format!("released{although}: the next request with this key executes{until}\n")
    }

    pub(super) fn resolved(&self) -> String {
        let although = although(&self.was);
        match self.outcome {
            OperatorVerdict::Happened => {
                format!("resolved{although}: it happened, and retries get this response\n")
            }
            OperatorVerdict::DidNotHappen => format!(
                "resolved{although}: it did not happen, and the next request with this key executes\n"
            ),
        }
    }
}

/// Prints the number of removed records.
#[derive(Debug, Serialize)]
pub(super) struct Purged {
    pub(super) removed: u64,
    /// True if nothing was removed here, because a gateway has the store open and removes records
    /// itself.
    pub(super) by_gateway: bool,
}

impl Purged {
    pub(super) fn text(&self) -> String {
        if self.by_gateway {
            return "nothing was removed here: the gateway that has this store open removes expired \
                    records itself\n"
                .into();
        }
        format!("{} expired records removed\n", self.removed)
    }
}

/// Prints the state that a forced decision replaced.
fn although(was: &RecordBefore) -> String {
    match was {
        RecordBefore { state: StateView::Done, ended: Some(at), status: Some(status) } => {
            format!(", although it was completed at {at} with status {status}")
        }
        RecordBefore { state: StateView::Done, .. } => ", although it was done".to_owned(),
        RecordBefore { state: StateView::InFlight, .. } => ", although it was in flight".to_owned(),
        _ => String::new(),
    }
}

/// Returns the option that forces a rejected decision, after the reason of the rejection.
pub(super) fn override_hint(code: &str, wanted: OperatorVerdict) -> &'static str {
    match (code, wanted) {
        ("in-flight", _) => " (--force)",
        ("other-kind", _) => " (--any-kind)",
        ("done", OperatorVerdict::DidNotHappen) => " (--forget)",
        _ => force_hint(code),
    }
}

/// Returns the option that forces a decision while a request may still execute.
pub(crate) fn force_hint(code: &str) -> &'static str {
    if code == "may-execute" { " (--force)" } else { "" }
}
