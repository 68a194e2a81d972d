//! As much of HTTP/1.1 as the benchmark speaks.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;

use crate::Any;

/// Length of a key: 64 bits of the run and 64 of the request, in hexadecimal.
const KEY: usize = 32;

/// Path that is protected wherever something protects.
pub const PATH: &str = "/payments";

/// Path that the gateway does not protect.
pub const OPEN_PATH: &str = "/open";

/// Body of every response of a handler or an upstream: 200 bytes of JSON.
pub const ANSWER: &str = concat!(
    r#"{"id":"ch_3PqL8bHx0Rk7","object":"charge","amount":1000,"currency":"eur","status":"succeeded","#,
    r#""description":"An answer of two hundred bytes, as a service sends after one","#,
    r#""livemode":false,"paid":true}"#,
);

/// Body of every request: 200 bytes of JSON.
const ORDER: &str = concat!(
    r#"{"amount":1000,"currency":"eur","customer":"cus_9s6XKzkNRiz8i3","#,
    r#""description":"A request of two hundred bytes, as a client sends for a payment.","#,
    r#""capture":true,"statement":"HAPAX BENCH 1","note":"no"}"#,
);

const _: () = assert!(ANSWER.len() == 200 && ORDER.len() == 200, "bodies have 200 bytes");

/// A request whose key, and session if it has one, can be replaced in place.
#[derive(Clone)]
pub struct Request {
    bytes: Vec<u8>,
    key: Range<usize>,
    session: Range<usize>,
}

impl Request {
    /// Returns a request for `path`. `session` is the value of its `Cookie`; empty for none.
    pub fn new(path: &str, session: &str) -> Self {
        let mut bytes = format!(
            "POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer me\r\n\
             content-type: application/json\r\ncontent-length: {}\r\nidempotency-key: ",
            ORDER.len()
        )
        .into_bytes();
        let key = bytes.len()..bytes.len() + KEY;
        bytes.resize(key.end, b'0');
        if !session.is_empty() {
            bytes.extend_from_slice(b"\r\ncookie: ");
        }
        let session_at = bytes.len()..bytes.len() + session.len();
        bytes.extend_from_slice(session.as_bytes());
        bytes.extend_from_slice(b"\r\n\r\n");
        bytes.extend_from_slice(ORDER.as_bytes());
        Self { bytes, key, session: session_at }
    }

    /// Sets the key to `number` within `run`.
    pub fn set_key(&mut self, run: u64, number: u64) {
        let key = &mut self.bytes[self.key.clone()];
        write_hex(&mut key[..KEY / 2], run);
        write_hex(&mut key[KEY / 2..], number);
    }

    /// Sets the session to another one of the same length.
    pub fn set_session(&mut self, session: &str) {
        self.bytes[self.session.clone()].copy_from_slice(session.as_bytes());
    }

    /// Returns the request as it is sent.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn write_hex(digits: &mut [u8], mut number: u64) {
    for digit in digits.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(number & 15) as usize];
        number >>= 4;
    }
}

/// Lengths of the message that begins a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Message {
    /// Length of the head, with its empty line.
    pub head: usize,
    /// Length of the whole message.
    pub length: usize,
}

/// Returns the message at the beginning of `input`; `None` if it is not complete.
///
/// # Errors
/// The message has a body whose length its head does not state.
pub fn message(input: &[u8]) -> Result<Option<Message>, Any> {
    let mut at = 0;
    let mut body = None;
    while let Some(length) = input[at..].iter().position(|byte| *byte == b'\n') {
        let line = &input[at..at + length];
        at += length + 1;
        if line.len() <= 1 {
            let body = body.ok_or("a message without a Content-Length")?;
            let message = Message { head: at, length: at + body };
            return Ok((input.len() >= message.length).then_some(message));
        }
        body = content_length(line)?.or(body);
    }
    Ok(None)
}

fn content_length(line: &[u8]) -> Result<Option<usize>, Any> {
    const NAME: &[u8] = b"content-length:";
    match line.split_at_checked(NAME.len()) {
        Some((name, value)) if name.eq_ignore_ascii_case(NAME) => {
            Ok(Some(std::str::from_utf8(value)?.trim().parse()?))
        }
        _ => Ok(None),
    }
}

/// Returns whether the head of a response has status 200.
pub fn is_ok(head: &[u8]) -> bool {
    head.starts_with(b"HTTP/1.1 200 ")
}

/// Returns whether the head of a response states that it is a replay, as Hapax or a peer does.
pub fn is_replay(head: &[u8]) -> bool {
    head.split(|byte| *byte == b'\n').any(|line| {
        let marks = ["idempotency-replayed: true", "idempotent-replayed: true"];
        marks.iter().any(|mark| line.trim_ascii_end().eq_ignore_ascii_case(mark.as_bytes()))
    })
}

/// Sends a request over a blocking connection, and returns head and body of the response.
///
/// # Errors
/// The connection fails, or its peer closes it.
pub fn exchange(stream: &mut TcpStream, request: &[u8]) -> Result<(String, String), Any> {
    stream.write_all(request)?;
    let mut input = Vec::new();
    loop {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece)?;
        if read == 0 {
            return Err("the server closed a connection without a whole response".into());
        }
        input.extend_from_slice(&piece[..read]);
        if let Some(Message { head, length }) = message(&input)? {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            return Ok((text(&input[..head]), text(&input[head..length])));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_complete_with_its_body() {
        let input = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nx: y\r\n\r\nabc";
        for end in 0..input.len() {
            assert!(message(&input[..end]).is_ok_and(|found| found.is_none()));
        }
        let found = message(input).ok().flatten();
        assert_eq!(found, Some(Message { head: input.len() - 3, length: input.len() }));
    }

    #[test]
    fn keys_and_sessions_are_replaced_in_place() {
        let mut request = Request::new(PATH, "session=aaaa");
        let length = request.bytes().len();
        request.set_key(0xab, 0x1_0f);
        request.set_session("session=bbbb");
        let text = String::from_utf8_lossy(request.bytes());
        assert!(text.contains("idempotency-key: 00000000000000ab000000000000010f\r\n"), "{text}");
        assert!(text.contains("cookie: session=bbbb\r\n\r\n{"), "{text}");
        assert_eq!(text.len(), length);
    }

    #[test]
    fn a_replay_is_distinguished_from_an_execution() {
        assert!(is_replay(b"HTTP/1.1 200 OK\r\nIdempotency-Replayed: true\r\n\r\n"));
        assert!(!is_replay(b"HTTP/1.1 200 OK\r\nIdempotency-Replayed: false\r\n\r\n"));
    }
}
