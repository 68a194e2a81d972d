//! Names, requests, waits, and the times of an operation.

use std::sync::Arc;
use std::time::Duration;

use hapax_client::{
    Client, ClientError, Journal, JournalError, PendingState, RequestError, SendError, Server,
};
use hapax_core::MemoryStore;
use hapax_testkit::ManualClock;
use serde_json::json;

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, client, journal, open, store};

#[tokio::test]
async fn an_operation_is_sent_once_and_its_response_is_stored() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let send = || {
        let request = client.post(bank.url("/payments?a=b")).operation("invoice/17");
        request.header("x-note", "one").json(&json!({"cents": 1999})).unwrap().send()
    };
    let sent = send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.replayed, sent.tries), (201, false, 1));
    assert_eq!(&sent.response.body[..], b"paid 14");
    assert!(!sent.response.headers.contains_key("set-cookie"));
    let arrived = bank.arrived();
    assert_eq!(arrived[0].line, "POST /payments?a=b HTTP/1.1");
    assert_eq!(arrived[0].body, br#"{"cents":1999}"#);
    let key = client.key("invoice/17").unwrap();
    assert_eq!(arrived[0].header("idempotency-key"), Some(&*format!("\"{}\"", key.as_str())));
    assert_eq!(arrived[0].header("content-type"), Some("application/json"));
    assert_eq!(arrived[0].header("x-note"), Some("one"));
    let again = send().await.unwrap();
    assert_eq!((again.response, again.replayed), (sent.response, true));
    assert_eq!(bank.arrived().len(), 1, "the kept answer needs no request");
}

#[tokio::test]
async fn another_request_under_a_name_is_rejected_and_nothing_is_sent() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let post = |path: &str| client.post(bank.url(path)).operation("n").body("one");
    post("/a").send().await.unwrap();
    let others = [
        post("/b"),
        post("/a?c"),
        post("/a").body("two"),
        post("/a").header("x-more", "1"),
        client.request(http::Method::PUT, bank.url("/a")).operation("n").body("one"),
    ];
    for other in others {
        let end = other.send().await;
        assert!(matches!(end, Err(SendError::Reused)), "{end:?}");
    }
    assert_eq!(bank.arrived().len(), 1);
    post("/a").within(Duration::from_secs(7)).send().await.expect("its time is not the request");
}

#[tokio::test]
async fn callers_of_one_name_get_one_execution_and_one_response() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let send = || client.post(bank.url("/")).operation("n").send();
    let ends = futures_util::future::join_all((0..16).map(|_| send())).await;
    assert!(ends.iter().all(|end| end.as_ref().unwrap().response.status == 201));
    assert_eq!(ends.iter().filter(|end| !end.as_ref().unwrap().replayed).count(), 1);
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn a_key_depends_on_the_name_and_the_secret_alone() {
    let bank = Bank::start().await;
    let [one, two] = [client(&bank, Server::hapax()).await, client(&bank, Server::plain()).await];
    assert_eq!(one.key("invoice/17"), two.key("invoice/17"));
    assert_ne!(one.key("invoice/17"), one.key("invoice/18"));
    assert_eq!(one.key(""), None);
    let store = MemoryStore::default().secret(hapax_core::Secret::new([8; 32]));
    let other = Client::open(Journal::over(Arc::new(store)).unwrap()).build().await.unwrap();
    assert_ne!(one.key("invoice/17"), other.key("invoice/17"));
}

#[tokio::test]
async fn a_journal_without_a_secret_is_rejected() {
    let journal = Journal::over(MemoryStore::default());
    assert!(matches!(journal, Err(JournalError::NoSecret)));
}

