//! A server of HTTP/2 that honors keys, and the frames of its connections.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use h2::server::SendResponse;
use tokio::net::TcpListener;

/// A request that arrived completely.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Http2Arrived {
    pub(crate) path: String,
    pub(crate) key: Option<String>,
    pub(crate) body: Vec<u8>,
}

#[derive(Default)]
struct State {
    arrived: Vec<Http2Arrived>,
    /// Effects by path, and the keys under which they had it.
    effects: BTreeMap<String, Vec<Option<String>>>,
}

/// The server.
#[derive(Clone)]
pub(crate) struct Http2Bank {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Http2Bank {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bank = Self { address: listener.local_addr().unwrap(), state: Arc::default() };
        let serving = bank.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let bank = serving.clone();
                tokio::spawn(async move {
                    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        let bank = bank.clone();
                        tokio::spawn(async move { bank.exchange(request, respond).await });
                    }
                });
            }
        });
        bank
    }

    /// Returns the requests for this path that arrived completely.
    pub(crate) fn arrived(&self, path: &str) -> Vec<Http2Arrived> {
        let state = self.state.lock().unwrap();
        state.arrived.iter().filter(|arrived| arrived.path == path).cloned().collect()
    }

    /// Returns the number of effects of this path.
    pub(crate) fn effects(&self, path: &str) -> usize {
        self.state.lock().unwrap().effects.get(path).map_or(0, Vec::len)
    }

    async fn exchange(
        &self,
        request: http::Request<h2::RecvStream>,
        mut respond: SendResponse<Bytes>,
    ) -> Option<()> {
        let (head, mut stream) = request.into_parts();
        let mut body = Vec::new();
        while let Some(data) = stream.data().await {
            let data = data.ok()?;
            stream.flow_control().release_capacity(data.len()).ok()?;
            body.extend_from_slice(&data);
        }
        let key = head.headers.get("idempotency-key");
        let key = key.map(|key| key.to_str().unwrap().to_owned());
        let path = head.uri.path().to_owned();
        let replayed = {
            let mut state = self.state.lock().unwrap();
            state.arrived.push(Http2Arrived { path: path.clone(), key: key.clone(), body });
            let effects = state.effects.entry(path).or_default();
            let replayed = key.is_some() && effects.contains(&key);
            if !replayed {
                effects.push(key);
            }
            replayed
        };
        let answer = http::Response::builder().status(201);
        let answer = answer.header("idempotency-replayed", replayed.to_string()).body(()).ok()?;
        let mut body = respond.send_response(answer, false).ok()?;
        body.send_data(Bytes::from_static(b"paid"), true).ok()
    }
}

/// A frame of HTTP/2.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    /// Number of bytes of the connection up to its end.
    pub(crate) end: usize,
}

impl Frame {
    pub(crate) const DATA: u8 = 0;
    pub(crate) const HEADERS: u8 = 1;

    /// Returns whether this frame is the last one of a request or an answer.
    pub(crate) fn ends_stream(&self) -> bool {
        matches!(self.kind, Self::DATA | Self::HEADERS) && self.flags & 1 == 1
    }
}

/// Returns the complete frames among the bytes of one side, after `preface` bytes.
pub(crate) fn frames(bytes: &[u8], preface: usize) -> Vec<Frame> {
    let (mut frames, mut at) = (Vec::new(), preface);
    while let Some(&[a, b, c, kind, flags, s0, s1, s2, s3]) =
        bytes.get(at..).and_then(<[u8]>::first_chunk)
    {
        at += 9 + u32::from_be_bytes([0, a, b, c]) as usize;
        if at > bytes.len() {
            break;
        }
        let stream = u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]);
        frames.push(Frame { kind, flags, stream, end: at });
    }
    frames
}

/// Number of bytes of the client's preface.
pub(crate) const PREFACE: usize = 24;
