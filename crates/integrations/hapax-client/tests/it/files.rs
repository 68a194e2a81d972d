//! Journals in files: restarts, processes, contents and modes.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax_client::{Client, Credentials, Journal, JournalError, SendError, Server};
use hapax_core::schedule::EntryKey;
use hapax_core::{Clock, EntryId, OperationId, Store as _};
use hapax_file::{FileOptions, FileStore, OpenError};
use hapax_testkit::ManualClock;

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, process};

async fn open(path: &Path, bank: &Bank) -> Client {
    let journal = Journal::file_within(path, LONG).await.unwrap();
    let client = Client::open(journal).server(bank.origin(), Server::hapax());
    client.lease(Duration::from_secs(1)).build().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_continues_after_its_process_died_and_has_one_effect() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let bank = Bank::start().await;
    // The first process dies while the server is silent, after it has executed.
    bank.act([Act::Silent]);
    process(async || {
        let client = open(&path, &bank).await;
        let send = client.post(bank.url("/")).operation("invoice/17").body("x").send();
        tokio::select! {
            end = send => panic!("{end:?}"),
            () = bank.wait_for(1) => {}
        }
    });
    let client = open(&path, &bank).await;
    let pending = client.pending().await.unwrap();
    assert!(pending.len() == 1 && pending[0].may_have_happened, "{pending:?}");
    assert_eq!(client.resume().await.unwrap().pending, 1);
    bank.wait_for(2).await;
    let sent = client.post(bank.url("/")).operation("invoice/17").body("x").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.replayed), (201, true));
    assert_eq!((bank.arrived().len(), bank.effects()), (2, vec![1]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_without_resume_is_continued_by_its_next_send() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let bank = Bank::start().await;
    bank.act([Act::Silent]);
    process(async || {
        let client = open(&path, &bank).await;
        let send = client.post(bank.url("/")).operation("invoice/17").send();
        tokio::select! {
            end = send => panic!("{end:?}"),
            () = bank.wait_for(1) => {}
        }
    });
    let client = open(&path, &bank).await;
    let sent = client.post(bank.url("/")).operation("invoice/17").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), bank.effects()), (201, vec![1]));
}

/// Sends the operation `n` in a process with this token.
async fn send_as(path: &Path, bank: &Bank, token: &'static str) -> Result<u16, SendError> {
    let journal = Journal::file_within(path, LONG).await.unwrap();
    let client = Client::open(journal).server(bank.origin(), Server::plain());
    let client = client.credentials(move |_| async move { Ok(Credentials::bearer(token)?) });
    let client = client.build().await.unwrap();
    let sent = client.post(bank.url("/")).operation("n").send().await;
    client.close(LONG).await;
    Ok(sent?.response.status.as_u16())
}