#[tokio::test]
async fn a_request_that_cannot_be_stored_or_sent_is_rejected_before_anything_is_stored() {
    let bank = Bank::start().await;
    let key = http::HeaderName::from_static("x-api-key");
    let client = open(&bank, Server::hapax()).secret_header(key).strict().build().await.unwrap();
    let post = || client.post(bank.url("/")).operation("n");
    let rejected = [
        (client.post(bank.url("/")), "found none"),
        (post().operation(""), "expected a name"),
        (post().operation("a\u{e9}"), "expected a name"),
        (client.post("http://other.example/").operation("n"), "declare it"),
        (client.post(bank.url("/").replace("http", "https")).operation("n"), "declare it"),
        (client.post("http://u:p@127.0.0.1/").operation("n"), "expected a URL"),
        (client.post(bank.url("/#a")).operation("n"), "expected a URL"),
        (client.post("/relative").operation("n"), "expected a URL"),
        (post().header("authorization", "Bearer t"), "expected no secret"),
        (post().header("Cookie", "a=b"), "expected no secret"),
        (post().header("x-api-key", "t"), "expected no secret"),
        (post().header("idempotency-key", "k"), "the client sets it"),
        (post().header("content-length", "1"), "the client sets it"),
        (post().header("connection", "close"), "the client sets it"),
        (post().header("a b", "c"), "invalid"),
        (post().header("a", "c\n"), "invalid"),
        (post().header("a", vec![b'a'; 40_000]), "at most 32768 bytes together"),
        (post().body(vec![0; 2 << 20]), "expected a body"),
        (post().within(Duration::ZERO), "above zero"),
    ];
    for (request, text) in rejected {
        match request.send().await {
            Err(SendError::Request(error)) => {
                assert!(error.to_string().contains(text), "{error}, expected {text}");
                assert!(!matches!(error, RequestError::Method));
            }
            end => panic!("{end:?}, expected {text}"),
        }
    }
    assert_eq!(bank.connections(), 0);
    assert!(client.pending().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_client_with_wrong_declarations_is_not_built() {
    for origin in
        ["", "example.com", "http://a/b", "http://a/?b", "http://u@a", "ftp://a", "http://a/#"]
    {
        let end = Client::open(journal()).server(origin, Server::plain()).build().await;
        assert!(matches!(end, Err(ClientError::Origin { .. })), "{origin}: {end:?}");
    }
    let twice = Client::open(journal()).server("http://a", Server::plain());
    let twice = twice.server("http://A:80/", Server::hapax()).build().await;
    assert!(matches!(twice, Err(ClientError::DuplicateServer { .. })));
    let zero = Client::open(journal()).within(Duration::ZERO).build().await;
    assert!(matches!(zero, Err(ClientError::ZeroDuration { .. })));
    for seconds in [0, 2, 60] {
        let short = Server::hapax().retention(Duration::from_secs(seconds));
        let end = Client::open(journal()).server("http://a", short).build().await;
        assert!(matches!(end, Err(ClientError::Retention { .. })), "{seconds}: {end:?}");
    }
}

#[tokio::test]
async fn a_caller_that_stops_waiting_gets_a_handle_and_the_operation_continues() {
    let bank = Bank::start().await;
    bank.act([Act::Silent]);
    let client =
        open(&bank, Server::hapax()).idle_timeout(Duration::from_secs(1)).build().await.unwrap();
    let post = client.post(bank.url("/")).operation("n");
    let end = post.wait(Duration::from_millis(50)).send().await;
    let Err(SendError::Pending(handle)) = end else { panic!("{end:?}") };
    assert_eq!(handle.name(), "n");
    let end = handle.wait(Duration::from_millis(1)).await;
    let Err(SendError::Pending(handle)) = end else { panic!("{end:?}") };
    let sent = handle.wait(LONG).await.unwrap();
    assert_eq!((sent.tries, sent.replayed), (2, true), "the server executed the first try");
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn a_dropped_call_does_not_stop_its_operation() {
    let bank = Bank::start().await;
    let client = client(&bank, Server::hapax()).await;
    let send = client.post(bank.url("/")).operation("n").send();
    assert!(tokio::time::timeout(Duration::ZERO, send).await.is_err());
    bank.wait_for(1).await;
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.arrived().len()), (201, 1));
}

#[tokio::test]
async fn nothing_is_sent_to_a_closed_port_and_the_next_send_tries_again() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let origin = format!("http://{address}");
    let client = Client::open(Journal::over(store()).unwrap()).server(&*origin, Server::hapax());
    let client = client.build().await.unwrap();
    let post = || client.post(format!("{origin}/")).operation("n");
    let end = post().within(Duration::from_millis(400)).send().await;
    assert!(matches!(end, Err(SendError::NotSent(_))), "{end:?}");
    let pending = client.pending().await.unwrap();
    assert!(!pending[0].may_have_happened && pending[0].tries > 0, "{pending:?}");
    let PendingState::Stopped { reason, .. } = &pending[0].state else { panic!("{pending:?}") };
    assert_eq!(reason, "exhausted");
    let bank = Bank::serve(tokio::net::TcpListener::bind(address).await.unwrap());
    assert_eq!(post().send().await.unwrap().response.status, 201);
    assert_eq!(bank.effects(), [1]);
}

