//! Findings about the configuration of a store.

use std::fmt;

/// The severity of a finding: how far it puts the store's guarantee at risk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
pub enum Severity {
    /// No action is needed.
    Fine,
    /// The check has no result: an operator has to inspect the server.
    Unknown,
    /// The guarantee breaks in an event that does occur: a crash, a failover.
    Risk,
    /// The guarantee does not hold.
    Broken,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fine => "fine",
            Self::Unknown => "unknown",
            Self::Risk => "risk",
            Self::Broken => "broken",
        })
    }
}

/// The result of one check of a store's server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// The subject of the check in one word: `maxmemory-policy`, `synchronous_commit`.
    pub subject: &'static str,
    /// The server of a cluster that the finding is about.
    pub server: Option<String>,
    /// The state that was found.
    pub found: String,
    /// The fix; empty if nothing is to be done.
    pub fix: &'static str,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { severity, subject, server, found, fix } = self;
        write!(f, "{severity}: {subject}: {found}")?;
        server.iter().try_for_each(|server| write!(f, " ({server})"))?;
        if fix.is_empty() { Ok(()) } else { write!(f, "; {fix}") }
    }
}
