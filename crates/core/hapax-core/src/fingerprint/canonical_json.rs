//! Canonical JSON: one text for all texts of the same JSON value.
//!
//! 1. White space between tokens is dropped.
//! 2. Members are sorted by the UTF-8 bytes of their unescaped names.
//! 3. Strings are unescaped, then escaped only where they must be.
//! 4. Numbers stay **as written**: `1.0` is not `1`, and 2^53+1 is not 2^53. Two different amounts
//!    never give the same text.
//!
//! Different values never give the same text. A text without a single meaning (a member twice, half
//! a surrogate pair) has no canonical form, nor has a text that is not strictly RFC 8259.
//!
//! Time is O(n log n) for n bytes, times the depth (at most 128) for the bytes that sorting moves.
//! Memory is at most a small multiple of n.

use std::ops::Range;

use super::pointers::{JsonPointers, Node};

/// The deepest nesting of arrays and objects that is read.
const MAX_DEPTH: usize = 128;

/// Returns the canonical form of a JSON text.
///
/// ```
/// let text = br#" { "b" : 1.0, "\u0061" : "\u00e9\/" } "#;
/// assert_eq!(hapax_core::canonicalize(text)?, r#"{"a":"é/","b":1.0}"#.as_bytes());
/// # Ok::<(), hapax_core::CanonicalJsonError>(())
/// ```
///
/// # Errors
/// [`CanonicalJsonError`] if the text has no canonical form.
pub fn canonicalize(json: &[u8]) -> Result<Vec<u8>, CanonicalJsonError> {
    read(json, None, Vec::new()).map(|reader| reader.out)
}

/// Returns the canonical form of a JSON text without the values at these pointers. An element of an
/// array is replaced by `_`, which is not JSON: `[5]` without its element is not `[]`.
///
/// ```
/// let except = hapax_core::JsonPointers::new(["/sent_at", "/items/0"])?;
/// let form = hapax_core::canonicalize_except(br#"{"sent_at":17,"items":[1,2]}"#, &except)?;
/// assert_eq!(form, br#"{"items":[_,2]}"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`CanonicalJsonError`], also for an error in a value that is left out.
pub fn canonicalize_except(
    json: &[u8],
    except: &JsonPointers,
) -> Result<Vec<u8>, CanonicalJsonError> {
    read(json, Some(except.root()), Vec::new()).map(|reader| reader.out)
}

/// Returns the canonical forms of the values at these pointers, in their order; `None` for a value
/// that does not exist.
///
/// # Errors
/// [`CanonicalJsonError`], also for an error in a value without a pointer.
pub fn canonicalize_only(
    json: &[u8],
    only: &JsonPointers,
) -> Result<Vec<Option<Vec<u8>>>, CanonicalJsonError> {
    let found = vec![None; only.iter().len()];
    read(json, Some(only.root()), found).map(|reader| reader.found)
}

/// Reads a text. Values at the pointers from `root` are copied to `found`, or left out if `found`
/// has no entry for them.
fn read<'a>(
    json: &'a [u8],
    root: Option<&Node>,
    found: Vec<Option<Vec<u8>>>,
) -> Result<Reader<'a>, CanonicalJsonError> {
    if let Err(error) = std::str::from_utf8(json) {
        return Err(CanonicalJsonError::Syntax { position: error.valid_up_to() });
    }
    // No token grows: a character that is escaped in the output has an escape at least as long in
    // the input.
    let mut reader = Reader {
        input: json,
        at: 0,
        out: Vec::with_capacity(json.len()),
        members: Vec::new(),
        names: Vec::new(),
        sorted: Vec::new(),
        found,
    };
    reader.value(0, root)?;
    reader.space();
    if reader.at < json.len() { Err(reader.unexpected()) } else { Ok(reader) }
}

/// Errors in a text that has no canonical form. Such texts are compared byte by byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CanonicalJsonError {
    /// The text is no JSON: RFC 8259, in UTF-8, without a byte order mark.
    #[error("expected JSON (RFC 8259), found another byte at position {position}")]
    Syntax {
        /// Position of the byte, from 0.
        position: usize,
    },
    /// An object has two members of one name.
    #[error("an object has the same member twice")]
    DuplicateMember,
    /// A string has half a surrogate pair, which is not a character.
    #[error("expected a complete surrogate pair, found half of one at byte {position}")]
    LoneSurrogate {
        /// Position of the byte, from 0.
        position: usize,
    },
    /// The text is nested deeper than 128.
    #[error("expected at most 128 levels of nesting, found more")]
    TooDeep,
}

/// A member of an object that is being read.
struct Member {
    /// Its unescaped name, as a range of `Reader::names`.
    name: Range<usize>,
    /// Its canonical name and value, as a range of `Reader::out`; empty if the member is left out.
    /// Such a member also counts as a duplicate if it occurs twice.
    text: Range<usize>,
}

