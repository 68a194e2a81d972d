//! Checks of a server for settings that break the store's guarantees unnoticed, for operators.

use std::time::Duration;

use hapax_core::diagnose::{Finding, Severity};
use hapax_core::{Clock, Timestamp};
use tokio::time::timeout;

use crate::error::{PostgresConnectError, UnsafeSetting};
use crate::link::{ConnectionSetup, PgConnection};
use crate::options::PostgresOptions;
use crate::schema::VERSION;
use crate::server_info::{self, OLDEST, ServerInfo};

/// Difference of the server's clock from the local one above which it is a risk. Only the server's
/// clock is used, so a difference breaks nothing; but one of the two is wrong.
const CLOCKS: Duration = Duration::from_secs(5);

/// Checks the server without opening a store, so also a server on which a store would not open. The
/// server's clock is compared with `clock`.
///
/// # Errors
/// [`PostgresConnectError`] if the server cannot be checked.
pub async fn diagnose(
    options: &PostgresOptions,
    clock: &dyn Clock,
) -> Result<Vec<Finding>, PostgresConnectError> {
    let setup = ConnectionSetup::new(options.clone());
    let looking = async {
        let (link, server, [before, after]) = reach(&setup, clock).await?;
        let version = server_info::version(link.client(), options).await?;
        link.close().await;
        let mut findings = settings(&server);
        findings.extend(tables(&server, version));
        findings.push(migrations(version));
        findings.push(clocks(before, &server, after));
        Ok(findings)
    };
    let limit = setup.answer * (1 + setup.hosts.count());
    timeout(limit, looking).await.unwrap_or(Err(PostgresConnectError::TimedOut))
}

/// Connects to the primary, or to a standby if no host is a primary; with the local time before and
/// after.
async fn reach(
    setup: &ConnectionSetup,
    clock: &dyn Clock,
) -> Result<(PgConnection, ServerInfo, [Timestamp; 2]), PostgresConnectError> {
    let mut seen = Err(PostgresConnectError::TimedOut);
    for attempt in setup.hosts.attempts() {
        let looking = async {
            let link = PgConnection::connect(setup, attempt.config()).await?;
            let before = clock.now();
            let server = ServerInfo::ask(link.client(), setup.options.schema.as_deref()).await?;
            Ok((link, server, [before, clock.now()]))
        };
        match timeout(setup.answer, looking).await.unwrap_or(Err(PostgresConnectError::TimedOut)) {
            Ok(found) if !found.1.standby => return Ok(found),
            found if seen.is_err() => seen = found,
            _ => {}
        }
    }
    seen
}

fn settings(server: &ServerInfo) -> Vec<Finding> {
    let old = server.major < OLDEST;
    let off = |setting: &str| setting == "off";
    vec![
        finding("version", server.major.to_string(), broken(old), "13 or later is needed"),
        finding(
            "role",
            (if server.standby { "standby" } else { "primary" }).into(),
            broken(server.standby),
            "name all hosts in the URL, with target_session_attrs=read-write",
        ),
        commits(server),
        standbys(server),
        finding(
            "fsync",
            server.fsync.clone(),
            broken(off(&server.fsync)),
            "set it to on: a crash of the operating system may lose or damage any data",
        ),
        finding(
            "full_page_writes",
            server.full_page_writes.clone(),
            if off(&server.full_page_writes) { Severity::Risk } else { Severity::Fine },
            "set it to on, unless the file system never tears a page",
        ),
    ]
}

fn commits(server: &ServerInfo) -> Finding {
    let found = server.synchronous_commit.as_str();
    let replicated = !server.synchronous_standbys.is_empty();
    let (severity, fix) = if server.forgetful() == Some(UnsafeSetting::SynchronousCommit) {
        let fix = "set it to on for this role: the last acknowledged writes are lost in a crash";
        (Severity::Broken, fix)
    } else if replicated && matches!(found, "local" | "remote_write") {
        // A store's own transactions set it to on.
        let fix = "set it to on for the roles that write records in their own transactions: the last \
                   writes that they acknowledged are lost with the primary";
        (Severity::Risk, fix)
    } else {
        (Severity::Fine, "")
    };
    finding("synchronous_commit", found.into(), severity, fix)
}

