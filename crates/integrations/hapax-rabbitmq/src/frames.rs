//! Frames of AMQP 0.9.1 between the server and the client library, which does not parse the properties of a message.
//!
//! RabbitMQ forwards what a producer has sent: short strings that are not UTF-8, tables nested as deep as a
//! frame allows, and headers to which the server adds its own until they no longer fit into a frame. The
//! parser of lapin (4.12) takes the first and the third for a broken connection, and the second overflows the
//! stack of its thread, which ends the process. The message would be delivered again on each connection. It also
//! loses the order of headers, and the types of those that it reads as another one.
//!
//! So the properties of a message go through the library as the bytes of one header ([`wrapped`]), in both directions.

use std::io;
use std::ops::Range;

use lapin::BasicProperties;

use crate::wrapped;

/// Bytes of a frame before its payload: type, channel and size.
const HEADER: usize = 7;

/// Bytes of a frame besides its payload.
const OVERHEAD: usize = HEADER + 1;

/// Largest payload of a method or of properties, which is read as a whole. By default RabbitMQ limits all
/// frames to 128 KiB.
const MAX_SIZE: usize = 16 << 20;

/// Least value of `frame_max` in AMQP.
const LEAST_FRAME_MAX: usize = 4096;

/// Greatest depth of tables and arrays in headers.
const MAX_DEPTH: u32 = 32;

const METHOD: u8 = 1;
const CONTENT_HEADER: u8 = 2;

/// First byte of a client, and of a server that has another version of AMQP. No frame begins with it.
const GREETING: u8 = b'A';

/// Bytes of the greeting of a client.
const CLIENT_GREETING: usize = 8;

/// Class and method of the methods that are read.
const CONNECTION_TUNE: (u16, u16) = (10, 30);
const CONNECTION_CLOSE: (u16, u16) = (10, 50);
const CHANNEL_CLOSE: (u16, u16) = (20, 40);
const BASIC_RETURN: (u16, u16) = (60, 50);
const BASIC_DELIVER: (u16, u16) = (60, 60);

/// Types of properties, in the order of their flags, from the highest bit.
pub(crate) const PROPERTIES: [Property; 14] = {
    use Property::{Fixed, ShortString, Table};
    [
        ShortString, // content-type
        ShortString, // content-encoding
        Table,       // headers
        Fixed(1),    // delivery-mode
        Fixed(1),    // priority
        ShortString, // correlation-id
        ShortString, // reply-to
        ShortString, // expiration
        ShortString, // message-id
        Fixed(8),    // timestamp
        ShortString, // type
        ShortString, // user-id
        ShortString, // app-id
        ShortString, // cluster-id
    ]
};

/// Index of the message id among the properties.
pub(crate) const MESSAGE_ID: usize = 8;

#[derive(Clone, Copy)]
pub(crate) enum Property {
    ShortString,
    Table,
    /// Number of bytes.
    Fixed(usize),
}

/// Split of the bytes of one direction of a connection into frames.
#[derive(Debug)]
struct Splitter {
    /// Types of the frames that are converted. The others are passed through.
    converted: &'static [u8],
    /// Number of the bytes that are passed through after [`GREETING`].
    greeting: usize,
    /// Whether no byte has arrived.
    is_begin: bool,
    /// Bytes of a frame that has not arrived whole.
    partial: Vec<u8>,
    /// Number of the bytes that follow and are passed through.
    pass_through: usize,
}

impl Splitter {
    const fn new(converted: &'static [u8], greeting: usize) -> Self {
        Self { converted, greeting, is_begin: true, partial: Vec::new(), pass_through: 0 }
    }

    /// Adds bytes, and appends to `to` those that are passed through. `convert` appends a frame.
    fn split(
        &mut self,
        bytes: &[u8],
        to: &mut Vec<u8>,
        mut convert: impl FnMut(&mut [u8], &mut Vec<u8>),
    ) -> io::Result<()> {
        self.partial.extend_from_slice(bytes);
        let mut at = 0;
        while at < self.partial.len() {
            let rest = &mut self.partial[at..];
            if self.pass_through > 0 {
                let passed = self.pass_through.min(rest.len());
                to.extend_from_slice(&rest[..passed]);
                self.pass_through -= passed;
                at += passed;
                continue;
            }
            if std::mem::replace(&mut self.is_begin, false) && rest[0] == GREETING {
                self.pass_through = self.greeting;
                continue;
            }
            let Some(&[kind, _, _, a, b, c, d]) = rest.first_chunk::<HEADER>() else { break };
            let size = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            let whole = size.saturating_add(OVERHEAD);
            if !self.converted.contains(&kind) {
                self.pass_through = whole;
                continue;
            }
            if size > MAX_SIZE {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "expected properties of a message of at most {MAX_SIZE} bytes, found {size}: \
                         remove the message from the queue, and lower `frame_max` of the server"
                    ),
                ));
            }
            if rest.len() < whole {
                break;
            }
            convert(&mut rest[..whole], to);
            at += whole;
        }
        self.partial.drain(..at);
        Ok(())
    }
}

