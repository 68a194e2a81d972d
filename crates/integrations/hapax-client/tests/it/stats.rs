//! Counters of a client, and the census of its journal.

use std::time::Duration;

use hapax_client::{ClientCensus, SendError, Server};

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, open};

#[tokio::test]
async fn tries_are_counted_by_server_and_operations_by_their_end() {
    let (bank, other) = (Bank::start().await, Bank::start().await);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = open(&bank, Server::hapax())
        .server(other.origin(), Server::without_keys())
        .server(&*closed, Server::hapax());
    let client = client.build().await.unwrap();
    assert_eq!(client.census().await.unwrap(), ClientCensus::default());

    bank.act([Act::Answer(answer(503, &[], "")), Act::CutAnswer(5)]);
    client.post(bank.url("/")).operation("paid").send().await.unwrap();
    other.act([Act::CutAnswer(5)]);
    let end = client.post(other.url("/")).operation("unknown").send().await;
    assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
    let late =
        client.post(format!("{closed}/")).operation("late").within(Duration::from_millis(300));
    let end = late.send().await;
    assert!(matches!(end, Err(SendError::NotSent(_))), "{end:?}");

    let stats = client.stats();
    let of = |origin: String| stats.servers.iter().find(|it| it.server == origin).unwrap();
    let paid = of(bank.origin());
    assert_eq!((paid.responded, paid.not_sent, paid.unknown, paid.denied), (2, 0, 1, 0));
    let unknown = of(other.origin());
    assert_eq!((unknown.responded, unknown.not_sent, unknown.unknown), (0, 0, 1));
    let late = of(closed);
    assert!((late.responded, late.unknown) == (0, 0) && late.not_sent > 0, "{late:?}");
    assert_eq!((stats.finished, stats.expired, stats.stopped), (1, 0, 2));
    let census = client.census().await.unwrap();
    assert_eq!((census.in_progress, census.expired, census.unknown, census.not_sent), (0, 0, 1, 1));
    assert!(census.oldest >= Duration::from_millis(300), "{census:?}");
}

#[tokio::test]
async fn an_expired_operation_and_a_denied_retry_are_counted() {
    let (bank, down) = (Bank::start().await, Bank::start().await);
    let server = Server::hapax().retention(Duration::from_secs(61));
    let client = open(&bank, server).server(down.origin(), Server::hapax()).build().await.unwrap();
    bank.act([Act::Answer(answer(503, &["retry-after: 2"], ""))]);
    let end = client.post(bank.url("/")).operation("expired").send().await;
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    assert_eq!(client.stats().expired, 1);
    let census = client.census().await.unwrap();
    assert_eq!((census.expired, census.unknown), (1, 0));

    // More operations than a server that answers nothing useful gets retries.
    down.act(std::iter::repeat_n(Act::Answer(answer(503, &[], "")), 10_000));
    for number in 0..150 {
        let post = client.post(down.url("/")).operation(format!("n/{number}"));
        let end = post.wait(Duration::from_millis(1)).send().await;
        assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    }
    let denied = async {
        while client.stats().servers.iter().all(|server| server.denied == 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, denied).await.unwrap();
    assert_eq!(client.census().await.unwrap().in_progress, 150);
}