fn standbys(server: &ServerInfo) -> Finding {
    let ServerInfo { standbys, synchronous_standbys: names, .. } = server;
    let count = standbys.len();
    let (found, severity, fix) = match (count, names.as_str()) {
        (0, "") => ("none".into(), Severity::Fine, ""),
        (_, "") => (
            format!("{count}, none of them synchronous"),
            Severity::Risk,
            "add one to synchronous_standby_names: in a failover to a standby that is not named, \
             the last acknowledged writes are lost",
        ),
        _ => {
            let wanted = Wanted::read(names);
            let absent = wanted.absent(standbys);
            let found = format!("{count}, of which commits wait for {names}");
            if absent.is_empty() {
                (found, Severity::Fine, "")
            } else if wanted.present(standbys) < wanted.count {
                (
                    format!("{count}, and commits wait for {names}: absent is {}", list(&absent)),
                    Severity::Risk,
                    "bring it back: until then every commit waits, and requests are rejected; do not \
                     end the backends that wait, nor take it out of synchronous_standby_names",
                )
            } else {
                (
                    format!("{found}; absent is {}", list(&absent)),
                    Severity::Risk,
                    "bring it back: if another one is lost, every commit waits",
                )
            }
        }
    };
    finding("standbys", found, severity, fix)
}

fn list(names: &[&str]) -> String {
    names.join(", ")
}

/// `synchronous_standby_names`, parsed: how many acknowledge a commit, of which.
#[derive(PartialEq, Eq, Debug)]
struct Wanted {
    count: usize,
    names: Vec<String>,
}

impl Wanted {
    /// Parses `a, b`, `1 (a, b)`, `FIRST 1 (a, b)` and `ANY 1 (a, b)`.
    fn read(setting: &str) -> Self {
        let (before, list) = match setting.split_once('(') {
            Some((before, list)) => (before, list.trim_end().trim_end_matches(')')),
            None => ("", setting),
        };
        let count = before.split_whitespace().find_map(|word| word.parse().ok()).unwrap_or(1);
        let names = list.split(',').map(str::trim).map(|name| {
            match name.strip_prefix('"').and_then(|name| name.strip_suffix('"')) {
                Some(quoted) => quoted.replace("\"\"", "\""),
                None => name.to_owned(),
            }
        });
        Self { count, names: names.filter(|name| !name.is_empty()).collect() }
    }

    /// Returns how many of the connected standbys a commit may wait for.
    fn present(&self, connected: &[String]) -> usize {
        let is_named = |standby: &&String| {
            self.names.iter().any(|name| name == "*" || name.eq_ignore_ascii_case(standby))
        };
        connected.iter().filter(is_named).count()
    }

    /// Returns the names of which no standby is connected.
    fn absent(&self, connected: &[String]) -> Vec<&str> {
        let is_absent = |name: &&String| match name.as_str() {
            "*" => connected.len() < self.count,
            name => !connected.iter().any(|standby| standby.eq_ignore_ascii_case(name)),
        };
        self.names.iter().filter(is_absent).map(String::as_str).collect()
    }
}

/// Checks the tables that migrations up to `version` created.
fn tables(server: &ServerInfo, version: Option<i32>) -> [Finding; 2] {
    let table = |subject, persistence: &Option<String>, since, logged| {
        let missing = "run the SQL of `hapax sql --part store`, and restore its rows from a backup";
        let (found, severity, fix) = match persistence.as_deref() {
            Some("p") => ("logged", Severity::Fine, ""),
            Some("u") => ("unlogged", Severity::Broken, logged),
            Some(_) => ("temporary", Severity::Broken, logged),
            None if version >= Some(since) => ("missing", Severity::Broken, missing),
            None => ("none yet", Severity::Fine, ""),
        };
        finding(subject, found.into(), severity, fix)
    };
    let cells = "ALTER TABLE hapax_cells SET LOGGED: a crash empties it";
    let schedule = "ALTER TABLE hapax_schedule SET LOGGED: a crash empties it";
    [
        table("table", &server.persistence, 1, cells),
        table("schedule", &server.schedule, VERSION, schedule),
    ]
}

