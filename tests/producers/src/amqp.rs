//! Reads the messages of a queue as bytes, since a client changes types, and fails at what is not UTF-8.

use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::raw::Raw;

const METHOD: u8 = 1;
const END: u8 = 0xce;

/// The properties of the class basic, from the highest flag on, and their types: a short string, a table, an octet, or a
/// time.
const PROPERTIES: [(&str, u8); 14] = [
    ("content-type", b's'),
    ("content-encoding", b's'),
    ("headers", b'F'),
    ("delivery-mode", b'B'),
    ("priority", b'B'),
    ("correlation-id", b's'),
    ("reply-to", b's'),
    ("expiration", b's'),
    ("message-id", b's'),
    ("timestamp", b'T'),
    ("type", b's'),
    ("user-id", b's'),
    ("app-id", b's'),
    ("cluster-id", b's'),
];

/// Returns all messages of a queue, which stay there.
pub(crate) async fn read(server: SocketAddr, queue: &str) -> Result<Vec<Raw>> {
    let mut wire = Wire(TcpStream::connect(server).await?);
    wire.0.write_all(b"AMQP\0\0\x09\x01").await?;
    wire.method().await?;
    let login = [&b"\0\0\0\0\x05PLAIN\0\0\0\x0c\0guest\0guest\x05en_US"[..]].concat();
    wire.send(0, 10, 11, &login).await?;
    let tune = wire.method().await?;
    // Channels and frames as the server has them, without heartbeats.
    wire.send(0, 10, 31, &[tune.get(4..10).unwrap_or_default(), &[0, 0]].concat()).await?;
    wire.send(0, 10, 40, b"\x01/\0\0").await?;
    wire.method().await?;
    wire.send(1, 20, 10, b"\0").await?;
    wire.method().await?;
    let length = u8::try_from(queue.len()).map_err(|_| broken("a short name"))?;
    let get = [&[0, 0, length], queue.as_bytes(), &[0]].concat();
    let mut all = Vec::new();
    loop {
        wire.send(1, 60, 70, &get).await?;
        let answer = wire.method().await?;
        match answer.get(..4) {
            Some([0, 60, 0, 71]) => all.push(wire.message(&answer[4..]).await?),
            Some([0, 60, 0, 72]) => break,
            _ => return Err(broken("a message or none")),
        }
    }
    // Returns all of them to the queue, before the answer to the end of the channel.
    wire.send(1, 60, 120, b"\0\0\0\0\0\0\0\0\x03").await?;
    wire.send(1, 20, 40, b"\0\0\0\0\0\0\0").await?;
    wire.method().await?;
    Ok(all)
}

struct Wire(TcpStream);

impl Wire {
    async fn send(
        &mut self,
        channel: u16,
        class: u16,
        method: u16,
        arguments: &[u8],
    ) -> Result<()> {
        let length = u32::try_from(arguments.len() + 4).map_err(|_| broken("a frame"))?;
        let mut frame = vec![METHOD];
        frame.extend(channel.to_be_bytes());
        frame.extend(length.to_be_bytes());
        frame.extend(class.to_be_bytes());
        frame.extend(method.to_be_bytes());
        frame.extend(arguments);
        frame.push(END);
        self.0.write_all(&frame).await
    }

    async fn frame(&mut self) -> Result<(u8, Vec<u8>)> {
        let mut head = [0; 7];
        self.0.read_exact(&mut head).await?;
        let length = u32::from_be_bytes([head[3], head[4], head[5], head[6]]);
        let mut payload = vec![0; usize::try_from(length).map_err(|_| broken("a frame"))? + 1];
        self.0.read_exact(&mut payload).await?;
        match payload.pop() {
            Some(END) => Ok((head[0], payload)),
            _ => Err(broken("the end of a frame")),
        }
    }

    /// Returns class, method and arguments of the next method.
    async fn method(&mut self) -> Result<Vec<u8>> {
        match self.frame().await? {
            (METHOD, payload) => Ok(payload),
            _ => Err(broken("a method")),
        }
    }

    /// Returns the message that follows the method get-ok with these arguments.
    async fn message(&mut self, arguments: &[u8]) -> Result<Raw> {
        let mut rest = arguments.get(9..).ok_or_else(|| broken("an answer"))?;
        let mut raw = Raw::default();
        for name in ["exchange", "routing key"] {
            raw.fields.insert(name.to_owned(), text(short(&mut rest)?));
        }
        let (_, header) = self.frame().await?;
        let mut rest = header.get(4..).ok_or_else(|| broken("a header"))?;
        let size = usize::try_from(number(&mut rest, 8)?).map_err(|_| broken("a size"))?;
        properties(&mut rest, &mut raw)?;
        while raw.payload.len() < size {
            raw.payload.extend(self.frame().await?.1);
        }
        Ok(raw)
    }
}

fn properties(rest: &mut &[u8], raw: &mut Raw) -> Result<()> {
    let flags = number(rest, 2)?;
    for (at, (name, kind)) in PROPERTIES.into_iter().enumerate() {
        if flags & (1 << (15 - at)) == 0 {
            continue;
        }
        let value = match kind {
            b's' => text(short(rest)?),
            b'F' => {
                for (name, value) in table(rest)? {
                    raw.add_header(&name, &value);
                }
                continue;
            }
            b'B' => number(rest, 1)?.to_string(),
            _ => number(rest, 8)?.to_string(),
        };
        raw.fields.insert(format!("property {name}"), value);
    }
    Ok(())
}

fn table(rest: &mut &[u8]) -> Result<Vec<(Vec<u8>, String)>> {
    let mut inner = long(rest)?;
    let mut all = Vec::new();
    while !inner.is_empty() {
        let name = short(&mut inner)?.to_vec();
        all.push((name, value(&mut inner)?));
    }
    Ok(all)
}

/// Returns a value as text, which begins with its type.
fn value(rest: &mut &[u8]) -> Result<String> {
    let kind = take(rest, 1)?[0];
    let content = match kind {
        b't' | b'b' | b'B' => hex(take(rest, 1)?),
        b's' | b'u' => hex(take(rest, 2)?),
        b'I' | b'i' | b'f' => hex(take(rest, 4)?),
        b'l' | b'L' | b'd' | b'T' => hex(take(rest, 8)?),
        b'D' => hex(take(rest, 5)?),
        b'S' | b'x' => text(long(rest)?),
        b'V' => String::new(),
        b'A' => {
            let mut inner = long(rest)?;
            let mut all = Vec::new();
            while !inner.is_empty() {
                all.push(value(&mut inner)?);
            }
            format!("[{}]", all.join(", "))
        }
        b'F' => {
            let all = table(rest)?;
            let all: Vec<_> = all
                .iter()
                .map(|(name, value)| format!("{}={value}", name.escape_ascii()))
                .collect();
            format!("{{{}}}", all.join(", "))
        }
        _ => return Err(broken("a type of a value")),
    };
    Ok(format!("{}{content}", char::from(kind)))
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(length).ok_or_else(|| broken("more bytes"))?;
    *rest = left;
    Ok(taken)
}

fn number(rest: &mut &[u8], length: usize) -> Result<u64> {
    Ok(take(rest, length)?.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

fn short<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8]> {
    let length = take(rest, 1)?[0];
    take(rest, usize::from(length))
}

fn long<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8]> {
    let length = usize::try_from(number(rest, 4)?).map_err(|_| broken("a length"))?;
    take(rest, length)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    format!("\"{}\"", bytes.escape_ascii())
}

fn broken(expected: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("AMQP: expected {expected}, found something else"))
}
