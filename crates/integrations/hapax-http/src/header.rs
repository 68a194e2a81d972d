//! The headers, and the grammar of `Idempotency-Key`.
//!
//! 1. The value is a Structured Field Item of type String (RFC 9651, RFC 8941), as in
//!    draft-ietf-httpapi-idempotency-key-header-07: `"8e03978e"`. Parameters are parsed and
//!    ignored.
//! 2. [`Grammar::Lenient`] also accepts a bare value, because most clients send one: visible ASCII
//!    without `"`, `,`, `;` and `\`. `abc` and `"abc"` are the same key.
//! 3. There must be one field line with one key. Two lines, or a list, are invalid: two readers
//!    could pick different keys.

use hapax_core::{Key, KeyError, OperationId, Timestamp};
use http::header::{
    AUTHORIZATION, COOKIE, DATE, EXPECT, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue,
    ORIGIN, VIA,
};
use sfv::BareItemFromInput;
use sfv::visitor::{Ignored, ParameterVisitor, parameter_visitor_with};

use crate::stored_response::hop_by_hop;

/// Request header: the key, unless a route names another header.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Request header to an upstream: the fence of this execution, a decimal number.
pub const IDEMPOTENCY_FENCE: HeaderName = HeaderName::from_static("idempotency-fence");
/// Request header to an upstream: the number of the execution within its record, from 1.
pub const IDEMPOTENCY_ATTEMPT: HeaderName = HeaderName::from_static("idempotency-attempt");
/// Request header to an upstream: the operation id, a hash of scope and key. It is the same for
/// every attempt and differs between callers with equal keys: services find operations by it.
/// Response header to a client, where a secret names records: the same id, to quote to an operator.
pub const IDEMPOTENCY_OPERATION_ID: HeaderName =
    HeaderName::from_static("idempotency-operation-id");
/// Request header to an upstream: the time after which its caller no longer waits, as a Date (RFC 9651,
/// 3.3.7). It proves nothing about the effect, and clocks differ.
pub const IDEMPOTENCY_DEADLINE: HeaderName = HeaderName::from_static("idempotency-deadline");
/// Header of a handler's response: `final`, `retryable` or `unknown`, instead of the class of its
/// status. Rejections have it for a layer or gateway in front ([`crate::error_format`]).
pub const IDEMPOTENCY_OUTCOME: HeaderName = HeaderName::from_static("idempotency-outcome");
/// Response header of a handler: the retention of this outcome in seconds.
pub const IDEMPOTENCY_RETENTION: HeaderName = HeaderName::from_static("idempotency-retention");
/// Response header: `true` on a replay, `false` on the response of the execution itself.
pub const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Response header: `pending` if the store has not accepted the outcome yet.
pub const IDEMPOTENCY_RECORDED: HeaderName = HeaderName::from_static("idempotency-recorded");
/// Response header: `false` if the store was unavailable and the route executes nevertheless.
pub const IDEMPOTENCY_PROTECTED: HeaderName = HeaderName::from_static("idempotency-protected");

/// Response header, if a route has enabled it: the time from which the key may be used again, as a
/// Date (RFC 9651, 3.3.7): `@` and seconds since 1970, by the store's clock.
pub const IDEMPOTENCY_EXPIRES: HeaderName = HeaderName::from_static("idempotency-expires");

/// Returns the value of [`IDEMPOTENCY_EXPIRES`] or [`IDEMPOTENCY_DEADLINE`], rounded up, so that no client
/// retries too early, and no caller waits longer.
#[must_use]
pub fn date(moment: Timestamp) -> HeaderValue {
    let date = format!("@{}", moment.as_micros().div_ceil(1_000_000));
    // Every header value may contain digits.
    HeaderValue::try_from(date).unwrap_or_else(|_| HeaderValue::from_static("@0"))
}

/// Removes every `Idempotency-*` header: those of a handler are for this layer only.
pub fn strip(headers: &mut HeaderMap) {
    retain(headers, |name| !is_protocol_header(name));
}

/// Returns whether a header is an `Idempotency-*` one.
pub(crate) fn is_protocol_header(name: &HeaderName) -> bool {
    name.as_str().starts_with("idempotency-")
}

/// Returns whether a header is for the executing service. A client's own would be mistaken for
/// ours.
pub(crate) fn is_sent_upstream(name: &HeaderName) -> bool {
    [IDEMPOTENCY_FENCE, IDEMPOTENCY_ATTEMPT, IDEMPOTENCY_OPERATION_ID, IDEMPOTENCY_DEADLINE]
        .contains(name)
}

/// Returns the value of [`IDEMPOTENCY_OPERATION_ID`]: 64 hexadecimal digits.
#[must_use]
pub fn operation_id(id: OperationId) -> HeaderValue {
    // Every header value may contain digits.
    HeaderValue::try_from(id.to_string()).unwrap_or_else(|_| HeaderValue::from_static("0"))
}

/// Removes the headers that `keep` rejects. The others keep their order, which `HeaderMap::remove`
/// would change. Copies the map only if there is something to remove.
pub(crate) fn retain(headers: &mut HeaderMap, keep: impl Fn(&HeaderName) -> bool) {
    if headers.keys().all(&keep) {
        return;
    }
    let mut retained = HeaderMap::with_capacity(headers.keys_len());
    for (name, value) in headers.iter().filter(|(name, _)| keep(name)) {
        retained.append(name, value.clone());
    }
    *headers = retained;
}