/// Each opening of a file ends all leases, that of an operation that has stopped too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stop_that_an_earlier_process_left_does_not_end_a_send() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed");
    let bank = Bank::start().await;
    bank.act([Act::Silent]);
    process(async || {
        tokio::select! {
            end = send_as(&path, &bank, "one") => panic!("{end:?}"),
            () = bank.wait_for(1) => {}
        }
    });
    for _ in 0..3 {
        let end = send_as(&path, &bank, "two").await;
        assert!(matches!(end, Err(SendError::CredentialsChanged)), "{end:?}");
    }
    assert_eq!(send_as(&path, &bank, "one").await.unwrap(), 201);
    assert_eq!((bank.arrived().len(), bank.effects()), (2, vec![1]));

    let path = folder.path().join("rejected");
    let bank = Bank::start().await;
    bank.act([Act::Answer(answer(401, &[], ""))]);
    let end = send_as(&path, &bank, "old").await;
    assert!(matches!(end, Err(SendError::Unauthorized)), "{end:?}");
    assert_eq!(send_as(&path, &bank, "new").await.unwrap(), 201);
    assert_eq!((bank.arrived().len(), bank.effects()), (2, vec![1]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_no_younger_than_the_latest_time_of_the_journal_after_the_clock_stepped_back() {
    const HOUR: Duration = Duration::from_secs(60 * 60);
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions::new(folder.path().join("journal"));
    let (bank, clock) = (Bank::start().await, Arc::new(ManualClock::default()));
    let (begin, options) = (clock.now(), options.clock(clock.clone()));
    let open = async || {
        let store = loop {
            match FileStore::open(options.clone()) {
                // The process before it is still ending.
                Err(OpenError::InUse { .. }) => tokio::task::yield_now().await,
                opened => break opened.unwrap(),
            }
        };
        let client = Client::open(Journal::over(store).unwrap()).clock(clock.clone());
        client.server(bank.origin(), Server::hapax()).build().await.unwrap()
    };
    let post = |client: &Client, name: &str| client.post(bank.url("/")).operation(name);
    bank.act([Act::Silent]);
    process(async || {
        let client = open().await;
        tokio::select! {
            end = post(&client, "a").send() => panic!("{end:?}"),
            () = bank.wait_for(1) => {}
        }
    });
    clock.advance(30 * HOUR);
    process(async || {
        let client = open().await;
        assert_eq!(post(&client, "b").send().await.unwrap().response.status, 201);
    });
    // The machine boots with a wrong clock.
    clock.set(begin.after(HOUR));
    let client = open().await;
    let end = post(&client, "a").send().await;
    assert!(matches!(end, Err(SendError::Expired)), "{end:?}");
    assert_eq!((bank.arrived().len(), bank.effects()), (2, vec![1, 1]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_no_caller_got_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let bank = Bank::start().await;
    process(async || {
        let client = open(&path, &bank).await;
        let send = client.post(bank.url("/")).operation("n").wait(Duration::ZERO).send();
        assert!(matches!(send.await, Err(SendError::Pending(_))));
        while client.finished().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    });
    let client = open(&path, &bank).await;
    let sent = client.post(bank.url("/")).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.replayed), (201, true));
    assert_eq!(bank.arrived().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_process_waits_for_the_journal_and_then_names_the_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let bank = Bank::start().await;
    let first = open(&path, &bank).await;
    let end = Journal::file_within(&path, Duration::from_millis(100)).await;
    let Err(error @ JournalError::InUse { .. }) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains(&format!("{}", std::process::id())), "{error}");
    let waiting = tokio::spawn(Journal::file_within(path.clone(), LONG));
    assert!(first.close(LONG).await);
    waiting.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_journal_has_no_secret_and_only_its_owner_can_read_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let bank = Bank::start().await;
    bank.act([
        Act::CutAnswer(10),
        Act::Answer(answer(503, &["set-cookie: session=hush-cookie", "retry-after: 1"], "")),
        Act::Execute(answer(201, &["set-cookie: session=hush-cookie"], "hush-body")),
    ]);
    let client = Client::open(Journal::file(&path).unwrap());
    let client = client.server(bank.origin(), Server::hapax()).credentials(|_| async {
        let name = http::HeaderName::from_static("x-api-key");
        let key = http::HeaderValue::from_static("hush-key");
        Ok(Credentials::bearer("hush-token")?.header(name, key))
    });
    let client = client.build().await.unwrap();
    let post = client.post(bank.url("/hush-path")).operation("hush-name").body("hush-request");
    post.send().await.unwrap();
    let arrived = &bank.arrived()[2];
    assert_eq!(arrived.header("authorization"), Some("Bearer hush-token"));
    assert_eq!(arrived.header("x-api-key"), Some("hush-key"));
    let kept = client.finished().await.unwrap();
    assert_eq!(kept[0].name, "hush-name");
    client.close(LONG).await;
    let mut files = 0;
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        let found = bytes.windows(5).any(|window| window == b"hush-");
        assert!(!found, "{}", file.path().display());
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.path().display());
        files += 1;
    }
    assert!(files >= 2, "journal and secret");
}

#[tokio::test]
async fn an_operation_takes_three_commits_of_a_file() {
    let bank = Bank::start().await;
    let folder = tempfile::tempdir().unwrap();
    let options = hapax_file::FileOptions::new(folder.path().join("journal"));
    let store = std::sync::Arc::new(hapax_file::FileStore::open(options).unwrap());
    let journal = Journal::over(std::sync::Arc::clone(&store)).unwrap();
    let client = Client::open(journal).server(bank.origin(), Server::hapax());
    let client = client.build().await.unwrap();
    let commits = || store.stats().commits;
    let mut counted = Vec::new();
    for number in 0..20 {
        let before = commits();
        client.post(bank.url("/")).operation(format!("{number}")).send().await.unwrap();
        // The entry is removed after the answer, in a commit of its own, for which no caller waits.
        let schedule = store.capabilities().schedule.unwrap();
        let limit = std::num::NonZeroU32::MIN;
        while !schedule.entries(None, limit).await.unwrap().entries.is_empty() {
            tokio::task::yield_now().await;
        }
        // Writes nothing, and is answered after the commit of the removal is counted.
        let none = EntryKey {
            operation: OperationId::from_bytes([0; 32]),
            id: EntryId::from_bytes([0; 16]),
        };
        schedule.remove(none).await.unwrap();
        counted.push(commits() - before - 1);
    }
    counted.sort_unstable();
    println!("commits before the answer of each operation: {counted:?}");
    // The claim; the entry with the try; the answer. An entry takes a commit of its own if the machine is
    // too busy to send the try within a millisecond.
    assert_eq!(counted[0], 3, "{counted:?}");
    let begun = commits();
    let posts = (0..64)
        .map(|number| client.post(bank.url("/")).operation(format!("at-once/{number}")).send());
    let ends = futures_util::future::join_all(posts).await;
    assert!(ends.iter().all(Result::is_ok));
    assert!(commits() - begun < 64 * 3, "{} commits of 64 callers", commits() - begun);
}
