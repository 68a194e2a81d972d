//! What a store looks at before it is used.

use std::time::Duration;

use hapax_core::diagnose::{Finding, Severity};
use hapax_core::{KeyRing, Secret, Store, StoreError, SystemClock};
use hapax_postgres::{
    PostgresConnectError, PostgresOptions, PostgresStore, SchemaName, UnsafeSetting, diagnose,
    migrations, migrations_beside_others,
};
use hapax_testkit::servers::{PostgresServer, free_port};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;

use super::support::{at, by, claim, expect_stored, key};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_processes_that_start_at_once_make_the_tables_once() {
    let server = PostgresServer::start().await;
    for schema in [None, Some("app")] {
        let mut starting = JoinSet::new();
        for _ in 0..12 {
            let options = schema.iter().fold(at(&server), |options, name| options.schema(*name));
            starting.spawn(async move { PostgresStore::connect(options).await.unwrap() });
        }
        for (of, store) in starting.join_all().await.iter().enumerate() {
            expect_stored(store, &claim(of as u64)).await;
        }
    }
    let count = "SELECT (SELECT count(*) FROM hapax_cells), (SELECT count(*) FROM app.hapax_cells),
        (SELECT count(*) FROM hapax_migrations), (SELECT count(*) FROM app.hapax_migrations)";
    assert_eq!(server.sql("postgres", count).await, "12|12|3|3");
}

#[tokio::test]
async fn tables_are_migrated_in_the_schema_that_has_them_after_one_named_like_the_role_has_appeared()
 {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    store.close().await;
    // Tables as version 2 has them, and the schema that the search path names first.
    let older = "DELETE FROM hapax_migrations WHERE version > 2; DROP TABLE hapax_schedule;
        CREATE SCHEMA postgres";
    server.sql("postgres", older).await;
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    assert!(store.load(&key(1)).await.unwrap().stored.is_some(), "the store is another one");
    let tables = "SELECT string_agg(schemaname || '.' || tablename, ' ' ORDER BY 1) FROM pg_tables
        WHERE tablename IN ('hapax_cells', 'hapax_schedule')";
    assert_eq!(server.sql("postgres", tables).await, "public.hapax_cells public.hapax_schedule");
    let paths = "SELECT DISTINCT proconfig[1] FROM pg_proc WHERE proname LIKE 'hapax%'";
    assert_eq!(server.sql("postgres", paths).await, "search_path=public, pg_temp");
}

#[tokio::test]
async fn tables_that_only_another_schema_has_are_not_created_a_second_time() {
    let server = PostgresServer::start().await;
    let other = SchemaName::new("Of others").unwrap();
    server.sql("postgres", &migrations(&other)).await;
    let refused = PostgresStore::connect(at(&server)).await.unwrap_err();
    assert!(matches!(&refused, PostgresConnectError::OtherSchema { .. }), "{refused}");
    assert!(refused.to_string().contains("found them in the schema \"Of others\""), "{refused}");
    let script = migrations(&SchemaName::default());
    let refused = server.try_sql("postgres", &script).await.unwrap_err();
    assert!(refused.contains("found them in \"Of others\""), "{refused}");
    // A schema that is named is meant.
    for named in ["Of others", "own"] {
        let store = PostgresStore::connect(at(&server).schema(named)).await.unwrap();
        expect_stored(&store, &claim(1)).await;
    }
    let tables = "SELECT count(*) FROM pg_tables WHERE tablename = 'hapax_cells'";
    assert_eq!(server.sql("postgres", tables).await, "2");
}

#[tokio::test]
async fn a_second_store_that_is_asked_for_is_that_of_the_role_whose_search_path_has_its_schema() {
    let server = PostgresServer::start().await;
    let [a, b] = ["a", "b"].map(|name| SchemaName::new(name).unwrap());
    server.sql("postgres", &migrations(&a)).await;
    let roles = "CREATE ROLE service_a LOGIN; ALTER ROLE service_a SET search_path = a;
        CREATE ROLE service_b LOGIN; ALTER ROLE service_b SET search_path = b;
        GRANT CREATE ON DATABASE postgres TO service_b";
    server.sql("postgres", roles).await;
    let by = |role: &str| -> PostgresOptions {
        let port = server.port();
        format!("host=127.0.0.1 port={port} user={role} dbname=postgres").parse().unwrap()
    };
    let refused = PostgresStore::connect(by("service_b")).await.unwrap_err();
    assert!(matches!(&refused, PostgresConnectError::OtherSchema { .. }), "{refused}");
    assert!(refused.to_string().contains("hapax sql --part store --new-schema"), "{refused}");
    let refused = server.try_sql("postgres", &migrations(&b)).await.unwrap_err();
    assert!(refused.contains("hapax sql --part store --schema NAME"), "{refused}");
    assert!(refused.contains("add --new-schema"), "{refused}");
    for _ in 0..2 {
        server.sql("postgres", &migrations_beside_others(&b)).await;
    }
    // Once it exists it is migrated as any other.
    for schema in [&a, &b] {
        server.sql("postgres", &migrations(schema)).await;
        let name = schema.as_str();
        let grants = format!(
            "GRANT USAGE ON SCHEMA {name} TO service_{name};
            GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO service_{name}"
        );
        server.sql("postgres", &grants).await;
    }
    for (role, claims) in [("service_a", 1), ("service_b", 2)] {
        let store = PostgresStore::connect(by(role)).await.unwrap();
        for of in 0..claims {
            expect_stored(&store, &claim(of)).await;
        }
        store.close().await;
    }
    let rows = "SELECT (SELECT count(*) FROM a.hapax_cells), (SELECT count(*) FROM b.hapax_cells)";
    assert_eq!(server.sql("postgres", rows).await, "1|2");
}

