//! Repair of AMQP 0.9.1 frames from the server, so that the client library can parse them.
//!
//! RabbitMQ forwards what a producer has sent: short strings that are not UTF-8, tables nested as deep as a
//! frame allows, and headers to which the server adds its own until they no longer fit into a frame. The
//! parser of lapin (4.12) takes the first and the third for a broken connection, and the second overflows the
//! stack of its thread, which ends the process. The message would be delivered again on each connection.

use std::io;
use std::ops::Range;

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

/// First byte that a server sends that has another version of AMQP. No frame begins with it.
const OTHER_VERSION: u8 = b'A';

/// Class and method of the methods that are read.
const CONNECTION_TUNE: (u16, u16) = (10, 30);
const CONNECTION_CLOSE: (u16, u16) = (10, 50);
const CHANNEL_CLOSE: (u16, u16) = (20, 40);
const BASIC_RETURN: (u16, u16) = (60, 50);
const BASIC_DELIVER: (u16, u16) = (60, 60);

/// Types of properties, in the order of their flags, from the highest bit.
const PROPERTIES: [Property; 14] = {
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
const MESSAGE_ID: usize = 8;

#[derive(Clone, Copy)]
enum Property {
    ShortString,
    Table,
    /// Number of bytes.
    Fixed(usize),
}

/// Repair of the bytes of one connection from the server:
///
/// - In short strings, a `?` replaces each byte that is not UTF-8.
/// - A message id that is not UTF-8 is left out: two of them could become equal.
/// - Tables and arrays beyond a depth of 32 become byte arrays.
/// - All headers are left out if with them the frame is larger than the client accepts.
/// - All properties are left out if they cannot be parsed.
///
/// Payloads of messages, and frames that break the protocol, are passed through.
#[derive(Debug)]
pub(crate) struct FrameRepair {
    /// Bytes of a frame that has not arrived whole.
    partial: Vec<u8>,
    /// Number of the bytes that follow and are passed through.
    pass_through: usize,
    /// Whether no frame has arrived.
    is_begin: bool,
    is_other_version: bool,
    /// Largest frame that the client accepts, in bytes.
    frame_max: usize,
}

impl FrameRepair {
    /// Creates it for a client with a `frame_max` of its own; `None` or 0 for that of the server.
    pub(crate) fn new(frame_max: Option<u32>) -> Self {
        Self {
            partial: Vec::new(),
            pass_through: 0,
            is_begin: true,
            is_other_version: false,
            frame_max: lower_limit(usize::MAX, frame_max.unwrap_or(0)),
        }
    }

    /// Adds bytes from the server, and appends to `repaired` those that the client can read.
    ///
    /// # Errors
    /// A frame over 16 MiB that is not part of a payload. The frames before it are in `repaired`.
    pub(crate) fn repair(&mut self, bytes: &[u8], repaired: &mut Vec<u8>) -> io::Result<()> {
        self.partial.extend_from_slice(bytes);
        let mut at = 0;
        while at < self.partial.len() {
            let rest = &mut self.partial[at..];
            if self.is_other_version {
                self.pass_through = rest.len();
            }
            if self.pass_through > 0 {
                let passed = self.pass_through.min(rest.len());
                repaired.extend_from_slice(&rest[..passed]);
                self.pass_through -= passed;
                at += passed;
                continue;
            }
            if self.is_begin && rest[0] == OTHER_VERSION {
                self.is_other_version = true;
                continue;
            }
            let Some(&[kind, _, _, a, b, c, d]) = rest.first_chunk::<HEADER>() else { break };
            let size = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            let whole = size.saturating_add(OVERHEAD);
            if !matches!(kind, METHOD | CONTENT_HEADER) {
                self.pass_through = whole;
                self.is_begin = false;
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
            self.is_begin = false;
            let payload = &mut rest[HEADER..HEADER + size];
            let left_out = match kind {
                METHOD => {
                    if let Some(frame_max) = repair_method(payload) {
                        self.frame_max = lower_limit(self.frame_max, frame_max);
                    }
                    [0..0, 0..0]
                }
                _ => {
                    let is_too_large = whole > self.frame_max;
                    if is_too_large {
                        tracing::warn!(
                            bytes = whole,
                            frame_max = self.frame_max,
                            "the headers of a message are left out, since they do not fit into a frame"
                        );
                    }
                    repair_content_header(payload, is_too_large)
                }
            };
            let [first, second] = left_out.map(|range| range.start + HEADER..range.end + HEADER);
            // At most `MAX_SIZE`.
            let size = u32::try_from(size - first.len() - second.len()).unwrap_or(u32::MAX);
            rest[3..HEADER].copy_from_slice(&size.to_be_bytes());
            repaired.extend_from_slice(&rest[..first.start]);
            repaired.extend_from_slice(&rest[first.end..second.start.max(first.end)]);
            repaired.extend_from_slice(&rest[second.end.max(first.end)..whole]);
            at += whole;
        }
        self.partial.drain(..at);
        Ok(())
    }
}

/// Returns the lower one of a limit and a `frame_max`, of which 0 is no limit.
fn lower_limit(limit: usize, frame_max: u32) -> usize {
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

/// Bytes of a content header before its properties: class, weight, size of the payload, flags.
const FLAGS_AT: usize = 12;
const PROPERTIES_AT: usize = FLAGS_AT + 2;

/// Repairs a content header. Returns the two ranges of bytes that are to be left out, in their order, either
/// of which may be empty.
fn repair_content_header(payload: &mut [u8], is_too_large: bool) -> [Range<usize>; 2] {
    let whole = payload.len();
    let Some(&[a, b]) = payload.get(FLAGS_AT..).and_then(<[u8]>::first_chunk) else {
        return [0..0, 0..0];
    };
    let flags = u16::from_be_bytes([a, b]);
    let (flags, left_out) = match repair_properties(payload, flags, is_too_large) {
        Some(repaired) => repaired,
        None => (0, [PROPERTIES_AT..whole, whole..whole]),
    };
    payload[FLAGS_AT..PROPERTIES_AT].copy_from_slice(&flags.to_be_bytes());
    left_out
}

/// Repairs properties. Returns the flags of those that stay, and the bytes of the others; `None` if they cannot
/// be parsed.
fn repair_properties(
    payload: &mut [u8],
    flags: u16,
    without_headers: bool,
) -> Option<(u16, [Range<usize>; 2])> {
    let mut cursor = Cursor { bytes: payload, at: PROPERTIES_AT };
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

/// Returns encoded properties, repaired as those in the frames of a server are.
pub(crate) fn repaired_properties(encoded: &[u8]) -> Vec<u8> {
    let mut payload = [&[0; FLAGS_AT][..], encoded].concat();
    let [first, second] = repair_content_header(&mut payload, false);
    payload.drain(second);
    payload.drain(first);
    payload.drain(..FLAGS_AT);
    payload
}

#[cfg(test)]
mod tests;
