//! `hapax consume` without servers, and its processes.

use std::net::SocketAddr;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use super::ready;
use crate::world::{get_with, hapax, refused};

/// A running `hapax consume`, which is killed when it is dropped.
pub(crate) struct ConsumeProcess {
    child: Child,
    pub(crate) admin: SocketAddr,
}

impl ConsumeProcess {
    /// Starts one with these flags, and waits until it is ready.
    pub(crate) fn start(flags: &[&str]) -> Self {
        let arguments = ["consume", "--admin", "127.0.0.1:0", "--log-format", "json"];
        let (child, admin) = ready(hapax(&[&arguments[..], flags].concat()));
        Self { child, admin }
    }

    pub(crate) fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Waits until it has ended; `None` if a signal ended it.
    pub(crate) fn wait(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.id(), signal).unwrap();
    }

    /// Shuts it down.
    pub(crate) fn end(self) {
        self.signal(Signal::TERM);
        assert_eq!(self.wait(), Some(0));
    }

    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = get_with(self.admin, "/metrics", "").body;
        let name = format!("hapax_consume_{name} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&name));
        value.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }
}

impl Drop for ConsumeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_consumer_with_a_wrong_setting_ends_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (short, of_mqtt) = (file("short", "whsec_c2VjcmV0\n"), file("url", "mqtt://hidden\n"));
    let right = [
        ("--from", "nats://127.0.0.1:1"),
        ("--stream", "ORDERS"),
        ("--consumer", "invoices"),
        ("--to", "http://127.0.0.1:1/hidden"),
        ("--store", "postgres://127.0.0.1:1/hidden"),
    ];
    let without: &str = "";
    for (changed, expected) in [
        (
            &[("--from", "kafka://hidden"), ("--stream", without)][..],
            if cfg!(feature = "kafka") {
                "--from: expected kafka://HOST[:PORT],…/TOPIC,… without a user; found no topic"
            } else {
                "--from: expected a program with the feature kafka for kafka://"
            },
        ),
        (
            &[("--from", "kafka://hidden@a/orders"), ("--stream", without)],
            if cfg!(feature = "kafka") { "found a user: remove it" } else { "the feature kafka" },
        ),
        (&[("--from", "http://u:hidden@a")], "or kafka://HOST/TOPIC, found the scheme http"),
        (&[("--from", "hidden")], "or kafka://HOST/TOPIC, found none: correct the URL"),
        (&[("--from", "amqp://hidden")], "--stream: expected a NATS server in --from"),
        (&[("--queue", "orders")], "--queue: expected a RabbitMQ server in --from"),
        (
            &[("--from", "amqp://hidden"), ("--stream", without)],
            "--queue: expected the queue of a RabbitMQ server, found none",
        ),
        (&[("--kafka-properties", "/hidden")], "expected Kafka brokers in --from"),
        (&[("--start-at", "latest")], "--start-at: expected Kafka brokers in --from"),
        (&[("--start-at", "now")], "expected earliest, latest, or a time in UTC such as"),
        (&[("--delivery-limit", "0")], "expected a number of at least 1, or none"),
        (&[("--from", "nats://u:hidden@a")], "--from: expected a URL without a password or token"),
        (&[("--from", "nats://hidden@a")], "set HAPAX_BROKER instead"),
        (&[("--from", without)], "--from <URL>"),
        (&[("--from", without), ("--from-file", &*of_mqtt)], "found the scheme mqtt"),
        (&[("--from", without), ("--from-file", "/none")], "--from-file: /none: "),
        (&[("--stream", without)], "--stream: expected the stream of a NATS server, found none"),
        (&[("--stream", "a.b")], "--stream: expected a name of letters"),
        (&[("--consumer", "a b")], "--consumer: expected a name of letters"),
        (&[("--order-by", "key")], "--order-by: expected subject or header:NAME"),
        (&[("--to", "nats://hidden")], "--to: expected http://HOST/PATH"),
        (&[("--to", "https://u:hidden@a")], "--to: expected a URL without user name"),
        (&[("--store", "memory:")], "--store: expected a store that outlasts this process"),
        (&[("--store", "mysql://hidden")], "--store: a store is "),
        (&[("--store", "postgres://u:hidden@a/b")], "set HAPAX_STORE instead"),
        (&[("--database", "postgres://u:hidden@a/b")], "set HAPAX_DATABASE instead"),
        (&[("--store", "file:hidden")], "--database: expected a PostgreSQL database"),
        (&[("--store", "redis://hidden")], "--database: expected a PostgreSQL database"),
        (&[("--signing-secret-file", &*short)], "--signing-secret-file: "),
        (&[("--to-ca", &*short)], "--to-ca: expected https://"),
        (&[("--id", "order")], "expected header:NAME, cloudevents"),
        (&[("--in-flight", "0")], "--in-flight"),
        (&[("--attempts", "0")], "--attempts"),
        (&[("--max-body", "0B")], "expected at least 1B"),
        (&[("--max-response", "64")], "--max-response"),
        (&[("--timeout", "0s")], "--timeout: expected a timeout of at least 1 ms"),
        (&[("--timeout", "30s")], "--drain-timeout: expected at least --timeout, 30s"),
        (&[("--lease", "500ms")], "--lease: expected at least 1s"),
        (&[("--retention", "1s")], "--retention: the retention is shorter than the lease"),
        (&[("--longest-pause", "8d")], "--longest-pause: expected 1ms to 7d"),
    ] {
        let mut flags: Vec<_> = right
            .into_iter()
            .filter(|(flag, _)| changed.iter().all(|(it, _)| it != flag))
            .collect();
        flags.extend(changed.iter().copied().filter(|(_, value)| *value != without));
        let words = flags.iter().flat_map(|(flag, value)| [*flag, *value]);
        let words: Vec<_> = ["consume", "--log-level", "off"].into_iter().chain(words).collect();
        let (code, line) = refused(&words);
        assert!(code == 64 && line.contains(expected), "{changed:?}: {code} {line}");
        assert!(!line.contains("hidden"), "{line}");
    }
}

