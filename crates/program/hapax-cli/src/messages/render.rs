//! Dead letters as text and as JSON.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hapax_postgres_messages::{LetterContents, LetterView};
use serde_json::{Value, json};

/// Returns bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn view(letter: &LetterView) -> Value {
    json!({
        "id": hex(&letter.id),
        "consumer": letter.consumer,
        "message_id": letter.message_id,
        "origin": letter.origin,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "error": letter.error,
        "order_key": letter.order_key,
        "first_at": letter.first_at,
        "last_at": letter.last_at,
        "redrives": letter.redrives,
        "payload_bytes": letter.payload_bytes,
    })
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Returns a list as JSON.
pub(super) fn json_list(letters: &[LetterView]) -> String {
    pretty(&json!({ "letters": letters.iter().map(view).collect::<Vec<_>>() }))
}

/// Returns a letter with its contents as JSON. Bytes that are no UTF-8 are in Base64.
pub(super) fn json(letter: &LetterView, contents: &LetterContents) -> String {
    let text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(_) => json!({ "base64": BASE64_STANDARD.encode(bytes) }),
    };
    let headers: Vec<_> = contents
        .headers
        .iter()
        .map(|(name, value)| json!({ "name": name, "value": text(value) }))
        .collect();
    let mut shown = view(letter);
    shown["headers"] = Value::from(headers);
    shown["payload"] = text(&contents.payload);
    pretty(&shown)
}

/// Returns a list: a line for each letter.
pub(super) fn list(letters: &[LetterView]) -> String {
    if letters.is_empty() {
        return "no dead letters\n".to_owned();
    }
    letters
        .iter()
        .map(|letter| {
            format!(
                "{}  {}  {:<13}  {}  {}  {}\n",
                &hex(&letter.id)[..12],
                letter.last_at,
                letter.reason,
                letter.consumer,
                line(letter.message_id.as_deref().unwrap_or("-")),
                line(&letter.error),
            )
        })
        .collect()
}

/// Returns a letter with its contents.
pub(super) fn show(letter: &LetterView, contents: &LetterContents) -> String {
    let mut out = String::new();
    let none = "-".to_owned();
    for (name, value) in [
        ("letter", hex(&letter.id)),
        ("consumer", letter.consumer.clone()),
        ("message id", letter.message_id.clone().unwrap_or_else(|| none.clone())),
        ("origin", letter.origin.clone()),
        ("reason", letter.reason.clone()),
        ("attempts", letter.attempts.to_string()),
        ("error", letter.error.clone()),
        ("order key", letter.order_key.clone().unwrap_or(none)),
        ("first", letter.first_at.clone()),
        ("last", letter.last_at.clone()),
        ("redrives", letter.redrives.to_string()),
    ] {
        out.push_str(&format!("{name:<11} {}\n", line(&value)));
    }
    for (name, value) in &contents.headers {
        out.push_str(&format!("{:<11} {}: {}\n", "header", line(name), line(&lossy(value))));
    }
    let payload = match std::str::from_utf8(&contents.payload) {
        Ok(text) => {
            text.replace(|it: char| it.is_control() && it != '\n' && it != '\t', "\u{fffd}")
        }
        Err(_) => format!("{} bytes: use --json", contents.payload.len()),
    };
    out.push_str(&format!("\n{payload}\n"));
    out
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns a text without characters that control a terminal.
fn line(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}
