//! A client that speaks HTTP/2, and one that writes its frames by hand.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::world::{TIMEOUT, Wire};

/// A connection of HTTP/2.
pub(crate) struct Two {
    pub(crate) send: SendRequest<Bytes>,
    pub(crate) driver: JoinHandle<Result<(), h2::Error>>,
}

/// An answer, as it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Answered {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    /// The code of a problem.
    pub(crate) fn code(&self) -> String {
        let json: serde_json::Value = serde_json::from_slice(&self.body).unwrap_or_default();
        json["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Two {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::on(TcpStream::connect(address).await.unwrap()).await
    }

    pub(crate) async fn on(stream: impl Wire + 'static) -> Self {
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        Self { send, driver: tokio::spawn(connection) }
    }

    /// A request for `shop.example`.
    pub(crate) fn request(
        method: &str,
        path: &str,
        fields: &[(&'static str, &str)],
    ) -> Request<()> {
        let mut request =
            Request::builder().method(method).uri(format!("http://shop.example{path}"));
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    /// Begins a request.
    pub(crate) async fn begin(
        &self,
        request: Request<()>,
        ends: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        let mut send = timeout(TIMEOUT, self.send.clone().ready()).await.expect("never ready")?;
        send.send_request(request, ends)
    }

    /// Asks, and reads the whole answer.
    pub(crate) async fn try_ask(
        &self,
        request: Request<()>,
        body: &str,
    ) -> Result<Answered, h2::Error> {
        let (response, mut sending) = self.begin(request, body.is_empty()).await?;
        if !body.is_empty() {
            sending.send_data(Bytes::copy_from_slice(body.as_bytes()), true)?;
        }
        let response = timeout(TIMEOUT, response).await.expect("no answer in time")?;
        read(response).await
    }

    pub(crate) async fn ask(&self, request: Request<()>, body: &str) -> Answered {
        self.try_ask(request, body).await.unwrap()
    }

    /// A `POST` of `body` under `key`.
    pub(crate) async fn post(&self, path: &str, key: &str, body: &str) -> Answered {
        self.ask(Self::request("POST", path, &[("idempotency-key", key)]), body).await
    }

    /// Waits until the connection has ended.
    pub(crate) async fn ended(self) -> Result<(), h2::Error> {
        drop(self.send);
        timeout(TIMEOUT, self.driver).await.expect("the connection goes on").unwrap()
    }
}

/// Reads an answer to its end.
pub(crate) async fn read(response: Response<RecvStream>) -> Result<Answered, h2::Error> {
    let (parts, mut stream) = response.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = timeout(TIMEOUT, stream.data()).await.expect("the answer hangs") {
        let piece = piece?;
        stream.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
    }
    let trailers = stream.trailers().await?;
    let (status, headers) = (parts.status.as_u16(), parts.headers);
    Ok(Answered { status, headers, body: body.into(), trailers })
}

/// A frame (RFC 9113 4.1) of stream 1, or of the connection.
pub(crate) fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [length[1], length[2], length[3], kind, flags, 0, 0, 0, stream];
    [&head[..], payload].concat()
}

/// Fields as they are, without tables or compression (RFC 7541 6.2.2).
pub(crate) fn fields(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).expect("short"));
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// Whether the server refuses a request of these fields, and of `rest` behind it: by its answer, the
/// stream or the connection.
pub(crate) async fn is_refused(address: SocketAddr, request: &[(&str, &str)], rest: &[u8]) -> bool {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(4, 0, 0, &[]));
    let ends = if rest.is_empty() { 5 } else { 4 };
    bytes.extend(frame(1, ends, 1, &fields(request)));
    bytes.extend_from_slice(rest);
    stream.write_all(&bytes).await.unwrap();
    let mut came = Vec::new();
    loop {
        let read = timeout(TIMEOUT, stream.read_buf(&mut came)).await.expect("no answer");
        while let Some((kind, id, payload)) = take_frame(&mut came) {
            match kind {
                // HEADERS; 400 is in the static table, and comes first (RFC 7541 appendix A).
                1 if id == 1 => return payload[0] == 0x8c,
                // RST_STREAM, GOAWAY.
                3 | 7 => return true,
                _ => {}
            }
        }
        assert!(read.is_ok_and(|count| count > 0), "it closed without a word");
    }
}

fn take_frame(bytes: &mut Vec<u8>) -> Option<(u8, u8, Vec<u8>)> {
    let head = bytes.get(..9)?;
    let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
    let (kind, id) = (head[3], head[8]);
    if bytes.len() < 9 + length {
        return None;
    }
    let rest = bytes.split_off(9 + length);
    let frame = std::mem::replace(bytes, rest);
    Some((kind, id, frame[9..].to_vec()))
}