#[tokio::test]
async fn migrations_can_be_run_by_others_any_number_of_times() {
    let server = PostgresServer::start().await;
    let options = at(&server).migrate(false);
    let refused = PostgresStore::connect(options.clone()).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::NotMigrated { found: None, .. }), "{refused}");
    for _ in 0..2 {
        server.sql("postgres", &migrations(&SchemaName::default())).await;
    }
    // A role that may do no more than what a store does.
    server
        .sql(
            "postgres",
            "CREATE ROLE app LOGIN; REVOKE CREATE ON SCHEMA public FROM public;
            GRANT SELECT, INSERT, UPDATE, DELETE
            ON hapax_cells, hapax_secrets, hapax_schedule, hapax_migrations TO app",
        )
        .await;
    let app: PostgresOptions =
        format!("host=127.0.0.1 port={} user=app dbname=postgres", server.port()).parse().unwrap();
    let store = PostgresStore::connect(app).await.unwrap();
    expect_stored(&store, &claim(1)).await;

    // Tables as version 1 has them.
    let older = "ALTER TABLE hapax_secrets DROP COLUMN identity, DROP COLUMN confirmed;
        DROP FUNCTION hapax_emptied CASCADE; DELETE FROM hapax_migrations WHERE version > 1";
    server.sql("postgres", older).await;
    let refused = PostgresStore::connect(options.clone()).await.unwrap_err();
    assert!(
        matches!(refused, PostgresConnectError::NotMigrated { found: Some(1), .. }),
        "{refused}"
    );
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    expect_stored(&store, &claim(2)).await;
    let there = "SELECT count(*) FROM hapax_cells";
    assert_eq!(server.sql("postgres", there).await, "2");

    server.sql("postgres", "INSERT INTO hapax_migrations VALUES (999)").await;
    let refused = PostgresStore::connect(options).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Newer { found: 999, .. }), "{refused}");
}

#[tokio::test]
async fn a_server_that_loses_commits_is_rejected_unless_allowed() {
    let server = PostgresServer::start().await;
    let good = PostgresStore::connect(at(&server)).await.unwrap();
    let refused = async |why| {
        let error = PostgresStore::connect(at(&server)).await.unwrap_err();
        assert!(matches!(error, PostgresConnectError::Forgetful(what) if what == why), "{error}");
        let accepted = PostgresStore::connect(at(&server).allow_lost_writes(true)).await.unwrap();
        accepted.close().await;
    };
    server.sql("postgres", "ALTER ROLE postgres SET synchronous_commit = off").await;
    refused(UnsafeSetting::SynchronousCommit).await;
    // One that is connected already looks as well, when it connects anew.
    let others = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    server.sql("postgres", others).await;
    let error = loop {
        // The end of the connection may be noticed by the first one.
        if let Err(StoreError::Unavailable(error)) = good.swap(claim(1)).await {
            break error;
        }
    };
    let source = error.source().expect("why there is no connection").to_string();
    assert!(source.contains("synchronous_commit is off"), "{source}");

    server.sql("postgres", "ALTER ROLE postgres RESET synchronous_commit").await;
    server.sql("postgres", "ALTER TABLE hapax_cells SET UNLOGGED").await;
    refused(UnsafeSetting::Unlogged).await;
}

