//! The request of a message.

use bytes::Bytes;
use hapax_core::{Key, NaturalKey};
use hapax_http::fingerprint::METHOD_OVERRIDES;
use hapax_http::header::{IDEMPOTENCY_KEY, encode};
use hapax_messages::{MessageId, OutgoingMessage, PublishError};
use hapax_proxy::headers::{
    drop_hop_by_hop, drop_where, is_forwarded, is_of_the_message, is_target, plain,
};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, TRAILER, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use super::WebhookSink;
use crate::scheme::{STANDARD_HEADERS, StandardHeaders, standard_signature};

const MESSAGE_ID: HeaderName = HeaderName::from_static("message-id");
const MESSAGE_DESTINATION: HeaderName = HeaderName::from_static("message-destination");
const MESSAGE_ORDER_KEY: HeaderName = HeaderName::from_static("message-order-key");

/// The largest number of headers of a message.
const MAX_HEADERS: usize = 100;

/// Bytes that are percent-encoded, as in the HTTP binding of CloudEvents.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

const OUR_AGENT: HeaderValue =
    HeaderValue::from_static(concat!("hapax/", env!("CARGO_PKG_VERSION")));

impl WebhookSink {
    /// Returns whether the sink leaves a header of a message out, since a service could take it for one that a proxy, or the
    /// sink, has set:
    ///
    /// - those that name the client or the target before a proxy, or another method (`x-forwarded-…`, `forwarded`,
    ///   `x-real-ip`, `x-original-url`, `x-rewrite-url`, `x-http-method-override` and its like);
    /// - another spelling of a header of the request with underscores, such as `webhook_id`: CGI, WSGI, PHP and their
    ///   like have one variable for both.
    ///
    /// Headers of one connection, `host` and `content-length` are left out too.
    #[must_use]
    pub fn leaves_out(name: &HeaderName) -> bool {
        let plain = plain(name);
        let is_override = METHOD_OVERRIDES.iter().any(|it| *it == *plain);
        let is_spelling = || {
            name.as_str().contains('_')
                && (is_of_the_message(&plain) || own_names().iter().any(|it| *it == *plain))
        };
        is_target(&plain) || is_forwarded(&plain) || is_override || is_spelling()
    }

    /// Returns the bytes of the headers of a request that have a text of its message: id, destination and order key, each
    /// encoded. They may have three times the length of their texts.
    #[must_use]
    pub fn text_header_bytes(message: &OutgoingMessage) -> usize {
        let key = message.key.as_deref().unwrap_or_default();
        let texts = [message.id.as_str(), &message.destination, key];
        let bytes = |text| utf8_percent_encode(text, ENCODED).map(str::len).sum::<usize>();
        texts.into_iter().map(bytes).sum()
    }

