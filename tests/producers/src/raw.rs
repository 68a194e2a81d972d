//! A message as its broker has it, and what a redrive may change.

use std::collections::BTreeMap;

use crate::broker::Kind;

/// A message: its payload, and each other part as text with its type, by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Raw {
    pub(crate) payload: Vec<u8>,
    pub(crate) fields: BTreeMap<String, String>,
}

impl Raw {
    /// Adds a header that may be there already: its values stay in their order.
    pub(crate) fn add_header(&mut self, name: &[u8], value: &str) {
        let all = self.fields.entry(format!("header {}", name.escape_ascii())).or_default();
        all.push_str(value);
        all.push(';');
        let others = ["message-id", "x-death", "x-delivery-count", "CC", "BCC"];
        let is_other = others.iter().any(|other| name.eq_ignore_ascii_case(other.as_bytes()));
        // Those have exceptions of their own.
        if !is_other && !name.to_ascii_lowercase().starts_with(b"hapax-") {
            let order = self.fields.entry("order of headers".to_owned()).or_default();
            order.push_str(&format!("{};", name.escape_ascii()));
        }
    }
}

/// A change of a field that a redrive may make.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Any,
    Added,
    Removed,
    /// The message had an id that was none.
    OfInvalidId,
}

/// A documented exception: broker, field (`*` at its end matches any rest), change and reason.
type Exception = (Option<Kind>, &'static str, Change, &'static str);

/// The exceptions from "a redriven message is what it was".
const EXCEPTIONS: &[Exception] = &[
    (None, "header hapax-redrive", Change::Any, "names the dead letter that the consumer removes"),
    (None, "header message-id", Change::Added, "the id under which the inbox knows the message"),
    (None, "header message-id", Change::OfInvalidId, "--new-id gives it one"),
    (Some(Kind::Rabbitmq), "property message-id", Change::Added, "as the header message-id"),
    (Some(Kind::Rabbitmq), "property message-id", Change::OfInvalidId, "--new-id gives it one"),
    (
        Some(Kind::Rabbitmq),
        "header hapax-routing-key",
        Change::Added,
        "the queue is the routing key",
    ),
    (
        Some(Kind::Rabbitmq),
        "header hapax-redriven-at",
        Change::Any,
        "its age counts from the redrive",
    ),
    (
        Some(Kind::Rabbitmq),
        "property delivery-mode",
        Change::Any,
        "redriven messages are persistent",
    ),
    (Some(Kind::Rabbitmq), "property expiration", Change::Removed, "its time to live is over"),
    (Some(Kind::Rabbitmq), "property user-id", Change::Removed, "another user publishes it"),
    (Some(Kind::Rabbitmq), "header x-death", Change::Removed, "the broker's own"),
    (Some(Kind::Rabbitmq), "header x-delivery-count", Change::Removed, "the broker's own"),
    (Some(Kind::Rabbitmq), "header CC", Change::Removed, "would copy it to other queues again"),
    (
        Some(Kind::Nats),
        "header Nats-*",
        Change::Any,
        "commands to the server, and its deduplication",
    ),
    (Some(Kind::Nats), "order of headers", Change::Any, "the client keeps that of one name only"),
];

/// Returns how a redriven message differs from what it was, as field and text.
pub(crate) fn differences(kind: Kind, was: &Raw, is: &Raw) -> Vec<(String, String)> {
    let mut found = Vec::new();
    if was.payload != is.payload {
        let text = |raw: &Raw| raw.payload.escape_ascii().to_string();
        found.push(("payload".to_owned(), said(Some(&text(was)), Some(&text(is)))));
    }
    let names: std::collections::BTreeSet<_> = was.fields.keys().chain(is.fields.keys()).collect();
    for name in names {
        let (before, after) = (was.fields.get(name), is.fields.get(name));
        if before != after && !is_allowed(kind, name, before, after) {
            found.push((name.clone(), said(before, after)));
        }
    }
    found
}

fn is_allowed(kind: Kind, name: &str, before: Option<&String>, after: Option<&String>) -> bool {
    EXCEPTIONS.iter().any(|(broker, field, change, _)| {
        let is_field = match field.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == *field,
        };
        let is_change = match change {
            Change::Any => true,
            Change::Added => before.is_none(),
            Change::Removed => after.is_none(),
            Change::OfInvalidId => before.is_some_and(|id| is_invalid(id)),
        };
        is_field && is_change && broker.is_none_or(|it| it == kind)
    })
}

/// Returns whether a field is an id that the inbox does not take: empty, not UTF-8, with a zero byte, or over 1,024
/// bytes.
fn is_invalid(field: &str) -> bool {
    let text = field.trim_end_matches(';');
    let text = text.strip_prefix('S').unwrap_or(text).trim_matches('"');
    text.is_empty() || text.contains("\\x") || text.len() > 1024
}

/// Returns both texts from shortly before their first difference on.
fn said(before: Option<&String>, after: Option<&String>) -> String {
    let same = match (before, after) {
        (Some(one), Some(other)) => {
            one.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count()
        }
        _ => 0,
    };
    let text = |field: Option<&String>| match field {
        None => "missing".to_owned(),
        Some(text) => {
            let from = text.floor_char_boundary(same.saturating_sub(SHOWN / 2));
            let to = text.floor_char_boundary(from + SHOWN);
            let [start, end] = [(from > 0), (to < text.len())].map(|it| if it { "…" } else { "" });
            format!("{start}{}{end}", &text[from..to])
        }
    };
    format!("was {}, is {}", text(before), text(after))
}

/// Length of a text in a difference.
const SHOWN: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exceptions_are_allowed() {
        let raw = |fields: &[(&str, &str)]| {
            let mut raw = Raw::default();
            fields.iter().for_each(|(name, value)| raw.add_header(name.as_bytes(), value));
            raw
        };
        let was = raw(&[("a", "I1"), ("Nats-Msg-Id", "\"x\"")]);
        let is = raw(&[("a", "I1"), ("Nats-Msg-Id", "\"y\""), ("hapax-redrive", "\"00\"")]);
        assert_eq!(differences(Kind::Nats, &was, &is), []);
        let fields =
            |found: Vec<(String, String)>| found.into_iter().map(|it| it.0).collect::<Vec<_>>();
        assert_eq!(fields(differences(Kind::Rabbitmq, &was, &is)), ["header Nats-Msg-Id"]);
        let is = raw(&[("a", "S\"1\""), ("message-id", "S\"m\"")]);
        assert_eq!(fields(differences(Kind::Rabbitmq, &raw(&[("a", "I1")]), &is)), ["header a"]);
        let was = raw(&[("message-id", "S\"\"")]);
        assert_eq!(differences(Kind::Rabbitmq, &was, &raw(&[("message-id", "S\"m\"")])), []);
        let was = raw(&[("message-id", "S\"l\"")]);
        assert_eq!(differences(Kind::Rabbitmq, &was, &raw(&[("message-id", "S\"m\"")])).len(), 1);
    }
}
