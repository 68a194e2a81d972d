//! A server that closes the connection at every byte of request and answer.

use hapax_client::{Client, Journal, Server};

use crate::bank::{Act, Bank};

/// Sends one operation to each of many servers, each of which first breaks off at another byte.
async fn one_effect_and_one_response(
    act: impl Fn(usize) -> Act,
    cuts: std::ops::RangeInclusive<usize>,
) {
    let folder = tempfile::tempdir().unwrap();
    let mut client = Client::open(Journal::file(folder.path().join("journal")).unwrap());
    let mut banks = Vec::new();
    for cut in cuts {
        let bank = Bank::start().await;
        bank.act([act(cut)]);
        client = client.server(bank.origin(), Server::hapax());
        banks.push((cut, bank));
    }
    let client = client.build().await.unwrap();
    let sends = banks.iter().map(|(cut, bank)| {
        let post = client.post(bank.url("/payments")).operation(format!("cut/{cut}"));
        post.header("content-type", "text/plain").body("nineteen").send()
    });
    let ends = futures_util::future::join_all(sends).await;
    for ((cut, bank), end) in banks.iter().zip(ends) {
        let sent = end.unwrap();
        assert_eq!((sent.response.status.as_u16(), sent.tries), (201, 2), "cut at {cut}");
        assert_eq!(&sent.response.body[..], b"paid 8", "cut at {cut}");
        assert_eq!(bank.effects(), [1], "cut at {cut}");
    }
}

#[tokio::test]
async fn a_request_that_is_cut_at_any_byte_has_one_effect_and_one_response() {
    let bank = Bank::start().await;
    let client = crate::world::client(&bank, Server::hapax()).await;
    let post = client.post(bank.url("/payments")).operation("cut/0");
    post.header("content-type", "text/plain").body("nineteen").send().await.unwrap();
    let arrived = &bank.arrived()[0];
    let headers = arrived.headers.iter().map(|(name, value)| name.len() + value.len() + 4);
    let length = arrived.line.len() + 2 + headers.sum::<usize>() + 2 + 8;
    assert!(length > 150, "{length}");
    // The last byte arrives, and nothing is executed.
    one_effect_and_one_response(Act::CutRequest, 1..=length).await;
}

#[tokio::test]
async fn a_response_that_is_cut_at_any_byte_is_none_and_the_effect_stays_one() {
    let answer = "HTTP/1.1 201 Created\r\ncontent-length: 6\r\nidempotency-replayed: false\r\nset-cookie: session=hush\r\n\r\npaid 8";
    one_effect_and_one_response(Act::CutAnswer, 0..=answer.len() - 1).await;
}
