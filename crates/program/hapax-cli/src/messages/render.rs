//! Dead letters as text and as JSON.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hapax_postgres_messages::{DeadLetterContents, DeadLetterSummary};
use serde_json::{Value, json};

use crate::exit::CliError;
use crate::output::{self, block, line};

/// Returns bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn view(dead_letter: &DeadLetterSummary) -> Value {
    json!({
        "id": hex(&dead_letter.id),
        "consumer": dead_letter.consumer,
        "message_id": dead_letter.message_id,
        "origin": dead_letter.origin,
        "reason": dead_letter.reason,
        "attempts": dead_letter.attempts,
        "error": dead_letter.error,
        "order_key": dead_letter.order_key,
        "first_at": dead_letter.first_at,
        "last_at": dead_letter.last_at,
        "redrives": dead_letter.redrives,
        "payload_bytes": dead_letter.payload_bytes,
    })
}

/// Returns a list as JSON.
pub(super) fn json_list(dead_letters: &[DeadLetterSummary]) -> Result<String, CliError> {
    output::json(&json!({ "dead_letters": dead_letters.iter().map(view).collect::<Vec<_>>() }))
}

/// Returns a dead letter with its contents as JSON. Bytes that are not UTF-8 are encoded as Base64.
pub(super) fn json(
    dead_letter: &DeadLetterSummary,
    contents: &DeadLetterContents,
) -> Result<String, CliError> {
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(_) => json!({ "base64": BASE64_STANDARD.encode(bytes) }),
    };
    let headers: Vec<_> = contents
        .headers
        .iter()
        .map(|(name, value)| json!({ "name": name, "value": text(value) }))
        .collect();
    let mut shown = view(dead_letter);
    shown["headers"] = Value::from(headers);
    shown["payload"] = text(&contents.payload);
    output::json(&shown)
}

/// Returns a list: a line for each dead letter.
pub(super) fn list(dead_letters: &[DeadLetterSummary]) -> String {
    if dead_letters.is_empty() {
        return "no dead letters\n".to_owned();
    }
    dead_letters
        .iter()
        .map(|dead_letter| {
            format!(
                "{}  {}  {:<13}  {}  {}  {}\n",
                &hex(&dead_letter.id)[..12],
                dead_letter.last_at,
                dead_letter.reason,
                dead_letter.consumer,
                line(dead_letter.message_id.as_deref().unwrap_or("-")),
                line(&dead_letter.error),
            )
        })
        .collect()
}

/// Returns a dead letter with its contents.
pub(super) fn show(dead_letter: &DeadLetterSummary, contents: &DeadLetterContents) -> String {
    let mut out = String::new();
    let none = "-".to_owned();
    for (name, value) in [
        ("dead letter", hex(&dead_letter.id)),
        ("consumer", dead_letter.consumer.clone()),
        ("message id", dead_letter.message_id.clone().unwrap_or_else(|| none.clone())),
        ("origin", dead_letter.origin.clone()),
        ("reason", dead_letter.reason.clone()),
        ("attempts", dead_letter.attempts.to_string()),
        ("error", dead_letter.error.clone()),
        ("order key", dead_letter.order_key.clone().unwrap_or(none)),
        ("first", dead_letter.first_at.clone()),
        ("last", dead_letter.last_at.clone()),
        ("redrives", dead_letter.redrives.to_string()),
    ] {
        out.push_str(&format!("{name:<11} {}\n", line(&value)));
    }
    for (name, value) in &contents.headers {
        out.push_str(&format!("{:<11} {}: {}\n", "header", line(name), line(&lossy(value))));
    }
    let payload = match std::str::from_utf8(&contents.payload) {
        Ok(text) => block(text),
        Err(_) => format!("{} bytes: use --json", contents.payload.len()),
    };
    out.push_str(&format!("\n{payload}\n"));
    out
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
