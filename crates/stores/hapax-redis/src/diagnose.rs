//! Checks of a server for settings that break the store's guarantees unnoticed, for operators.

use std::sync::Arc;

use hapax_core::diagnose::{Finding, Severity};
use hapax_core::{Clock, Timestamp};
use redis::{RedisResult, Value};
use tokio::time::timeout;

use crate::connection::{self, Connection, Node};
use crate::error::RedisConnectError;
use crate::options::RedisOptions;
use crate::server_info::ServerInfo;

/// Checks the server, or every server of a cluster, without opening a store, so also a server on
/// which a store would not open. The server's clock is compared with `clock`.
///
/// # Errors
/// [`RedisConnectError`] if the server cannot be checked.
pub async fn diagnose(
    options: &RedisOptions,
    clock: &dyn Clock,
) -> Result<Vec<Finding>, RedisConnectError> {
    let url = options.target()?;
    let looking = async {
        let ignored: connection::PushHandler = Arc::new(|_| {});
        let (mut connection, server_info) = connection::reach(&url, options, &ignored).await?;
        let mut servers = vec![(None, server_info)];
        if servers.iter().any(|(_, server_info)| server_info.is_cluster()) {
            connection = connection::cluster(&url, options, &ignored).await?;
            servers = connection.server_info().await?;
        }
        let mut findings = Vec::new();
        for (node, server_info) in servers {
            let before = findings.len();
            look(&mut connection, node.as_ref(), &server_info, clock, &mut findings).await;
            let server = node.map(|Node { host, port }| format!("{host}:{port}"));
            findings[before..].iter_mut().for_each(|finding| finding.server.clone_from(&server));
        }
        Ok(findings)
    };
    let limit = options.timeout * 4;
    timeout(limit, looking).await.unwrap_or(Err(RedisConnectError::TimedOut(limit)))
}

async fn look(
    connection: &mut Connection,
    node: Option<&Node>,
    server_info: &ServerInfo,
    clock: &dyn Clock,
    findings: &mut Vec<Finding>,
) {
    findings.push(version(server_info));
    findings.push(role(server_info, node.is_some()));
    findings.push(eviction(server_info));
    if server_info.is_replica() {
        return;
    }
    findings.push(replicas(server_info));
    let mut setting = async |name| value(connection.query_on(node, &config(name)).await);
    let (save, sync) = (setting("save").await, setting("appendfsync").await);
    findings.push(persistence(server_info, save.as_deref()));
    if server_info.value("aof_enabled") == Some("1") {
        findings.push(appendfsync(sync.as_deref()));
    }
    let before = clock.now();
    let time = connection.query_on(node, &redis::cmd("TIME")).await;
    findings.push(clocks(before, time, clock.now()));
}

fn version(server_info: &ServerInfo) -> Finding {
    let found = server_info.value("redis_version").unwrap_or("not reported").to_owned();
    let severity = if server_info.is_too_old() { Severity::Broken } else { Severity::Fine };
    finding(severity, "version", found, "6.2 or later is needed")
}

fn role(server_info: &ServerInfo, in_cluster: bool) -> Finding {
    let found = server_info.value("role").unwrap_or("not reported").to_owned();
    let severity = match server_info.value("role") {
        None => Severity::Unknown,
        // In a cluster the store is on the masters.
        Some(_) if in_cluster => Severity::Fine,
        Some(_) if server_info.is_replica() => Severity::Broken,
        Some(_) => Severity::Fine,
    };
    finding(severity, "role", found, "a store must be on the master")
}

fn eviction(server_info: &ServerInfo) -> Finding {
    let fix = "set maxmemory-policy to noeviction: the operation of an evicted record executes again without an error";
    match (server_info.value("maxmemory_policy"), server_info.eviction()) {
        (None, _) => finding(Severity::Unknown, "maxmemory-policy", "not reported".into(), fix),
        (_, Some(policy)) => finding(Severity::Broken, "maxmemory-policy", policy.into(), fix),
        (Some(policy), None) => finding(Severity::Fine, "maxmemory-policy", policy.into(), fix),
    }
}

