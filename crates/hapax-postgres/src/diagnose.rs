//! What would silently break the promise, for an operator to read.

use std::fmt;
use std::time::Duration;

use hapax::{Clock, Timestamp};
use tokio::time::timeout;

use crate::error::{ConnectError, Forgetful};
use crate::link::{Link, Setup};
use crate::look::{self, OLDEST, Server};
use crate::options::Options;
use crate::schema::VERSION;

/// How much of a promise is at stake.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Severity {
    /// Nothing to do.
    Fine,
    /// It holds until something happens that does happen: a crash, a failover.
    Risk,
    /// It does not hold.
    Broken,
}

/// Something that was looked at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was looked at, in one word: `synchronous_commit`, `migrations`, …
    pub subject: &'static str,
    /// What was found.
    pub found: String,
    /// What to do about it; empty where nothing is to be done.
    pub fix: &'static str,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { severity, subject, found, fix } = self;
        let severity = match severity {
            Severity::Fine => "fine",
            Severity::Risk => "risk",
            Severity::Broken => "broken",
        };
        write!(f, "{severity}: {subject}: {found}")?;
        if fix.is_empty() { Ok(()) } else { write!(f, "; {fix}") }
    }
}

/// How far the server's clock may be from ours. It decides alone, so that a difference breaks
/// nothing; but one of the two is wrong.
const CLOCKS: Duration = Duration::from_secs(5);

/// Looks at the server without opening a store: also at one on which none would be opened.
/// `clock` is what the server's is compared with.
///
/// # Errors
/// [`ConnectError`] where nothing can be looked at.
pub async fn diagnose(options: &Options, clock: &dyn Clock) -> Result<Vec<Finding>, ConnectError> {
    let setup = Setup::new(options.clone());
    let looking = async {
        let link = Link::connect(&setup).await?;
        let before = clock.now();
        let server = Server::ask(link.client(), options.schema.as_deref()).await?;
        let after = clock.now();
        let version = look::version(link.client(), options).await?;
        link.close().await;
        let mut findings = settings(&server);
        findings.push(migrations(version));
        findings.push(clocks(before, &server, after));
        Ok(findings)
    };
    timeout(setup.answer * 2, looking).await.unwrap_or(Err(ConnectError::TimedOut))
}

fn settings(server: &Server) -> Vec<Finding> {
    let old = server.major < OLDEST;
    let commit = server.forgetful() == Some(Forgetful::SynchronousCommit);
    let off = |setting: &str| setting == "off";
    vec![
        finding("version", server.major.to_string(), broken(old), "13 or later is needed"),
        finding(
            "role",
            (if server.standby { "standby" } else { "primary" }).into(),
            broken(server.standby),
            "name the primary, or add target_session_attrs=read-write to the URL",
        ),
        finding(
            "synchronous_commit",
            server.synchronous_commit.clone(),
            broken(commit),
            "set it to on for this role: what was acknowledged last is lost in a crash",
        ),
        finding(
            "fsync",
            server.fsync.clone(),
            broken(off(&server.fsync)),
            "set it to on: a crash of the system loses or damages anything",
        ),
        finding(
            "full_page_writes",
            server.full_page_writes.clone(),
            if off(&server.full_page_writes) { Severity::Risk } else { Severity::Fine },
            "set it to on, unless the file system never tears a page",
        ),
        table(server),
    ]
}

fn table(server: &Server) -> Finding {
    let (found, severity) = match server.persistence.as_deref() {
        Some("p") => ("logged", Severity::Fine),
        Some("u") => ("unlogged", Severity::Broken),
        Some(_) => ("temporary", Severity::Broken),
        None => ("none yet", Severity::Fine),
    };
    let fix = "ALTER TABLE hapax_cells SET LOGGED: a crash empties it";
    finding("table", found.into(), severity, fix)
}

fn migrations(found: Option<i32>) -> Finding {
    let (text, severity, fix) = match found {
        None => ("none".into(), Severity::Risk, "connect once, or run the migrations"),
        Some(version) if version < VERSION => (
            format!("version {version} of {VERSION}"),
            Severity::Risk,
            "connect once, or run the migrations",
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

fn clocks(before: Timestamp, server: &Server, after: Timestamp) -> Finding {
    let server = Timestamp::from_micros(server.now.try_into().unwrap_or(0));
    // It was read some time between the two.
    let apart = before.since(server).max(server.since(after));
    let severity = if apart > CLOCKS { Severity::Risk } else { Severity::Fine };
    let found = format!("{:.3} s apart from this machine's", apart.as_secs_f64());
    let fix = "have both machines' clocks set by the network: a step of the server's lapses leases";
    finding("clock", found, severity, fix)
}

const fn broken(is: bool) -> Severity {
    if is { Severity::Broken } else { Severity::Fine }
}

fn finding(subject: &'static str, found: String, severity: Severity, fix: &'static str) -> Finding {
    let fix = if severity == Severity::Fine { "" } else { fix };
    Finding { severity, subject, found, fix }
}
