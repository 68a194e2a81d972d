//! `application/x-www-form-urlencoded` as decoded pairs (WHATWG URL, 5.1).
//!
//! 1. Pairs are separated by `&`, a name and its value by the first `=`. In both, `+` is a space and `%XX` is a byte. So
//!    `a+b` is `a%20b`, and `a=` is not `a`.
//! 2. Pairs keep their order: `items[][name]=x&items[][qty]=1&items[][name]=y` has another meaning in another order.
//! 3. A body that two readers may decode differently has no pairs: one with an invalid `%`, with a `;`, a space, a control
//!    or non-ASCII byte that is not encoded, with a `charset` other than UTF-8 or more than one, with a pair named
//!    `_charset_`, or with more than [`MAX_PARTS`] pairs.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use super::multipart::MAX_PARTS;

/// Returns whether a content type is that of form data.
pub(super) fn is_form(kind: &str) -> bool {
    let media = kind.split(';').next().unwrap_or_default();
    media.trim().eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// Returns names and values by turns. A value begins with its `=`; an absent one is empty.
pub(super) fn pairs<'a>(kind: &str, body: &'a [u8]) -> Option<Vec<Cow<'a, [u8]>>> {
    let is_plain = |byte: &u8| byte.is_ascii_graphic() && *byte != b';';
    if !is_form(kind) || !is_utf8(kind) || !body.iter().all(is_plain) {
        return None;
    }
    let mut fields = Vec::new();
    for pair in body.split(|byte| *byte == b'&') {
        if fields.len() == 2 * MAX_PARTS {
            return None;
        }
        let (name, value) =
            pair.split_at(pair.iter().position(|it| *it == b'=').unwrap_or(pair.len()));
        let name = decoded(name)?;
        if *name == *b"_charset_" {
            return None;
        }
        fields.push(name);
        fields.push(decoded(value)?);
    }
    Some(fields)
}

/// Returns whether a content type has no `charset`, or UTF-8 once. Other parameters have no meaning.
fn is_utf8(kind: &str) -> bool {
    let parameters = kind.split(';').skip(1).filter_map(|it| it.split_once('='));
    let mut charsets = parameters.filter(|(name, _)| name.trim().eq_ignore_ascii_case("charset"));
    let (first, second) = (charsets.next(), charsets.next());
    let is_utf8 = |value: &str| {
        let value = value.trim();
        let quoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        quoted.unwrap_or(value).eq_ignore_ascii_case("utf-8")
    };
    second.is_none() && first.is_none_or(|(_, value)| is_utf8(value))
}

/// Returns a name or value without its encoding; `None` if a `%` does not begin a byte.
fn decoded(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut escapes = text.split(|byte| *byte == b'%').skip(1);
    if !escapes.all(|it| it.len() >= 2 && it[..2].iter().all(u8::is_ascii_hexdigit)) {
        return None;
    }
    if !text.contains(&b'+') {
        return Some(percent_decode(text).into());
    }
    let spaced: Vec<u8> = text.iter().map(|it| if *it == b'+' { b' ' } else { *it }).collect();
    Some(percent_decode(&spaced).collect::<Vec<_>>().into())
}
