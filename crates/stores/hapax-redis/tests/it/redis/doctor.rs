//! What the doctor finds.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::diagnose::{Finding, Severity};
use hapax_core::{Clock, SystemClock};
use hapax_redis::diagnose;
use hapax_testkit::ManualClock;
use hapax_testkit::servers::{RedisServer, RedisServerOptions};

use super::support::at;

async fn findings(server: &RedisServer) -> Vec<Finding> {
    diagnose(&at(server.port()), &SystemClock).await.unwrap()
}

fn severity(findings: &[Finding], subject: &str) -> Severity {
    let found = findings.iter().find(|finding| finding.subject == subject);
    found.unwrap_or_else(|| panic!("nothing about {subject}: {findings:?}")).severity
}

#[tokio::test]
async fn a_durable_server_has_no_findings_above_fine() {
    let always = RedisServerOptions::new().set("appendfsync", "always");
    let server = RedisServer::start_with(always).await;
    let findings = findings(&server).await;
    let worst = findings.iter().map(|finding| finding.severity).max();
    assert_eq!(worst, Some(Severity::Fine), "{findings:?}");
    assert!(findings.iter().all(|finding| finding.fix.is_empty()));
    let subjects: Vec<_> = findings.iter().map(|finding| finding.subject).collect();
    let all =
        ["version", "role", "maxmemory-policy", "replicas", "persistence", "appendfsync", "clock"];
    assert_eq!(subjects, all);
}

#[tokio::test]
async fn diagnose_finds_a_broken_guarantee_without_opening_a_store() {
    let forgetful =
        RedisServerOptions::new().set("maxmemory-policy", "volatile-lru").set("appendonly", "no");
    let server = RedisServer::start_with(forgetful).await;
    let found = findings(&server).await;
    assert_eq!(severity(&found, "maxmemory-policy"), Severity::Broken);
    assert_eq!(severity(&found, "persistence"), Severity::Broken);
    let line = found.iter().find(|finding| finding.subject == "maxmemory-policy").unwrap();
    assert!(line.to_string().contains("set maxmemory-policy to noeviction"), "{line}");

    server.command_of(&["CONFIG", "SET", "save", "3600 1"]).await;
    assert_eq!(severity(&findings(&server).await, "persistence"), Severity::Risk);
    server.command("CONFIG SET appendonly yes").await;
    assert_eq!(severity(&findings(&server).await, "appendfsync"), Severity::Risk);
}

#[tokio::test]
async fn replicas_are_found_on_master_and_replica() {
    let at_once = RedisServerOptions::new().set("repl-diskless-sync-delay", "0");
    let master = RedisServer::start_with(at_once).await;
    let of = format!("127.0.0.1 {}", master.port());
    let replica = RedisServer::start_with(RedisServerOptions::new().set("replicaof", of)).await;
    assert_eq!(severity(&findings(&replica).await, "role"), Severity::Broken);
    while severity(&findings(&master).await, "replicas") != Severity::Risk {}
}

#[tokio::test]
async fn a_clock_difference_is_found() {
    let server = RedisServer::start().await;
    let ours = Arc::new(ManualClock::at(SystemClock.now()));
    ours.advance(Duration::from_secs(60));
    let found = diagnose(&at(server.port()), &*ours).await.unwrap();
    let clock = found.iter().find(|finding| finding.subject == "clock").unwrap();
    assert_eq!(clock.severity, Severity::Risk);
    assert!(clock.found.contains("behind this one"), "{clock}");
}

#[tokio::test]
async fn a_setting_that_is_not_reported_is_unknown() {
    let server = RedisServer::start().await;
    // As hosted servers do.
    let rename = ["ACL", "SETUSER", "default", "-config"];
    assert_eq!(server.command_of(&rename).await, "+OK");
    assert_eq!(severity(&findings(&server).await, "appendfsync"), Severity::Unknown);
}
