//! `multipart/form-data` (RFC 7578, RFC 2046) without its boundary.
//!
//! 1. A body has parts if it consists only of delimiters and the bytes between them. Each line
//!    break of a delimiter is CR LF. The one after the closing delimiter may be absent, and there
//!    may be one before the first delimiter, which some clients write.
//! 2. A part counts byte for byte, its head included.
//! 3. Any other body has no parts, since two readers could read it differently: one with a
//!    preamble, an epilogue, white space after a delimiter, a part that begins with a delimiter, or
//!    more than [`MAX_PARTS`]; one whose boundary has characters that neither RFC 2046 nor a token
//!    allows; one with more than one boundary.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::CONTENT_TYPE;

/// Most parts of a body; no form has as many.
pub(super) const MAX_PARTS: usize = 4096;

/// Returns the content type of a request; empty if there is none, or more than one.
pub(super) fn content_type(headers: &HeaderMap) -> &str {
    let mut lines = headers.get_all(CONTENT_TYPE).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => line.to_str().unwrap_or_default(),
        _ => "",
    }
}

/// Returns the parts of a body of this content type.
pub(super) fn parts<'a>(kind: &str, body: &'a [u8]) -> Option<Vec<Cow<'a, [u8]>>> {
    let delimiter = format!("\r\n--{}", boundary(kind)?).into_bytes();
    // The first delimiter has no line before it, or an empty one.
    let body = body.strip_prefix(b"\r\n").unwrap_or(body);
    let mut rest = body.strip_prefix(&delimiter[2..])?;
    let mut parts = Vec::new();
    loop {
        if let Some(end) = rest.strip_prefix(b"--") {
            return (end.is_empty() || end == b"\r\n").then_some(parts);
        }
        // The part begins with the line break that ends the delimiter, since that may also begin
        // the next one.
        let part = rest.get(..find(rest, &delimiter)?)?.strip_prefix(b"\r\n")?;
        if parts.len() == MAX_PARTS {
            return None;
        }
        parts.push(Cow::Borrowed(part));
        rest = rest.get(2 + part.len() + delimiter.len()..)?;
    }
}

/// Returns the boundary of `multipart/form-data`.
fn boundary(kind: &str) -> Option<String> {
    let (media, mut rest) = kind.split_once(';')?;
    if !media.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let mut boundary = None;
    while !rest.trim().is_empty() {
        let (name, value) = rest.split_once('=')?;
        let (text, after) = parameter(value)?;
        if name.trim().eq_ignore_ascii_case("boundary") && boundary.replace(text).is_some() {
            return None;
        }
        rest = after;
    }
    boundary.filter(|boundary| is_boundary(boundary))
}

/// Returns whether a text is a boundary: 1 to 70 characters, the last of them no space (RFC 2046,
/// 5.1.1). All characters of tokens (RFC 9110, 5.6.2) are accepted too: boundaries of asterisks are
/// widespread.
fn is_boundary(text: &str) -> bool {
    let others = b"'()+_,-./:=? !#$%&*^`|~";
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    (1..=70).contains(&text.len()) && text.bytes().all(allowed) && !text.ends_with(' ')
}

/// Returns a parameter's value, a token or a quoted string, and the text after its semicolon.
fn parameter(value: &str) -> Option<(String, &str)> {
    let Some(quoted) = value.trim_start().strip_prefix('"') else {
        let (text, after) = value.split_once(';').unwrap_or((value, ""));
        return Some((text.trim().to_owned(), after));
    };
    let mut text = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => {
                let after = quoted[at + 1..].trim_start();
                let after = if after.is_empty() { after } else { after.strip_prefix(';')? };
                return Some((text, after));
            }
            '\\' => text.push(characters.next()?.1),
            _ => text.push(character),
        }
    }
    None
}

/// Returns the first position of `needle` in `text`.
fn find(text: &[u8], needle: &[u8]) -> Option<usize> {
    text.windows(needle.len()).position(|window| window == needle)
}
