//! Counts and violations of a run.

use std::fmt;

/// Counts and violations of a run.
#[derive(Clone, Debug, Default)]
pub struct ConsumersReport {
    /// Messages published, duplicates included.
    pub published: u64,
    /// Effects in the table.
    pub effects: u64,
    /// Processes that were killed.
    pub kills: u64,
    /// Processes that were frozen for longer than their lease.
    pub freezes: u64,
    /// Freezes during which another process wrote the effect of the message.
    pub takeovers: u64,
    /// Restarts of the broker after SIGKILL.
    pub broker_restarts: u64,
    /// Outages of the store.
    pub outages: u64,
    /// Replies of the database that were dropped.
    pub lost_replies: u64,
    /// Starts of consumers that failed because the store or the broker was unavailable.
    pub failed_starts: u64,
    /// Violations, the first few of each kind.
    pub violations: Vec<String>,
}

impl fmt::Display for ConsumersReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("messages published", self.published),
            ("effects", self.effects),
            ("kills", self.kills),
            ("freezes", self.freezes),
            ("  takeovers by another process", self.takeovers),
            ("broker killed and restarted", self.broker_restarts),
            ("outages of the store", self.outages),
            ("replies of the database dropped", self.lost_replies),
            ("starts that failed", self.failed_starts),
        ];
        for (name, count) in rows {
            writeln!(f, "{name:<34}{count:>8}")?;
        }
        for violation in &self.violations {
            writeln!(f, "VIOLATION: {violation}")?;
        }
        Ok(())
    }
}
