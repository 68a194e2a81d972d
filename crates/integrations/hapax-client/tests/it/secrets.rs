//! Credentials: in no journal, log or `Debug` form.

use std::io;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_client::{Client, Credentials, Journal, SendError, Server};
use hapax_core::{Inspect, RecordState};
use http::header::COOKIE;
use http::{HeaderName, HeaderValue};
use tracing_subscriber::fmt::MakeWriter;

use crate::bank::{Act, Bank, answer};
use crate::world::{LONG, store};

/// The beginning of every secret.
const HUSH: &str = "hush";

/// A text of every request, which journals have, sealed.
const BODY: &str = "a-body-that-is-no-secret";

/// A writer that collects the log in memory.
#[derive(Clone, Default)]
pub(crate) struct Written(Arc<Mutex<Vec<u8>>>);

impl Written {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    fn add(&self, text: impl std::fmt::Debug) {
        self.0.lock().unwrap().extend_from_slice(format!("{text:?}\n{text:#?}\n").as_bytes());
    }
}

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Written {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Returns whether bytes contain a text.
pub(crate) fn contains(bytes: &[u8], text: &str) -> bool {
    // Faster than a comparison of all windows.
    String::from_utf8_lossy(bytes).contains(text)
}

fn value(text: &str) -> HeaderValue {
    HeaderValue::try_from(text).unwrap()
}

/// Sends operations that end in every way, with credentials of every kind: one is answered after a
/// rejected token, one was rejected by the server, one is in progress, one may have happened, and one was
/// not sent, because its credentials cannot be had. Returns the `Debug` forms of all that it got.
pub(crate) async fn send_all(store: impl Inspect) -> Written {
    let bank = Bank::start().await;
    let debug = Written::default();
    let client = Client::open(Journal::over(store).unwrap().namespace(""));
    let client = client.server(bank.origin(), Server::hapax());
    let (shown, replaced) = (debug.clone(), AtomicBool::new(false));
    let client =
        client.secret_header(HeaderName::from_static("x-api-key")).credentials(move |request| {
            shown.add(&request);
            let shown = shown.clone();
            let replaced = replaced.fetch_or(request.previous_rejected, Ordering::SeqCst)
                || request.previous_rejected;
            async move {
                if request.name == "not-sent" {
                    return Err(format!("POST /token?client_secret={HUSH}-client").into());
                }
                let token = format!("{HUSH}-token-{replaced}");
                let key = HeaderName::from_static("x-api-key");
                let credentials = Credentials::bearer(&token)?
                    .header(COOKIE, value(&format!("id={HUSH}-cookie")))
                    .header(key, value(&format!("{HUSH}-key")))
                    .varying_header(
                        HeaderName::from_static("x-sign"),
                        value(&format!("{HUSH}-sign")),
                    );
                shown.add(&credentials);
                Ok(credentials)
            }
        });
    debug.add(&client);
    let client = client.build().await.unwrap();
    debug.add(&client);
    let set_cookie = format!("set-cookie: id={HUSH}-session");
    let post = |name: &str| client.post(bank.url("/")).operation(name).body(BODY);

    bank.act([
        Act::Answer(answer(401, &[&set_cookie], "")),
        Act::Execute(answer(503, &[&set_cookie, "retry-after: 0"], "")),
        Act::Execute(answer(201, &[&set_cookie], "paid")),
    ]);
    let request = post("answered");
    debug.add(&request);
    let sent = request.send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.tries), (201, 3));
    debug.add(&sent);
    let arrived = bank.arrived();
    let last = arrived.last().unwrap();
    for (name, value) in [
        ("authorization", "Bearer hush-token-true"),
        ("cookie", "id=hush-cookie"),
        ("x-api-key", "hush-key"),
        ("x-sign", "hush-sign"),
    ] {
        assert_eq!(last.header(name), Some(value));
    }

    let problem = r#"{"type":"urn:hapax:problem:key-reused","code":"key-reused"}"#;
    let headers = [&*set_cookie, "content-type: application/problem+json"];
    let later = || Act::Execute(answer(503, &[&set_cookie, "retry-after: 100"], ""));
    bank.act([
        Act::Answer(answer(422, &headers, problem)),
        Act::Answer(answer(401, &[&set_cookie], "")),
        later(),
        later(),
    ]);
    for name in ["reused", "unauthorized", "unknown", "not-sent"] {
        let is_tried_again = ["unknown", "not-sent"].contains(&name);
        let within = if is_tried_again { Duration::from_secs(2) } else { LONG };
        let end = post(name).within(within).send().await;
        match (name, &end) {
            ("reused", Err(SendError::ReusedAtServer(_)))
            | ("unauthorized", Err(SendError::Unauthorized))
            | ("unknown", Err(SendError::Unknown(_)))
            | ("not-sent", Err(SendError::NotSent(_))) => {}
            _ => panic!("{name}: {end:?}"),
        }
        debug.add(end.as_ref().map_err(ToString::to_string).err());
        debug.add(&end);
    }
    let end = post("under-way").wait(Duration::from_millis(1)).send().await;
    assert!(matches!(end, Err(SendError::Pending(_))), "{end:?}");
    debug.add(&end);
    bank.wait_for(7).await;
    let rejected = post("rejected").header("x-api-key", format!("{HUSH}-stored")).send().await;
    assert!(matches!(rejected, Err(SendError::Request(_))), "{rejected:?}");
    debug.add(&rejected);
    let (finished, pending) = (client.finished().await.unwrap(), client.pending().await.unwrap());
    assert_eq!((finished.len(), pending.len()), (2, 4), "{finished:?} {pending:?}");
    debug.add((finished, pending));
    client.close(LONG).await;
    debug
}