struct Reader<'a> {
    input: &'a [u8],
    at: usize,
    out: Vec<u8>,
    /// Members of all open objects, the innermost last, and their names.
    members: Vec<Member>,
    names: Vec<u8>,
    /// A buffer that all objects share, to save allocations.
    sorted: Vec<u8>,
    /// Content at the pointers; empty if it is left out.
    found: Vec<Option<Vec<u8>>>,
}

impl Reader<'_> {
    /// Reads a value. `depth`, the number of arrays and objects around it, bounds the recursion.
    fn value(&mut self, depth: usize, node: Option<&Node>) -> Result<(), CanonicalJsonError> {
        self.space();
        let start = self.out.len();
        match self.peek() {
            Some(b'{' | b'[') if depth == MAX_DEPTH => return Err(CanonicalJsonError::TooDeep),
            Some(b'{') => self.object(depth + 1, node)?,
            Some(b'[') => self.array(depth + 1, node)?,
            Some(b'"') => self.string()?,
            Some(b'-' | b'0'..=b'9') => self.number()?,
            Some(b't') => self.literal(b"true")?,
            Some(b'f') => self.literal(b"false")?,
            Some(b'n') => self.literal(b"null")?,
            _ => return Err(self.unexpected()),
        }
        if let Some(pointer) = node.and_then(|node| node.ends) {
            match self.found.get_mut(pointer) {
                Some(found) => *found = Some(self.out[start..].to_vec()),
                None => self.out.truncate(start),
            }
        }
        Ok(())
    }

    fn array(&mut self, depth: usize, node: Option<&Node>) -> Result<(), CanonicalJsonError> {
        self.copy(b'[')?;
        if self.next_is(b']') {
            return self.copy(b']');
        }
        for index in 0.. {
            let before = self.out.len();
            self.value(depth, node.and_then(|node| node.element(index)))?;
            if self.out.len() == before {
                self.out.push(b'_');
            }
            if self.next_is(b']') {
                break;
            }
            self.copy(b',')?;
        }
        self.copy(b']')
    }

    fn object(&mut self, depth: usize, node: Option<&Node>) -> Result<(), CanonicalJsonError> {
        self.copy(b'{')?;
        let (first, names) = (self.members.len(), self.names.len());
        let start = self.out.len();
        if !self.next_is(b'}') {
            loop {
                self.member(depth, node, start)?;
                if self.next_is(b'}') {
                    break;
                }
                if !self.skip(b",") {
                    return Err(self.unexpected());
                }
            }
        }
        self.sort(first, start)?;
        self.members.truncate(first);
        self.names.truncate(names);
        self.copy(b'}')
    }

    /// Reads a member of the object whose text begins at `start`.
    fn member(
        &mut self,
        depth: usize,
        node: Option<&Node>,
        start: usize,
    ) -> Result<(), CanonicalJsonError> {
        if !self.next_is(b'"') {
            return Err(self.unexpected());
        }
        let before = self.out.len();
        if before > start {
            self.out.push(b',');
        }
        let (name, mut text) = (self.names.len(), self.out.len());
        self.string_into(|this, piece, _| this.names.extend_from_slice(piece))?;
        let name = name..self.names.len();
        self.out.push(b'"');
        escape(&self.names[name.clone()], &mut self.out);
        self.out.push(b'"');
        self.space();
        self.copy(b':')?;
        let node = node.and_then(|node| node.member(&self.names[name.clone()]));
        let value = self.out.len();
        self.value(depth, node)?;
        if self.out.len() == value {
            self.out.truncate(before);
            text = before;
        }
        self.members.push(Member { name, text: text..self.out.len() });
        Ok(())
    }

    /// Sorts the members from index `first` on, whose text begins at `start`.
    fn sort(&mut self, first: usize, start: usize) -> Result<(), CanonicalJsonError> {
        let Self { members, names, sorted, out, .. } = self;
        let name = |member: &Member| &names[member.name.clone()];
        let members = &mut members[first..];
        if members.is_sorted_by(|one, next| name(one) < name(next)) {
            return Ok(());
        }
        members.sort_unstable_by(|one, other| name(one).cmp(name(other)));
        if members.windows(2).any(|pair| name(&pair[0]) == name(&pair[1])) {
            return Err(CanonicalJsonError::DuplicateMember);
        }
        sorted.clear();
        for member in members.iter().filter(|member| !member.text.is_empty()) {
            if !sorted.is_empty() {
                sorted.push(b',');
            }
            sorted.extend_from_slice(&out[member.text.clone()]);
        }
        out.truncate(start);
        out.extend_from_slice(sorted);
        Ok(())
    }

    fn string(&mut self) -> Result<(), CanonicalJsonError> {
        self.out.push(b'"');
        self.string_into(|this, piece, is_plain| match is_plain {
            true => this.out.extend_from_slice(piece),
            false => escape(piece, &mut this.out),
        })?;
        self.out.push(b'"');
        Ok(())
    }

    /// Reads a string, and passes its unescaped text to `sink` piece by piece, with whether the piece
    /// is plain: it contains no character that needs an escape.
    fn string_into(
        &mut self,
        sink: impl Fn(&mut Self, &[u8], bool),
    ) -> Result<(), CanonicalJsonError> {
        let input = self.input;
        self.at += 1;
        loop {
            let rest = &input[self.at..];
            let plain = rest.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f));
            let plain = &rest[..plain.unwrap_or(rest.len())];
            self.at += plain.len();
            sink(self, plain, true);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => {
                    let character = self.escaped()?;
                    sink(self, character.encode_utf8(&mut [0; 4]).as_bytes(), false);
                }
                _ => return Err(self.unexpected()),
            }
        }
    }

    fn escaped(&mut self) -> Result<char, CanonicalJsonError> {
        let position = self.at;
        self.at += 1;
        let character = match self.peek() {
            Some(b'u') => return self.unicode(position),
            Some(plain @ (b'"' | b'\\' | b'/')) => char::from(plain),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            _ => return Err(self.unexpected()),
        };
        self.at += 1;
        Ok(character)
    }

    fn unicode(&mut self, position: usize) -> Result<char, CanonicalJsonError> {
        let unit = self.hex()?;
        let code = match unit {
            0xd800..=0xdbff => {
                if !self.input[self.at..].starts_with(b"\\u") {
                    return Err(CanonicalJsonError::LoneSurrogate { position });
                }
                self.at += 1;
                let low = self.hex()?;
                if !(0xdc00..=0xdfff).contains(&low) {
                    return Err(CanonicalJsonError::LoneSurrogate { position });
                }
                0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
            }
            _ => unit,
        };
        char::from_u32(code).ok_or(CanonicalJsonError::LoneSurrogate { position })
    }

    /// Reads the four digits after the next character, `u`.
    fn hex(&mut self) -> Result<u32, CanonicalJsonError> {
        self.at += 1;
        let mut unit = 0;
        for _ in 0..4 {
            let digit = self.peek().and_then(|byte| char::from(byte).to_digit(16));
            unit = unit << 4 | digit.ok_or_else(|| self.unexpected())?;
            self.at += 1;
        }
        Ok(unit)
    }

    fn number(&mut self) -> Result<(), CanonicalJsonError> {
        let start = self.at;
        self.skip(b"-");
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.skip(b".") {
            self.digits()?;
        }
        if self.skip(b"eE") {
            self.skip(b"+-");
            self.digits()?;
        }
        self.out.extend_from_slice(&self.input[start..self.at]);
        Ok(())
    }

    fn digits(&mut self) -> Result<(), CanonicalJsonError> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(self.unexpected()) } else { Ok(()) }
    }

    fn literal(&mut self, word: &[u8]) -> Result<(), CanonicalJsonError> {
        if !self.input[self.at..].starts_with(word) {
            return Err(self.unexpected());
        }
        self.at += word.len();
        self.out.extend_from_slice(word);
        Ok(())
    }

    fn peek(&self) -> Option<u8> {
        self.input.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Skips white space, and returns whether `byte` is next.
    fn next_is(&mut self, byte: u8) -> bool {
        self.space();
        self.peek() == Some(byte)
    }

    /// Skips one of `bytes` if it is next, and returns whether it was.
    fn skip(&mut self, bytes: &[u8]) -> bool {
        let found = self.peek().is_some_and(|byte| bytes.contains(&byte));
        self.at += usize::from(found);
        found
    }

    /// Copies `byte`, which must be next.
    fn copy(&mut self, byte: u8) -> Result<(), CanonicalJsonError> {
        if self.peek() != Some(byte) {
            return Err(self.unexpected());
        }
        self.at += 1;
        self.out.push(byte);
        Ok(())
    }

    fn unexpected(&self) -> CanonicalJsonError {
        CanonicalJsonError::Syntax { position: self.at }
    }
}

/// Writes a text with the shortest escapes that RFC 8259 allows, only where it requires one.
fn escape(text: &[u8], out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut rest = text;
    while let Some(at) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f)) {
        out.extend_from_slice(&rest[..at]);
        let byte = rest[at];
        rest = &rest[at + 1..];
        let short = match byte {
            0x08 => b'b',
            0x0c => b'f',
            b'\n' => b'n',
            b'\r' => b'r',
            b'\t' => b't',
            0..=0x1f => {
                out.extend_from_slice(b"\\u00");
                out.extend([HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
                continue;
            }
            _ => byte,
        };
        out.extend([b'\\', short]);
    }
    out.extend_from_slice(rest);
}
