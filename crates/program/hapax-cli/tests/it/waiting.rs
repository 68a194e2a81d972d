//! Stores that are away when a gateway starts.

use hapax_testkit::servers::{PostgresServer, RedisServer, RedisServerOptions};
use rustix::process::Signal;

use crate::shared::{REFUSED, Server, blocking};
use crate::world::{
    Gateway, Starting, Upstream, get, hapax, log_line, receive, refused, run, send, wait_for_log,
};

/// Logged while a store is away at the start.
const AWAY: &str = "the store was not reached: waiting for it";

mod redis {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_does_not_answer_is_waited_for() {
        let server = RedisServer::start().await;
        blocking(server, |server| super::a_server_that_does_not_answer_is_waited_for(&*server))
            .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_starts_later_is_waited_for() {
        let mut server = RedisServer::start().await;
        server.kill().await;
        let (upstream, folder, store) =
            (Upstream::start(), tempfile::tempdir().unwrap(), server.store());
        let more = ["--store", &*store, "--store-wait", "10m"];
        let starting = Starting::logged(upstream.address, folder.path(), &more);
        wait_for_log(folder.path(), AWAY, 1);
        server.restart().await;
        executes(&starting.ready(), &upstream);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_without_persistence_is_warned_of_at_each_start() {
        let options = RedisServerOptions::new().set("appendonly", "no").set("save", "");
        let server = RedisServer::start_with(options).await;
        blocking(server, |server| {
            let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
            for _ in 0..2 {
                let more = ["--store", &*server.store()];
                let _gateway = Gateway::logged(upstream.address, folder.path(), &more);
                wait_for_log(folder.path(), "the store does not keep its guarantee", 1);
                let line = log_line(folder.path(), "the store does not keep its guarantee");
                assert_eq!(
                    (&line["level"], &line["subject"]),
                    (&"WARN".into(), &"persistence".into())
                );
            }
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_rejects_the_password_is_not_waited_for() {
        let options = RedisServerOptions::new().set("requirepass", "right");
        let server = RedisServer::start_with(options).await;
        let store = server.url().replace("redis://", "redis://:wrong@");
        blocking(server, move |_| refused_at_once(&store)).await;
    }
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_does_not_answer_is_waited_for() {
        let server = PostgresServer::start().await;
        blocking(server, |server| super::a_server_that_does_not_answer_is_waited_for(&*server))
            .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_database_that_does_not_exist_is_not_waited_for() {
        let server = PostgresServer::start().await;
        blocking(server, |server| refused_at_once(&server.url("nowhere"))).await;
    }
}

#[test]
fn an_unreachable_store_ends_the_start_with_exit_code_69() {
    for store in ["redis://127.0.0.1:1", "postgres://127.0.0.1:1/x"] {
        let with = |wait| [&REFUSED[..], &["--store", store, "--store-wait", wait]].concat();
        let started = run(&with("300ms"));
        let said = String::from_utf8(started.stderr).unwrap();
        assert_eq!(started.status.code(), Some(69), "{said}");
        let last = said.lines().last().unwrap();
        assert!(last.starts_with("hapax: ") && last.contains("--store-wait"), "{said}");
        // Zero gives up at once, with one line.
        let (code, line) = refused(&with("0s"));
        assert!(code == 69 && !line.contains("--store-wait"), "{line}");
    }
}

fn a_server_that_does_not_answer_is_waited_for(server: &impl Server) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = server.store();
    let more = ["--store", &*store, "--store-wait", "10m"];
    server.freeze();
    let starting = Starting::logged(upstream.address, folder.path(), &more);
    wait_for_log(folder.path(), AWAY, 1);
    // It listens, says that it is not ready, and executes nothing.
    let line = log_line(folder.path(), AWAY);
    let [address, admin] =
        ["listen", "admin"].map(|name| line[name].as_str().unwrap().parse().unwrap());
    assert_eq!(get(admin, "/healthz").status, 200);
    for path in ["/readyz", "/metrics", "/api/keys"] {
        assert_eq!(get(admin, path).status, 503, "{path}");
    }
    let asked = send(address, "early", "x");
    assert!(upstream.is_idle());
    // A signal ends the wait of another one at once.
    let other = tempfile::tempdir().unwrap();
    let ending = Starting::logged(upstream.address, other.path(), &more);
    wait_for_log(other.path(), AWAY, 1);
    ending.signal(Signal::TERM);
    assert_eq!(ending.wait(), 0);
    server.thaw();
    let gateway = starting.ready();
    assert_eq!((gateway.address, gateway.admin), (address, admin));
    upstream.next().answer("201 Created", "done");
    assert_eq!(receive(&asked).unwrap().body, "done");
    executes(&gateway, &upstream);
}

fn executes(gateway: &Gateway, upstream: &Upstream) {
    // A store that has just come back may need a moment.
    while gateway.admin("/readyz").status != 200 {
        std::thread::yield_now();
    }
    let asked = send(gateway.address, "key", "x");
    upstream.next().answer("201 Created", "done");
    assert_eq!(receive(&asked).unwrap().status, 201);
}

/// Starts a gateway that may wait for longer than a test takes.
fn refused_at_once(store: &str) {
    // By the variable, since an argument may have no password.
    let mut gateway = hapax(&[&REFUSED[..], &["--store-wait", "24h"]].concat());
    let output = gateway.env("HAPAX_STORE", store).output().unwrap();
    assert_eq!(output.status.code(), Some(69), "{output:?}");
}
