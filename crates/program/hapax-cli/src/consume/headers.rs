//! Headers of messages in requests. What HTTP cannot carry, or a service would answer with an error, is encoded or left out:
//! no message becomes a dead letter because of its headers.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use hapax_messages::OutgoingMessage;
use hapax_webhooks::WebhookSink;
use http::HeaderName;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};

/// Most headers of a message in a request. Services accept at least 100, and the request has others.
const MAX_HEADERS: usize = 64;

/// Most bytes of these, with id, destination and order key of the message as the request has them. Services accept at least
/// 8 KiB, and the request has others.
const MAX_BYTES: usize = 6 * 1024;

/// Most warnings of a process.
const MAX_WARNINGS: usize = 100;

/// Longest name in a warning, in characters.
const MAX_NAME: usize = 100;

/// Prefixes of the attributes of a CloudEvent in the bindings of brokers.
const CLOUD_EVENTS: [&str; 3] = ["cloudEvents:", "cloudEvents_", "ce_"];

/// Values of `content-encoding` that a service may know. AMQP has a property of this name, in which frameworks store a
/// character set, such as kombu `utf-8`; a service answers it with 415.
const CONTENT_CODINGS: [&str; 8] =
    ["gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress", "identity"];

/// A difference of a header in a request from the header of its message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Change {
    Name,
    Misleading,
    Repeated,
    ContentType,
    ContentEncoding,
    TooLarge,
    Encoded,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name => {
                f.write_str("it is left out: expected a name of an HTTP header, found another one")
            }
            Self::Misleading => f.write_str(
                "it is left out: a service could take it for one that a proxy, or this program, has set",
            ),
            Self::Repeated => f.write_str("it is left out but for the first: expected it once"),
            Self::ContentType => {
                f.write_str("it is left out: expected a media type, found an empty one")
            }
            Self::ContentEncoding => f.write_str(
                "it is left out: expected a content coding, such as gzip, found another text",
            ),
            Self::TooLarge => write!(
                f,
                "it is left out: expected at most {MAX_HEADERS} headers of {MAX_BYTES} bytes in sum with id, destination and \
                 order key, found more"
            ),
            Self::Encoded => f.write_str(
                "it is percent-encoded: expected visible ASCII and spaces, found other bytes",
            ),
        }
    }
}

/// Warnings about headers, each of which is logged once.
#[derive(Debug, Default)]
pub(super) struct HeaderWarnings(Mutex<HashSet<(String, Change)>>);

impl HeaderWarnings {
    fn warn(&self, name: &str, change: Change) {
        let name: String = name.chars().take(MAX_NAME).collect();
        let mut warned = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.len() < MAX_WARNINGS && warned.insert((name.clone(), change)) {
            drop(warned);
            tracing::warn!(header = name, "a header of messages in requests: {change}");
        }
    }
}

/// Returns the headers of the request of a message, those that `message` gets. The attributes of a CloudEvent get their names
/// of the HTTP binding.
pub(super) fn of_request(
    headers: &[(String, Bytes)],
    message: &OutgoingMessage,
    warnings: &HeaderWarnings,
) -> Vec<(String, Bytes)> {
    let mut sent: Vec<(String, Bytes)> = Vec::with_capacity(headers.len().min(MAX_HEADERS));
    let mut left = MAX_BYTES.saturating_sub(WebhookSink::text_header_bytes(message));
    for (name, value) in headers {
        let change = |change| warnings.warn(name, change);
        let http_name = http_name(name);
        let Ok(field) = HeaderName::from_bytes(http_name.as_bytes()) else {
            change(Change::Name);
            continue;
        };
        if WebhookSink::leaves_out(&field) {
            change(Change::Misleading);
            continue;
        }
        if let Some(unusable) = unusable(&field, value, &sent) {
            change(unusable);
            continue;
        }
        // Before it is encoded, which may be much longer.
        let bytes = |value: &[u8]| http_name.len().saturating_add(value.len()).saturating_add(4);
        let fits = |value: &[u8]| sent.len() < MAX_HEADERS && bytes(value) <= left;
        if !fits(value) {
            change(Change::TooLarge);
            continue;
        }
        let mut value = value.clone();
        if !value.iter().all(|byte| is_plain(*byte)) {
            value = encoded(&value);
            if !fits(&value) {
                change(Change::TooLarge);
                continue;
            }
            change(Change::Encoded);
        }
        left -= bytes(&value);
        sent.push((http_name, value));
    }
    sent
}

