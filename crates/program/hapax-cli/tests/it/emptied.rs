//! A store that is emptied or replaced.

use std::net::SocketAddr;

use hapax_testkit::servers::{PostgresServer, RedisServer};
use rustix::process::Signal;
use serde_json::Value;

use crate::world::{Gateway, Upstream, ok, post, receive, refused, run, send, store};

const BLOCK: [&str; 2] = ["--on-unknown", "block"];

/// Sends a request that executes.
fn executes(upstream: &Upstream, gateway: SocketAddr, key: &str) {
    let asked = send(gateway, key, "x");
    upstream.next().answer("201 Created", "done");
    assert_eq!(receive(&asked).unwrap().status, 201);
}

fn is_rejected(gateway: SocketAddr, key: &str) {
    let rejected = post(gateway, key, "x");
    assert_eq!((rejected.status, &*rejected.code()), (503, "store-unavailable"), "{rejected:?}");
}

fn stop(gateway: Gateway) {
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
}

/// Returns whether the doctor finds that the store is to be confirmed.
fn is_unconfirmed(at: &[&str]) -> bool {
    let looked = run(&[&["doctor"], at].concat());
    let found = String::from_utf8(looked.stdout).unwrap();
    let unconfirmed = found.contains("broken   unconfirmed store: ");
    assert!(!unconfirmed || found.contains("`hapax store confirm`"), "{found}");
    assert!(!unconfirmed || looked.status.code() == Some(1), "{found}");
    unconfirmed
}

#[test]
fn a_new_file_beside_an_old_secret_executes_nothing_before_it_is_confirmed() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = store(folder.path());
    let (at, confirm) =
        (["--store", &*store], ["store", "confirm", "--store", &*store, "--reason", "a test"]);
    let (code, said) = refused(&confirm);
    assert_eq!(code, 69, "{said}");
    assert!(said.contains("there is no store at"), "{said}");
    let start = || Gateway::logged(upstream.address, folder.path(), &BLOCK);
    let remove = || std::fs::remove_file(folder.path().join("hapax.db")).unwrap();
    let gateway = start();
    executes(&upstream, gateway.address, "key");
    stop(gateway);

    // Through the gateway that has it open.
    remove();
    let missing = run(&[&["doctor"], &at[..]].concat());
    assert_eq!(missing.status.code(), Some(1));
    let found = String::from_utf8(missing.stdout).unwrap();
    assert!(
        found.contains(
            "broken   file: the file is missing, and a gateway used it before; restore the file"
        ),
        "{found}"
    );
    let gateway = start();
    is_rejected(gateway.address, "key");
    is_rejected(gateway.address, "other");
    assert!(is_unconfirmed(&at), "asked of the gateway that has it open");
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.contains("hapax store confirm") && log.contains("another one"), "{log}");
    assert_eq!(ok(&confirm), "confirmed: operations of the earlier records may execute again\n");
    assert!(!is_unconfirmed(&at));
    executes(&upstream, gateway.address, "key");
    let again = ok(&[&confirm[..], &["--json"]].concat());
    assert_eq!(again, "{\n  \"replaced\": false\n}\n");
    stop(gateway);

    // While none runs.
    remove();
    let gateway = start();
    is_rejected(gateway.address, "key");
    stop(gateway);
    assert!(is_unconfirmed(&at));
    ok(&confirm);
    assert!(!is_unconfirmed(&at));
    let gateway = start();
    executes(&upstream, gateway.address, "key");
}

#[test]
fn a_file_that_is_removed_under_a_gateway_can_be_backed_up() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = store(folder.path());
    let gateway = Gateway::logged(upstream.address, folder.path(), &BLOCK);
    executes(&upstream, gateway.address, "key");
    std::fs::remove_file(folder.path().join("hapax.db")).unwrap();
    let looked = run(&["doctor", "--store", &store]);
    let found = String::from_utf8(looked.stdout).unwrap();
    assert_eq!(looked.status.code(), Some(1), "{found}");
    assert!(found.contains("broken   file: it was removed while process "), "{found}");
    let backup = folder.path().join("backup.db").display().to_string();
    let said = ok(&["backup", &backup, "--store", &store]);
    assert!(said.starts_with("1 records written to "), "{said}");
    stop(gateway);
}