#[tokio::test]
async fn a_standby_is_rejected_and_a_demoted_primary_writes_nothing() {
    let mut server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    server.stop().await;
    // That is all it takes to be a standby, if one that nobody sends anything.
    std::fs::write(server.data().join("standby.signal"), "").unwrap();
    server.restart().await;
    let refused = PostgresStore::connect(at(&server)).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Standby), "{refused}");
    let _ = store.swap(claim(2)).await;
    let swapped = store.swap(claim(3)).await;
    assert!(matches!(swapped, Err(StoreError::Unavailable(_))), "{swapped:?}");
    let findings = diagnose(&at(&server), &SystemClock).await.unwrap();
    assert_eq!(severity(&findings, "role"), Severity::Broken);
}

#[tokio::test]
async fn an_unreachable_server_is_an_error_by_its_cause() {
    let refused = "mysql://x".parse::<PostgresOptions>().unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Url(_)), "{refused}");
    let refused = PostgresStore::connect(by(free_port())).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Connect(_)), "{refused}");
    // It takes connections and says nothing.
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let options = by(silent.local_addr().unwrap().port()).timeout(Duration::from_millis(200));
    let refused = PostgresStore::connect(options).await.unwrap_err();
    assert!(
        matches!(refused, PostgresConnectError::TimedOut | PostgresConnectError::Connect(_)),
        "{refused}"
    );
}

#[test]
fn a_password_is_not_shown() {
    let options: PostgresOptions = "postgres://app:geheim@localhost/x".parse().unwrap();
    let options = options.secret(Secret::new([77; 32]));
    let shown = format!("{options:?}");
    assert!(!shown.contains("geheim") && !shown.contains("77"), "{shown}");
}

#[tokio::test]
async fn processes_with_different_secrets_do_not_share_tables() {
    let server = PostgresServer::start().await;
    let [first, second, third] = [1, 2, 3].map(|byte| Secret::new([byte; 32]));
    // At once, so that each may find nothing: one of them is first.
    let mut starting = JoinSet::new();
    for secret in [first.clone(), second.clone()] {
        let options = at(&server).secret(secret);
        starting.spawn(async move { PostgresStore::connect(options).await });
    }
    let started = starting.join_all().await;
    let refused =
        started.iter().filter(|one| matches!(one, Err(PostgresConnectError::OtherSecret)));
    assert_eq!((refused.count(), started.iter().filter(|one| one.is_ok()).count()), (1, 1));
    drop(started);
    let won = server.sql("postgres", "SELECT count(*) FROM hapax_secrets").await;
    assert_eq!(won, "1");
    let connect = async |options: PostgresOptions| PostgresStore::connect(options).await.map(drop);
    let was_first = connect(at(&server).secret(first.clone())).await.is_ok();
    let known = if was_first { first } else { second };
    for options in [at(&server), at(&server).secret(third.clone())] {
        let refused = connect(options).await.unwrap_err();
        assert!(matches!(refused, PostgresConnectError::OtherSecret), "{refused}");
    }
    // Whoever names keys by the one in use may seal under another, beside those who do not.
    connect(at(&server).key_ring(KeyRing::new(known.clone()).sealing(third.clone())))
        .await
        .unwrap();
    connect(at(&server).secret(known)).await.unwrap();
    let alone = connect(at(&server).secret(third)).await.unwrap_err();
    assert!(matches!(alone, PostgresConnectError::OtherSecret), "{alone}");
}

#[tokio::test]
async fn diagnose_distinguishes_safe_and_unsafe_servers() {
    let server = PostgresServer::start().await;
    let findings = diagnose(&at(&server), &SystemClock).await.unwrap();
    assert_eq!(severity(&findings, "migrations"), Severity::Risk, "{findings:?}");
    drop(PostgresStore::connect(at(&server)).await.unwrap());
    let findings = diagnose(&at(&server), &SystemClock).await.unwrap();
    let shown: Vec<_> = findings.iter().map(ToString::to_string).collect();
    for finding in &findings {
        // It is a server for tests.
        let worst = if finding.subject == "fsync" { Severity::Broken } else { Severity::Fine };
        assert_eq!(finding.severity, worst, "{shown:?}");
        assert_eq!(finding.fix.is_empty(), worst == Severity::Fine);
    }
    server
        .sql(
            "postgres",
            "ALTER ROLE postgres SET synchronous_commit = off;
            ALTER TABLE hapax_cells SET UNLOGGED; DELETE FROM hapax_migrations",
        )
        .await;
    server.sql("postgres", "ALTER SYSTEM SET full_page_writes = off").await;
    server.sql("postgres", "SELECT pg_reload_conf()").await;
    let behind = hapax_testkit::ManualClock::default();
    let findings = loop {
        let findings = diagnose(&at(&server), &behind).await.unwrap();
        // A server takes its time to read its configuration.
        if severity(&findings, "full_page_writes") == Severity::Risk {
            break findings;
        }
    };
    for (subject, wanted) in [
        ("synchronous_commit", Severity::Broken),
        ("table", Severity::Broken),
        ("migrations", Severity::Risk),
        ("clock", Severity::Risk),
        ("version", Severity::Fine),
    ] {
        assert_eq!(severity(&findings, subject), wanted, "{subject}");
    }
}