/// Returns why a service would answer a header with an error, or would not find its value.
fn unusable(field: &HeaderName, value: &Bytes, sent: &[(String, Bytes)]) -> Option<Change> {
    if *field != CONTENT_TYPE && *field != CONTENT_ENCODING {
        return None;
    }
    let text = std::str::from_utf8(value).unwrap_or_default().trim();
    let is_coding = |it: &str| CONTENT_CODINGS.iter().any(|coding| it.eq_ignore_ascii_case(coding));
    if *field == CONTENT_TYPE && value.trim_ascii().is_empty() {
        Some(Change::ContentType)
    } else if *field == CONTENT_ENCODING && !text.split(',').all(|it| is_coding(it.trim())) {
        Some(Change::ContentEncoding)
    } else {
        let is_repeated = sent.iter().any(|(name, _)| name.eq_ignore_ascii_case(field.as_str()));
        is_repeated.then_some(Change::Repeated)
    }
}

fn http_name(name: &str) -> String {
    let attribute = CLOUD_EVENTS.iter().find_map(|prefix| name.strip_prefix(prefix));
    attribute.map_or_else(|| name.to_owned(), |attribute| format!("ce-{attribute}"))
}

/// Returns whether every service reads a byte of a value as it is.
const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() || byte == b' ' || byte == b'\t'
}