/// Returns whether this header may carry a key. A header that describes a message, its sender or
/// its connection may not, nor may another `Idempotency-*` header.
#[must_use]
pub fn may_have_key(name: &HeaderName) -> bool {
    let plain = name.as_str().replace('_', "-");
    let is_others = plain.starts_with("content-")
        || plain.starts_with("x-forwarded-")
        || plain.starts_with("idempotency-")
        || hop_by_hop(name)
        || [AUTHORIZATION, COOKIE, DATE, EXPECT, FORWARDED, HOST, ORIGIN, VIA].contains(name);
    *name == IDEMPOTENCY_KEY || !is_others
}

/// Returns a header of the request that differs from one of `names` only in an underscore for a
/// hyphen, with the name that it resembles: CGI and similar interfaces take one for the other.
pub fn other_spelling<'a, 'n>(
    headers: &'a HeaderMap,
    names: impl Iterator<Item = &'n HeaderName> + Clone,
) -> Option<(&'a HeaderName, &'n HeaderName)> {
    let is_hyphen = |byte: &u8| matches!(byte, b'-' | b'_');
    let resembles = |field: &HeaderName, name: &HeaderName| {
        let (field, name) = (field.as_str().as_bytes(), name.as_str().as_bytes());
        let mut bytes = field.iter().zip(name);
        field.len() == name.len() && bytes.all(|(a, b)| a == b || is_hyphen(a) && is_hyphen(b))
    };
    let mut fields = headers.keys().filter(|field| !names.clone().any(|name| name == *field));
    fields.find_map(|field| Some((field, names.clone().find(|name| resembles(field, name))?)))
}

/// Grammars of `Idempotency-Key`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Grammar {
    /// A String Item, or a bare value.
    #[default]
    Lenient,
    /// A String Item only, as in the draft.
    Strict,
}

/// Returns the key of a request; `None` if it has none.
///
/// ```
/// use hapax_http::header::{Grammar, IDEMPOTENCY_KEY, key};
/// let mut headers = http::HeaderMap::new();
/// headers.insert(IDEMPOTENCY_KEY, "\"8e03978e\"; origin=mobile".parse()?);
/// let key = key(&headers, Grammar::Strict)?.map(|key| key.as_str().to_owned());
/// assert_eq!(key.as_deref(), Some("8e03978e"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`InvalidKey`] names the error; it never contains the value.
pub fn key(headers: &HeaderMap, grammar: Grammar) -> Result<Option<Key>, InvalidKey> {
    key_in(headers, &IDEMPOTENCY_KEY, grammar)
}

/// Returns the key of a request whose key is in the header `name`, by the same grammar.
///
/// # Errors
/// [`InvalidKey`].
pub fn key_in(
    headers: &HeaderMap,
    name: &HeaderName,
    grammar: Grammar,
) -> Result<Option<Key>, InvalidKey> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(line), None) => decode(line.as_bytes(), grammar).map(Some),
        (Some(_), Some(_)) => Err(InvalidKey::Repeated),
    }
}

/// Returns the key of one header value.
///
/// # Errors
/// [`InvalidKey`].
pub fn decode(value: &[u8], grammar: Grammar) -> Result<Key, InvalidKey> {
    let value = trimmed(value);
    if value.is_empty() {
        return Err(InvalidKey::Key(KeyError::Empty));
    }
    if value.starts_with(b"\"") {
        return sfv::Parser::new(value)
            .parse_item_with_visitor(as_string)
            .map_err(|_| InvalidKey::Malformed)
            .and_then(|text| Key::new(text).map_err(InvalidKey::Key));
    }
    let bare =
        |byte: &u8| matches!(byte, 0x21..=0x7e) && !matches!(byte, b'"' | b',' | b';' | b'\\');
    match (grammar, std::str::from_utf8(value)) {
        (Grammar::Lenient, Ok(text)) if value.iter().all(bare) => {
            Key::new(text).map_err(InvalidKey::Key)
        }
        _ => Err(InvalidKey::Malformed),
    }
}

/// Returns the key as a String Item, which every grammar accepts.
///
/// ```
/// use hapax_http::header::{Grammar, decode, encode};
/// let key: hapax_core::Key = r#"a "quoted" key"#.parse()?;
/// assert_eq!(encode(&key), r#""a \"quoted\" key""#);
/// assert_eq!(decode(encode(&key).as_bytes(), Grammar::Strict)?, key);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn encode(key: &Key) -> HeaderValue {
    let mut item = String::with_capacity(key.as_str().len() + 2);
    item.push('"');
    for character in key.as_str().chars() {
        if matches!(character, '"' | '\\') {
            item.push('\\');
        }
        item.push(character);
    }
    item.push('"');
    // A key is printable ASCII, which every header value may contain.
    HeaderValue::try_from(item).unwrap_or_else(|_| HeaderValue::from_static("\"\""))
}

/// Reasons for which the value of `Idempotency-Key` is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidKey {
    /// There is more than one field line.
    #[error("expected one header line, found several")]
    Repeated,
    /// The value does not match the grammar.
    #[error("expected one quoted string or one bare word, found something else")]
    Malformed,
    /// The value matches the grammar, but is no key.
    #[error(transparent)]
    Key(KeyError),
}

/// Returns the visitor of a String Item, which ignores its parameters; any other type is an error.
fn as_string(
    item: BareItemFromInput<'_>,
) -> Result<impl ParameterVisitor<'_, Out = String>, NotString> {
    match item {
        BareItemFromInput::String(text) => {
            let text = text.as_str().to_owned();
            Ok(parameter_visitor_with(Ignored, move |_| Ok(text)))
        }
        _ => Err(NotString),
    }
}

#[derive(Debug, thiserror::Error)]
#[error("not a string")]
struct NotString;

fn trimmed(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}
