//! Several gateways on one server.

use std::sync::Arc;
use std::time::Duration;

use hapax_testkit::servers::{PostgresServer, PostgresServerOptions, RedisServer};
use hapax_torture::{OnUnknownPolicy, TortureOptions, run as torture};
use rustix::process::Signal;
use serde_json::Value;
use tokio::time::Instant;

use crate::world::{
    Gateway, TIMEOUT, Upstream, log_lines, ok, post, receive, run, send, wait_for_log,
};

/// A gateway that does not start.
pub(crate) const REFUSED: [&str; 9] = [
    "gateway",
    "--upstream",
    "http://127.0.0.1:1",
    "--listen",
    "127.0.0.1:0",
    "--admin",
    "off",
    "--namespace",
    "shop",
];

/// A server that can be frozen.
pub(crate) trait Server {
    fn store(&self) -> String;
    fn freeze(&self);
    fn thaw(&self);
}

impl Server for RedisServer {
    fn store(&self) -> String {
        self.url()
    }

    fn freeze(&self) {
        self.pause();
    }

    fn thaw(&self) {
        self.resume();
    }
}

impl Server for PostgresServer {
    fn store(&self) -> String {
        self.url("postgres")
    }

    fn freeze(&self) {
        self.pause();
    }

    fn thaw(&self) {
        self.resume();
    }
}