fn replicas(server_info: &ServerInfo) -> Finding {
    match server_info.value("connected_slaves") {
        None | Some("0") => finding(Severity::Fine, "replicas", "none".into(), ""),
        Some(count) => finding(
            Severity::Risk,
            "replicas",
            format!("{count}, which receive writes after the answer"),
            "a failover loses the last acknowledged writes: use Postgres or a file for operations \
             that must not execute twice",
        ),
    }
}

fn persistence(server_info: &ServerInfo, save: Option<&str>) -> Finding {
    let fix = "set appendonly to yes, or a restart loses the records";
    if server_info.value("aof_enabled") == Some("1") {
        return finding(Severity::Fine, "persistence", "append-only file".into(), fix);
    }
    match save {
        None => finding(Severity::Unknown, "persistence", "no append-only file".into(), fix),
        Some("") => finding(Severity::Broken, "persistence", "none".into(), fix),
        Some(_) => finding(
            Severity::Risk,
            "persistence",
            "snapshots only: a crash loses what was written after the last".into(),
            fix,
        ),
    }
}

fn appendfsync(sync: Option<&str>) -> Finding {
    let fix = "set appendfsync to always, or accept that a crash loses acknowledged writes";
    let (severity, found) = match sync {
        None => (Severity::Unknown, "not reported".into()),
        Some("always") => (Severity::Fine, "always".into()),
        Some("everysec") => {
            (Severity::Risk, "everysec: a crash may lose the writes of the last second".into())
        }
        Some(other) => (
            Severity::Risk,
            format!("{other}: a crash may lose the writes of the last half minute"),
        ),
    };
    finding(severity, "appendfsync", found, fix)
}

/// Checks that the server's clock is between two readings of the local one.
fn clocks(before: Timestamp, time: RedisResult<Value>, after: Timestamp) -> Finding {
    const APART: std::time::Duration = std::time::Duration::from_secs(1);
    let fix = "leases and retention use the server's clock: synchronize it, and do not set it by \
               hand while the store is in use";
    let Some(server) = time.ok().and_then(|time| timestamp(&time)) else {
        return finding(Severity::Unknown, "clock", "not reported".into(), fix);
    };
    let apart = before.since(server).max(server.since(after));
    if apart < APART {
        return finding(Severity::Fine, "clock", "within 1 s of this machine's".into(), fix);
    }
    let way = if server < before { "behind" } else { "ahead of" };
    finding(Severity::Risk, "clock", format!("{}s {way} this one", apart.as_secs()), fix)
}

fn finding(severity: Severity, subject: &'static str, found: String, fix: &'static str) -> Finding {
    let fix = if severity == Severity::Fine { "" } else { fix };
    Finding { severity, subject, server: None, found, fix }
}

fn config(name: &str) -> redis::Cmd {
    let mut config = redis::cmd("CONFIG");
    config.arg("GET").arg(name);
    config
}

/// Returns the only value of `CONFIG GET`; `None` where the command is denied, as hosted servers
/// do.
fn value(answer: RedisResult<Value>) -> Option<String> {
    let value = match answer.ok()? {
        Value::Map(mut pairs) => pairs.pop()?.1,
        Value::Array(mut pair) => pair.pop()?,
        _ => return None,
    };
    text(&value)
}

fn timestamp(time: &Value) -> Option<Timestamp> {
    let Value::Array(time) = time else { return None };
    let [seconds, micros] = time.as_slice() else { return None };
    let (seconds, micros): (u64, u64) = (text(seconds)?.parse().ok()?, text(micros)?.parse().ok()?);
    Some(Timestamp::from_micros(seconds.checked_mul(1_000_000)?.checked_add(micros)?))
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        _ => None,
    }
}
