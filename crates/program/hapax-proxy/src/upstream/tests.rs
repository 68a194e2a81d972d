//! Tests of requests without a response.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, duplex};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::*;

fn at(
    listener: &TcpListener,
    timeout: Duration,
    concurrent: usize,
    protocol: UpstreamProtocol,
) -> Upstream {
    let authority = listener.local_addr().unwrap().to_string().parse().unwrap();
    let origin = Origin { secure: false, authority };
    let connect = ConnectOptions { protocol, ..ConnectOptions::default() };
    Upstream::new(origin, timeout, concurrent, connect)
}

/// A connection that takes `takes` bytes, and then breaks.
struct Breaking {
    takes: usize,
}

impl AsyncRead for Breaking {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for Breaking {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.takes == 0 {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let taken = self.takes.min(bytes.len());
        self.takes -= taken;
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Creates an upstream that answers, and one kept connection to it.
async fn with_kept<S>(io: S) -> (Upstream, TcpListener)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = at(&listener, Duration::from_secs(5), 10, UpstreamProtocol::Http1);
    let mut connection = UpstreamConnection::http1(io, None).await.unwrap();
    assert!(connection.reusable().await);
    upstream.inner.pool.put(connection);
    (upstream, listener)
}

fn request() -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::from(Bytes::from_static(b"body")));
    *request.method_mut() = http::Method::POST;
    request
}

#[tokio::test]
async fn a_closed_idle_connection_is_replaced() {
    let (here, there) = duplex(1024);
    let (upstream, listener) = with_kept(here).await;
    // Nothing runs in between: the gateway cannot detect it when it takes the connection.
    drop(there);
    let answering = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut buffer = vec![0; 1024];
        let mut read = 0;
        while !buffer[..read].ends_with(b"body") {
            read += stream.read(&mut buffer[read..]).await.unwrap();
        }
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
    };
    let (response, ()) = tokio::join!(upstream.send(request()), answering);
    assert_eq!(response.unwrap().status(), 204);
}

#[tokio::test]
async fn a_request_without_a_sent_byte_is_unreachable() {
    let (upstream, _listener) = with_kept(Breaking { takes: 0 }).await;
    let failure = upstream.send(request()).await.unwrap_err();
    assert!(matches!(failure, UpstreamError::Unreachable(_)), "{failure:?}");
}

#[tokio::test]
async fn a_request_with_one_sent_byte_is_broken_and_not_sent_again() {
    let (upstream, listener) = with_kept(Breaking { takes: 1 }).await;
    let failure = tokio::select! {
        failure = upstream.send(request()) => failure.unwrap_err(),
        _ = listener.accept() => panic!("it was sent again"),
    };
    assert!(matches!(failure, UpstreamError::Broken(_)), "{failure:?}");
}

#[tokio::test]
async fn requests_beyond_the_limit_are_rejected() {
    let (upstream, _listener) = with_kept(Breaking { takes: 9999 }).await;
    let permits = upstream.inner.permits.clone().acquire_many_owned(10).await.unwrap();
    assert!(matches!(upstream.send(request()).await, Err(UpstreamError::Busy)));
    drop(permits);
}

/// Creates an upstream that answers before it has read the request, and then neither reads nor
/// closes.
async fn early(answer: &'static [u8]) -> (Upstream, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = at(&listener, Duration::from_secs(60), 1, UpstreamProtocol::Http1);
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.read_exact(&mut [0; 1]).await.unwrap();
        stream.write_all(answer).await.unwrap();
        std::future::pending::<()>().await;
    });
    (upstream, serving)
}

fn large() -> Request<Full<Bytes>> {
    let mut request = request();
    *request.body_mut() = Full::from(vec![0; 32 << 20]);
    request
}

async fn is_free(upstream: &Upstream) {
    let free = Arc::clone(&upstream.inner.permits).acquire_owned();
    drop(timeout(Duration::from_secs(20), free).await.unwrap().unwrap());
}

#[tokio::test]
async fn after_an_early_response_the_rest_of_the_request_is_dropped() {
    let answer = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno";
    let (upstream, serving) = early(answer).await;
    let response = upstream.send(large()).await.unwrap();
    assert!(matches!(upstream.send(request()).await, Err(UpstreamError::Busy)));
    let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
    assert_eq!(body.to_bytes(), "no");
    is_free(&upstream).await;
    assert!(upstream.inner.pool.take(true).is_none());
    serving.abort();
}

#[tokio::test]
async fn after_a_dropped_or_cut_response_the_rest_of_the_request_is_dropped() {
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nno";
    let (upstream, serving) = early(answer).await;
    drop(upstream.send(large()).await.unwrap());
    is_free(&upstream).await;
    serving.abort();
    let (upstream, serving) = early(answer).await;
    let _response = upstream.send(large()).await.unwrap();
    upstream.cut();
    is_free(&upstream).await;
    serving.abort();
}

/// Returns the failure of the first request to an HTTP/2 server that does `act` with it.
async fn refusing(
    act: fn(
        h2::server::SendResponse<Bytes>,
        &mut h2::server::Connection<tokio::net::TcpStream, Bytes>,
    ),
) -> UpstreamError {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = at(&listener, Duration::from_secs(20), 1, UpstreamProtocol::Http2);
    let serving = async {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (_request, respond) = connection.accept().await.unwrap().unwrap();
        act(respond, &mut connection);
        while let Some(Ok(_)) = connection.accept().await {}
    };
    let (failure, ()) = tokio::join!(upstream.send(request()), serving);
    failure.unwrap_err()
}