/// Repair of the bytes of one connection from the server:
///
/// - The properties of a message are [`wrapped`], so that the library does not parse them.
/// - In other short strings, a `?` replaces each byte that is not UTF-8.
/// - If wrapped ones do not fit into a frame that the client accepts, the properties are [repaired](repaired_properties), and
///   if these do not fit either, all headers are left out.
///
/// Payloads of messages, and frames that break the protocol, are passed through.
#[derive(Debug)]
pub(crate) struct FrameRepair {
    splitter: Splitter,
    /// Largest frame that the client accepts, in bytes.
    frame_max: usize,
}

impl FrameRepair {
    /// Creates it for a client with a `frame_max` of its own; `None` or 0 for that of the server.
    pub(crate) fn new(frame_max: Option<u32>) -> Self {
        Self {
            // Nothing but an end follows another version.
            splitter: Splitter::new(&[METHOD, CONTENT_HEADER], usize::MAX),
            frame_max: lower_limit(usize::MAX, frame_max.unwrap_or(0)),
        }
    }

    /// Adds bytes from the server, and appends to `repaired` those that the client can read.
    ///
    /// # Errors
    /// A frame over 16 MiB that is not part of a payload. The frames before it are in `repaired`.
    pub(crate) fn repair(&mut self, bytes: &[u8], repaired: &mut Vec<u8>) -> io::Result<()> {
        let Self { splitter, frame_max } = self;
        splitter.split(bytes, repaired, |frame, repaired| {
            let end = frame.len() - 1;
            if frame[0] != METHOD {
                return repair_properties_of(frame, *frame_max, repaired);
            }
            if let Some(server) = repair_method(&mut frame[HEADER..end]) {
                *frame_max = lower_limit(*frame_max, server);
            }
            repaired.extend_from_slice(frame);
        })
    }
}

/// Restoration of the bytes of one connection to the server: the properties of a message that are [`wrapped`] are what they
/// were.
#[derive(Debug)]
pub(crate) struct FrameRestore(Splitter);

impl FrameRestore {
    pub(crate) const fn new() -> Self {
        Self(Splitter::new(&[CONTENT_HEADER], CLIENT_GREETING))
    }

    /// Adds bytes of the client, and appends to `restored` those for the server.
    ///
    /// # Errors
    /// A frame over 16 MiB that is not part of a payload, which no client sends.
    pub(crate) fn restore(&mut self, bytes: &[u8], restored: &mut Vec<u8>) -> io::Result<()> {
        self.0.split(bytes, restored, |frame, restored| {
            let payload = &frame[HEADER..frame.len() - 1];
            match payload.get(FLAGS_AT..).and_then(wrapped::unwrap) {
                Some(encoded) => append_content_header(frame, encoded, restored),
                None => restored.extend_from_slice(frame),
            }
        })
    }
}

/// Appends the frame of a content header, with other properties.
fn append_content_header(frame: &[u8], encoded: &[u8], to: &mut Vec<u8>) {
    // At most about `MAX_SIZE`.
    let size = u32::try_from(FLAGS_AT + encoded.len()).unwrap_or(u32::MAX);
    to.extend_from_slice(&frame[..3]);
    to.extend_from_slice(&size.to_be_bytes());
    to.extend_from_slice(&frame[HEADER..HEADER + FLAGS_AT]);
    to.extend_from_slice(encoded);
    to.extend_from_slice(&frame[frame.len() - 1..]);
}

/// Appends the frame of a content header, whose properties the client can read.
fn repair_properties_of(frame: &[u8], frame_max: usize, repaired: &mut Vec<u8>) {
    let payload = &frame[HEADER..frame.len() - 1];
    let Some(encoded) = payload.get(FLAGS_AT..).filter(|encoded| encoded.len() >= 2) else {
        return repaired.extend_from_slice(frame);
    };
    if frame.len().saturating_add(wrapped::OVERHEAD) <= frame_max {
        return append_content_header(frame, &wrapped::wrap(encoded), repaired);
    }
    let is_too_large = frame.len() > frame_max;
    if is_too_large {
        tracing::warn!(
            bytes = frame.len(),
            frame_max,
            "the headers of a message are left out, since they do not fit into a frame"
        );
    }
    append_content_header(frame, &repaired_without(encoded, is_too_large), repaired);
}

/// Returns the bytes of the frame in which the server gets properties that are published.
pub(crate) fn content_header_bytes(properties: &BasicProperties) -> usize {
    let encoded = wrapped::encode(properties);
    OVERHEAD + FLAGS_AT + wrapped::unwrap(&encoded).unwrap_or(&encoded).len()
}