#[test]
fn a_login_at_a_broker_that_cannot_be_used_ends_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (password, token) =
        (file("password", "user=a\npassword=hidden"), file("token", "token=hidden"));
    let (half, jwt) =
        (file("half", "user=hidden"), file("jwt", "-----BEGIN NATS USER JWT-----\nhidden"));
    let (text, url) = (file("text", "hidden"), file("url", "nats://hidden@127.0.0.1:1\n"));
    let (nats, amqps) = ("nats://127.0.0.1:1", "amqps://127.0.0.1:1");
    let (credentials, ca) = ("--broker-credentials", "--broker-ca");
    for (to, flags, expected) in [
        (
            nats,
            &[credentials, "/none"][..],
            (69, "--broker-credentials: expected a file that can be read"),
        ),
        (nats, &[ca, "/none"], (69, "--broker-ca: expected a file that can be read")),
        (nats, &[ca, "/dev/zero"], (69, "it is no regular file")),
        (nats, &["--broker-cert", &text], (64, "--broker-key <PATH>")),
        (nats, &[credentials, &half], (64, "expected user and password together")),
        (nats, &[credentials, &text], (64, "line 1: expected user=")),
        (nats, &[credentials, &jwt], (64, "nsc generate creds")),
        (amqps, &[credentials, &token], (64, "found credentials of NATS")),
        (amqps, &[ca, &text], (69, "in PEM")),
        ("amqp://127.0.0.1:1", &[ca, &text], (64, "--broker-ca: expected amqps://HOST in --to")),
        ("https://127.0.0.1:1", &[ca, &text], (64, "expected a NATS or RabbitMQ server in --to")),
    ] {
        let relay = ["relay", "--from", "postgres://127.0.0.1:1/x", "--to", to];
        let quiet = ["--admin", "off", "--log-level", "off"];
        let (code, line) = refused(&[&relay[..], &quiet, flags].concat());
        assert!(code == expected.0 && line.contains(expected.1), "{flags:?}: {code} {line}");
        assert!(!line.contains("hidden"), "{line}");
    }
    let consume = ["consume", "--from-file", &url, "--stream", "ORDERS", "--consumer", "invoices"];
    let more = ["--to", "http://127.0.0.1:1", "--store", "postgres://127.0.0.1:1/x"];
    let login = ["--log-level", "off", credentials, &password];
    let (code, line) = refused(&[&consume[..], &more, &login].concat());
    assert!(code == 64 && line.contains("expected a URL without a user or token"), "{line}");
    assert!(!line.contains("hidden"), "{line}");
}
