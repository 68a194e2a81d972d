//! `hapax call` against a server of threads that honors keys, and a client against the gateway.

mod bank;
mod kills;
mod output;
mod parallel;
mod proxies;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use hapax_client::{Client, Credentials, Journal, SendError, Server};

use self::bank::{Act, Bank};
use crate::world::{Gateway, hapax};

struct Script {
    bank: Bank,
    folder: tempfile::TempDir,
}

impl Script {
    fn new() -> Self {
        Self { bank: Bank::start(), folder: tempfile::tempdir().unwrap() }
    }

    fn journal(&self) -> PathBuf {
        self.folder.path().join("calls.db")
    }

    fn call(&self, words: &[&str]) -> Output {
        self.call_with(words, &self.journal())
    }

    fn call_with(&self, words: &[&str], journal: &Path) -> Output {
        let words = [&["call"], words, &["--journal", journal.to_str().unwrap()]].concat();
        hapax(&words).env("TOKEN", "Bearer hush-token").output().unwrap()
    }

    /// Pays an invoice; returns the exit code and standard output.
    fn pay(&self, name: &str, words: &[&str]) -> (i32, String) {
        let url = self.bank.url();
        let send =
            ["--name", name, "--server", "hapax", "POST", &url, "--json", r#"{"cents":1999}"#];
        let output = self.call(&[&send[..], words].concat());
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    }

    fn list(&self) -> Value {
        serde_json::from_slice(&self.call(&["list", "--json"]).stdout).unwrap()
    }
}

#[test]
fn a_call_prints_its_answer_and_the_same_call_again_sends_nothing() {
    let script = Script::new();
    for _ in 0..2 {
        let header = ["--header-env", "authorization=TOKEN", "--header", "x-note: one"];
        assert_eq!(script.pay("invoice-17", &header), (0, "paid".to_owned()));
    }
    let requests = script.bank.requests();
    assert_eq!(requests.len(), 1);
    assert!(requests[0].starts_with("POST /payments HTTP/1.1\r\n"), "{}", requests[0]);
    for text in
        ["authorization: Bearer hush-token", "x-note: one", "application/json", r#"{"cents":1999}"#]
    {
        assert!(requests[0].contains(text), "{text}: {}", requests[0]);
    }
    let listed = script.list();
    assert_eq!(listed["finished"][0]["name"], "invoice-17");
    assert_eq!(listed["finished"][0]["status"], 201);
    let listed = String::from_utf8(script.call(&["list"]).stdout).unwrap();
    assert!(listed.contains("201") && listed.contains("invoice-17  POST http://"), "{listed}");
    for file in std::fs::read_dir(script.folder.path()).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(4).any(|window| window == b"hush"));
    }
}

#[test]
fn a_new_journal_is_told_in_one_line_and_can_be_rejected() {
    let script = Script::new();
    let (journal, url) = (script.journal(), script.bank.url());
    let is_empty = || std::fs::read_dir(script.folder.path()).unwrap().count() == 0;
    let send = ["--name", "invoice-17", "--server", "hapax", "POST", &url];
    let required = [&send[..], &["--journal-must-exist"]].concat();
    let expected = format!("hapax: expected a journal at {}, found none", journal.display());
    let resume = ["resume", "--origin", &url];
    let (acknowledge, forget) = (["acknowledge", "invoice-17"], ["forget", "invoice-17"]);
    for words in [&["list"][..], &resume, &acknowledge, &forget, &required] {
        let output = script.call(words);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(69), "{line}");
        assert!(line.starts_with(&expected) && line.lines().count() == 1, "{line}");
        assert!(is_empty(), "{words:?}");
    }
    // The folder of the default journal is made by a call only.
    let default = hapax(&["call", "list"]).env("HOME", script.folder.path()).output().unwrap();
    assert_eq!(default.status.code(), Some(69));
    assert!(is_empty());

    let made =
        format!("hapax: a new journal was created, {}, with a new secret", journal.display());
    for (words, line) in [(&send[..], Some(&made)), (&required, None)] {
        let output = script.call(words);
        assert!(output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), usize::from(line.is_some()), "{said}");
        assert!(line.is_none_or(|line| said.starts_with(line)), "{said}");
    }
    assert_eq!(script.bank.requests().len(), 1);
}