fn migrations(found: Option<i32>) -> Finding {
    let (text, severity, fix) = match found {
        None => (
            "none".into(),
            Severity::Risk,
            "start a gateway, or run the SQL of `hapax sql --part store`, as a user who may create \
             tables",
        ),
        Some(version) if version < VERSION => (
            format!("version {version} of {VERSION}"),
            Severity::Risk,
            "start a gateway, or run the SQL of `hapax sql --part store`, as a user who may create \
             tables",
        ),
        Some(version) if version > VERSION => (
            format!("version {version}, newer than {VERSION}"),
            Severity::Broken,
            "run a newer build",
        ),
        Some(version) => (format!("version {version}"), Severity::Fine, ""),
    };
    finding("migrations", text, severity, fix)
}

fn clocks(before: Timestamp, server: &ServerInfo, after: Timestamp) -> Finding {
    let server = Timestamp::from_micros(server.now.try_into().unwrap_or(0));
    // The server's clock was read at some moment between the two.
    let apart = before.since(server).max(server.since(after));
    let severity = if apart > CLOCKS { Severity::Risk } else { Severity::Fine };
    let found = format!("{:.3} s apart from this machine's", apart.as_secs_f64());
    let fix = "synchronize the clocks of both machines: a step of the server's lapses leases";
    finding("clock", found, severity, fix)
}

const fn broken(is: bool) -> Severity {
    if is { Severity::Broken } else { Severity::Fine }
}

fn finding(subject: &'static str, found: String, severity: Severity, fix: &'static str) -> Finding {
    let fix = if severity == Severity::Fine { "" } else { fix };
    Finding { severity, subject, server: None, found, fix }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(synchronous_commit: &str, names: &str, standbys: &[&str]) -> ServerInfo {
        ServerInfo {
            major: OLDEST,
            standby: false,
            synchronous_commit: synchronous_commit.into(),
            fsync: "on".into(),
            full_page_writes: "on".into(),
            synchronous_standbys: names.into(),
            standbys: standbys.iter().map(|name| (*name).to_owned()).collect(),
            persistence: Some("p".into()),
            schedule: Some("p".into()),
            migrations: true,
            now: 0,
        }
    }

    #[test]
    fn synchronous_commit_and_standbys_have_their_severities() {
        use Severity::{Broken, Fine, Risk};
        for (commit, names, there, wanted) in [
            ("on", "", &[][..], [Fine, Fine]),
            ("on", "", &["one", "two"], [Fine, Risk]),
            ("on", "one", &["one"], [Fine, Fine]),
            ("remote_apply", "one", &["one"], [Fine, Fine]),
            // Sufficient for a crash of the primary.
            ("local", "", &[], [Fine, Fine]),
            ("local", "one", &["one"], [Risk, Fine]),
            ("remote_write", "one", &["one"], [Risk, Fine]),
            ("off", "one", &["one"], [Broken, Fine]),
            // Absent standbys.
            ("on", "one", &[], [Fine, Risk]),
            ("on", "*", &[], [Fine, Risk]),
            ("on", "*", &["walreceiver"], [Fine, Fine]),
            ("on", "one", &["two"], [Fine, Risk]),
            ("on", "ANY 1 (one, two)", &["TWO"], [Fine, Risk]),
            ("on", "FIRST 2 (one, \"a b\")", &["one", "a b"], [Fine, Fine]),
        ] {
            let server = server(commit, names, there);
            let found = [commits(&server).severity, standbys(&server).severity];
            assert_eq!(found, wanted, "{commit} {names:?} {there:?}");
        }
    }

    #[test]
    fn absent_standbys_are_named() {
        let found = |names: &str, there: &[&str]| standbys(&server("on", names, there)).found;
        let waits = found("FIRST 2 (one, two, three)", &["two"]);
        assert!(waits.ends_with("absent is one, three"), "{waits}");
        assert!(waits.contains("commits wait for FIRST 2"), "{waits}");
        let goes_on = found("ANY 1 (one, two)", &["two"]);
        assert!(goes_on.contains("of which commits wait") && goes_on.ends_with("absent is one"));
        assert_eq!(Wanted::read("2 (a, \"b\"\"c\")").names, ["a", "b\"c"]);
    }
}
