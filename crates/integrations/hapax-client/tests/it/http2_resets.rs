//! Streams of HTTP/2 that the server resets or leaves unfinished.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_client::{Client, SendError, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::http2_bank::{Frame, PREFACE};
use crate::world::{LONG, journal};

/// Every code of RFC 9113, and one that has no meaning.
const CODES: std::ops::RangeInclusive<u32> = 0..=14;
const REFUSED_STREAM: u32 = 7;

/// The part of an answer before which its stream is reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Head,
    Body,
    /// In the body of an answer that declares its length.
    KnownBody,
    /// Before the frame that ends the stream, which would be empty.
    End,
}

/// An answer that is not finished.
#[derive(Clone, Copy, Debug)]
struct Unfinished {
    stage: Stage,
    /// Code of the reset; without one nothing follows, and the stream stays open.
    code: Option<u32>,
}

/// A server that writes its frames itself: so what comes before a reset is written as well.
#[derive(Clone)]
struct RawServer {
    origin: String,
    /// For its next requests; it answers others.
    unfinished: Arc<Mutex<VecDeque<Unfinished>>>,
    /// Requests that arrived completely, except rejected ones.
    executed: Arc<Mutex<u32>>,
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
    [&head, payload].concat()
}

/// Returns the head of an answer with the status 201.
fn head(stream: u32, length: Option<usize>) -> Vec<u8> {
    // Literal fields with indexed names, never indexed themselves: `:status`, `content-length`.
    let mut block = b"\x08\x03201".to_vec();
    if let Some(length) = length {
        block.extend_from_slice(b"\x0f\x0d");
        let length = length.to_string();
        block.push(u8::try_from(length.len()).unwrap());
        block.extend_from_slice(length.as_bytes());
    }
    frame(Frame::HEADERS, 4, stream, &block)
}

impl RawServer {
    async fn start(unfinished: impl IntoIterator<Item = Unfinished>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let origin = format!("http://{}", listener.local_addr().unwrap());
        let unfinished = Arc::new(Mutex::new(unfinished.into_iter().collect()));
        let server = Self { origin, unfinished, executed: Arc::default() };
        let serving = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let server = serving.clone();
                tokio::spawn(async move { server.serve(stream).await });
            }
        });
        server
    }

    fn executed(&self) -> u32 {
        *self.executed.lock().unwrap()
    }

    async fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        const SETTINGS: u8 = 4;
        const PING: u8 = 6;
        stream.read_exact(&mut [0; PREFACE]).await?;
        stream.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
        loop {
            let mut bytes = [0; 9];
            stream.read_exact(&mut bytes).await?;
            let [a, b, c, kind, flags, s0, s1, s2, s3] = bytes;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            stream.read_exact(&mut payload).await?;
            let id = u32::from_be_bytes([s0, s1, s2, s3]);
            let is_end = Frame { kind, flags, stream: id, end: 0 }.ends_stream();
            let answer = match kind {
                SETTINGS if flags == 0 => frame(SETTINGS, 1, 0, &[]),
                PING if flags == 0 => frame(PING, 1, 0, &payload),
                _ if is_end => self.answer(id),
                _ => continue,
            };
            stream.write_all(&answer).await?;
        }
    }

    fn answer(&self, id: u32) -> Vec<u8> {
        const RST_STREAM: u8 = 3;
        let unfinished = self.unfinished.lock().unwrap().pop_front();
        let is_refused =
            |it: Unfinished| (it.stage, it.code) == (Stage::Head, Some(REFUSED_STREAM));
        if !unfinished.is_some_and(is_refused) {
            *self.executed.lock().unwrap() += 1;
        }
        let Some(Unfinished { stage, code }) = unfinished else {
            return [head(id, None), frame(Frame::DATA, 1, id, b"paid")].concat();
        };
        let mut answer = match stage {
            Stage::Head => Vec::new(),
            Stage::Body => [head(id, None), frame(Frame::DATA, 0, id, b"pa")].concat(),
            Stage::KnownBody => [head(id, Some(4)), frame(Frame::DATA, 0, id, b"pa")].concat(),
            Stage::End => [head(id, None), frame(Frame::DATA, 0, id, b"paid")].concat(),
        };
        if let Some(code) = code {
            answer.extend(frame(RST_STREAM, 0, id, &code.to_be_bytes()));
        }
        answer
    }

    /// Sends an operation to this server, which is silent only if it does not reset the stream.
    async fn send(&self, server: Server, it: Unfinished) -> Result<(u32, Vec<u8>), SendError> {
        let client = Client::open(journal()).server(&*self.origin, server.http2_prior_knowledge());
        let idle_timeout = if it.code.is_none() { Duration::from_secs(5) } else { LONG };
        let client = client.idle_timeout(idle_timeout).build().await.unwrap();
        let post = client.post(format!("{}/", self.origin)).operation("n").body("nineteen");
        let sent = post.wait(LONG).send().await?;
        assert_eq!(sent.response.status, 201);
        Ok((sent.tries, sent.response.body.to_vec()))
    }
}

/// Every reset at every stage, and answers after which nothing follows.
fn all() -> Vec<Unfinished> {
    let stages = [Stage::Head, Stage::Body, Stage::KnownBody, Stage::End];
    let codes = CODES.map(Some).chain([Some(u32::MAX), None]);
    codes.flat_map(|code| stages.map(|stage| Unfinished { stage, code })).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_ends_without_its_end_is_no_response_and_is_sent_again() {
    let ends = all().into_iter().map(|unfinished| async move {
        let server = RawServer::start([unfinished]).await;
        (unfinished, server.send(Server::hapax(), unfinished).await, server.executed())
    });
    for (unfinished, end, executed) in futures_util::future::join_all(ends).await {
        let sent = end.unwrap_or_else(|error| panic!("{unfinished:?}: {error}"));
        assert_eq!(sent, (2, b"paid".to_vec()), "{unfinished:?}");
        let is_refused = (unfinished.stage, unfinished.code) == (Stage::Head, Some(REFUSED_STREAM));
        assert_eq!(executed, if is_refused { 1 } else { 2 }, "{unfinished:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_refused_stream_is_sent_again_to_a_server_without_keys() {
    let ends = all().into_iter().map(|unfinished| async move {
        let server = RawServer::start([unfinished]).await;
        (unfinished, server.send(Server::without_keys(), unfinished).await, server.executed())
    });
    let mut refused = 0;
    for (unfinished, end, executed) in futures_util::future::join_all(ends).await {
        match (unfinished.stage, unfinished.code) {
            (Stage::Head, Some(REFUSED_STREAM)) => {
                assert_eq!(end.unwrap(), (2, b"paid".to_vec()));
                refused += 1;
            }
            _ => assert!(matches!(end, Err(SendError::Unknown(_))), "{unfinished:?}: {end:?}"),
        }
        assert_eq!(executed, 1, "{unfinished:?}");
    }
    assert_eq!(refused, 1);
}
