//! `multipart/form-data` (RFC 7578, RFC 2046) without its boundary.
//!
//! 1. A body has parts if it is nothing but delimiters and what is between them, each line break
//!    of a delimiter written as CR LF; a last one, after the closing delimiter, may be left out, and
//!    one before the first delimiter may be there, which some clients write.
//! 2. A part counts byte for byte, its head included.
//! 3. Whatever else there is makes it odd, and an odd body has no parts: a preamble, an epilogue,
//!    white space after a delimiter, a part that begins with a delimiter, more than [`MAX_PARTS`];
//!    a boundary of characters that neither RFC 2046 nor a token allows, or more than one. Two readers could read it in two
//!    ways.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::CONTENT_TYPE;

/// More parts than any form has.
pub(super) const MAX_PARTS: usize = 4096;

/// The one content type of a request; empty where there is none, or more than one.
pub(super) fn content_type(headers: &HeaderMap) -> &str {
    let mut lines = headers.get_all(CONTENT_TYPE).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => line.to_str().unwrap_or_default(),
        _ => "",
    }
}

/// The parts of a body of this content type.
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
        // From the line break that ends the delimiter: with it, another one may begin.
        let part = rest.get(..find(rest, &delimiter)?)?.strip_prefix(b"\r\n")?;
        if parts.len() == MAX_PARTS {
            return None;
        }
        parts.push(Cow::Borrowed(part));
        rest = rest.get(2 + part.len() + delimiter.len()..)?;
    }
}

/// The boundary of `multipart/form-data`.
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

/// RFC 2046, 5.1.1: 1 to 70 characters, the last of them no space. What any token may hold (RFC
/// 9110, 5.6.2) is taken as well: boundaries of asterisks are widespread.
fn is_boundary(text: &str) -> bool {
    let others = b"'()+_,-./:=? !#$%&*^`|~";
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
    (1..=70).contains(&text.len()) && text.bytes().all(allowed) && !text.ends_with(' ')
}

/// A parameter's value, a token or a quoted string, and what follows its semicolon.
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

/// Where `needle`, which begins with its only carriage return, first occurs in `text`: no byte
/// is looked at twice.
fn find(text: &[u8], needle: &[u8]) -> Option<usize> {
    text.windows(needle.len()).position(|window| window == needle)
}
