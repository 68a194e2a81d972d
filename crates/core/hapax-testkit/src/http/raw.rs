//! A client of HTTP/2 that can send frames which no library sends.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::client::{TIMEOUT, TestClient};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

/// A connection that sends any frames.
#[derive(Debug)]
pub struct Raw2 {
    stream: TcpStream,
}

/// End of a stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamEnd {
    /// A response with this status; 0 for a status that the static table lacks.
    Answered(u16),
    /// The stream was reset, or its connection ended.
    Rejected,
}

impl Raw2 {
    /// Opens a connection and sends its preface.
    pub async fn connect(client: TestClient) -> Self {
        let mut stream = TcpStream::connect(client.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let mut this = Self { stream };
        this.frame(SETTINGS, 0, 0, &[]).await;
        this
    }

    /// Sends the head of a request with these fields, in this order.
    pub async fn head(&mut self, stream: u32, fields: &[(&str, &str)], end: bool) {
        let mut block = Vec::new();
        for (name, value) in fields {
            // A literal field, never indexed, not compressed (RFC 7541, 6.2.3).
            block.push(0x10);
            for text in [name, value] {
                // Lengths below 127 fit in one byte.
                block.push(u8::try_from(text.len()).ok().filter(|length| *length < 127).unwrap());
                block.extend_from_slice(text.as_bytes());
            }
        }
        self.frame(HEADERS, END_HEADERS | if end { END_STREAM } else { 0 }, stream, &block).await;
    }

    /// Sends a part of the body.
    pub async fn data(&mut self, stream: u32, data: &[u8], end: bool) {
        self.frame(DATA, if end { END_STREAM } else { 0 }, stream, data).await;
    }

    /// Resets the stream for this reason.
    pub async fn reset(&mut self, stream: u32, reason: u32) {
        self.frame(RST_STREAM, 0, stream, &reason.to_be_bytes()).await;
    }

    /// Resolves when the other side has read everything that was sent.
    pub async fn wait_until_read(&mut self) {
        self.frame(PING, 0, 0, b"all read").await;
        let pong = async {
            while let Some((kind, flags, ..)) = self.next().await {
                if kind == PING && flags & ACK != 0 {
                    return;
                }
            }
        };
        tokio::time::timeout(TIMEOUT, pong).await.expect("no answer to a ping");
    }

    /// Waits for the end of a stream.
    pub async fn fate(&mut self, stream: u32) -> StreamEnd {
        let fate = async {
            while let Some((kind, _, of, payload)) = self.next().await {
                match kind {
                    // The status comes first, by its index in the static table (RFC 7541, A) or by
                    // its digits, compressed.
                    HEADERS if of == stream => {
                        return StreamEnd::Answered(match payload.first() {
                            Some(0x88) => 200,
                            Some(0x8c) => 400,
                            Some(0x8d) => 404,
                            Some(0x8e) => 500,
                            _ => 0,
                        });
                    }
                    RST_STREAM if of == stream => return StreamEnd::Rejected,
                    GOAWAY => return StreamEnd::Rejected,
                    _ => {}
                }
            }
            StreamEnd::Rejected
        };
        tokio::time::timeout(TIMEOUT, fate).await.expect("nothing became of a stream")
    }

    async fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = length[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend_from_slice(payload);
        // The connection may have closed already; the stream's end shows that.
        let _ = self.stream.write_all(&frame).await;
    }

    /// Returns the next frame: its kind, flags, stream and payload.
    async fn next(&mut self) -> Option<(u8, u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await.ok()?;
        let (kind, flags) = (head[3], head[4]);
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]) & 0x7fff_ffff;
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload).await.ok()?;
        Some((kind, flags, stream, payload))
    }
}