#[tokio::test]
async fn an_operation_ends_after_its_time_and_may_have_happened_if_a_try_arrived() {
    let bank = Bank::start().await;
    bank.act(std::iter::repeat_n(Act::Answer(answer(503, &[], "")), 100));
    let client = client(&bank, Server::hapax()).await;
    let post = || client.post(bank.url("/")).operation("n");
    let end = post().within(Duration::from_millis(400)).send().await;
    let Err(SendError::Unknown(text)) = end else { panic!("{end:?}") };
    assert!(text.contains("a response within 400ms") && text.contains("503"), "{text}");
    let before = bank.arrived().len();
    // An absurd time is clamped to that of the operation.
    bank.act([]);
    let end = post().within(Duration::from_millis(300)).send().await;
    assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
    assert!(bank.arrived().len() > before, "it was asked again");
}

#[tokio::test]
async fn an_absurd_retry_after_ends_with_the_time_of_the_operation() {
    let bank = Bank::start().await;
    let later = answer(503, &["retry-after: 99999999999999999999"], "");
    bank.act([Act::Answer(later)]);
    let client = client(&bank, Server::hapax()).await;
    let post = client.post(bank.url("/")).operation("n").within(Duration::from_secs(1));
    let end = post.send().await;
    assert!(matches!(end, Err(SendError::Unknown(_))), "{end:?}");
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test]
async fn a_key_that_the_server_may_have_forgotten_is_not_sent() {
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(503, &["retry-after: 2"], ""))]);
    // The longest duration of a try, and one second.
    let server = Server::hapax().retention(Duration::from_secs(61));
    let client = client(&bank, server).await;
    let post = || client.post(bank.url("/")).operation("n");
    for _ in 0..2 {
        let end = post().send().await;
        assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
        assert_eq!(bank.arrived().len(), 1);
    }
    let resumed = client.resume().await.unwrap();
    assert_eq!((resumed.pending, resumed.expired), (0, 1));
}

#[tokio::test]
async fn a_key_that_aged_while_the_machine_was_suspended_is_not_sent() {
    let (bank, wall) = (Bank::start().await, Arc::new(ManualClock::default()));
    bank.act([Act::Silent]);
    let client =
        open(&bank, Server::hapax()).clock(wall.clone()).idle_timeout(Duration::from_secs(2));
    let client = client.build().await.unwrap();
    let post = || client.post(bank.url("/")).operation("n");
    let suspend = async {
        bank.wait_for(1).await;
        // The monotonic clock stands still meanwhile.
        wall.advance(Duration::from_secs(63 * 60 * 60));
    };
    let (end, ()) = tokio::join!(post().send(), suspend);
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    let end = post().send().await;
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    assert_eq!((bank.arrived().len(), bank.effects()), (1, vec![1]));
}

#[tokio::test]
async fn one_dead_server_delays_no_other() {
    let (dead, bank) = (Bank::start().await, Bank::start().await);
    dead.act(std::iter::repeat_n(Act::Silent, 2_000));
    let client = open(&bank, Server::hapax()).server(dead.origin(), Server::hapax());
    let client = client.build().await.unwrap();
    for number in 0..200 {
        let post = client.post(dead.url("/")).operation(format!("dead/{number}"));
        let end = post.wait(Duration::from_millis(1)).send().await;
        assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    }
    for number in 0..20 {
        let post = client.post(bank.url("/")).operation(format!("alive/{number}"));
        assert_eq!(post.wait(LONG).send().await.unwrap().response.status, 201);
    }
}

#[tokio::test]
async fn a_closed_client_ends_its_calls_and_another_one_continues() {
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(503, &["retry-after: 1"], ""))]);
    let store = store();
    let open = || {
        Client::open(Journal::over(Arc::clone(&store)).unwrap())
            .server(bank.origin(), Server::hapax())
            .build()
    };
    let first = open().await.unwrap();
    let call = tokio::spawn(first.post(bank.url("/")).operation("n").send());
    bank.wait_for(1).await;
    assert!(first.close(LONG).await);
    let end = call.await.unwrap();
    assert!(matches!(end, Err(SendError::Closed)), "{end:?}");
    let second = open().await.unwrap();
    assert_eq!(second.resume().await.unwrap().pending, 1);
    bank.wait_for(2).await;
    let sent = second.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.arrived().len()), (201, 2));
    assert!(second.pending().await.unwrap().is_empty());
}
