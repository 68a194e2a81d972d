//! Counts and violations of a run.

use std::collections::BTreeMap;
use std::fmt;

/// Counts and violations of a run.
#[derive(Clone, Debug, Default)]
pub struct CallsReport {
    /// Seed of the choices.
    pub seed: u64,
    /// Operations.
    pub operations: u64,
    /// Ends of sends that the clients recorded.
    pub sends: u64,
    /// Operations that were answered in the first run.
    pub known_at_first: u64,
    /// Effects.
    pub effects: u64,
    /// Kills of clients.
    pub client_kills: u64,
    /// Kills of the gateway.
    pub gateway_kills: u64,
    /// Kills of the service, or the server in Stripe's manner.
    pub service_kills: u64,
    /// Faults of the service, by kind.
    pub faults: BTreeMap<String, u64>,
    /// Reconcile requests that were answered: it happened, it did not.
    pub asked: (u64, u64),
    /// Starts of processes that failed.
    pub failed_starts: u64,
    /// Seconds of the first run, and of the second.
    pub seconds: (u64, u64),
    /// Violations, the first few of each kind.
    pub violations: Vec<String>,
}

impl fmt::Display for CallsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("seed", self.seed),
            ("operations", self.operations),
            ("sends that ended", self.sends),
            ("operations known in the first run", self.known_at_first),
            ("effects", self.effects),
            ("kills of clients", self.client_kills),
            ("kills of the gateway", self.gateway_kills),
            ("kills of the service", self.service_kills),
            ("reconciled: happened", self.asked.0),
            ("reconciled: did not", self.asked.1),
            ("starts that failed", self.failed_starts),
            ("seconds of the first run", self.seconds.0),
            ("seconds of the second run", self.seconds.1),
            ("faults of the service", self.faults.values().sum()),
        ];
        for (name, count) in rows {
            writeln!(f, "{name:<36}{count:>8}")?;
        }
        for (fault, count) in &self.faults {
            writeln!(f, "  {fault:<34}{count:>8}")?;
        }
        for violation in &self.violations {
            writeln!(f, "VIOLATION: {violation}")?;
        }
        Ok(())
    }
}