mod redis {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn duplicates_at_gateways_that_are_killed_execute_once() {
        super::duplicates_at_gateways_that_are_killed_execute_once(&RedisServer::start().await)
            .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_owner_that_is_paused_past_its_lease_is_superseded() {
        let server = RedisServer::start().await;
        blocking(server, |server| {
            super::an_owner_that_is_paused_past_its_lease_is_superseded(&*server)
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn claims_on_a_frozen_server_block_no_key() {
        let server = RedisServer::start().await;
        blocking(server, |server| super::claims_on_a_frozen_server_block_no_key(&*server)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn operators_list_and_decide_records() {
        let server = RedisServer::start().await;
        blocking(server, |server| super::operators_list_and_decide_records(&*server)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn operators_read_a_store_that_is_sealed_later() {
        let server = RedisServer::start().await;
        blocking(server, |server| super::operators_read_a_store_that_is_sealed_later(&*server))
            .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_that_rejects_writes_is_reported() {
        let server = Arc::new(RedisServer::start().await);
        let memory = async |limit: &str| {
            server.command(&format!("CONFIG SET maxmemory {limit}")).await;
        };
        let (upstream, folder, store) =
            (Upstream::start(), tempfile::tempdir().unwrap(), server.store());
        let gateway = Gateway::start(upstream.address, folder.path(), &["--store", &*store]);
        assert_eq!(gateway.metric("hapax_store_writable"), 1);
        memory("1").await;
        let refused = post(gateway.address, "key", "x");
        assert_eq!((refused.status, &*refused.code()), (503, "store-unavailable"));
        // It answers all the same.
        assert_eq!(gateway.metric("hapax_store_up"), 1);
        assert_eq!(gateway.metric("hapax_store_writable"), 0);
        let ready = gateway.admin("/readyz");
        assert_eq!((ready.status, ready.body.contains("did not take")), (200, true), "{ready:?}");
        memory("0").await;
        let asked = send(gateway.address, "key", "x");
        upstream.next().answer("201 Created", "done");
        assert_eq!(receive(&asked).unwrap().status, 201);
        assert_eq!(gateway.metric("hapax_store_writable"), 1);
        assert_eq!(gateway.admin("/readyz").body, "ready\n");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_emptied_server_is_reported() {
        let server = RedisServer::start().await;
        let (upstream, folder, store) =
            (Upstream::start(), tempfile::tempdir().unwrap(), server.store());
        let _gateway = Gateway::logged(upstream.address, folder.path(), &["--store", &*store]);
        server.command("FLUSHALL").await;
        server.command("CLIENT KILL TYPE normal").await;
        let lost =
            "the server of the store was emptied: operations of the lost records execute again";
        wait_for_log(folder.path(), lost, 1);
        assert_eq!(log_lines(folder.path(), lost)[0]["level"], "ERROR");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_cache_answers_replays_and_may_become_unavailable() {
        let server = RedisServer::start().await;
        let cache = server.url();
        let server = tokio::task::spawn_blocking(move || {
            let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
            let more = ["--cache", &*cache];
            let gateway = Gateway::start(upstream.address, folder.path(), &more);
            let asked = send(gateway.address, "key", "x");
            upstream.next().answer("201 Created", "done");
            assert_eq!(receive(&asked).unwrap().status, 201);
            // It is put there in the background, once the store has shown it.
            let soon = Instant::now() + TIMEOUT;
            while gateway.metric("hapax_store_cache_hits_total") == 0 {
                assert_eq!(post(gateway.address, "key", "x").body, "done");
                assert!(Instant::now() < soon, "the cache answers nothing");
            }
            // Frozen it costs a moment, and nothing else, also for a gateway that starts.
            server.freeze();
            assert_eq!(post(gateway.address, "key", "x").body, "done");
            drop(gateway);
            let gateway = Gateway::start(upstream.address, folder.path(), &more);
            assert_eq!(post(gateway.address, "key", "x").body, "done");
            server.thaw();
            // Another key: what was put in vain may arrive late, so that its key is left alone.
            let mut again = 0;
            while gateway.metric("hapax_store_cache_hits_total") == 0 {
                again += 1;
                let key = format!("again-{again}");
                let asked = send(gateway.address, &key, "x");
                upstream.next().answer("201 Created", "again");
                assert_eq!(receive(&asked).unwrap().status, 201);
                for _ in 0..3 {
                    assert_eq!(post(gateway.address, &key, "x").body, "again");
                }
                assert!(Instant::now() < soon + TIMEOUT, "it is not found again");
            }
            assert!(upstream.is_idle());
            server
        });
        drop(server.await.unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_useless_or_unsealed_cache_is_rejected() {
        let server = RedisServer::start().await;
        blocking(server, |server| {
            let url = server.store();
            let refused = |store: &str, cache: &str| {
                let started = run(&[&REFUSED[..], &["--store", store, "--cache", cache]].concat());
                assert_eq!(started.status.code(), Some(64));
                String::from_utf8(started.stderr).unwrap()
            };
            assert!(refused("memory:", &url).contains("is for stores that are slower"));
            assert!(refused(&url, &url).contains("is for stores that are slower"));
            assert!(refused("postgres://nowhere/x", &url).contains("needs --secret-file"));
            // Not the number of a database.
            let folder = tempfile::tempdir().unwrap();
            let file = format!("file:{}", folder.path().join("hapax.db").display());
            assert!(refused(&file, &format!("{url}/x")).contains("database"));
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_doctor_reports_a_server_that_evicts() {
        let server = RedisServer::start().await;
        server.command("CONFIG SET maxmemory 100mb").await;
        server.command("CONFIG SET maxmemory-policy allkeys-lru").await;
        blocking(server, |server| {
            let found = run(&["doctor", "--store", &server.store()]);
            let text = String::from_utf8(found.stdout).unwrap();
            assert_eq!(found.status.code(), Some(1), "{text}");
            assert!(text.contains("broken   maxmemory-policy: "), "{text}");
            let url = server.store();
            let started = run(&[&REFUSED[..], &["--store", &url]].concat());
            let said = String::from_utf8(started.stderr).unwrap();
            assert_eq!(started.status.code(), Some(69), "{said}");
            assert!(said.contains("evict"), "{said}");
        })
        .await;
    }
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn duplicates_at_gateways_that_are_killed_execute_once() {
        let server = PostgresServer::start().await;
        super::duplicates_at_gateways_that_are_killed_execute_once(&server).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_owner_that_is_paused_past_its_lease_is_superseded() {
        let server = PostgresServer::start().await;
        blocking(server, |server| {
            super::an_owner_that_is_paused_past_its_lease_is_superseded(&*server)
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn claims_on_a_frozen_server_block_no_key() {
        let server = PostgresServer::start().await;
        blocking(server, |server| super::claims_on_a_frozen_server_block_no_key(&*server)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn operators_list_and_decide_records() {
        let server = PostgresServer::start().await;
        blocking(server, |server| super::operators_list_and_decide_records(&*server)).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn operators_read_a_store_that_is_sealed_later() {
        let server = PostgresServer::start().await;
        blocking(server, |server| super::operators_read_a_store_that_is_sealed_later(&*server))
            .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn an_unreachable_host_of_several_is_skipped() {
        let server = PostgresServer::start().await;
        blocking(server, |server| {
            let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let hosts = server.store().replace('@', &format!("@{gone},"));
            let store = format!("{hosts}?target_session_attrs=read-write");
            let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
            let gateway = Gateway::start(upstream.address, folder.path(), &["--store", &store]);
            let asked = send(gateway.address, "key", "x");
            upstream.next().answer("201 Created", "done");
            assert_eq!(receive(&asked).unwrap().status, 201);
            let replay = post(gateway.address, "key", "x");
            assert_eq!((replay.status, &*replay.body), (201, "done"));
            assert_eq!(replay.header("idempotency-replayed"), "true");
            assert!(upstream.is_idle());
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_doctor_reports_a_database_that_loses_commits() {
        let durable = PostgresServerOptions::new().set("fsync", "on");
        let server = PostgresServer::start_with(durable.set("synchronous_commit", "off")).await;
        blocking(server, |server| {
            let url = server.store();
            let findings = || {
                let found = run(&["doctor", "--store", &url, "--json"]);
                let findings: Value = serde_json::from_slice(&found.stdout).unwrap();
                assert_eq!(found.status.code(), Some(1), "{findings}");
                findings.as_array().unwrap().clone()
            };
            let broken = |finding: &&Value| finding["severity"] == "broken";
            let seen = findings();
            let subjects: Vec<_> = seen.iter().filter(broken).map(|it| &it["subject"]).collect();
            assert_eq!(subjects, ["synchronous_commit"]);
            // Looking made no tables.
            let migrations = |findings: &[Value]| {
                findings.iter().find(|it| it["subject"] == "migrations").unwrap()["found"].clone()
            };
            assert_eq!(
                (migrations(&seen), migrations(&findings())),
                ("none".into(), "none".into())
            );
            let started = run(&[&REFUSED[..], &["--store", &url]].concat());
            let said = String::from_utf8(started.stderr).unwrap();
            assert_eq!(started.status.code(), Some(69), "{said}");
            assert!(said.contains("synchronous_commit"), "{said}");
        })
        .await;
    }
}

/// Programs and sockets that wait, off the threads that serve the server.
pub(crate) async fn blocking<S: Send + Sync + 'static>(
    server: S,
    test: impl FnOnce(Arc<S>) + Send + 'static,
) {
    let server = Arc::new(server);
    let given = Arc::clone(&server);
    let done = tokio::task::spawn_blocking(move || test(given)).await;
    if let Err(failed) = done {
        std::panic::resume_unwind(failed.into_panic());
    }
}

async fn duplicates_at_gateways_that_are_killed_execute_once(server: &impl Server) {
    let options = TortureOptions {
        gateway: env!("CARGO_BIN_EXE_hapax").into(),
        kills: 36,
        seed: 1,
        clients: 8,
        duplicates: 20,
        gateways: 2,
        store: Some(server.store()),
    };
    let report = torture(&options).await.expect("every gateway comes up again");
    assert_eq!(report.violations, [""; 0]);
    for (policy, counts) in report.counts {
        assert!(counts.kills >= 12 && counts.replays > 0, "{policy}: {counts:?}");
        if policy != OnUnknownPolicy::Reexecute {
            assert_eq!(counts.duplicates, 0, "{policy}");
        }
    }
}

fn an_owner_that_is_paused_past_its_lease_is_superseded(server: &impl Server) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = server.store();
    let waiting = ["--lease", "1s", "--in-flight", "wait", "--wait-for", "30s"];
    let more = [&["--store", &*store, "--on-unknown", "reexecute"], &waiting[..]].concat();
    let [first, second] = [1, 2].map(|_| Gateway::start(upstream.address, folder.path(), &more));
    let slept = send(first.address, "key", "x");
    let begun = upstream.next();
    first.signal(Signal::STOP);
    // The second waits for the first one's lease to lapse, and takes over.
    let took_over = send(second.address, "key", "x");
    let again = upstream.next();
    assert_ne!(begun.header("idempotency-fence"), again.header("idempotency-fence"));
    again.answer("201 Created", "second");
    assert_eq!(receive(&took_over).unwrap().body, "second");
    // Only now is the first one answered, and goes on.
    begun.answer("201 Created", "first");
    first.signal(Signal::CONT);
    let told = receive(&slept).unwrap();
    assert_eq!((told.status, &*told.code()), (409, "superseded"));
    for gateway in [&first, &second] {
        let replay = post(gateway.address, "key", "x");
        assert_eq!((replay.status, &*replay.body), (201, "second"));
        assert_eq!(replay.header("idempotency-replayed"), "true");
    }
    assert!(upstream.is_idle());
}

fn claims_on_a_frozen_server_block_no_key(server: &impl Server) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = server.store();
    let more = ["--store", &*store, "--on-unknown", "block", "--store-timeout", "1s"];
    let gateway = Gateway::logged(upstream.address, folder.path(), &more);
    let key = |at: usize| format!("key-{at}");
    // A connection is open then that a claim can use.
    let first = send(gateway.address, "first", "x");
    upstream.next().answer("201 Created", "done");
    assert_eq!(receive(&first).unwrap().status, 201);
    server.freeze();
    let begun = Instant::now();
    // Half of the clients go away, the others hear within the time-out that the store does.
    let mut clients: Vec<_> = (0..40).map(|at| send(gateway.address, &key(at), "x")).collect();
    let mut at = 0;
    clients.retain(|_| {
        at += 1;
        at % 2 == 0
    });
    for client in clients {
        let told = receive(&client).unwrap();
        assert_eq!((told.status, &*told.code()), (503, "store-unavailable"));
    }
    assert!(begun.elapsed() < TIMEOUT, "{:?}", begun.elapsed());
    assert!(upstream.is_idle(), "something was executed without a record");
    // One warning a minute stands for all of them.
    let warnings = log_lines(
        folder.path(),
        "the store did not answer a claim: the request was rejected, or executes unprotected",
    )
    .len() as u64;
    assert!((1..=1 + begun.elapsed().as_secs() / 60).contains(&warnings), "{warnings}");
    server.thaw();
    // Claims land now, and are withdrawn.
    let list = ["keys", "list", "--state", "released", "--json", "--store", &store];
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let listed: Value = serde_json::from_str(&ok(&list)).unwrap();
        if listed["keys"].as_array().is_some_and(|keys| !keys.is_empty()) {
            break;
        }
        assert!(Instant::now() < deadline, "no claim landed: nothing was to be released");
    }
    // Every key is free again: under `block` a claim that was left behind would be in doubt for ever.
    for at in 0..40 {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let asked = send(gateway.address, &key(at), "x");
            if let Some(request) = upstream.next_within(Duration::from_millis(200)) {
                assert_eq!(request.header("idempotency-attempt"), "1");
                request.answer("201 Created", "done");
            }
            let told = receive(&asked).unwrap();
            if told.status == 201 {
                break;
            }
            assert!(["in-flight", "store-unavailable"].contains(&&*told.code()), "{told:?}");
            assert!(Instant::now() < deadline, "{} is wedged: {told:?}", key(at));
        }
    }
}

fn operators_list_and_decide_records(server: &impl Server) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let (store, secret) = (server.store(), folder.path().join("secret"));
    std::fs::write(&secret, "11".repeat(32)).unwrap();
    let secret = secret.to_str().unwrap();
    let more = ["--store", &*store, "--secret-file", secret, "--on-unknown", "block"];
    let gateway = Gateway::start(upstream.address, folder.path(), &more);
    for (key, status) in [("done", "201 Created"), ("unknown", "500 Oh")] {
        let asked = send(gateway.address, key, "x");
        upstream.next().answer(status, "hello");
        receive(&asked).unwrap();
    }
    let at = ["--store", &store, "--secret-file", secret, "--scope", "Bearer a"];
    let keys = |words: &[&str]| ok(&[&["keys"], words, &at].concat());
    let shown = keys(&["show", "done"]);
    assert!(shown.contains("201") && shown.contains("hello"), "{shown}");
    // One call lists what waits for a decision and no more, by the gateway and without it.
    let direct = ["--store", &store, "--secret-file", secret];
    let admin = gateway.admin.to_string();
    let token = folder.path().join("hapax.db.admin-token").display().to_string();
    let through = ["--admin", &admin, "--admin-token-file", &token];
    for at in [&direct, &through] {
        let list = ["keys", "list", "--state", "unknown", "--json"];
        let listed: Value = serde_json::from_str(&ok(&[&list[..], at].concat())).unwrap();
        let keys = listed["keys"].as_array().unwrap();
        assert_eq!(keys.len(), 1, "{listed}");
        let described = &keys[0]["described"];
        assert_eq!((&described["key"], &described["method"]), (&"unknown".into(), &"POST".into()));
        assert!(!listed.to_string().contains("Bearer a"), "{listed}");
        // A key alone leads to it, and so do the first digits of its id.
        let found = ok(&[&["keys", "find", "unknown", "--json"], &at[..]].concat());
        let found: Value = serde_json::from_str(&found).unwrap();
        let searched = (&found["searched"], &found["unreadable"], &found["keys"][0]["id"]);
        assert_eq!(searched, (&2.into(), &0.into(), &keys[0]["id"]), "{found}");
        let id = keys[0]["id"].as_str().unwrap();
        assert!(ok(&[&["keys", "show", "--id", &id[..8]], &at[..]].concat()).contains(id));
        // Who asks with a credential finds what was requested with it, in any state.
        let hash = described["caller"][0]["hash"].as_str().unwrap();
        for (caller, unknown, all) in [
            (["--caller", "Bearer a"], 1, 2),
            (["--caller-hash", hash], 1, 2),
            (["--caller", "Bearer b"], 0, 0),
        ] {
            for (states, found) in [(&["--state", "unknown"][..], unknown), (&[], all)] {
                let list = [&["keys", "list", "--json"], &caller[..]].concat();
                let listed: Value =
                    serde_json::from_str(&ok(&[&list[..], states, at].concat())).unwrap();
                assert_eq!(listed["keys"].as_array().unwrap().len(), found, "{caller:?}: {listed}");
            }
        }
    }
    let resolve = ["resolve", "unknown", "--outcome", "happened", "--status", "202"];
    let audit = folder.path().join("audit.jsonl");
    let why = ["--reason", "the service has it", "--audit-file", audit.to_str().unwrap()];
    keys(&[&resolve[..], &why].concat());
    assert_eq!(post(gateway.address, "unknown", "x").status, 202);
    assert!(keys(&["show", "unknown"]).contains("the service has it"));
    let audit = std::fs::read_to_string(audit).unwrap();
    let stages: Vec<Value> =
        audit.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let stages: Vec<_> = stages.iter().map(|line| (&line["stage"], &line["by"])).collect();
    let by = Value::from("cli");
    assert_eq!(stages, [(&"intended".into(), &by), (&"done".into(), &by)], "{audit}");
    let listed = ok(&["keys", "list", "--store", &store, "--secret-file", secret, "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["keys"].as_array().unwrap().len(), 2);
    // The secret that seals may be replaced while the gateway runs: the one that names stays.
    let ring =
        format!("name {}\nseal {}\nopen {}\n", "11".repeat(32), "22".repeat(32), "11".repeat(32));
    std::fs::write(secret, ring).unwrap();
    assert!(keys(&["show", "done"]).contains("hello"));
    // Without the secret that they were sealed under, records cannot be opened.
    let doctor = ["doctor", "--store", &store, "--secret-file", secret];
    let text = String::from_utf8(run(&doctor).stdout).unwrap();
    // The register of the store is a record too.
    assert!(text.contains("fine     key ring: all of the 3 "), "{text}");
    let ring = format!("name {}\nseal {}\n", "11".repeat(32), "22".repeat(32));
    std::fs::write(secret, ring).unwrap();
    let found = run(&doctor);
    let text = String::from_utf8(found.stdout).unwrap();
    assert_eq!(found.status.code(), Some(1), "{text}");
    assert!(text.contains("broken   key ring: 3 of the 3 ") && text.contains("another secret"));
    // Another one names other keys: that is refused, not taken for an empty store.
    std::fs::write(secret, "33".repeat(32)).unwrap();
    let other = run(&["keys", "list", "--store", &store, "--secret-file", secret]);
    let said = String::from_utf8(other.stderr).unwrap();
    assert!(!other.status.success() && said.contains("another secret"), "{said}");
    let found = run(&["doctor", "--store", &store, "--secret-file", secret]);
    let text = String::from_utf8(found.stdout).unwrap();
    assert_eq!(found.status.code(), Some(1), "{text}");
    assert!(text.contains("broken   secret: "), "{text}");
}

fn operators_read_a_store_that_is_sealed_later(server: &impl Server) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let (store, ring) = (server.store(), folder.path().join("ring"));
    let at = ["--store", &store, "--secret-file", ring.to_str().unwrap()];
    let serve = |key, status, more: &[&str]| {
        let gateway = Gateway::start(upstream.address, folder.path(), more);
        let asked = send(gateway.address, key, "x");
        upstream.next().answer(status, "hello");
        receive(&asked).unwrap();
    };
    let doctor = |at: &[&str]| String::from_utf8(run(&[&["doctor"], at].concat()).stdout).unwrap();
    let show = ["keys", "show", "before", "--scope", "Bearer a"];
    serve("before", "201 Created", &["--store", &*store]);
    for (word, state) in
        [("open", "it opens records and seals none"), ("seal", "it seals responses")]
    {
        std::fs::write(&ring, format!("name none\n{word} {}\n", "22".repeat(32))).unwrap();
        let text = doctor(&at);
        assert!(text.contains(&format!("risk     secret: {state}")), "{text}");
        assert!(text.contains("fine     key ring: all of the 2 "), "{text}");
        assert!(ok(&[&show[..], &at].concat()).contains("hello"));
        let is_hashed = run(&[&["keys", "hash", "before"], &at[..]].concat()).status.success();
        assert_eq!(is_hashed, word == "seal");
    }
    serve("after", "500 Oh", &[&at[..], &["--on-unknown", "block"]].concat());
    // Also in the first step, beside processes that took the second one.
    for word in ["seal", "open"] {
        std::fs::write(&ring, format!("name none\n{word} {}\n", "22".repeat(32))).unwrap();
        let found = ok(&[&["keys", "find", "after", "--json"], &at[..]].concat());
        let found: Value = serde_json::from_str(&found).unwrap();
        assert_eq!(found["keys"][0]["described"]["key"], "after", "{found}");
        assert!(doctor(&at).contains("fine     key ring: all of the 3 "));
    }
    let text = doctor(&at[..2]);
    assert!(text.contains("broken   key ring: 2 of the 3 "), "{text}");
    assert!(ok(&[&show[..], &at[..2]].concat()).contains("hello"));
}