/// Checks the contents of a journal as the store opens them.
pub(crate) async fn opened(store: &impl Inspect) {
    const ALL: NonZeroU32 = NonZeroU32::new(256).unwrap();
    let mut found = Vec::new();
    for (_, stored) in store.page(None, ALL).await.unwrap().records {
        let record = stored.unwrap().record;
        found.extend(record.checkpoint);
        found.extend(record.notes.description);
        found.extend(record.notes.decision);
        if let RecordState::Done(outcome) = &record.state {
            found.push(outcome.bytes().clone());
        }
    }
    let schedule = store.capabilities().schedule.unwrap();
    let entries = schedule.entries(None, ALL).await.unwrap().entries;
    found.extend(entries.into_iter().map(|(_, entry)| entry.unwrap().note));
    assert!(found.iter().any(|it| contains(it, BODY)), "requests");
    assert!(found.iter().any(|it| contains(it, "paid")), "answers");
    for bytes in found {
        assert!(!contains(&bytes, HUSH), "{}", String::from_utf8_lossy(&bytes));
    }
}

/// Checks all files of a folder and of those in it; returns whether one has this text.
pub(crate) fn files_have(folder: &Path, text: &str) -> bool {
    let mut has = false;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        has |= match path.is_dir() {
            true => files_have(&path, text),
            // One that was removed meanwhile has none.
            false => contains(&std::fs::read(&path).unwrap_or_default(), text),
        };
    }
    has
}

pub(crate) fn files_have_no_secret(folder: &Path) {
    assert!(!files_have(folder, HUSH) && !files_have(folder, BODY), "{}", folder.display());
    // The check finds what is there.
    std::fs::write(folder.join("planted"), format!("{HUSH} {BODY}")).unwrap();
    assert!(files_have(folder, HUSH) && files_have(folder, BODY));
}

#[tokio::test]
async fn logs_and_debug_forms_have_no_credentials() {
    let log = Written::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_span_events(tracing_subscriber::fmt::format::FmtSpan::FULL)
        .with_writer(log.clone())
        .finish();
    // The runtime of this test has one thread.
    let logging = tracing::subscriber::set_default(subscriber);
    let store = store();
    let debug = send_all(Arc::clone(&store)).await;
    drop(logging);
    opened(&store).await;
    let log = log.text();
    for text in ["hapax_client", "hapax_saga", "under-way"] {
        assert!(log.contains(text), "no {text}: {log}");
    }
    assert!(!log.contains(HUSH) && !log.contains(BODY), "{log}");
    let debug = debug.text();
    assert!(debug.contains("under-way"));
    assert!(!debug.contains(HUSH) && !debug.contains(BODY), "{debug}");
}

#[cfg(feature = "file")]
#[tokio::test]
async fn the_files_of_a_journal_have_no_credentials_and_belong_to_their_owner() {
    use std::os::unix::fs::PermissionsExt;

    use hapax_file::{FileOptions, FileStore};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let store = Arc::new(FileStore::open(FileOptions::new(&path)).unwrap());
    send_all(Arc::clone(&store)).await;
    opened(&store).await;
    let mut names = Vec::new();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        names.push(file.file_name().into_string().unwrap());
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{names:?}");
    }
    names.sort();
    // Also while the journal is open.
    assert_eq!(names, ["journal", "journal.lock", "journal.reserve", "journal.secret"]);
    files_have_no_secret(folder.path());
}
