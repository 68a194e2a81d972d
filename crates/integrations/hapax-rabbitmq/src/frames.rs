//! Frames of AMQP 0.9.1 from the server, with texts and tables that the client library can parse.
//!
//! RabbitMQ passes on what a producer has sent: texts that are not UTF-8, and tables nested as deep as a
//! frame allows. The parser of lapin (4.12) takes the first for a broken connection, and the second
//! overflows the stack of its thread, which ends the process. The message would come again with each
//! connection.

use std::io;
use std::ops::Range;

/// Bytes of a frame before its payload: type, channel and size.
const HEADER: usize = 7;

/// Largest frame of a method or of properties. RabbitMQ limits all frames to 128 KiB by default.
const MAX_SIZE: usize = 1 << 20;

/// Greatest depth of tables and arrays in headers.
const MAX_DEPTH: u32 = 32;

const METHOD: u8 = 1;
const PROPERTIES: u8 = 2;

/// First byte of what a server sends that has another version of AMQP: it is no frame.
const OTHER_VERSION: u8 = b'A';

/// Class and methods whose texts come from producers.
const BASIC: u16 = 60;
const RETURN: u16 = 50;
const DELIVER: u16 = 60;

/// Types of properties, in the order of their flags, from the highest bit.
const KINDS: [Property; 14] = {
    use Property::{Fixed, Table, Text};
    [
        Text,     // content-type
        Text,     // content-encoding
        Table,    // headers
        Fixed(1), // delivery-mode
        Fixed(1), // priority
        Text,     // correlation-id
        Text,     // reply-to
        Text,     // expiration
        Text,     // message-id
        Fixed(8), // timestamp
        Text,     // type
        Text,     // user-id
        Text,     // app-id
        Text,     // cluster-id
    ]
};

/// Index of the message id among the properties.
const MESSAGE_ID: usize = 8;

#[derive(Clone, Copy)]
enum Property {
    Text,
    Table,
    /// Number of bytes.
    Fixed(usize),
}

/// Bytes from the server, of which frames of methods and properties are repaired:
///
/// - In texts, a `?` replaces each byte that is not UTF-8.
/// - A message id that is not UTF-8 is left out: two of them could become equal.
/// - Tables and arrays beyond a depth of 32 become byte arrays.
///
/// Payloads of messages, and frames that break the protocol, are passed on.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// The begin of a frame that has not arrived whole.
    partial: Vec<u8>,
    /// Bytes that follow and are not repaired.
    pass: usize,
    is_other_version: bool,
}

impl Frames {
    /// Adds bytes from the server, and appends to `repaired` what the client can read.
    ///
    /// # Errors
    /// A frame over 1 MiB that is not part of a payload.
    pub(crate) fn repair(&mut self, bytes: &[u8], repaired: &mut Vec<u8>) -> io::Result<()> {
        self.partial.extend_from_slice(bytes);
        let mut at = 0;
        while at < self.partial.len() {
            let rest = &mut self.partial[at..];
            if self.is_other_version {
                self.pass = rest.len();
            }
            if self.pass > 0 {
                let passed = self.pass.min(rest.len());
                repaired.extend_from_slice(&rest[..passed]);
                self.pass -= passed;
                at += passed;
                continue;
            }
            if rest[0] == OTHER_VERSION {
                self.is_other_version = true;
                continue;
            }
            let Some(&[kind, _, _, a, b, c, d]) = rest.first_chunk::<HEADER>() else { break };
            let size = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            // With the byte that ends a frame.
            let whole = HEADER.saturating_add(size).saturating_add(1);
            if !matches!(kind, METHOD | PROPERTIES) {
                self.pass = whole;
                continue;
            }
            if size > MAX_SIZE {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "expected a frame of at most {MAX_SIZE} bytes, found {size}: lower `frame_max` of \
                         the server"
                    ),
                ));
            }
            if rest.len() < whole {
                break;
            }
            let payload = &mut rest[HEADER..HEADER + size];
            let left_out = match kind {
                METHOD => {
                    repair_method(payload);
                    None
                }
                _ => repair_properties(payload),
            };
            let left_out = left_out.map_or(0..0, |range| range.start + HEADER..range.end + HEADER);
            // A frame of at most 1 MiB.
            let size = u32::try_from(size - left_out.len()).unwrap_or(u32::MAX);
            rest[3..HEADER].copy_from_slice(&size.to_be_bytes());
            repaired.extend_from_slice(&rest[..left_out.start]);
            repaired.extend_from_slice(&rest[left_out.end..whole]);
            at += whole;
        }
        self.partial.drain(..at);
        Ok(())
    }
}

