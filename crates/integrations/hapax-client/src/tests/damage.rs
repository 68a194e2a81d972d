//! Journals that fail, or are damaged in part.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::schedule::{EntryKey, NewEntry};
use hapax_core::{EntryId, Key, Store as _};
use tokio::sync::Notify;
use tokio::time::sleep;

use super::store::CountedStore;
use super::{Double, Mode, open, send};
use crate::{Client, Credentials, Journal, PendingState, SendError, Server};

#[tokio::test(start_paused = true)]
async fn a_try_whose_callers_have_left_returns_its_permit_when_the_journal_fails() {
    let store = CountedStore::new(Duration::ZERO);
    let (began, goes_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let supply = {
        let (began, goes_on) = (Arc::clone(&began), Arc::clone(&goes_on));
        move |_| {
            let (began, goes_on) = (Arc::clone(&began), Arc::clone(&goes_on));
            async move {
                began.notify_one();
                goes_on.notified().await;
                Ok(Credentials::new())
            }
        }
    };
    let client = Client::open(Journal::over(Arc::clone(&store)).unwrap())
        .clock(store.clock())
        .server("http://bank.example", Server::plain())
        .credentials(supply);
    let client = client.build().await.unwrap();
    let host = client.host("http://bank.example:80").unwrap();
    let free = host.admission.free();
    let sending = tokio::spawn(client.post("http://bank.example/").operation("n").send());
    began.notified().await;
    assert_eq!(host.admission.free(), free - 1, "the try that is prepared has one");
    // The caller looks, finds the journal failing, and leaves; then the try cannot be saved.
    store.fail(true);
    let end = sending.await.unwrap();
    assert!(matches!(end, Err(SendError::Journal(_))), "{end:?}");
    goes_on.notify_one();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(host.admission.free(), free);
}

#[tokio::test(start_paused = true)]
async fn callers_outlive_a_journal_that_is_away_for_a_moment() {
    let store = CountedStore::new(Duration::ZERO);
    let server = Double::new("http://bank.example", Mode::Away);
    let client = open(&store, &[&server]).await;
    let mut handles = Vec::new();
    for number in 0..200 {
        let post = client.post("http://bank.example/").operation(format!("{number}"));
        let end = post.wait(Duration::ZERO).send().await;
        let Err(SendError::Pending(handle)) = end else { panic!("{end:?}") };
        handles.push(handle);
    }
    // Some are tried, some in a pause, some wait for the budget of their server.
    sleep(Duration::from_secs(20)).await;
    store.fail(true);
    sleep(Duration::from_secs(5)).await;
    store.fail(false);
    server.set(Mode::Answers);
    for handle in handles {
        let sent = handle.wait(Duration::from_secs(600)).await.unwrap();
        assert_eq!(sent.response.status.as_u16(), 200);
    }
    assert_eq!(client.stats().finished, 200);
}

#[tokio::test(start_paused = true)]
async fn operations_that_cannot_be_read_are_listed_with_what_is_known_and_hide_no_other() {
    let store = CountedStore::new(Duration::ZERO);
    let server = Double::new("http://bank.example", Mode::Away);
    let first = open(&store, &[&server]).await;
    for name in ["record", "entry", "whole"] {
        send(&first, &server, name.to_owned());
    }
    sleep(Duration::from_secs(5)).await;
    let id = |name| first.id(&Key::new(name).unwrap());
    let (record, entry, whole) = (id("record"), id("entry"), id("whole"));
    assert!(first.close(Duration::from_secs(5)).await);
    store.damage(record, entry);

    let second = open(&store, &[&server]).await;
    let mut pending = second.pending().await.unwrap();
    pending.sort_by(|one, other| one.name.cmp(&other.name));
    let names: Vec<_> = pending.iter().map(|it| (&*it.name, &*it.url, it.id)).collect();
    let url = "http://bank.example/";
    assert_eq!(names, [("entry", "", entry), ("record", url, record), ("whole", url, whole)]);
    for it in &pending[..2] {
        let PendingState::Unreadable { detail } = &it.state else { panic!("{it:?}") };
        assert!(detail.contains("hapax doctor") && detail.contains("look the operation up"));
        assert!(it.may_have_happened);
    }
    assert_eq!(pending[2].state, PendingState::UnderWay);
    let census = second.census().await.unwrap();
    assert_eq!((census.in_progress, census.unreadable), (1, 2));
    let resumed = second.resume().await.unwrap();
    assert_eq!((resumed.pending, resumed.not_continued, resumed.expired), (1, 2, 0));
}

#[tokio::test(start_paused = true)]
async fn an_entry_that_an_earlier_start_left_hides_no_operation() {
    let store = CountedStore::new(Duration::ZERO);
    let server = Double::new("http://bank.example", Mode::Away);
    let first = open(&store, &[&server]).await;
    send(&first, &server, "n".to_owned());
    sleep(Duration::from_secs(5)).await;
    assert!(first.close(Duration::from_secs(5)).await);
    let schedule = store.capabilities().schedule.unwrap();
    let page = schedule.entries(None, NonZeroU32::MIN).await.unwrap();
    let (own, entry) = page.entries.into_iter().next().unwrap();
    let entry = entry.unwrap();
    // Before its own, in the order of keys.
    let key = EntryKey { id: EntryId::from_bytes([0; 16]), ..own };
    let (queue, note) = (entry.queue, entry.note);
    schedule.insert(NewEntry { key, queue, due_in: Duration::ZERO, note }).await.unwrap();

    let second = open(&store, &[&server]).await;
    let pending = second.pending().await.unwrap();
    assert_eq!(pending.iter().map(|it| &*it.name).collect::<Vec<_>>(), ["n"]);
    assert_eq!(second.resume().await.unwrap().pending, 1);
}