pub(crate) fn severity(findings: &[Finding], subject: &str) -> Severity {
    let finding = findings.iter().find(|finding| finding.subject == subject);
    finding.unwrap_or_else(|| panic!("nobody looked at {subject}")).severity
}

#[tokio::test]
async fn a_closed_store_finishes_waiting_requests_and_accepts_no_more() {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    let waiting: Vec<_> = (0..50).map(claim).collect();
    let mut answers = JoinSet::new();
    let store = std::sync::Arc::new(store);
    for swap in &waiting {
        let (store, swap) = (store.clone(), swap.clone());
        answers.spawn(async move { store.swap(swap).await });
    }
    while store.stats().queued < waiting.len() && store.stats().swaps == 0 {
        tokio::task::yield_now().await;
    }
    store.close().await;
    for answer in answers.join_all().await {
        assert!(matches!(answer, Ok(_) | Err(StoreError::Unavailable(_))), "{answer:?}");
    }
    assert!(matches!(store.swap(claim(99)).await, Err(StoreError::Unavailable(_))));
    let left = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'
        AND pid <> pg_backend_pid()";
    // The server takes its time to notice who left.
    while server.sql("postgres", left).await != "0" {}
    let there = PostgresStore::connect(at(&server)).await.unwrap();
    assert!(there.load(&key(0)).await.unwrap().stored.is_some());
}

#[tokio::test]
async fn a_standby_that_is_not_synchronous_is_a_risk() {
    let server = PostgresServer::start().await;
    let findings = diagnose(&at(&server), &SystemClock).await.unwrap();
    assert_eq!(severity(&findings, "standbys"), Severity::Fine, "{findings:?}");
    // That is all it takes to be counted as one.
    let mut standby = tokio::net::TcpStream::connect(server.address()).await.unwrap();
    let begin = b"\0\x03\0\0user\0postgres\0replication\0true\0\0";
    standby.write_u32(begin.len() as u32 + 4).await.unwrap();
    standby.write_all(begin).await.unwrap();
    let told = async {
        while severity(&diagnose(&at(&server), &SystemClock).await.unwrap(), "standbys")
            != Severity::Risk
        {}
    };
    tokio::time::timeout(Duration::from_secs(60), told).await.expect("it is seen");
}

#[tokio::test]
async fn the_first_write_enters_the_secret_and_a_read_does_not() {
    let server = PostgresServer::start().await;
    server.sql("postgres", &migrations(&SchemaName::default())).await;
    let secrets = "SELECT count(*) FROM hapax_secrets";
    let looking = PostgresStore::connect(at(&server).migrate(false)).await.unwrap();
    assert!(looking.load(&key(1)).await.unwrap().stored.is_none());
    looking.reap(std::num::NonZeroU32::MIN).await.unwrap();
    assert_eq!(server.sql("postgres", secrets).await, "0");

    let [first, second] =
        [1, 2].map(|byte| at(&server).migrate(false).secret(Secret::new([byte; 32])));
    let writing = PostgresStore::connect(first).await.unwrap();
    let late = PostgresStore::connect(second).await.unwrap();
    expect_stored(&writing, &claim(1)).await;
    assert_eq!(server.sql("postgres", secrets).await, "1");
    // Neither who has another nor who has none.
    for store in [late, looking] {
        let Err(StoreError::Unavailable(error)) = store.swap(claim(2)).await else {
            panic!("written under another secret")
        };
        let source = error.source().expect("why there is no connection").to_string();
        assert!(source.contains("another secret"), "{source}");
    }
}

#[tokio::test]
async fn a_server_that_returns_with_another_secret_is_rejected() {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server).secret(Secret::new([1; 32]))).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    // As if it had been restored from elsewhere.
    server.sql("postgres", "UPDATE hapax_secrets SET name = 'none'").await;
    server.sql("postgres", super::faults::TERMINATE).await;
    // The end of the connection may be noticed by the first one.
    let _ = store.swap(claim(2)).await;
    let refused = [store.swap(claim(3)).await.map(drop), store.load(&key(1)).await.map(drop)];
    for refused in refused {
        let Err(StoreError::Unavailable(error)) = refused else { panic!("{refused:?}") };
        let source = error.source().expect("why there is no connection").to_string();
        assert!(source.contains("another secret"), "{source}");
    }
}