/// A position in a payload. `None` of its functions: the payload ends before.
struct Cursor<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Cursor<'_> {
    fn skip(&mut self, count: usize) -> Option<Range<usize>> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len())?;
        let skipped = self.at..end;
        self.at = end;
        Some(skipped)
    }

    fn octet(&mut self) -> Option<u8> {
        self.skip(1).map(|range| self.bytes[range.start])
    }

    fn short(&mut self) -> Option<u16> {
        let range = self.skip(2)?;
        Some(u16::from_be_bytes(self.bytes[range].try_into().ok()?))
    }

    fn long(&mut self) -> Option<usize> {
        let range = self.skip(4)?;
        usize::try_from(u32::from_be_bytes(self.bytes[range].try_into().ok()?)).ok()
    }

    /// Passes a text of at most 255 bytes. Returns whether it was UTF-8.
    fn text(&mut self) -> Option<bool> {
        let length = self.octet()?;
        let range = self.skip(usize::from(length))?;
        let text = &mut self.bytes[range];
        let mut is_utf8 = true;
        let mut begin = 0;
        while let Err(error) = std::str::from_utf8(&text[begin..]) {
            is_utf8 = false;
            begin += error.valid_up_to();
            let invalid = error.error_len().unwrap_or(text.len() - begin);
            text[begin..begin + invalid].fill(b'?');
            begin += invalid;
        }
        Some(is_utf8)
    }

    /// Passes the entries of a table until `end`.
    fn table(&mut self, end: usize, depth: u32) -> Option<()> {
        while self.at < end {
            self.text()?;
            self.value(depth)?;
        }
        Some(())
    }

    /// Passes a value with its type, as RabbitMQ writes it.
    fn value(&mut self, depth: u32) -> Option<()> {
        let kind_at = self.at;
        let kind = self.octet()?;
        let size = match kind {
            b'V' => 0,
            b't' | b'b' | b'B' => 1,
            b's' | b'U' | b'u' => 2,
            b'I' | b'i' | b'f' => 4,
            b'D' => 5,
            b'L' | b'l' | b'd' | b'T' => 8,
            b'S' | b'x' => self.long()?,
            b'A' | b'F' => {
                let length = self.long()?;
                let content = self.skip(length)?;
                if depth == MAX_DEPTH {
                    // A byte array has the same shape: a length of four bytes, and so many bytes.
                    self.bytes[kind_at] = b'x';
                    return Some(());
                }
                self.at = content.start;
                if kind == b'F' {
                    return self.table(content.end, depth + 1);
                }
                while self.at < content.end {
                    self.value(depth + 1)?;
                }
                return Some(());
            }
            _ => return None,
        };
        self.skip(size).map(drop)
    }
}

/// Repairs the texts of a delivery and of a returned message.
fn repair_method(payload: &mut [u8]) -> Option<()> {
    let mut cursor = Cursor { bytes: payload, at: 0 };
    match (cursor.short()?, cursor.short()?) {
        (BASIC, DELIVER) => {
            cursor.text()?;
            // Delivery tag, and whether it was delivered before.
            cursor.skip(9)?;
            cursor.text()?;
            cursor.text()?;
        }
        (BASIC, RETURN) => {
            // Code.
            cursor.skip(2)?;
            for _text_exchange_key in 0..3 {
                cursor.text()?;
            }
        }
        _ => {}
    }
    Some(())
}

