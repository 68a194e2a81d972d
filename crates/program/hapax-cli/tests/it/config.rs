//! The configuration file, and SIGHUP.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::Instant;

use crate::world::{Gateway, TIMEOUT, Upstream, hapax, log_lines, ok, receive, refused, send_to};

/// Answers everything at once, with the path that was asked for, until nobody asks any more.
fn answering(upstream: &Upstream, clients: &AtomicUsize) {
    while clients.load(Ordering::SeqCst) > 0 {
        while let Some(waiting) = upstream.next_within(Duration::from_millis(20)) {
            let path = waiting.head.split(' ').nth(1).unwrap_or_default().to_owned();
            waiting.answer("201 Created", &path);
        }
    }
}

fn write(file: &Path, text: &str) {
    // Never half of it.
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, file).unwrap();
}

#[test]
fn the_example_file_is_accepted() {
    let example =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../examples/gateway/hapax.toml");
    let shown = ok(&["gateway", "--config", example.to_str().unwrap(), "--check"]);
    for line in [
        "[gateway]",
        "[policy]",
        "[[route]]",
        "upstream = \"http://127.0.0.1:3000/\"",
        "on_unknown = \"block\"",
        "protect = false",
        "observe = true",
    ] {
        assert!(shown.lines().any(|it| it == line), "{line} is not in\n{shown}");
    }
}

#[test]
fn flags_override_environment_file_and_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hapax.toml");
    let text = "[gateway]\nupstream = \"http://file:1\"\nmax_waiters = 1\n\
                [policy]\nlease = \"1s\"\nretention = \"1h\"\nwait_for = \"1s\"\nin_flight = \"wait\"\n\
                replay_set_cookie = true\nstream = true\n";
    write(&file, text);
    let mut command = hapax(&["gateway", "--check", "--lease", "3s", "--replay-set-cookie=false"]);
    command.env("HAPAX_CONFIG", &file);
    command.env("HAPAX_LEASE", "2s").env("HAPAX_RETENTION", "2h").env("HAPAX_STREAM", "0");
    command.env("HAPAX_ADMIN_TOKEN_FILE", "/a/token");
    let output = command.output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        "lease = \"3s\"",
        "retention = \"2h\"",
        "wait_for = \"1s\"",
        "max_waiters = 1",
        "replay_set_cookie = false",
        "stream = false",
        "profile = \"standard\"",
        "admin_token_file = \"/a/token\"",
    ] {
        assert!(shown.lines().any(|it| it == line), "{line} is not in\n{shown}");
    }
}

#[test]
fn an_invalid_file_is_one_line_and_exit_code_64() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hapax.toml");
    let name = file.to_str().unwrap();
    for (text, says) in [
        ("[gateway]\nupstream = \"http://127.0.0.1:1\"\nlisten = 7", ":3: "),
        ("[gateway]\n\nupstrem = \"http://127.0.0.1:1\"", ":3: unknown field `upstrem`"),
        ("[policy]\nmethods = []\n[gateway]\nupstream = \"http://127.0.0.1:1\"", ":2: --methods"),
        (
            "[gateway]\nupstream = \"http://127.0.0.1:1\"\nstore = \"http://u:pass@h\"",
            ":3: --store",
        ),
    ] {
        write(&file, text);
        for more in [&["--check"][..], &[]] {
            let (code, line) = refused(&[&["gateway", "--config", name], more].concat());
            assert!(code == 64 && line.starts_with(&format!("hapax: {name}{says}")), "{line}");
            assert!(!line.contains("pass"), "{line}");
        }
    }
    let (code, line) = refused(&["gateway", "--config", "/nowhere/hapax.toml"]);
    assert!(code == 64 && line.contains("/nowhere/hapax.toml: cannot be read"), "{line}");
}

/// How an answer shows which configuration it was made under, in three ways at once: whose upstream,
/// whose documentation, whose key rule.
fn of(number: usize, upstream: &SocketAddr) -> String {
    let required = if number.is_multiple_of(2) { "required" } else { "optional" };
    format!(
        "[gateway]\nupstream = \"http://{upstream}\"\n\
         [policy]\nscope = \"x-generation-{number}\"\ndocs_url = \"https://docs.example/{number}\"\n\
         [[route]]\npath = \"/{number}\"\nkey = \"{required}\"\nmax_request_body = \"{number}B\"\n"
    )
}

const BAD: [&str; 4] = [
    "[gateway]\nupstream = ",
    "[policy]\nkey = \"sometimes\"\n",
    "[gateway]\nupstream = \"http://127.0.0.1:1\"\nmax_connections = 7\n",
    "[gateway]\nupstream = \"http://127.0.0.1:1\"\n[[route]]\npath = \"nowhere\"\n",
];

const RELOADS: usize = 40;
const CLIENTS: usize = 4;

