//! A server of HTTP/2 that refuses streams and leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_client::{Client, SendError, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::world::journal;

#[derive(Clone, Copy)]
enum Act {
    Refuse,
    GoAway,
    Reset,
}

/// Starts a server that does this to its first request, and executes all others. Returns its origin,
/// and the number of executions.
async fn serve(act: Act) -> (String, Arc<AtomicU32>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let (executed, seen) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&executed);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (count, seen) = (Arc::clone(&count), Arc::clone(&seen));
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    if seen.fetch_add(1, Ordering::SeqCst) == 0 {
                        match act {
                            Act::Refuse => respond.send_reset(h2::Reason::REFUSED_STREAM),
                            Act::Reset => respond.send_reset(h2::Reason::INTERNAL_ERROR),
                            Act::GoAway => {
                                connection.abrupt_shutdown(h2::Reason::ENHANCE_YOUR_CALM)
                            }
                        }
                        continue;
                    }
                    count.fetch_add(1, Ordering::SeqCst);
                    let answer = http::Response::builder().status(201).body(()).unwrap();
                    let mut body = respond.send_response(answer, false).unwrap();
                    body.send_data(Bytes::from_static(b"paid"), true).unwrap();
                }
            });
        }
    });
    (origin, executed)
}

async fn client(origin: &str, server: Server) -> Client {
    Client::open(journal()).server(origin, server.http2_prior_knowledge()).build().await.unwrap()
}

#[tokio::test]
async fn a_refused_stream_is_sent_again_also_to_a_server_without_keys() {
    let (origin, executed) = serve(Act::Refuse).await;
    let client = client(&origin, Server::without_keys()).await;
    let sent = client.post(format!("{origin}/")).operation("n").body("x").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.tries), (201, 2));
    assert_eq!(executed.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_age_of_a_key_does_not_begin_with_a_refused_stream() {
    let (origin, _) = serve(Act::Refuse).await;
    // With an age, the second try would be too late.
    let server = Server::hapax().retention(Duration::from_secs(60) + Duration::from_nanos(1));
    let client = client(&origin, server).await;
    let sent = client.post(format!("{origin}/")).operation("n").send().await.unwrap();
    assert_eq!(sent.tries, 2);
}

#[tokio::test]
async fn a_stream_that_is_reset_for_another_reason_may_have_happened() {
    for act in [Act::Reset, Act::GoAway] {
        let (origin, executed) = serve(act).await;
        let client = client(&origin, Server::without_keys()).await;
        let end = client.post(format!("{origin}/")).operation("n").send().await;
        assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
        assert_eq!(executed.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn a_request_above_the_last_stream_of_a_goaway_is_sent_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    let client = client(&origin, Server::without_keys()).await;
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // Settings, and once a request has come: GOAWAY, which names no stream as the last one.
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        let mut read = Vec::new();
        while !read.windows(6).any(|frame| frame[0] == 1 && frame[1] & 4 == 4 && frame[5] == 1) {
            read.push(stream.read_u8().await.unwrap());
        }
        let goaway = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        stream.write_all(&goaway).await.unwrap();
        while stream.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0) {}
        drop(stream);
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (_, mut respond) = connection.accept().await.unwrap().unwrap();
        let answer = http::Response::builder().status(201).body(()).unwrap();
        respond.send_response(answer, true).unwrap();
        while connection.accept().await.is_some() {}
    });
    let sent = client.post(format!("{origin}/")).operation("n").body("x").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.tries), (201, 2));
    serving.abort();
}
