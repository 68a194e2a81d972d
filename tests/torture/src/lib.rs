//! Kills gateways again and again under load, and checks that no promise breaks.
//!
//! For each `on_unknown` policy there is a world of its own: a real gateway process on a file, or
//! several on a server, an upstream that counts executions by key and fence, and clients that retry
//! with the same key, at any of them.
//! Gateways get SIGKILL at random instants, some of them while they recover from the last one.
//! At the end every answer that a client ever received is asked for again.
//!
//! What must hold is listed in `ledger.rs`. What SIGKILL cannot show is what a power failure
//! loses: the system keeps what was written but never synced. Images of the file show that.

mod client;
mod dice;
mod gateway;
mod ledger;
mod response;
mod upstream;
mod world;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use ledger::TortureCounts;

use dice::Dice;

/// What to do.
#[derive(Clone, Debug)]
pub struct TortureOptions {
    /// The program `hapax`.
    pub gateway: PathBuf,
    /// How often to kill, over all policies.
    pub kills: u64,
    /// From which the instants and the clients' choices follow.
    pub seed: u64,
    /// Concurrent clients of each world.
    pub clients: u64,
    /// In how many copies one in four requests is sent at once.
    pub duplicates: u64,
    /// Gateways of each world, at least one; a file can have only one.
    pub gateways: u64,
    /// A store other than a new file for each world: a server; or `memory:`, to see this fail.
    pub store: Option<String>,
}

/// A gateway's `--on-unknown`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnUnknownPolicy {
    /// Executes again.
    Reexecute,
    /// Never executes again by itself.
    Block,
    /// Asks first.
    Reconcile,
}

impl OnUnknownPolicy {
    /// All of them.
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

/// What was seen.
#[derive(Clone, Debug)]
pub struct TortureReport {
    /// What each policy's world saw.
    pub counts: Vec<(OnUnknownPolicy, TortureCounts)>,
    /// Promises that were broken, the first few of each world.
    pub violations: Vec<String>,
}

/// The run could not go on: a gateway did not start, or ended by itself.
#[derive(Debug)]
pub struct TortureError(pub(crate) String);

impl fmt::Display for TortureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TortureError {}

impl From<std::io::Error> for TortureError {
    fn from(error: std::io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Runs the worlds of all policies at once, and judges them.
///
/// # Errors
/// [`TortureError`] when a gateway does not come up again or ends by itself: a broken promise as well.
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

/// Faults that a long run must have met, in a sentence for each that it did not.
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
                want("answer that was lost", counts.answers_lost);
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

/// A poisoned lock's data is as good as any: the panic is reported where it happened.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