#[test]
fn an_accepted_operation_is_followed_if_the_server_is_declared_so() {
    let script = Script::new();
    let lines = || {
        let requests = script.bank.requests().into_iter();
        requests.map(|it| it.lines().next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    script.bank.act(Act::Accept);
    assert_eq!(script.pay("plain", &[]), (0, "accepted".to_owned()));
    script.bank.act(Act::Accept);
    assert_eq!(script.pay("followed", &["--follow-accepted"]), (0, "paid".to_owned()));
    let (post, get) = ("POST /payments HTTP/1.1", "GET /status HTTP/1.1");
    assert_eq!(lines(), [post, post, get]);
}

#[test]
fn exit_codes_say_how_a_call_ended() {
    let script = Script::new();
    script.bank.act(Act::Status(404));
    assert_eq!(script.pay("answered", &[]), (22, "no".to_owned()));
    assert_eq!(script.pay("answered", &["--header", "a: b"]).0, 65, "another request");
    script.bank.act(Act::Declined(404));
    assert_eq!(script.pay("declined", &[]), (22, "no".to_owned()));
    assert_eq!(script.pay("declined", &["--header", "a: b"]).0, 0, "the name was free");
    script.bank.act(Act::Status(503));
    assert_eq!(script.pay("pending", &["--wait", "1ms"]).0, 75);
    script.bank.act(Act::Status(401));
    assert_eq!(script.pay("unauthorized", &[]).0, 77);
    assert_eq!(script.pay("usage", &["--header", "authorization: Bearer t"]).0, 64);
    assert_eq!(script.pay("usage", &["--header-env", "authorization=MISSING"]).0, 64);
    assert_eq!(script.pay("usage", &["--header-env", "idempotency-key=TOKEN"]).0, 64);
    let twice = ["--header", "X-Key: a", "--header-env", "x-key=TOKEN"];
    assert_eq!(script.pay("usage", &twice).0, 64);
    assert_eq!(script.call(&[]).status.code(), Some(64));
    let folder = script.folder.path();
    let url = script.bank.url();
    let ended = script.call_with(&["--name", "n", "POST", &url], folder);
    assert_eq!(ended.status.code(), Some(69), "a folder is no journal");
    // By default the server honors no keys.
    let hang = ["--name", "unknown", "GET", &url, "--wait", "500ms"];
    script.bank.act(Act::Hang);
    assert_eq!(script.call(&hang).status.code(), Some(75));
    assert_eq!(script.call(&hang).status.code(), Some(76));
}

#[test]
fn an_answer_that_cannot_be_printed_is_kept() {
    let script = Script::new();
    let (url, journal) = (script.bank.url(), script.journal());
    let words = ["call", "--name", "n", "--server", "hapax", "POST", &url, "--json"];
    let words =
        [&words[..], &[r#"{"cents":1999}"#, "--journal", journal.to_str().unwrap()]].concat();
    // It rejects each write, like a full disk.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert_eq!(hapax(&words).stdout(full).status().unwrap().code(), Some(74));
    assert_eq!(script.pay("n", &[]), (0, "paid".to_owned()));
    assert_eq!(script.bank.requests().len(), 1);
}

#[test]
fn an_answer_that_is_neither_printed_nor_kept_is_looked_up() {
    let script = Script::new();
    let (url, journal) = (script.bank.url(), script.journal());
    let words = ["call", "--server", "hapax", "POST", &url, "--journal", journal.to_str().unwrap()];
    for (name, act, then) in [
        ("large", Act::Large((1 << 20) + 1), "look the result up"),
        ("rejected", Act::Status(403), "which sends again"),
    ] {
        script.bank.act(act);
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = hapax(&[&words[..], &["--name", name]].concat()).stdout(full).output();
        let output = output.unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(74), "{error}");
        assert!(error.contains("is not in the journal") && error.contains(then), "{error}");
    }
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let list =
        hapax(&["call", "list", "--journal", journal.to_str().unwrap()]).stdout(full).status();
    assert_eq!(list.unwrap().code(), Some(74));
}

#[test]
fn the_default_journal_does_not_depend_on_the_directory() {
    let script = Script::new();
    let (home, url) = (script.folder.path().join("home"), script.bank.url());
    let words = ["call", "--name", "n", "--server", "hapax", "POST", &url];
    for folder in ["one", "two"] {
        let folder = script.folder.path().join(folder);
        std::fs::create_dir(&folder).unwrap();
        let mut call = hapax(&words);
        call.current_dir(&folder).env_remove("HAPAX_JOURNAL");
        call.env("XDG_STATE_HOME", "state").env("HOME", &home);
        assert_eq!(call.output().unwrap().status.code(), Some(0));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        let mut call = hapax(&words);
        call.current_dir(&folder).env_remove("HAPAX_JOURNAL");
        call.env_remove("XDG_STATE_HOME").env("HOME", "home");
        assert_eq!(call.output().unwrap().status.code(), Some(64));
    }
    assert_eq!(script.bank.requests().len(), 1);
    assert!(home.join(".local/state/hapax/calls.db").exists());
}

#[test]
fn a_password_in_a_url_is_rejected_and_not_repeated() {
    let script = Script::new();
    let url = script.bank.url().replace("http://", "http://bot:s3cret@");
    let output = script.call(&["--name", "n", "POST", &url]);
    assert_eq!(output.status.code(), Some(64));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("--header-env") && !error.contains("s3cret"), "{error}");
    assert_eq!(script.bank.requests().len(), 0);
}

#[test]
fn a_script_that_is_killed_and_run_again_pays_once() {
    let script = Script::new();
    script.bank.act(Act::Hang);
    let url = script.bank.url();
    let journal = script.journal();
    let words = [
        "call",
        "--name",
        "invoice-17",
        "--server",
        "hapax",
        "POST",
        &url,
        "--json",
        r#"{"cents":1999}"#,
        "--journal",
        journal.to_str().unwrap(),
    ];
    let mut first = hapax(&words).spawn().unwrap();
    while script.bank.requests().is_empty() {
        std::thread::yield_now();
    }
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(script.pay("invoice-17", &[]), (0, "paid".to_owned()));
    assert_eq!(script.bank.state.lock().unwrap().executions, 1);
}

#[test]
fn pending_operations_are_resumed_and_finished_ones_forgotten() {
    let script = Script::new();
    let origin = format!("http://{}", script.bank.address);
    script.bank.act(Act::Status(503));
    assert_eq!(script.pay("invoice-17", &["--wait", "1ms"]).0, 75);
    let resume = ["resume", "--server", "hapax", "--origin"];
    let other = script.call(&[&resume[..], &["http://127.0.0.1:1"]].concat());
    assert_eq!(other.status.code(), Some(75), "of another server");
    let resumed = script.call(&[&resume[..], &[&origin]].concat());
    assert_eq!(resumed.status.code(), Some(0), "{resumed:?}");
    assert_eq!(script.list()["finished"][0]["status"], 201);
    let sent = script.bank.requests().len();
    assert_eq!(script.pay("invoice-17", &[]).0, 0);
    assert_eq!(script.bank.requests().len(), sent);
    assert_eq!(script.call(&["forget", "invoice-17"]).status.code(), Some(0));
    assert_eq!(script.call(&["forget", "invoice-17"]).status.code(), Some(1));
    assert_eq!(script.pay("invoice-17", &[]).0, 0);
    assert_eq!(script.bank.requests().len(), sent + 1);
    assert_eq!(script.bank.state.lock().unwrap().executions, 1, "the key is the same");
}

#[test]
fn a_resume_with_another_declaration_sends_nothing_and_the_right_one_continues() {
    let script = Script::new();
    script.bank.act(Act::Hang);
    let origin = format!("http://{}", script.bank.address);
    assert_eq!(script.pay("invoice-17", &["--wait", "500ms"]).0, 75);
    let other = script.call(&["resume", "--origin", &origin]);
    assert_eq!(other.status.code(), Some(76), "the default is without-keys");
    assert_eq!(script.list()["pending"][0]["state"], "key-changed");
    assert_eq!(script.bank.requests().len(), 1);
    let right = script.call(&["resume", "--server", "hapax", "--origin", &origin]);
    assert_eq!(right.status.code(), Some(0), "{right:?}");
    assert_eq!(script.bank.state.lock().unwrap().executions, 1, "the key is the same");
}

#[test]
fn a_resumed_operation_that_is_rejected_unexecuted_is_listed_and_not_lost() {
    let script = Script::new();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = closed.local_addr().unwrap();
    drop(closed);
    let url = format!("http://{address}/payments");
    let send = ["--name", "invoice-17", "--server", "hapax", "POST", &url, "--wait", "300ms"];
    let token = ["--header-env", "authorization=TOKEN"];
    assert_eq!(script.call(&[&send[..], &token].concat()).status.code(), Some(75));
    assert_eq!(script.list()["pending"][0]["may_have_happened"], false);

    let listen = address.to_string();
    let more = ["--listen", &listen];
    let gateway = Gateway::start(script.bank.address, script.folder.path(), &more);
    let origin = format!("http://{}", gateway.address);
    let resume = ["resume", "--server", "hapax", "--origin", &origin];
    for _ in 0..2 {
        // Without the token, as in a crontab that was not completed.
        let resumed = script.call(&resume);
        assert_eq!(resumed.status.code(), Some(76), "{resumed:?}");
        let printed = String::from_utf8(resumed.stdout).unwrap();
        assert!(printed.contains("rejected") && printed.contains("invoice-17"), "{printed}");
        let listed = script.list();
        assert_eq!(listed["pending"][0]["state"], "rejected");
        assert_eq!(listed["pending"][0]["may_have_happened"], false);
    }
    assert_eq!(script.bank.requests().len(), 0);
    let resumed = script.call(&[&resume[..], &token].concat());
    assert_eq!(resumed.status.code(), Some(0), "{resumed:?}");
    assert_eq!(script.list()["finished"][0]["status"], 201);
    assert_eq!(script.bank.state.lock().unwrap().executions, 1);
}

#[test]
fn a_header_from_the_environment_is_sent_to_one_server_only() {
    let script = Script::new();
    let origin = format!("http://{}", script.bank.address);
    let resume = ["resume", "--origin", &origin, "--origin", "http://127.0.0.1:1"];
    let refused = script.call(&[&resume[..], &["--header-env", "authorization=TOKEN"]].concat());
    let error = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(64), "{error}");
    assert!(error.contains("one --origin with --header-env") && error.lines().count() == 1);
    assert!(!script.journal().exists(), "it is refused before anything else");
    assert_eq!(script.pay("invoice-17", &[]).0, 0);
    assert_eq!(script.call(&resume).status.code(), Some(0), "without a header both are resumed");
}

#[test]
fn an_acknowledged_operation_is_not_sent_again() {
    let script = Script::new();
    let url = script.bank.url();
    script.bank.act(Act::Hang);
    let send = ["--name", "unknown", "GET", &url, "--wait", "500ms"];
    let waiting = script.call(&send);
    assert_eq!(waiting.status.code(), Some(75));
    let error = String::from_utf8(waiting.stderr).unwrap();
    assert!(error.contains("after 1 tries") && error.contains("run the same command"), "{error}");
    let early = script.call(&["acknowledge", "unknown"]);
    assert_eq!(early.status.code(), Some(1), "it may still be tried");
    assert_eq!(script.call(&send).status.code(), Some(76));
    assert_eq!(script.call(&["acknowledge", "unknown"]).status.code(), Some(0));
    let none = script.call(&["acknowledge", "unknown", "--json"]);
    assert_eq!(none.status.code(), Some(1));
    let error: Value = serde_json::from_slice(&none.stderr).unwrap();
    assert_eq!(error["code"], "not-found");
    assert_eq!(script.list()["pending"], serde_json::json!([]));
    assert_eq!(script.call(&send).status.code(), Some(76));
    assert_eq!(script.bank.requests().len(), 1);
}

#[test]
fn a_request_that_the_gateway_rejects_unexecuted_leaves_the_name_free() {
    let script = Script::new();
    let gateway = Gateway::start(script.bank.address, script.folder.path(), &[]);
    let url = format!("http://{}/payments", gateway.address);
    let send = ["--name", "invoice-17", "--server", "hapax", "POST", &url];
    let rejected = script.call(&send);
    assert_eq!(rejected.status.code(), Some(22));
    assert!(String::from_utf8(rejected.stdout).unwrap().contains("missing-scope"));
    assert_eq!(script.list()["finished"], serde_json::json!([]));
    let paid = script.call(&[&send[..], &["--header-env", "authorization=TOKEN"]].concat());
    assert_eq!(paid.status.code(), Some(0), "{paid:?}");
    assert_eq!(script.bank.requests().len(), 1, "only the second one reached the service");
}

#[test]
fn errors_name_flags_and_how_a_name_becomes_free() {
    let script = Script::new();
    let url = script.bank.url();
    let error = |words: &[&str]| String::from_utf8(script.call(words).stderr).unwrap();
    let send = ["--name", "n", "--server", "hapax", "POST", &url];
    let secret = error(&[&send[..], &["--header", "cookie: a=b"]].concat());
    assert!(secret.contains("--header-env") && !secret.contains("ClientBuilder"), "{secret}");
    let fence = error(&[&send[..], &["--header", "Idempotency-Fence: 1"]].concat());
    assert!(fence.contains("found `idempotency-fence`"), "{fence}");
    script.bank.act(Act::Status(400));
    let stored = error(&send);
    assert!(stored.contains("400 Bad Request") && stored.contains("hapax call forget"), "{stored}");
    let reused = error(&[&send[..], &["--header", "a: b"]].concat());
    assert!(reused.contains("found another method, URL, header or body"), "{reused}");
    assert!(reused.contains("it may have happened"), "{reused}");
}

#[test]
fn a_journal_that_another_call_has_open_is_waited_for_and_then_its_owner_named() {
    let script = Script::new();
    script.bank.act(Act::Hang);
    let url = script.bank.url();
    let journal = script.journal();
    let words = ["call", "--name", "slow", "POST", &url, "--journal", journal.to_str().unwrap()];
    let mut first = hapax(&words).spawn().unwrap();
    while script.bank.requests().is_empty() {
        std::thread::yield_now();
    }
    let second = script.call(&["list", "--lock-wait", "50ms"]);
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(69));
    assert!(said.contains(&first.id().to_string()) && said.contains("--lock-wait"), "{said}");
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn a_call_that_is_killed_at_any_moment_and_run_again_pays_once() {
    let script = Script::new();
    let url = script.bank.url();
    let journal = script.journal();
    // The moments are parts of the time that a call takes on this machine.
    let begun = tokio::time::Instant::now();
    assert_eq!(script.pay("unharmed", &[]), (0, "paid".to_owned()));
    let whole = begun.elapsed();
    let (mut killed, mut calls) = (0, 0);
    while killed < 20 {
        let name = format!("invoice-{}", calls / 4);
        let words = [
            "call",
            "--name",
            &name,
            "--server",
            "hapax",
            "POST",
            &url,
            "--json",
            r#"{"cents":1999}"#,
            "--journal",
            journal.to_str().unwrap(),
        ];
        let mut call = hapax(&words).stdout(std::process::Stdio::null()).spawn().unwrap();
        std::thread::park_timeout(whole * (calls % 20) / 20);
        killed += u32::from(call.try_wait().unwrap().is_none());
        call.kill().unwrap();
        call.wait().unwrap();
        calls += 1;
    }
    let names = calls.div_ceil(4);
    for number in 0..names {
        assert_eq!(script.pay(&format!("invoice-{number}"), &[]), (0, "paid".to_owned()));
    }
    assert_eq!(script.bank.state.lock().unwrap().executions, names + 1);
    assert_eq!(script.list()["pending"], serde_json::json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotated_token_is_rejected_by_default_and_continues_if_the_gateway_scopes_by_account() {
    for scoped_by_account in [false, true] {
        let (bank, folder) = (Bank::start(), tempfile::tempdir().unwrap());
        bank.act(Act::Slow(Duration::from_secs(1)));
        let scope: &[&str] = if scoped_by_account { &["--scope", "none"] } else { &[] };
        let gateway =
            tokio::task::block_in_place(|| Gateway::start(bank.address, folder.path(), scope));
        let origin = format!("http://{}", gateway.address);
        let server = Server::hapax();
        let server = if scoped_by_account { server.scoped_by_account() } else { server };
        let token = Arc::new(Mutex::new("one"));
        let supplied = Arc::clone(&token);
        let journal = Journal::file(folder.path().join("calls.db")).unwrap();
        let client = Client::open(journal).server(&*origin, server).credentials(move |_| {
            let token = std::mem::replace(&mut *supplied.lock().unwrap(), "two");
            std::future::ready(Credentials::bearer(token).map_err(Into::into))
        });
        let client = client.idle_timeout(Duration::from_millis(200)).build().await.unwrap();
        let send = || client.post(format!("{origin}/payments")).operation("invoice/17").send();
        let end = send().await;
        if scoped_by_account {
            assert_eq!(end.unwrap().response.status, 201);
        } else {
            assert!(matches!(end, Err(SendError::CredentialsChanged)), "{end:?}");
            // With the first token again, the gateway finds the operation.
            while !matches!(&send_with(&token, "one", &send).await, Ok(status) if *status == 201) {}
        }
        assert_eq!(bank.requests().len(), 1, "the service executed once");
    }
}

async fn send_with<F: Future<Output = Result<hapax_client::Sent, SendError>>>(
    token: &Mutex<&'static str>,
    value: &'static str,
    send: &impl Fn() -> F,
) -> Result<u16, SendError> {
    *token.lock().unwrap() = value;
    Ok(send().await?.response.status.as_u16())
}
