//! Connections that are cut at every byte, in both versions of HTTP.

use std::time::Duration;

use futures_util::future::join_all;
use hapax_client::{Client, SendError, Server};

use crate::bank::Bank;
use crate::cutter::{Cut, Cutter, Passed};
use crate::http2_bank::{Frame, Http2Bank, PREFACE, frames};
use crate::world::{LONG, journal};

/// Starts a proxy for each cut of a connection whose sides have these lengths.
async fn cutters(
    upstream: std::net::SocketAddr,
    whole: &Passed,
    always: bool,
) -> Vec<(Cut, Cutter)> {
    // Keys of other names take other numbers of bytes, as they are compressed.
    let sent = (0..whole.sent.len() + 8).map(Cut::Sent);
    let cuts = sent.chain((0..whole.received.len() + 8).map(Cut::Received));
    let start = |cut| async move { (cut, Cutter::start(upstream, Some(cut), always).await) };
    join_all(cuts.map(start)).await
}

fn declare(cutters: &[(Cut, Cutter)], server: &Server) -> hapax_client::ClientBuilder {
    let origins = cutters.iter().map(|(_, cutter)| cutter.origin());
    origins.fold(Client::open(journal()), |client, origin| client.server(origin, server.clone()))
}

/// Sends one operation through each proxy, to a path of its own.
async fn send_all(
    client: &Client,
    cutters: &[(Cut, Cutter)],
    within: Duration,
) -> Vec<Result<hapax_client::Sent, SendError>> {
    let sends = cutters.iter().enumerate().map(|(at, (_, cutter))| {
        let post = client.post(format!("{}{}", cutter.origin(), path(at)));
        let post = post.operation(format!("cut/{at:04}")).header("content-type", "text/plain");
        post.body("nineteen").within(within).wait(LONG).send()
    });
    join_all(sends).await
}

fn path(at: usize) -> String {
    format!("/cut/{at:04}")
}

/// Sends one operation through a proxy that cuts nothing, and returns what it passed on.
async fn whole(upstream: std::net::SocketAddr, server: &Server) -> Passed {
    let cutter = Cutter::start(upstream, None, false).await;
    let cutters = [(Cut::Sent(usize::MAX), cutter)];
    let client = declare(&cutters, server).build().await.unwrap();
    let post = client.post(format!("{}/whole/00", cutters[0].1.origin())).operation("whole/00");
    post.header("content-type", "text/plain").body("nineteen").send().await.unwrap();
    client.close(LONG).await;
    let connections = cutters[0].1.connections();
    assert_eq!(connections.len(), 1);
    connections[0].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_http2_connection_that_is_cut_at_any_byte_has_one_effect_and_one_response() {
    let bank = Http2Bank::start().await;
    let server = Server::hapax().http2_prior_knowledge();
    let whole = whole(bank.address, &server).await;
    let cutters = cutters(bank.address, &whole, false).await;
    let client = declare(&cutters, &server).build().await.unwrap();
    let ends = send_all(&client, &cutters, LONG).await;
    // First tries that were cut before the request was complete, and before the answer was.
    let (mut requests, mut answers) = (0, 0);
    for (at, ((cut, cutter), end)) in cutters.iter().zip(ends).enumerate() {
        let sent = end.unwrap_or_else(|error| panic!("{cut:?}: {error}"));
        assert_eq!(sent.response.status, 201, "{cut:?}");
        assert_eq!(&sent.response.body[..], b"paid", "{cut:?}");
        assert_eq!(bank.effects(&path(at)), 1, "{cut:?}");
        let arrived = bank.arrived(&path(at));
        assert!(arrived.iter().all(|it| it.body == b"nineteen" && it.key.is_some()), "{cut:?}");
        let first = &cutter.connections()[0];
        let has_request = frames(&first.sent, PREFACE).iter().any(Frame::ends_stream);
        let has_answer = frames(&first.received, 0).iter().any(Frame::ends_stream);
        let most = if has_answer { 1..=2 } else { 2..=2 };
        assert!(most.contains(&sent.tries), "{cut:?}: {} tries", sent.tries);
        requests += u32::from(first.is_cut && !has_request);
        answers += u32::from(first.is_cut && has_request && !has_answer);
    }
    assert!(requests > 100 && answers > 20, "{requests} requests and {answers} answers were cut");
}

/// The ends of operations at a server without keys.
#[derive(Default, Debug)]
struct Ends {
    answered: u32,
    not_sent: u32,
    unknown: u32,
}

impl Ends {
    /// Counts an end. Of a request that is reported as not sent, `begun` is false and nothing arrived.
    fn count(
        &mut self,
        cut: Cut,
        end: &Result<hapax_client::Sent, SendError>,
        begun: bool,
        arrived: usize,
    ) {
        match end {
            Ok(sent) => {
                assert_eq!((sent.response.status.as_u16(), arrived), (201, 1), "{cut:?}");
                self.answered += 1;
            }
            Err(SendError::NotSent(_)) => {
                assert_eq!((begun, arrived), (false, 0), "{cut:?} was reported as not sent");
                self.not_sent += 1;
            }
            Err(SendError::Unknown(_)) => {
                assert!(arrived <= 1, "{cut:?} was sent again");
                self.unknown += 1;
            }
            Err(end) => panic!("{cut:?}: {end}"),
        }
    }
}

/// Sends to a server that has stopped; nothing is sent.
async fn refused(server: Server, ends: &mut Ends) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let origin = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = Client::open(journal()).server(&*origin, server).build().await.unwrap();
    let post = client.post(format!("{origin}/")).operation("n").within(WITHIN);
    ends.count(Cut::Sent(0), &post.send().await, false, 0);
}

