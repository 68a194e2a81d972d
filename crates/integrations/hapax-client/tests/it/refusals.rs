//! Operations that are rejected without a connection: a new client has none that it could reuse.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, Journal, JournalError, SendError, Server};
use hapax_core::Clock;
use hapax_file::{FileOptions, FileStore, OpenError};
use hapax_testkit::ManualClock;
use http::Method;

use crate::bank::{Act, Bank, answer};
use crate::roles::{self, Role};
use crate::world::LONG;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

async fn open(path: &Path, clock: Arc<ManualClock>, bank: &Bank) -> Client {
    let store = loop {
        match FileStore::open(FileOptions::new(path).clock(clock.clone())) {
            // The tasks of a client before this one have not ended yet.
            Err(OpenError::InUse { .. }) => tokio::task::yield_now().await,
            opened => break opened.unwrap(),
        }
    };
    let client = Client::open(Journal::over(store).unwrap());
    client.server(bank.origin(), Server::hapax().retention(DAY)).build().await.unwrap()
}

#[tokio::test]
async fn another_body_url_or_method_under_a_name_is_rejected_without_a_connection() {
    let folder = tempfile::tempdir().unwrap();
    let (path, clock) = (folder.path().join("journal"), Arc::new(ManualClock::default()));
    let bank = Bank::start().await;
    bank.act([Act::Execute(answer(503, &["retry-after: 100"], ""))]);
    let client = open(&path, Arc::clone(&clock), &bank).await;
    let post = client.post(bank.url("/a")).operation("pending").body("one");
    let end = post.wait(Duration::from_millis(1)).send().await;
    assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    bank.wait_for(1).await;
    client.post(bank.url("/a")).operation("finished").body("one").send().await.unwrap();
    assert!(client.close(LONG).await);

    let (connections, arrived) = (bank.connections(), bank.arrived().len());
    let client = open(&path, clock, &bank).await;
    for name in ["pending", "finished"] {
        let post = |path: &str| client.post(bank.url(path)).operation(name).body("one");
        let others = [
            post("/a").body("two"),
            post("/b"),
            client.request(Method::PUT, bank.url("/a")).operation(name).body("one"),
        ];
        for other in others {
            let end = other.send().await;
            assert!(matches!(end, Err(SendError::Reused)), "{name}: {end:?}");
            let text = end.unwrap_err().to_string();
            assert!(
                text.contains("found another") && text.contains("it may have happened"),
                "{text}"
            );
        }
    }
    assert_eq!((bank.connections(), bank.arrived().len()), (connections, arrived));
}

#[tokio::test]
async fn an_operation_past_a_tenth_before_the_end_of_the_retention_is_not_sent() {
    // The age also counts the time that passes in the test, before and after the jump of the clock.
    let (last, margin) = (DAY.mul_f64(0.9), Duration::from_secs(60));
    for (age, is_sent) in [(last - margin, true), (last + margin, false)] {
        let folder = tempfile::tempdir().unwrap();
        let (path, clock) = (folder.path().join("journal"), Arc::new(ManualClock::default()));
        let bank = Bank::start().await;
        bank.act([Act::Execute(answer(503, &["retry-after: 1"], ""))]);
        let client = open(&path, Arc::clone(&clock), &bank).await;
        let post = || client.post(bank.url("/")).operation("n");
        let end = post().wait(Duration::from_millis(1)).send().await;
        assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
        bank.wait_for(1).await;
        assert!(client.close(LONG).await);

        let connections = bank.connections();
        clock.set(clock.now().after(age));
        let client = open(&path, clock, &bank).await;
        let end = client.post(bank.url("/")).operation("n").within(DAY).send().await;
        if is_sent {
            assert_eq!(end.unwrap().response.status, 201);
            assert_eq!(bank.effects(), [1]);
            continue;
        }
        assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
        let text = end.unwrap_err().to_string();
        assert!(text.contains("too old to be sent again"), "{text}");
        assert_eq!((bank.connections(), bank.arrived().len()), (connections, 1));
        let resumed = client.resume().await.unwrap();
        assert_eq!((resumed.pending, resumed.expired), (0, 1));
        assert_eq!(client.pending().await.unwrap()[0].name, "n");
        assert!(client.close(LONG).await);
        assert_eq!(bank.connections(), connections);
    }
}

#[tokio::test]
async fn a_journal_that_another_process_has_open_is_not_opened() {
    if let Some(path) = roles::argument() {
        let _journal = Journal::file(path).unwrap();
        roles::say("open");
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let test = "refusals::a_journal_that_another_process_has_open_is_not_opened";
    let mut other = Role::start(test, path.to_str().unwrap());
    assert_eq!(other.next().as_deref(), Some("open"));
    let end = Journal::file(&path);
    let Err(error @ JournalError::InUse { .. }) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains(&other.id().to_string()), "{error}");
    let waiting = tokio::spawn(Journal::file_within(path, LONG));
    other.kill();
    waiting.await.unwrap().expect("the lock of a killed process is released");
}
