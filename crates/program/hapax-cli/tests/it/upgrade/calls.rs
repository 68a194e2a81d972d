//! A journal of `hapax call`.

use std::net::TcpListener;
use std::time::Duration;

use super::{fixture, journal};
use crate::world::{Upstream, hapax};

/// The server of the fixture: it is part of a call.
const BANK: &str = "127.91.7.3:41999";

#[test]
fn a_call_of_an_earlier_release_ends_with_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let journal = journal(folder.path());
    // Another run of this test may have the address for a moment.
    let bank = loop {
        match TcpListener::bind(BANK) {
            Ok(bank) => break Upstream::on(bank),
            Err(_) => std::thread::park_timeout(Duration::from_millis(20)),
        }
    };
    let call = |name: &str, path: &str, more: &[&str]| {
        let url = format!("http://{BANK}/{path}");
        let words = ["call", "--journal-must-exist", "--name", name, "--data", name];
        let at = ["--journal", journal.to_str().unwrap(), "POST", &url];
        let output = hapax(&[&words[..], more, &at].concat()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    };
    let plain = ["--server", "plain", "--retention", "3653d"];
    assert_eq!(call("paid", "pay", &plain), (0, "paid".to_owned()));
    assert!(bank.is_idle());
    let key = std::thread::scope(|scope| {
        let called = scope.spawn(|| call("unfinished", "hang", &plain));
        let request = bank.next();
        let key = request.header("idempotency-key");
        request.answer("201 Created", "paid now");
        assert_eq!(called.join().unwrap(), (0, "paid now".to_owned()));
        key
    });
    assert_eq!(key, fixture("calls.key").trim());

    // It may have happened, and is not sent again; the one that is finished now is replayed.
    assert_eq!(call("once", "hang", &[]).0, 76);
    assert_eq!(call("unfinished", "hang", &plain), (0, "paid now".to_owned()));
    assert!(bank.is_idle());
}