/// Percent-encodes the bytes that are not visible ASCII or spaces, and `%`.
fn encoded(value: &[u8]) -> Bytes {
    let mut text = String::with_capacity(value.len());
    for byte in value {
        if is_plain(*byte) && *byte != b'%' {
            text.push(char::from(*byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use hapax_messages::MessageId;
    use http::HeaderValue;

    use super::*;

    fn message(id: &str, destination: &str, key: &str) -> OutgoingMessage {
        let mut message = OutgoingMessage::new(destination, MessageId::new(id).unwrap(), "{}");
        message.key = Some(key.to_owned());
        message
    }

    fn sent(headers: &[(&str, &[u8])]) -> Vec<(String, String)> {
        let own: Vec<_> = headers
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Bytes::copy_from_slice(value)))
            .collect();
        let sent = of_request(&own, &message("1", "", ""), &HeaderWarnings::default());
        let mut bytes = 0;
        for (name, value) in &sent {
            HeaderName::from_bytes(name.as_bytes()).unwrap();
            HeaderValue::from_bytes(value).unwrap();
            bytes += name.len() + value.len();
        }
        assert!(sent.len() <= MAX_HEADERS && bytes <= MAX_BYTES);
        let text = |value: Bytes| String::from_utf8(value.to_vec()).unwrap();
        sent.into_iter().map(|(name, value)| (name, text(value))).collect()
    }

    #[test]
    fn what_http_cannot_carry_is_encoded_or_left_out() {
        let found = sent(&[
            ("tenant", b"a %20 b"),
            ("city", "Zürich 100%".as_bytes()),
            ("binary", &[0, 255, b'\r', b'\n', 127]),
            ("a b", b"x"),
            ("", b"x"),
            ("ü", b"x"),
            ("a:b", b"x"),
            ("trace", b"1"),
            ("Trace", b"2"),
            ("empty", b""),
            ("cloudEvents:subject", "ä".as_bytes()),
        ]);
        let expected = [
            ("tenant", "a %20 b"),
            ("city", "Z%C3%BCrich 100%25"),
            ("binary", "%00%FF%0D%0A%7F"),
            ("trace", "1"),
            ("Trace", "2"),
            ("empty", ""),
            ("ce-subject", "%C3%A4"),
        ];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn headers_about_the_payload_are_those_that_a_service_knows() {
        for (headers, expected) in [
            (&[("content-type", "a/b"), ("Content-Type", "c/d")][..], &["a/b"][..]),
            (&[("content-type", ""), ("content-type", " \t"), ("content-type", "a/b")], &["a/b"]),
            (&[("content-type", " \t\r\n")], &[]),
            (&[("content-encoding", "utf-8")], &[]),
            (&[("content-encoding", "binary")], &[]),
            (&[("content-encoding", "")], &[]),
            (&[("Content-Encoding", "gzip, BR"), ("content-encoding", "gzip")], &["gzip, BR"]),
        ] {
            let bytes: Vec<_> =
                headers.iter().map(|(name, value)| (*name, value.as_bytes())).collect();
            let values: Vec<_> = sent(&bytes).into_iter().map(|(_, value)| value).collect();
            assert_eq!(values, expected, "{headers:?}");
        }
    }

    #[test]
    fn headers_that_are_too_many_or_too_large_are_left_out_and_later_ones_that_fit_are_not() {
        let large = vec![b'x'; MAX_BYTES + 1];
        // Encoded it is three times as large.
        let binary = vec![0xff; MAX_BYTES / 2];
        let name = "n".repeat(70_000);
        let found = sent(&[("large", &large), ("binary", &binary), (&name, b""), ("last", b"x")]);
        assert_eq!(found, [("last".to_owned(), "x".to_owned())]);
        let many: Vec<_> = (0..200).map(|_| ("a", &b"x"[..])).collect();
        assert_eq!(sent(&many).len(), MAX_HEADERS);
    }

    #[test]
    fn the_headers_of_id_destination_and_order_key_are_within_the_same_bytes() {
        // As long as each may be, and three times as long in the request.
        let (id, key) = ("ä".repeat(512), "ö".repeat(512));
        let header = ("trace".to_owned(), Bytes::from(vec![b'x'; 2_000]));
        for (id, key, is_sent) in
            [("1", "1", true), (&*id, "1", true), ("1", &*key, true), (&*id, &*key, false)]
        {
            let message = message(id, "orders", key);
            let sent =
                of_request(std::slice::from_ref(&header), &message, &HeaderWarnings::default());
            assert_eq!(sent.len(), usize::from(is_sent), "{} {}", id.len(), key.len());
        }
    }

    #[test]
    fn headers_that_a_service_could_take_for_those_of_a_proxy_are_left_out_with_a_warning() {
        let names = ["webhook_id", "x-http-method-override", "X-Forwarded-For", "authorization"];
        let headers = names.map(|name| (name.to_owned(), Bytes::from("x")));
        let warnings = HeaderWarnings::default();
        let sent = of_request(&headers, &message("1", "", ""), &warnings);
        assert_eq!(sent, headers[3..]);
        let warned = warnings.0.lock().unwrap();
        let expected = names[..3].iter().map(|name| ((*name).to_owned(), Change::Misleading));
        assert_eq!(*warned, expected.collect());
    }

    #[test]
    fn each_warning_is_logged_once_and_few_are() {
        let warnings = HeaderWarnings::default();
        for number in 0..1_000 {
            for change in [Change::Name, Change::Encoded, Change::Name] {
                warnings.warn(&format!("{number}{}", "x".repeat(10_000)), change);
            }
        }
        let warned = warnings.0.lock().unwrap();
        assert_eq!(warned.len(), MAX_WARNINGS);
        assert!(warned.iter().all(|(name, _)| name.len() <= MAX_NAME));
    }

    #[test]
    fn attributes_of_cloud_events_have_their_names_of_http() {
        for name in ["cloudEvents:id", "cloudEvents_id", "ce_id", "ce-id"] {
            assert_eq!(http_name(name), "ce-id");
        }
        assert_eq!(http_name("trace"), "trace");
    }
}
