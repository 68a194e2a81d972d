//! Kills gateways repeatedly under load, and checks that no promise breaks. The feature `demo` has
//! `hapax demo`, the same with a payments service and a table.
//!
//! Each `on_unknown` policy has a world: real gateway processes, one on a file or several on a
//! server, an upstream that counts executions by key and fence, and clients that retry with the
//! same key at any of them. Gateways get SIGKILL at random instants, some of them during the
//! recovery from an earlier kill. At the end, clients repeat every key that ever got a response.
//!
//! The rules are listed in `ledger.rs`. SIGKILL does not lose data that was written but never
//! synced, because the system keeps it; a power failure does. Images of the file test that.

mod client;
#[cfg(feature = "demo")]
pub mod demo;
mod dice;
mod gateway;
mod ledger;
mod process;
mod response;
mod upstream;
mod world;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use ledger::TortureCounts;
pub use process::ProcessError;

use dice::Dice;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct TortureOptions {
    /// The program `hapax`.
    pub gateway: PathBuf,
    /// Number of kills, over all policies.
    pub kills: u64,
    /// Seed of the instants and of the clients' choices.
    pub seed: u64,
    /// Concurrent clients of each world.
    pub clients: u64,
    /// Number of identical requests that one in four operations sends at once.
    pub duplicates: u64,
    /// Gateways of each world, at least one; a file supports only one.
    pub gateways: u64,
    /// A store that replaces the new file of each world: a server, or `memory:`, with which the run
    /// must fail.
    pub store: Option<String>,
}

/// A gateway's `--on-unknown`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnUnknownPolicy {
    /// Executes again.
    Reexecute,
    /// Never executes again automatically.
    Block,
    /// Calls the hook before it executes again.
    Reconcile,
}

impl OnUnknownPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Reexecute, Self::Block, Self::Reconcile];
}

impl fmt::Display for OnUnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Reexecute => "reexecute",
            Self::Block => "block",
            Self::Reconcile => "reconcile",
        })
    }
}

/// Counts and violations of a run.
#[derive(Clone, Debug)]
pub struct TortureReport {
    /// Counts of each policy's world.
    pub counts: Vec<(OnUnknownPolicy, TortureCounts)>,
    /// Violations, the first few of each world.
    pub violations: Vec<String>,
}

/// Failure that ends the run: a gateway did not start, or ended unexpectedly.
#[derive(Debug)]
pub struct TortureError(pub(crate) String);

impl fmt::Display for TortureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TortureError {}

impl From<ProcessError> for TortureError {
    fn from(error: ProcessError) -> Self {
        Self(error.to_string())
    }
}

impl From<std::io::Error> for TortureError {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Runs the worlds of all policies at once, and returns their counts and violations.
///
/// # Errors
/// [`TortureError`] if a gateway does not start again or ends unexpectedly: that is a broken
/// promise too.
pub async fn run(options: &TortureOptions) -> Result<TortureReport, TortureError> {
    let folder = tempfile::tempdir()?;
    let mut dice = Dice::new(options.seed);
    let share = options.kills / OnUnknownPolicy::ALL.len() as u64;
    let rest = options.kills - share * OnUnknownPolicy::ALL.len() as u64;
    let mut world = |policy, kills| world::run(options, policy, kills, folder.path(), dice.split());
    let (one, two, three) = tokio::try_join!(
        world(OnUnknownPolicy::Reexecute, share),
        world(OnUnknownPolicy::Block, share + rest),
        world(OnUnknownPolicy::Reconcile, share),
    )?;
    let mut report = TortureReport { counts: Vec::new(), violations: Vec::new() };
    for (policy, (counts, violations)) in OnUnknownPolicy::ALL.into_iter().zip([one, two, three]) {
        report.counts.push((policy, counts));
        report.violations.extend(violations);
    }
    Ok(report)
}

/// Returns a sentence for each fault that a long run must include and did not.
#[must_use]
pub fn missing(report: &TortureReport) -> Vec<String> {
    let mut missing = Vec::new();
    for (policy, counts) in &report.counts {
        let mut want = |what: &str, count: u64| {
            if count == 0 {
                missing.push(format!("{policy}: no {what}"));
            }
        };
        want("kill in mid-request", counts.kills_in_execution);
        want("kill during a start", counts.kills_in_start);
        want("replay", counts.replays);
        match policy {
            OnUnknownPolicy::Reexecute => {
                want("second execution", counts.executed_again);
                want("response that was lost", counts.answers_lost);
            }
            OnUnknownPolicy::Block => want("unknown outcome", counts.unknown),
            OnUnknownPolicy::Reconcile => {
                want("answer of the hook that it happened", counts.hook_happened);
                want("answer of the hook that it did not", counts.hook_did_not);
                want("answer of the hook that it cannot say", counts.hook_cannot_say);
            }
        }
    }
    missing
}

/// Locks `mutex`, poisoned or not: the panic that poisoned it is reported where it happened.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
