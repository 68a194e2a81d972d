//! Stores and secrets that do not exist yet: one that is created is logged, and a flag rejects it.

use std::path::Path;

use crate::world::{
    Gateway, Upstream, hapax, log_line, log_lines, ok, refused, store, wait_for_log,
};

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_new_store_and_its_secret_are_logged_and_a_release_in_another_folder_can_be_rejected() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::logged(upstream.address, folder.path(), &[]);
    let path = folder.path().join("hapax.db").display().to_string();
    for (message, path) in [
        ("a new store was created: it has no records", path.clone()),
        ("a new secret was created: under it every key and name is new", format!("{path}.secret")),
    ] {
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
        let mut lines = log.lines().filter(|line| line.contains(message));
        let line: serde_json::Value = serde_json::from_str(lines.next().unwrap()).unwrap();
        assert_eq!((&line["level"], &line["path"]), (&"WARN".into(), &path.into()), "{line}");
        assert_eq!(lines.count(), 0);
    }
    wait_for_log(folder.path(), "ready", 1);
    let created = log_line(folder.path(), "ready")["created"].clone();
    let seconds = gateway.metric("hapax_store_created_seconds");
    assert!(seconds > 1_700_000_000);
    drop(gateway);

    // The next start finds it, with the flag too.
    let gateway = Gateway::logged(upstream.address, folder.path(), &["--store-must-exist"]);
    let opened = log_line(folder.path(), "the store is open");
    assert_eq!(
        (&opened["level"], &opened["path"], &opened["created"]),
        (&"INFO".into(), &path.into(), &created)
    );
    assert_eq!(gateway.metric("hapax_store_created_seconds"), seconds);
    assert_eq!(log_lines(folder.path(), "the store is open").len(), 1);
    drop(gateway);

    // A release starts in another folder.
    let release = tempfile::tempdir().unwrap();
    let nobody = ["--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin", "off"];
    for required in [&["--store-must-exist"][..], &[]] {
        let output = hapax(&[&["gateway"], &nobody[..], required].concat())
            .envs(required.is_empty().then_some(("HAPAX_STORE_MUST_EXIST", "true")))
            .current_dir(release.path())
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let line = said.trim_end().lines().last().unwrap();
        let path = release.path().canonicalize().unwrap().join("hapax.db");
        let expected = format!("expected a store that was used before at file:{}", path.display());
        assert!(line.starts_with("hapax: ") && line.contains(&expected), "{said}");
        assert!(line.contains("--store-must-exist") && line.contains("restore it"), "{said}");
        assert_eq!(output.status.code(), Some(69));
    }
    assert_eq!(files(release.path()), [""; 0]);
}

#[test]
fn a_store_in_memory_that_must_exist_is_rejected() {
    let (code, line) = refused(&[
        "gateway",
        "--upstream",
        "http://127.0.0.1:1",
        "--store",
        "memory:",
        "--store-must-exist",
    ]);
    assert_eq!(code, 64);
    assert!(line.contains("--store-must-exist contradicts --store memory:"), "{line}");
}

#[test]
fn a_file_whose_secret_is_missing_is_rejected_with_and_without_the_flag() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    drop(Gateway::start(upstream.address, folder.path(), &[]));
    std::fs::remove_file(folder.path().join("hapax.db.secret")).unwrap();
    let store = store(folder.path());
    for required in [&["--store-must-exist"][..], &[]] {
        let start = ["gateway", "--upstream", "http://127.0.0.1:1", "--store", &store];
        let output = hapax(&[&start[..], required].concat()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("hapax.db.secret is missing: put it back"), "{said}");
        assert_eq!(output.status.code(), Some(64));
    }
    assert!(!folder.path().join("hapax.db.secret").exists());
}

#[test]
fn a_command_that_reads_or_decides_makes_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path());
    let at = ["--store", &store];
    for command in [
        &["keys", "list"][..],
        &["keys", "show", "k", "--scope", "me"],
        &["keys", "purge"],
        &["saga", "list"],
        &["store", "confirm", "--reason", "a test"],
    ] {
        let (code, line) = refused(&[command, &at[..]].concat());
        assert_eq!(code, 69, "{line}");
        assert!(line.contains("there is no store at"), "{line}");
        assert_eq!(files(folder.path()), [""; 0], "{command:?}");
    }
    let found = ok(&[&["doctor"], &at[..]].concat());
    assert!(found.contains("there is none yet; it can be made"), "{found}");
    assert_eq!(files(folder.path()), [""; 0]);
    // Where the gateway does not make it, that is a finding.
    let config = folder.path().join("hapax.toml");
    let text = format!("[gateway]\nstore = \"{store}\"\nstore_must_exist = true\n");
    std::fs::write(&config, text).unwrap();
    let output = hapax(&["doctor", "--config", config.to_str().unwrap()]).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    assert!(found.contains("broken   file: expected a store that was used before"), "{found}");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(files(folder.path()), ["hapax.toml"]);
}

