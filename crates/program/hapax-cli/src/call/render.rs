//! Lists and responses of `hapax call` on standard output.

use std::fmt::{Display, Write as _};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hapax_client::{FinishedOperation, PendingOperation, PendingState, Sent};
use hapax_core::{Key, Timestamp};
use serde_json::{Value, json};

use crate::exit::CliError;
use crate::output;

/// Returns a response as a JSON document. The value of a header that is no text is shown as Latin-1.
pub(super) fn sent(sent: &Sent) -> Result<String, CliError> {
    let latin = |bytes: &[u8]| bytes.iter().copied().map(char::from).collect::<String>();
    let headers = sent.response.headers.iter();
    let headers: Vec<_> = headers
        .map(|(name, value)| {
            let text = std::str::from_utf8(value.as_bytes()).map(str::to_owned);
            (name.as_str(), text.unwrap_or_else(|_| latin(value.as_bytes())))
        })
        .collect();
    let mut document = json!({
        "status": sent.response.status.as_u16(), "headers": headers,
        "replayed": sent.replayed, "stored": sent.stored, "tries": sent.tries,
    });
    let (name, body) = match std::str::from_utf8(&sent.response.body) {
        Ok(text) => ("body", text.to_owned()),
        Err(_) => ("body_base64", BASE64_STANDARD.encode(&sent.response.body)),
    };
    document[name] = body.into();
    output::json(&document)
}

/// Returns a list of operations as text.
pub(super) fn listed(pending: &[PendingOperation], finished: &[FinishedOperation]) -> String {
    let mut text = String::new();
    if pending.is_empty() && finished.is_empty() {
        text.push_str("no operations\n");
        return text;
    }
    row(&mut text, &"STATE", &"TRIES", [&"BEGUN", &"LAST TRY"], &"OPERATION");
    for it in pending {
        let (state, _) = state_and_detail(&it.state);
        let id = it.id.to_string();
        let name = if it.name.is_empty() { &id } else { &it.name };
        let operation = format!("{name}  {} {}", it.method, it.url);
        let [begun, last] = [it.begun, it.last_try].map(shown);
        row(&mut text, &state, &it.tries, [&begun, &last], &operation);
        keys(&mut text, &it.key, it.server_operation.as_deref());
    }
    for it in finished {
        let operation = format!("{}  {} {}", it.name, it.method, it.url);
        let [begun, last] = [it.begun, it.last_try].map(shown);
        row(&mut text, &it.status.as_u16(), &it.tries, [&begun, &last], &operation);
        keys(&mut text, &it.key, it.server_operation.as_deref());
    }
    text
}

fn row(
    text: &mut String,
    state: &dyn Display,
    tries: &dyn Display,
    [begun, last]: [&dyn Display; 2],
    operation: &dyn Display,
) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{state:<20} {tries:>5}  {begun:<24}  {last:<24}  {operation}");
}

fn keys(text: &mut String, key: &Key, server: Option<&str>) {
    let key = key.as_str();
    let server = server.map(|id| format!("  server's operation id {id}")).unwrap_or_default();
    let _ = writeln!(text, "  key {key}{server}");
}

fn shown(time: Option<Timestamp>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| time.to_string())
}

/// Returns the word for a state, and a sentence about it.
fn state_and_detail(state: &PendingState) -> (&str, Option<&String>) {
    match state {
        PendingState::Stopped { reason, detail } => (reason, Some(detail)),
        PendingState::Unreadable { detail } => ("unreadable", Some(detail)),
        _ => ("pending", None),
    }
}

/// Returns a list of operations as JSON.
pub(super) fn listed_json(pending: &[PendingOperation], finished: &[FinishedOperation]) -> Value {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    let pending = pending.iter().map(|it| {
        let (state, detail) = state_and_detail(&it.state);
        json!({
            "operation": it.id.to_string(), "name": it.name, "method": it.method, "url": it.url, "state": state, "detail": detail,
            "tries": it.tries, "may_have_happened": it.may_have_happened, "last_error": it.last_error,
            "key": it.key.as_str(), "server_operation": it.server_operation, "begun": time(it.begun), "last_try": time(it.last_try),
        })
    });
    let finished = finished.iter().map(|it| {
        json!({
            "name": it.name, "method": it.method, "url": it.url, "status": it.status.as_u16(), "tries": it.tries,
            "key": it.key.as_str(), "server_operation": it.server_operation, "begun": time(it.begun), "last_try": time(it.last_try),
        })
    });
    json!({ "pending": pending.collect::<Vec<_>>(), "finished": finished.collect::<Vec<_>>() })
}