/// The time in which an operation that is not sent is tried again.
const WITHIN: Duration = Duration::from_millis(700);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_reported_as_not_sent_was_not_sent_over_http_1() {
    let bank = Bank::start().await;
    let server = Server::without_keys();
    let whole = whole(bank.address, &server).await;
    let cutters = cutters(bank.address, &whole, true).await;
    let client = declare(&cutters, &server).build().await.unwrap();
    let sent = send_all(&client, &cutters, WITHIN).await;
    let (mut ends, arrived) = (Ends::default(), bank.arrived());
    for (at, ((cut, cutter), end)) in cutters.iter().zip(sent).enumerate() {
        let line = format!("POST {} HTTP/1.1", path(at));
        let arrived = arrived.iter().filter(|arrived| arrived.line == line).count();
        // Not even a part of it.
        let begun = cutter.connections().iter().any(|it| !it.sent.is_empty());
        ends.count(*cut, &end, begun, arrived);
    }
    assert!(bank.effects().iter().all(|effects| *effects == 1));
    assert!(ends.unknown > 50 && ends.answered > 0, "{ends:?}");
    refused(server, &mut ends).await;
    assert!(ends.not_sent > 0, "{ends:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_reported_as_not_sent_was_not_sent_over_http_2() {
    let bank = Http2Bank::start().await;
    let server = Server::without_keys().http2_prior_knowledge();
    let whole = whole(bank.address, &server).await;
    let cutters = cutters(bank.address, &whole, true).await;
    let client = declare(&cutters, &server).build().await.unwrap();
    let sent = send_all(&client, &cutters, WITHIN).await;
    let mut ends = Ends::default();
    for (at, ((cut, cutter), end)) in cutters.iter().zip(sent).enumerate() {
        // A frame of the request, complete or not, begins where the ones before it end.
        let begun = cutter.connections().iter().any(|connection| {
            let whole = frames(&connection.sent, PREFACE);
            let end = whole.last().map_or(PREFACE, |frame| frame.end);
            let partial = connection.sent.get(end + 3).is_some_and(|kind| *kind <= Frame::HEADERS);
            partial || whole.iter().any(|frame| frame.kind <= Frame::HEADERS)
        });
        assert!(bank.effects(&path(at)) <= 1, "{cut:?}");
        ends.count(*cut, &end, begun, bank.arrived(&path(at)).len());
    }
    assert!(ends.unknown > 50 && ends.answered > 0, "{ends:?}");
    refused(server, &mut ends).await;
    assert!(ends.not_sent > 0, "{ends:?}");
}