mod postgres {
    use hapax_testkit::servers::PostgresServer;

    use super::files;
    use crate::messages::migrations;
    use crate::shared::REFUSED;
    use crate::world::{Gateway, Upstream, ok, refused, store};

    #[tokio::test(flavor = "multi_thread")]
    async fn a_consumer_a_redrive_and_a_confirmation_make_no_store() {
        let server = PostgresServer::start().await;
        server.sql("postgres", "CREATE DATABASE empty").await;
        server.sql("postgres", &migrations()).await;
        let (full, empty) = (server.url("postgres"), server.url("empty"));
        tokio::task::spawn_blocking(move || {
            let folder = tempfile::tempdir().unwrap();
            let file = store(folder.path());
            let consume = |store: &str, more: &[&str]| {
                let words = [
                    "consume",
                    "--from",
                    "nats://127.0.0.1:1",
                    "--stream",
                    "S",
                    "--consumer",
                    "c",
                    "--to",
                    "http://127.0.0.1:1/",
                    "--database",
                    &full,
                    "--log-level",
                    "off",
                ];
                refused(&[&words[..], &["--store", store, "--store-must-exist"], more].concat())
            };
            let redrive = ["messages", "redrive", "--database", &full, "--consumer", "c"];
            let redrive = [&redrive[..], &["--reason", "a test", "--store", &file]].concat();
            for (code, line) in [consume(&file, &[]), consume(&empty, &[]), refused(&redrive)] {
                assert_eq!(code, 69, "{line}");
                assert!(line.contains("expected a store that was used before at "), "{line}");
            }
            let confirm = ["store", "confirm", "--reason", "a test", "--store", &empty];
            let audit = folder.path().join("audit").display().to_string();
            let (code, line) = refused(&[&confirm[..], &["--audit-file", &audit]].concat());
            assert_eq!(code, 69, "{line}");
            assert!(line.contains("there are no tables yet"), "{line}");
            assert_eq!(files(folder.path()), [""; 0]);
        })
        .await
        .unwrap();
        let tables = "SELECT count(*) FROM pg_class WHERE relname LIKE 'hapax%'";
        assert_eq!(server.sql("empty", tables).await.trim(), "0");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_second_store_in_a_database_is_made_by_its_sql_and_used_by_its_role_alone() {
        let server = PostgresServer::start().await;
        let script = |words: &[&str]| {
            let script = ok(&[&["sql", "--part", "store"][..], words].concat());
            script.strip_prefix("\\set ON_ERROR_STOP on\n").unwrap().to_owned()
        };
        let (code, line) = refused(&["sql", "--schema", "b", "--new-schema"]);
        assert!(code == 64 && line.contains("--part"), "{line}");
        let roles = "CREATE ROLE service_b LOGIN; ALTER ROLE service_b SET search_path = b";
        server.sql("postgres", roles).await;
        server.sql("postgres", &script(&["--schema", "a"])).await;
        let url = server.url("postgres").replace("postgres@", "service_b@");
        let started = [&REFUSED[..], &["--store", &url, "--log-level", "off"]].concat();
        let (code, line) = tokio::task::block_in_place(|| refused(&started));
        assert_eq!(code, 69, "{line}");
        assert!(line.contains("`hapax sql --part store --new-schema --schema NAME`"), "{line}");
        let made = script(&["--schema", "b", "--new-schema", "--store-role", "service_b"]);
        server.sql("postgres", &made).await;
        let folder = tempfile::tempdir().unwrap();
        tokio::task::block_in_place(|| {
            let upstream = Upstream::start();
            Gateway::start(upstream.address, folder.path(), &["--store", &url]).kill();
        });
        let used =
            "SELECT (SELECT count(*) FROM a.hapax_secrets), (SELECT count(*) FROM b.hapax_secrets)";
        assert_eq!(server.sql("postgres", used).await, "0|1");
    }
}