#[test]
fn a_new_file_and_a_new_secret_execute_nothing_before_they_are_confirmed() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = store(folder.path());
    let start = || Gateway::logged(upstream.address, folder.path(), &BLOCK);
    let gateway = start();
    executes(&upstream, gateway.address, "key");
    stop(gateway);
    for file in ["hapax.db", "hapax.db.secret"] {
        std::fs::remove_file(folder.path().join(file)).unwrap();
    }
    let looked = run(&["doctor", "--store", &store]);
    let found = String::from_utf8(looked.stdout).unwrap();
    assert!(
        found.contains("broken   file: the file is missing, and a gateway used it before"),
        "{found}"
    );
    let gateway = start();
    is_rejected(gateway.address, "key");
    ok(&["store", "confirm", "--store", &store, "--reason", "a test"]);
    executes(&upstream, gateway.address, "key");
    stop(gateway);
    let gateway = start();
    executes(&upstream, gateway.address, "later");
    stop(gateway);
}

/// A server that is emptied by `empty`, for gateways with one secret.
fn an_emptied_server_executes_nothing_before_it_is_confirmed(store: &str, empty: &dyn Fn()) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "7".repeat(64)).unwrap();
    let secret = secret.display().to_string();
    let at = ["--store", store, "--secret-file", &secret];
    let audit = folder.path().join("audit.jsonl").display().to_string();
    let confirm =
        [&["store", "confirm", "--reason", "a test", "--audit-file", &audit], &at[..]].concat();
    let start = |on_unknown: &str| {
        let more = [&at[..], &["--on-unknown", on_unknown]].concat();
        Gateway::logged(upstream.address, folder.path(), &more)
    };

    // While it runs.
    let gateway = start("block");
    executes(&upstream, gateway.address, "key");
    empty();
    is_rejected(gateway.address, "key");
    assert!(gateway.admin("/readyz").body.contains("emptied or replaced"));
    ok(&confirm);
    // The gateway writes to a file of its own.
    let lines = std::fs::read_to_string(&audit).unwrap();
    let lines: Vec<Value> = lines.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
    let stages: Vec<_> = lines.iter().map(|line| &line["stage"]).collect();
    assert_eq!(stages, ["intended", "done"]);
    for line in &lines {
        let seen = [&line["by"], &line["store"], &line["why"]];
        assert_eq!(seen, ["cli", "confirmed", "a test"], "{line}");
    }
    executes(&upstream, gateway.address, "key");
    empty();
    is_rejected(gateway.address, "key");
    stop(gateway);

    // At the start, and confirmed while none runs.
    assert!(is_unconfirmed(&at));
    let gateway = start("block");
    is_rejected(gateway.address, "key");
    stop(gateway);
    ok(&confirm);
    assert!(!is_unconfirmed(&at));
    let gateway = start("block");
    executes(&upstream, gateway.address, "key");
    stop(gateway);

    // Through the API.
    let gateway = start("block");
    empty();
    is_rejected(gateway.address, "key");
    let (admin, token) = (gateway.admin.to_string(), gateway.token.display().to_string());
    let reason = ["--reason", "a test"];
    let remote = ["store", "confirm", "--admin", &admin, "--admin-token-file", &token];
    ok(&[&remote[..], &reason].concat());
    executes(&upstream, gateway.address, "key");
    stop(gateway);

    // Where it may execute again, it does, with one error in the log.
    let gateway = start("reexecute");
    assert_eq!(post(gateway.address, "key", "x").status, 201);
    empty();
    executes(&upstream, gateway.address, "key");
    executes(&upstream, gateway.address, "other");
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    let errors = log.lines().filter(|line| line.contains("\"ERROR\"")).collect::<Vec<_>>();
    assert!(matches!(&*errors, [error] if error.contains("hapax store confirm")), "{errors:?}");
    stop(gateway);

    // Another secret does not join.
    ok(&confirm);
    std::fs::write(&secret, "8".repeat(64)).unwrap();
    let (code, said) = refused(
        &[&["gateway", "--upstream", "http://127.0.0.1:9", "--namespace", ""], &at[..]].concat(),
    );
    assert!(code != 0 && said.contains("set the secret of the other processes"), "{said}");
}

mod redis {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn an_emptied_server_executes_nothing_before_it_is_confirmed() {
        let server = RedisServer::start().await;
        let runtime = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || {
            let empty = || drop(runtime.block_on(server.command("FLUSHALL")));
            super::an_emptied_server_executes_nothing_before_it_is_confirmed(&server.url(), &empty);
        })
        .await
        .unwrap();
    }
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn an_emptied_server_executes_nothing_before_it_is_confirmed() {
        let server = PostgresServer::start().await;
        let runtime = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || {
            let empty = || {
                let truncate = server.sql("postgres", "TRUNCATE hapax_cells");
                drop(runtime.block_on(truncate));
            };
            let url = crate::shared::Server::store(&server);
            super::an_emptied_server_executes_nothing_before_it_is_confirmed(&url, &empty);
        })
        .await
        .unwrap();
    }
}