#[test]
fn a_reload_under_load_neither_drops_requests_nor_mixes_configurations() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hapax.toml");
    let upstream = Upstream::start();
    write(&file, &of(1, &upstream.address));
    let arguments = ["--config", file.to_str().unwrap()];
    let gateway = Gateway::logged(upstream.address, folder.path(), &arguments);
    let (done, failed) = (AtomicBool::new(false), AtomicBool::new(false));
    let (clients, requests) = (AtomicUsize::new(CLIENTS), AtomicUsize::new(0));
    let (address, served) = (gateway.address, upstream.address);
    std::thread::scope(|scope| {
        let (done, failed, clients, requests) = (&done, &failed, &clients, &requests);
        scope.spawn(move || answering(&upstream, clients));
        for client in 0..CLIENTS {
            scope.spawn(move || {
                let _client = Client { clients, failed };
                let mut asked = 0;
                while !done.load(Ordering::SeqCst) {
                    asked += 1;
                    let body = "x".repeat(RELOADS + 2);
                    // Refused, by the one policy or the other, with the documentation of the very
                    // configuration that refuses: of its own scope, or of the limit of its own route.
                    let stream = send_to(address, "/any", &format!("{client}-{asked}"), &[], &body);
                    let answer = receive(&stream).expect("a request was dropped");
                    requests.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(answer.code(), "missing-scope", "{}", answer.head);
                    let number = number(&answer.header("link"));
                    let scope = format!("x-generation-{number}");
                    let path = format!("/{number}");
                    let fields = [(scope.as_str(), "me")];
                    let key = format!("{client}-{asked}");
                    let stream = send_to(address, &path, &key, &fields, &body);
                    let answer = receive(&stream).expect("a request was dropped");
                    requests.fetch_add(1, Ordering::SeqCst);
                    // Still the same, with its route's limit; or another one by now, of another scope.
                    match answer.code().as_str() {
                        "body-too-large" => {
                            assert!(answer.body.contains(&format!("at most {number} bytes")));
                            assert_eq!(self::number(&answer.header("link")), number);
                        }
                        "missing-scope" => {
                            assert_ne!(self::number(&answer.header("link")), number);
                        }
                        code => panic!("{code}: {}", answer.head),
                    }
                    // One that is executed, or would be.
                    let path = format!("/none/{client}-{asked}");
                    let stream = send_to(address, &path, &key, &fields, "x");
                    let answer = receive(&stream).expect("a request was dropped");
                    requests.fetch_add(1, Ordering::SeqCst);
                    match answer.status {
                        201 => assert_eq!(answer.body, path),
                        status => {
                            assert_eq!((status, answer.code().as_str()), (400, "missing-scope"))
                        }
                    }
                }
            });
        }
        // A thread that fails ends the others.
        let give_up = Instant::now() + TIMEOUT;
        let until = |what: &str, reached: &dyn Fn() -> bool| {
            while !reached() {
                if failed.load(Ordering::SeqCst) || Instant::now() > give_up {
                    done.store(true, Ordering::SeqCst);
                    panic!("never: {what}");
                }
                std::thread::yield_now();
            }
        };
        let wait_for = |message: &str, count: usize| {
            until(message, &|| log_lines(folder.path(), message).len() >= count);
        };
        for number in 2..=RELOADS {
            let before = requests.load(Ordering::SeqCst);
            if number.is_multiple_of(4) {
                write(&file, BAD[number / 4 % BAD.len()]);
                gateway.signal(Signal::HUP);
                wait_for(
                    "SIGHUP: the reload was rejected; the configuration in force stays",
                    number / 4,
                );
            }
            write(&file, &of(number, &served));
            gateway.signal(Signal::HUP);
            wait_for("SIGHUP: reloaded, for requests from now on", number - 1);
            until("requests go on", &|| requests.load(Ordering::SeqCst) >= before + 12);
        }
        done.store(true, Ordering::SeqCst);
    });
    let refused = log_lines(
        folder.path(),
        "SIGHUP: the reload was rejected; the configuration in force stays",
    );
    assert_eq!(refused.len(), RELOADS / 4);
    let said: Vec<&str> = refused.iter().map(|line| line["refused"].as_str().unwrap()).collect();
    let name = file.to_str().unwrap();
    for says in [
        ":2: ",
        ":2: `sometimes`: expected one of optional, required in [policy]",
        ":3: --max-connections cannot change without a restart",
        ":4: route nowhere: the path must begin with a slash",
    ] {
        let says = format!("{name}{says}");
        assert!(said.iter().any(|line| line.starts_with(&says)), "{says} is not in {said:#?}");
    }
    // And the last one holds.
    let stream = send_to(address, "/", "last", &[], "x");
    assert_eq!(number(&receive(&stream).unwrap().header("link")), RELOADS);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
}

/// One of the clients; says so when it panics.
struct Client<'a> {
    clients: &'a AtomicUsize,
    failed: &'a AtomicBool,
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        self.failed.fetch_or(std::thread::panicking(), Ordering::SeqCst);
        self.clients.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Of the configuration whose documentation this links to.
fn number(link: &str) -> usize {
    let (_, rest) = link.split_once("docs.example/").unwrap_or_else(|| panic!("{link:?}"));
    rest.split('>').next().unwrap().parse().unwrap()
}
