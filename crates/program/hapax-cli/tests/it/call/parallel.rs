//! Calls at the same time, on journals in PostgreSQL and Redis.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use hapax_testkit::servers::{PostgresServer, RedisServer};
use tokio::runtime::Handle;

use super::{Act, Script};
use crate::world::hapax;

/// Calls on a journal on a server, each in a namespace of its own: their names are those of no other test.
struct Shared {
    script: Script,
    journal: String,
    namespace: &'static str,
}

impl Shared {
    fn new(journal: &str, namespace: &'static str) -> Self {
        let (script, journal) = (Script::new(), journal.to_owned());
        std::fs::write(secret(&script), "5c".repeat(32)).unwrap();
        std::fs::set_permissions(secret(&script), Permissions::from_mode(0o600)).unwrap();
        Self { script, journal, namespace }
    }

    fn call(&self, words: &[&str]) -> Command {
        let mut call = hapax(&[&["call"], words].concat());
        call.env("HAPAX_JOURNAL", &self.journal).env("HAPAX_JOURNAL_NAMESPACE", self.namespace);
        call.env("HAPAX_JOURNAL_SECRET_FILE", secret(&self.script));
        call.stdout(Stdio::piped()).stderr(Stdio::piped());
        call
    }

    fn pay(&self, name: &str, words: &[&str]) -> Command {
        let url = self.script.bank.url();
        self.call(&[&["--name", name, "--server", "plain", "POST", &url], words].concat())
    }

    /// Waits until this number of requests has arrived, of calls that do not end before.
    #[track_caller]
    fn wait_for(&self, requests: usize, calls: &mut [Child]) {
        while self.script.bank.requests().len() < requests {
            for call in &mut *calls {
                assert_eq!(call.try_wait().unwrap(), None, "a call has ended before its request");
            }
            std::thread::yield_now();
        }
    }

    /// Returns the keys of the requests that arrived.
    fn keys(&self) -> Vec<String> {
        let requests = self.script.bank.requests().into_iter();
        let line = |it: &str| it.starts_with("idempotency-key: ");
        requests.map(|it| it.lines().find(|it| line(it)).unwrap().to_owned()).collect()
    }

    fn executions(&self) -> u32 {
        self.script.bank.state.lock().unwrap().executions
    }
}

fn secret(script: &Script) -> std::path::PathBuf {
    script.folder.path().join("journal.secret")
}

#[track_caller]
fn paid(output: &Output) {
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"paid"[..]), "{output:?}");
}