/// Returns the lower one of a limit and a `frame_max`, of which 0 is no limit.
pub(crate) fn lower_limit(limit: usize, frame_max: u32) -> usize {
    match usize::try_from(frame_max) {
        Ok(0) | Err(_) => limit,
        Ok(frame_max) => limit.min(frame_max.max(LEAST_FRAME_MAX)),
    }
}

/// A reader of a payload. Its functions return `None` if the payload ends too early.
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

    /// Repairs a short string, and skips it. Returns whether it was UTF-8.
    fn short_string(&mut self) -> Option<bool> {
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

    /// Repairs the entries of a table until `end`, and skips them.
    fn table(&mut self, end: usize, depth: u32) -> Option<()> {
        while self.at < end {
            self.short_string()?;
            self.value(depth)?;
        }
        (self.at == end).then_some(())
    }

    /// Repairs a value with its type, as RabbitMQ encodes it, and skips it.
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
                return (self.at == content.end).then_some(());
            }
            _ => return None,
        };
        self.skip(size).map(drop)
    }
}

/// Repairs the short strings of a method. Returns the server's `frame_max`, which one method contains.
fn repair_method(payload: &mut [u8]) -> Option<u32> {
    let mut cursor = Cursor { bytes: payload, at: 0 };
    match (cursor.short()?, cursor.short()?) {
        CONNECTION_TUNE => {
            let _channel_max = cursor.short()?;
            return cursor.long().and_then(|frame_max| u32::try_from(frame_max).ok());
        }
        CONNECTION_CLOSE | CHANNEL_CLOSE => {
            let _code = cursor.short()?;
            // The server cuts an explanation at a byte.
            cursor.short_string()?;
        }
        BASIC_DELIVER => {
            let _consumer = cursor.short_string()?;
            let _tag_and_is_redelivery = cursor.skip(9)?;
            let _exchange = cursor.short_string()?;
            let _routing_key = cursor.short_string()?;
        }
        BASIC_RETURN => {
            let _code = cursor.short()?;
            let _explanation = cursor.short_string()?;
            let _exchange = cursor.short_string()?;
            let _routing_key = cursor.short_string()?;
        }
        _ => {}
    }
    None
}

/// Bytes of a content header before its properties: class, weight, size of the payload.
const FLAGS_AT: usize = 12;

/// Bytes of the flags of properties.
const FLAGS: usize = 2;

/// Repairs properties. Returns the flags of those that stay, and the bytes of the others; `None` if they cannot
/// be parsed.
fn repair_properties(
    encoded: &mut [u8],
    flags: u16,
    without_headers: bool,
) -> Option<(u16, [Range<usize>; 2])> {
    let mut cursor = Cursor { bytes: encoded, at: FLAGS };
    let mut kept = flags;
    let (mut headers, mut message_id) = (0..0, 0..0);
    for (index, property) in PROPERTIES.into_iter().enumerate() {
        let flag = 0x8000 >> index;
        if flags & flag == 0 {
            continue;
        }
        let begin = cursor.at;
        match property {
            Property::ShortString => {
                let is_utf8 = cursor.short_string()?;
                if index == MESSAGE_ID && !is_utf8 {
                    kept &= !flag;
                    message_id = begin..cursor.at;
                }
            }
            Property::Table => {
                let length = cursor.long()?;
                let end = cursor.at.checked_add(length)?;
                if without_headers {
                    cursor.skip(length)?;
                    kept &= !flag;
                    headers = begin..end;
                } else {
                    cursor.table(end, 1)?;
                }
            }
            Property::Fixed(bytes) => {
                cursor.skip(bytes)?;
            }
        }
    }
    (cursor.at == cursor.bytes.len()).then_some((kept, [headers, message_id]))
}

/// Returns encoded properties, of which the client library can read each:
///
/// - In short strings, a `?` replaces each byte that is not UTF-8.
/// - A message id that is not UTF-8 is left out: two of them could become equal.
/// - Tables and arrays beyond a depth of 32 become byte arrays.
/// - All properties are left out if they cannot be parsed.
pub(crate) fn repaired_properties(encoded: &[u8]) -> Vec<u8> {
    repaired_without(encoded, false)
}

fn repaired_without(encoded: &[u8], without_headers: bool) -> Vec<u8> {
    let mut encoded = encoded.to_vec();
    let Some(&flags) = encoded.first_chunk() else { return vec![0; FLAGS] };
    let flags = u16::from_be_bytes(flags);
    let Some((kept, [headers, id])) = repair_properties(&mut encoded, flags, without_headers)
    else {
        return vec![0; FLAGS];
    };
    encoded[..FLAGS].copy_from_slice(&kept.to_be_bytes());
    // In this order, since an id follows the headers.
    encoded.drain(id);
    encoded.drain(headers);
    encoded
}

#[cfg(test)]
mod tests;