#[tokio::test]
async fn a_stream_with_refused_stream_counts_as_not_sent() {
    let failure = refusing(|mut respond, _| respond.send_reset(h2::Reason::REFUSED_STREAM)).await;
    assert!(matches!(failure, UpstreamError::Unreachable(_)), "{failure:?}");
}

#[tokio::test]
async fn a_stream_with_another_reset_counts_as_sent() {
    let failure = refusing(|mut respond, _| respond.send_reset(h2::Reason::CANCEL)).await;
    assert!(matches!(failure, UpstreamError::Broken(_)), "{failure:?}");
    // It names the request as one that it processed.
    let abrupt = |_, connection: &mut h2::server::Connection<_, _>| {
        connection.abrupt_shutdown(h2::Reason::INTERNAL_ERROR);
    };
    let failure = refusing(abrupt).await;
    assert!(matches!(failure, UpstreamError::Broken(_)), "{failure:?}");
}

/// Returns a frame of HTTP/2.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let head = [length[1], length[2], length[3], kind, flags, 0, 0, 0, 0];
    [&head[..], payload].concat()
}

#[tokio::test]
async fn a_request_after_the_last_stream_of_a_goaway_counts_as_not_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = at(&listener, Duration::from_secs(20), 1, UpstreamProtocol::Http2);
    let serving = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&frame(4, 0, &[])).await.unwrap();
        let mut read = Vec::new();
        // Until its HEADERS have arrived.
        while !contains_headers(&read) {
            assert!(stream.read_buf(&mut read).await.unwrap() > 0);
        }
        // GOAWAY: no stream was processed, no error.
        stream.write_all(&frame(7, 0, &[0; 8])).await.unwrap();
        let _ = stream.read_to_end(&mut read).await;
    };
    let (failure, ()) = tokio::join!(upstream.send(request()), serving);
    let failure = failure.unwrap_err();
    assert!(matches!(failure, UpstreamError::Unreachable(_)), "{failure:?}");
}

fn contains_headers(bytes: &[u8]) -> bool {
    let mut rest = bytes.get(24..).unwrap_or_default();
    while rest.len() >= 9 {
        let length = usize::from(rest[0]) << 16 | usize::from(rest[1]) << 8 | usize::from(rest[2]);
        if rest[3] == 1 {
            return true;
        }
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    false
}

#[tokio::test]
async fn a_server_without_http2_gets_no_request() {
    for says in [&b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"[..], b""] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = at(&listener, Duration::from_secs(20), 1, UpstreamProtocol::Http2);
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut read = vec![0; 24];
            stream.read_exact(&mut read).await.unwrap();
            stream.write_all(says).await.unwrap();
            stream.shutdown().await.unwrap();
            let _ = stream.read_to_end(&mut read).await;
            assert!(!contains_headers(&read));
        };
        let (failure, ()) = tokio::join!(upstream.send(request()), serving);
        let failure = failure.unwrap_err();
        assert!(matches!(failure, UpstreamError::Unreachable(_)), "{failure:?}");
    }
}

#[tokio::test]
async fn an_http2_connection_is_reused() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = at(&listener, Duration::from_secs(20), 1, UpstreamProtocol::Http2);
    let serving = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let mut served = 0;
        while let Some(Ok((request, mut respond))) = connection.accept().await {
            assert_eq!(request.version(), http::Version::HTTP_2);
            let response = Response::builder().status(200).body(()).unwrap();
            let mut body = respond.send_response(response, false).unwrap();
            body.send_data(Bytes::from_static(b"answer"), true).unwrap();
            served += 1;
        }
        served
    });
    for _ in 0..5 {
        let response = upstream.send(request()).await.unwrap();
        let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap();
        assert_eq!(body.to_bytes(), "answer");
        // The connection is put back before the permit is released.
        is_free(&upstream).await;
    }
    drop(upstream);
    assert_eq!(timeout(Duration::from_secs(20), serving).await.unwrap().unwrap(), 5);
}

#[tokio::test]
async fn bytes_before_a_request_are_not_its_response() {
    for surplus in [&b"HTTP/1.1 201 Created\r\ncontent-length: 7\r\n\r\nsurplus"[..], b"\n", b""] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = at(&listener, Duration::from_secs(20), 1, UpstreamProtocol::Http1);
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut read = Vec::new();
            while !read.ends_with(b"body") {
                assert!(stream.read_buf(&mut read).await.unwrap() > 0);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            stream.into_std().unwrap()
        };
        let (response, stream) = tokio::join!(upstream.send(request()), serving);
        let body = http_body_util::BodyExt::collect(response.unwrap().into_body()).await.unwrap();
        assert_eq!(body.to_bytes(), "ok");
        // The connection is put back before the permit is released.
        is_free(&upstream).await;
        // Nothing is awaited from here on, so the runtime cannot have been notified.
        if surplus.is_empty() {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        } else {
            std::io::Write::write_all(&mut &stream, surplus).unwrap();
        }
        tokio::select! {
            biased;
            answered = upstream.send(request()) => panic!("{answered:?}"),
            fresh = listener.accept() => drop(fresh.unwrap()),
        }
    }
}