/// Repairs properties. Returns the bytes of a message id that is to be left out.
fn repair_properties(payload: &mut [u8]) -> Option<Range<usize>> {
    let mut cursor = Cursor { bytes: payload, at: 0 };
    // Class, weight and size of the payload.
    cursor.skip(12)?;
    let flags_at = cursor.at;
    let flags = cursor.short()?;
    let mut left_out = None;
    for (nth, kind) in KINDS.into_iter().enumerate() {
        if flags & (0x8000 >> nth) == 0 {
            continue;
        }
        let begin = cursor.at;
        match kind {
            Property::Text => {
                let is_utf8 = cursor.text()?;
                if nth == MESSAGE_ID && !is_utf8 {
                    left_out = Some(begin..cursor.at);
                }
            }
            Property::Table => {
                let length = cursor.long()?;
                let end = cursor.at.checked_add(length)?;
                cursor.table(end, 1)?;
            }
            Property::Fixed(bytes) => {
                cursor.skip(bytes)?;
            }
        }
    }
    if left_out.is_some() {
        let flags = flags & !(0x8000 >> MESSAGE_ID);
        cursor.bytes[flags_at..flags_at + 2].copy_from_slice(&flags.to_be_bytes());
    }
    left_out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![kind, 0, 1];
        frame.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend(payload);
        frame.push(0xce);
        frame
    }

    fn text(text: &[u8]) -> Vec<u8> {
        [&[u8::try_from(text.len()).unwrap()], text].concat()
    }

    /// Properties with headers, and with a message id.
    fn properties(headers: &[u8], id: Option<&[u8]>) -> Vec<u8> {
        let flags: u16 = if id.is_some() { 0x2080 } else { 0x2000 };
        let mut payload =
            [&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5], &flags.to_be_bytes()[..]].concat();
        payload.extend(u32::try_from(headers.len()).unwrap().to_be_bytes());
        payload.extend(headers);
        payload.extend(id.map(text).unwrap_or_default());
        payload
    }

    fn nested(depth: u32, kind: u8) -> Vec<u8> {
        let mut value = vec![b'V'];
        for _ in 1..depth {
            let name = if kind == b'F' { text(b"n") } else { Vec::new() };
            let content = [name, value].concat();
            let length = u32::try_from(content.len()).unwrap().to_be_bytes();
            value = [&[kind], &length[..], &content].concat();
        }
        [text(b"h"), value].concat()
    }

    /// Repairs bytes that arrive in parts of every size up to 9, which gives the same each time.
    fn repaired(bytes: &[u8]) -> Vec<u8> {
        let mut whole = Vec::new();
        Frames::default().repair(bytes, &mut whole).unwrap();
        for size in 1..10 {
            let (mut frames, mut found) = (Frames::default(), Vec::new());
            for part in bytes.chunks(size) {
                frames.repair(part, &mut found).unwrap();
            }
            assert_eq!(found, whole, "in parts of {size} bytes");
        }
        whole
    }

    #[test]
    fn frames_that_are_correct_stay_as_they_are() {
        let every_type = [
            &b"\x01vV\x01tt\x01\x02uibx\x01BB\x01\x01ss\x01\x02\x01UU\x01\x02\x01uu\x01\x02"[..],
            b"\x01II\x01\x02\x03\x04\x01ii\x01\x02\x03\x04\x01ff\x01\x02\x03\x04",
            b"\x01DD\x01\x02\x03\x04\x05\x01Ll12345678\x01ll12345678\x01dd12345678\x01TT12345678",
            b"\x01SS\x00\x00\x00\x01\xff\x01xx\x00\x00\x00\x01\xff",
            b"\x01AA\x00\x00\x00\x03Vt\x01\x01FF\x00\x00\x00\x04\x02\xc3\xbcV",
        ]
        .concat();
        let bytes = [
            frame(PROPERTIES, &properties(&every_type, Some("\u{fc}".as_bytes()))),
            frame(PROPERTIES, &properties(&nested(MAX_DEPTH, b'F'), None)),
            frame(3, &[0xff; 300]),
            frame(8, &[]),
            frame(METHOD, &[0, 10, 0, 10, 0xff, 0xff]),
            frame(METHOD, &[0, 60]),
            frame(PROPERTIES, &[0; 3]),
        ]
        .concat();
        assert_eq!(repaired(&bytes), bytes);
        // What a server sends that has another version.
        let other = b"AMQP\x03\x01\x00\x00 and more";
        assert_eq!(repaired(other), other);
    }

    #[test]
    fn texts_that_are_not_utf8_are_replaced_in_place() {
        let headers = [text(b"a\xffb\xc3"), vec![b'S', 0, 0, 0, 1, 0xff]].concat();
        let expected = [text(b"a?b?"), vec![b'S', 0, 0, 0, 1, 0xff]].concat();
        let found = repaired(&frame(PROPERTIES, &properties(&headers, Some(b"one"))));
        assert_eq!(found, frame(PROPERTIES, &properties(&expected, Some(b"one"))));

        let deliver = |key: &[u8]| {
            let rest = [text(b"tag"), vec![0xff; 9], text(b""), text(key)].concat();
            frame(METHOD, &[vec![0, 60, 0, 60], rest].concat())
        };
        assert_eq!(repaired(&deliver(b"\xfe\xff")), deliver(b"??"));
        let returned = |key: &[u8]| {
            let rest = [vec![1, 56], text(b"NO_ROUTE"), text(key), text(key)].concat();
            frame(METHOD, &[vec![0, 60, 0, 50], rest].concat())
        };
        assert_eq!(repaired(&returned(b"k\xff")), returned(b"k?"));
    }

    #[test]
    fn a_message_id_that_is_not_utf8_is_left_out() {
        let next = frame(8, &[]);
        let bytes = [frame(PROPERTIES, &properties(b"", Some(b"i\xff"))), next.clone()].concat();
        let expected = [frame(PROPERTIES, &properties(b"", None)), next].concat();
        assert_eq!(repaired(&bytes), expected);
    }

    #[test]
    fn what_is_nested_too_deep_becomes_a_byte_array() {
        for kind in *b"FA" {
            for depth in [MAX_DEPTH + 1, MAX_DEPTH + 2, 10_000] {
                let bytes = frame(PROPERTIES, &properties(&nested(depth, kind), None));
                let found = repaired(&bytes);
                assert_eq!(found.len(), bytes.len());
                let changed: Vec<_> =
                    (0..bytes.len()).filter(|at| bytes[*at] != found[*at]).collect();
                assert_eq!(changed.len(), 1, "{kind} {depth}");
                assert_eq!((bytes[changed[0]], found[changed[0]]), (kind, b'x'));
            }
        }
    }

    #[test]
    fn a_frame_over_the_limit_is_an_error() {
        let bytes = [METHOD, 0, 1, 0xff, 0xff, 0xff, 0xff];
        let error = Frames::default().repair(&bytes, &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn no_bytes_panic() {
        let whole = frame(PROPERTIES, &properties(&nested(40, b'F'), Some(b"\xff")));
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let mut frames = Frames::default();
                let _ = frames.repair(&bytes, &mut Vec::new());
                let _ = frames.repair(&bytes, &mut Vec::new());
            }
        }
    }
}
