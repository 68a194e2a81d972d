//! Counts of panics of background tasks.

use std::fmt::{self, Write};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::{add, head};

/// Tasks that run beside requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BackgroundTask {
    /// The listener for clients.
    Listener,
    /// The removal of expired records.
    Reap,
    /// The removal of expired records of observed routes.
    ReapObserved,
    /// The removal of idle connections to upstreams.
    IdleConnections,
    /// The checks for changed certificate files.
    Certificates,
    /// The reconciliation without retries.
    Reconcile,
    /// The entry in the register of the store.
    Register,
}

impl BackgroundTask {
    const ALL: [Self; 7] = [
        Self::Listener,
        Self::Reap,
        Self::ReapObserved,
        Self::IdleConnections,
        Self::Certificates,
        Self::Reconcile,
        Self::Register,
    ];

    /// Returns its name as a label.
    const fn label(self) -> &'static str {
        match self {
            Self::Listener => "listener",
            Self::Reap => "reap",
            Self::ReapObserved => "reap-observed",
            Self::IdleConnections => "idle-connections",
            Self::Certificates => "certificates",
            Self::Reconcile => "reconcile",
            Self::Register => "register",
        }
    }

    /// Returns the subject of its log lines.
    pub(crate) const fn subject(self) -> &'static str {
        match self {
            Self::Listener => "the listener for clients",
            Self::Reap => "the removal of expired records",
            Self::ReapObserved => "the removal of expired records of observed routes",
            Self::IdleConnections => "the removal of idle connections to upstreams",
            Self::Certificates => "the check for changed certificate files",
            Self::Reconcile => "the reconciliation without retries",
            Self::Register => "the entry in the register of the store",
        }
    }
}

/// Counts of panics by task.
#[derive(Debug, Default)]
pub(crate) struct TaskPanics([AtomicU64; BackgroundTask::ALL.len()]);

impl TaskPanics {
    /// Returns the counter of a task.
    pub(crate) fn of(&self, task: BackgroundTask) -> &AtomicU64 {
        let index = BackgroundTask::ALL.iter().position(|it| *it == task).unwrap_or_default();
        &self.0[index]
    }

    /// Counts a panic of a task that does not begin anew.
    pub(crate) fn count(&self, task: BackgroundTask) {
        add(self.of(task));
    }

    pub(super) fn write(&self, out: &mut String) -> fmt::Result {
        let name = "hapax_task_panics_total";
        head(out, name, "counter", "Panics of tasks beside requests, by task.")?;
        for (task, count) in BackgroundTask::ALL.iter().zip(&self.0) {
            writeln!(out, "{name}{{task=\"{}\"}} {}", task.label(), count.load(Relaxed))?;
        }
        Ok(())
    }
}