/// 41-13: the same name is one operation, and other names do not wait for it.
fn calls_at_the_same_time_send_a_name_once(journal: &str) {
    let shared = Shared::new(journal, "parallel");
    let bank = &shared.script.bank;
    bank.act(Act::Held);
    let mut calls: Vec<_> =
        (0..8).map(|_| shared.pay("invoice-17", &[]).spawn().unwrap()).collect();
    shared.wait_for(1, &mut calls);
    paid(&shared.pay("invoice-18", &[]).output().unwrap());
    let impatient = shared.pay("invoice-17", &["--wait", "300ms"]).output().unwrap();
    let error = String::from_utf8(impatient.stderr).unwrap();
    assert_eq!(impatient.status.code(), Some(75), "{error}");
    assert!(error.contains("this process sends nothing more"), "{error}");
    bank.release();
    for call in calls {
        paid(&call.wait_with_output().unwrap());
    }
    assert_eq!((bank.requests().len(), shared.executions()), (2, 2));
    let list = shared.call(&["list", "--json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list["finished"].as_array().unwrap().len(), 2, "{list}");
    assert_eq!(list["pending"], serde_json::json!([]));
}

/// 41-13: another call continues the operation under its key.
fn a_call_that_is_killed_is_continued_by_another_one(journal: &str) {
    let shared = Shared::new(journal, "killed");
    let bank = &shared.script.bank;
    bank.act(Act::Hang);
    let lease = ["--lease", "1s"];
    let mut first = shared.pay("invoice-17", &lease).spawn().unwrap();
    shared.wait_for(1, std::slice::from_mut(&mut first));
    let second = shared.pay("invoice-17", &lease).spawn().unwrap();
    first.kill().unwrap();
    first.wait().unwrap();
    paid(&second.wait_with_output().unwrap());
    let keys = shared.keys();
    assert!(keys.len() == 2 && keys[0] == keys[1], "{keys:?}");
    assert_eq!(shared.executions(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_on_postgres_at_the_same_time() {
    let server = PostgresServer::start().await;
    server.create_database("journal").await;
    let url = server.url("journal");
    tokio::task::spawn_blocking(move || {
        calls_at_the_same_time_send_a_name_once(&url);
        a_call_that_is_killed_is_continued_by_another_one(&url);
        let drop = "DROP SCHEMA public CASCADE; CREATE SCHEMA public";
        an_emptied_journal_is_rejected_until_it_is_confirmed(&url, || {
            Handle::current().block_on(server.sql("journal", drop));
        });
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_on_redis_at_the_same_time() {
    let server = RedisServer::start().await;
    let url = server.url();
    tokio::task::spawn_blocking(move || {
        journals_on_servers_need_a_namespace_and_a_secret(&url);
        new_journals_and_namespaces_are_named_and_can_be_rejected(&url);
        calls_at_the_same_time_send_a_name_once(&url);
        a_call_that_is_killed_is_continued_by_another_one(&url);
        let command = |words: &str| Handle::current().block_on(server.command(words));
        an_emptied_journal_is_rejected_until_it_is_confirmed(&url, || {
            command("FLUSHALL");
        });
        command("CONFIG SET appendonly no");
        a_journal_that_may_lose_operations_is_for_servers_with_keys(&url);
    })
    .await
    .unwrap();
}

fn failed(call: &mut Command) -> (i32, String) {
    let output = call.output().unwrap();
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// 41-13: what was sent before is not sent again because the server has forgotten it.
fn an_emptied_journal_is_rejected_until_it_is_confirmed(journal: &str, empty: impl Fn()) {
    let shared = Shared::new(journal, "emptied");
    paid(&shared.pay("first", &[]).output().unwrap());
    empty();
    for _ in 0..2 {
        let (code, error) = failed(&mut shared.pay("first", &[]));
        assert!(code == 69 && error.contains("emptied or replaced"), "{error}");
    }
    assert_eq!(shared.script.bank.requests().len(), 1);
    let secret = secret(&shared.script);
    let words = ["store", "confirm", "--store", &shared.journal, "--reason", "a test"];
    let mut confirm = hapax(&[&words[..], &["--secret-file", secret.to_str().unwrap()]].concat());
    let confirmed = confirm.current_dir(shared.script.folder.path()).output().unwrap();
    assert!(confirmed.status.success(), "{confirmed:?}");
    paid(&shared.pay("first", &[]).output().unwrap());
    assert_eq!(shared.executions(), 1, "the key is the same");
}

/// 41-13: a wrong name of a database or of a namespace is noticed.
fn new_journals_and_namespaces_are_named_and_can_be_rejected(journal: &str) {
    let shared = Shared::new(journal, "billing");
    let required = ["--journal-must-exist"];
    let other = ["--namespace", "biling"];
    let (code, error) = failed(&mut shared.pay("a", &required));
    assert!(code == 69 && error.contains("expected a journal at"), "{error}");
    let (code, error) = failed(&mut shared.pay("a", &[]));
    let lines: Vec<_> = error.lines().collect();
    let [journal, namespace] = lines[..] else { panic!("{error}") };
    assert!(code == 0 && journal.contains("a new journal was created"), "{error}");
    assert!(namespace.contains("the namespace billing is new"), "{error}");
    assert_eq!(failed(&mut shared.pay("a", &required)), (0, String::new()));
    let (code, error) = failed(&mut shared.pay("a", &[&required[..], &other].concat()));
    assert!(code == 69 && error.contains("found biling"), "{error}");
    let (code, error) = failed(&mut shared.pay("b", &other));
    assert!(code == 0 && error.contains("the namespace biling is new"), "{error}");
    assert_eq!(failed(&mut shared.pay("b", &[&required[..], &other].concat())).0, 0);
    assert_eq!(shared.script.bank.requests().len(), 2);
}

/// 41-13: Redis may lose a request that was sent, and only the server's key prevents a second effect.
fn a_journal_that_may_lose_operations_is_for_servers_with_keys(journal: &str) {
    let shared = Shared::new(journal, "lossy");
    let url = shared.script.bank.url();
    for call in [&["--name", "n", "POST", &url][..], &["resume", "--origin", &url]] {
        let (code, error) = failed(&mut shared.call(call));
        assert!(code == 64 && error.contains("found without-keys"), "{error}");
    }
    let (code, error) = failed(&mut shared.pay("warned", &[]));
    assert!(code == 0 && error.contains("may lose operations: persistence"), "{error}");
    assert_eq!(shared.script.bank.requests().len(), 1);
}

fn journals_on_servers_need_a_namespace_and_a_secret(journal: &str) {
    let shared = Shared::new(journal, "invalid");
    let rejected = |call: &mut Command, code: i32, part: &str| {
        let output = call.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(part) && !error.contains("hush"), "{part}: {error}");
    };
    let without = |variable: &str| {
        let mut call = shared.pay("n", &[]);
        call.env_remove(variable);
        call
    };
    rejected(&mut without("HAPAX_JOURNAL_NAMESPACE"), 64, "--namespace");
    rejected(&mut without("HAPAX_JOURNAL_SECRET_FILE"), 64, "--secret-file");
    let missing = Path::new("/nonexistent/secret").to_str().unwrap();
    let no_file = shared.pay("n", &["--secret-file", missing]).output().unwrap();
    assert_eq!(no_file.status.code(), Some(69), "{no_file:?}");
    let file = shared.script.journal();
    let file = file.to_str().unwrap();
    rejected(&mut shared.pay("n", &["--journal", file]), 64, "found a file");
    let shown = ["--journal", "redis://:hush@127.0.0.1"];
    rejected(&mut shared.pay("n", &shown), 64, "set HAPAX_JOURNAL instead");
    rejected(&mut shared.pay("n", &["--journal", "mysql://a"]), 64, "found another URL");
    rejected(&mut shared.pay("n", &["--lease", "1ms"]), 64, "at least 100ms");
    rejected(&mut shared.call(&["list"]), 69, "--journal");
    assert_eq!(shared.script.bank.requests().len(), 0);
}