    /// Returns the request of a message, signed now.
    pub(super) fn request(
        &self,
        message: &OutgoingMessage,
    ) -> Result<Request<Full<Bytes>>, PublishError> {
        let mut headers = own_headers(&message.headers)?;
        let id = webhook_id(&message.id);
        let timestamp = (self.clock.now().as_micros() / 1_000_000).to_string();
        let StandardHeaders { id: id_name, timestamp: timestamp_name, signature } =
            STANDARD_HEADERS;
        if let Some(secrets) = &self.secrets {
            let text = standard_signature(secrets, &id, &timestamp, &message.payload);
            headers.insert(signature, value(&text)?);
        } else {
            headers.remove(signature);
        }
        headers.insert(id_name, value(id.as_str())?);
        headers.insert(timestamp_name, value(&timestamp)?);
        headers.insert(IDEMPOTENCY_KEY, encode(&id));
        headers.insert(MESSAGE_ID, encoded(message.id.as_str())?);
        headers.insert(MESSAGE_DESTINATION, encoded(&message.destination)?);
        headers.remove(MESSAGE_ORDER_KEY);
        if let Some(key) = &message.key {
            headers.insert(MESSAGE_ORDER_KEY, encoded(key)?);
        }
        headers.insert(HOST, value(self.endpoint.authority().as_str())?);
        headers.entry(USER_AGENT).or_insert(OUR_AGENT);
        headers.entry(CONTENT_TYPE).or_insert_with(|| content_type(&message.payload));
        let mut request = Request::new(Full::new(message.payload.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from(self.path_and_query.clone());
        *request.headers_mut() = headers;
        Ok(request)
    }
}

/// Returns the headers that the sink sets, beside those that every request has.
fn own_names() -> [HeaderName; 8] {
    let StandardHeaders { id, timestamp, signature } = STANDARD_HEADERS;
    [
        id,
        timestamp,
        signature,
        IDEMPOTENCY_KEY,
        MESSAGE_ID,
        MESSAGE_DESTINATION,
        MESSAGE_ORDER_KEY,
        USER_AGENT,
    ]
}

/// Returns the id of a webhook. No two messages share one: [`MessageId::to_key`] hashes ids in the
/// same way.
fn webhook_id(id: &MessageId) -> Key {
    // A header has no white space at its ends, and the signed content has one full stop after the
    // id.
    match id.as_str().bytes().all(|byte| byte.is_ascii_graphic() && byte != b'.') {
        true => id.to_key(),
        false => NaturalKey::new("message").part("id", id.as_str()).key(),
    }
}

/// Returns the content type of a payload whose message has none. Many frameworks reject each request
/// without one. A number or a word is a JSON text too, but more often another one.
fn content_type(payload: &[u8]) -> HeaderValue {
    let first = payload.iter().find(|byte| !byte.is_ascii_whitespace());
    let is_json = first.is_some_and(|byte| b"{[".contains(byte))
        && serde_json::from_slice::<serde_json::Value>(payload).is_ok();
    HeaderValue::from_static(match is_json {
        true => "application/json",
        false => "application/octet-stream",
    })
}

/// Returns the headers of the message itself.
fn own_headers(headers: &[(String, Bytes)]) -> Result<HeaderMap, PublishError> {
    let found = headers.len();
    if found > MAX_HEADERS {
        return Err(PublishError::rejected(format!(
            "expected at most {MAX_HEADERS} headers, found {found}: remove some where the \
             message is written"
        )));
    }
    let mut map = HeaderMap::with_capacity(found + 10);
    for (name, value) in headers {
        let cannot = |what: &str| {
            PublishError::rejected(format!(
                "the header {name:?}: expected {what}, found another one: change it where the \
                 message is written"
            ))
        };
        let field = HeaderName::from_bytes(name.as_bytes());
        let field = field.map_err(|_| cannot("a name of letters, digits and hyphens"))?;
        let value = HeaderValue::from_bytes(value);
        map.append(field, value.map_err(|_| cannot("a value of one line"))?);
    }
    drop_hop_by_hop(&mut map);
    for name in [HOST, CONTENT_LENGTH, EXPECT, TRAILER] {
        map.remove(name);
    }
    drop_where(&mut map, WebhookSink::leaves_out);
    Ok(map)
}

fn encoded(text: &str) -> Result<HeaderValue, PublishError> {
    value(&utf8_percent_encode(text, ENCODED).to_string())
}

fn value(text: &str) -> Result<HeaderValue, PublishError> {
    HeaderValue::from_str(text).map_err(PublishError::rejected)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_that_no_header_can_carry_are_hashed_and_stay_distinct() {
        let id = |text: &str| webhook_id(&MessageId::new(text).unwrap()).as_str().to_owned();
        assert_eq!(id("m-1"), "m-1");
        let hash = id("orders.17");
        let texts =
            ["orders.17", "a b", " a", "a", "ä", "a\n", &"x".repeat(256), &"x".repeat(255), &hash];
        let ids: BTreeSet<_> = texts.iter().map(|text| id(text)).collect();
        assert_eq!(ids.len(), texts.len());
        assert!(ids.iter().all(|id| id.len() <= 255 && !id.contains(['.', ' '])), "{ids:?}");
    }

    #[test]
    fn a_payload_is_json_if_it_is_an_object_or_an_array() {
        for payload in ["{}", " \n[1, {\"a\": null}] ", "{\"a\": \"ä\"}"] {
            assert_eq!(content_type(payload.as_bytes()), "application/json", "{payload}");
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        for payload in ["", " ", "17", "true", "\"a\"", "{", "{} {}", "[1,]", "a=b", &deep] {
            assert_eq!(content_type(payload.as_bytes()), "application/octet-stream");
        }
        assert_eq!(content_type(b"[\"\xff\"]"), "application/octet-stream");
    }

    #[test]
    fn headers_that_a_service_could_take_for_those_of_the_sink_or_of_a_proxy_are_left_out() {
        let left_out = [
            "webhook_id",
            "Webhook_Timestamp",
            "webhook_signature",
            "idempotency_key",
            "idempotency_Key",
            "message_id",
            "message_destination",
            "message_order-key",
            "message-order_key",
            "user_agent",
            "content_type",
            "content_length",
            "transfer_encoding",
            "x-http-method-override",
            "X_Method_Override",
            "x-http-method",
            "x-original-url",
            "x_rewrite_url",
            "x-forwarded-for",
            "x_forwarded_proto",
            "X-Forwarded-Prefix",
            "forwarded",
            "x-real-ip",
        ];
        let kept = ["authorization", "cookie", "webhook_x", "x_tenant", "ce_id", "x-forward"];
        let headers = left_out.iter().chain(&kept);
        let headers = headers.map(|name| ((*name).to_owned(), Bytes::from("of the message")));
        let map = own_headers(&headers.collect::<Vec<_>>()).unwrap();
        let found: BTreeSet<_> = map.keys().map(HeaderName::as_str).collect();
        assert_eq!(found, BTreeSet::from(kept));
    }

    #[test]
    fn the_bytes_of_headers_with_texts_are_those_that_the_request_has() {
        let id = MessageId::new("ä%".repeat(300)).unwrap();
        let mut message = OutgoingMessage::new("orders created", id, "{}");
        message.key = Some("\n\u{7f}k".repeat(100));
        let texts = [message.id.as_str(), &message.destination, message.key.as_ref().unwrap()];
        let bytes: usize = texts.iter().map(|text| encoded(text).unwrap().len()).sum();
        assert_eq!(WebhookSink::text_header_bytes(&message), bytes);
        message.key = None;
        let bytes = bytes - encoded(&"\n\u{7f}k".repeat(100)).unwrap().len();
        assert_eq!(WebhookSink::text_header_bytes(&message), bytes);
    }

    #[test]
    fn headers_of_a_connection_are_left_out() {
        let of = |headers: &[(&str, &'static str)]| {
            let headers =
                headers.iter().map(|(name, value)| ((*name).to_owned(), Bytes::from(*value)));
            own_headers(&headers.collect::<Vec<_>>())
        };
        let map = of(&[
            ("Content-Type", "application/json"),
            ("Connection", "X-Hop"),
            ("x-hop", "1"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Length", "3"),
            ("HOST", "other.example"),
            ("expect", "100-continue"),
            ("trace", "ä"),
        ]);
        let map = map.unwrap();
        let names: Vec<_> = map.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["content-type", "trace"]);
        for wrong in [("a b", "x"), ("", "x"), ("a", "x\r\ny: z"), ("a", "\0")] {
            let error = of(&[wrong]).unwrap_err();
            assert!(matches!(&error, PublishError::Rejected(_)), "{error}");
        }
        assert!(of(&[("a", "b"); 101]).is_err());
    }
}
