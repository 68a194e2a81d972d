//! Counts of reconciliations without a retry.

use std::fmt::{self, Write};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::{add, head};
use crate::reconcile::{NotRequested, NotRequestedCounts};

/// Results of reconciliations without a retry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UnretriedResult {
    Happened,
    DidNotHappen,
    CannotSay,
    /// The store did not accept the request or the verdict.
    Failed,
}

impl UnretriedResult {
    const ALL: [Self; 4] = [Self::Happened, Self::DidNotHappen, Self::CannotSay, Self::Failed];

    /// Returns its name.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Happened => "happened",
            Self::DidNotHappen => "did-not-happen",
            Self::CannotSay => "cannot-say",
            Self::Failed => "failed",
        }
    }
}

/// Counts of results, and of the records about which the last pass sent no request.
#[derive(Debug, Default)]
pub(crate) struct UnretriedCounts {
    results: [AtomicU64; UnretriedResult::ALL.len()],
    not_requested: [AtomicU64; NotRequested::CODES.len()],
}

impl UnretriedCounts {
    /// Counts a result.
    pub(crate) fn reconciled(&self, result: UnretriedResult) {
        let index = UnretriedResult::ALL.iter().position(|it| *it == result).unwrap_or_default();
        add(&self.results[index]);
    }

    /// Sets the counts of a pass.
    pub(crate) fn set_not_requested(&self, counts: &NotRequestedCounts) {
        for (gauge, count) in self.not_requested.iter().zip(counts) {
            gauge.store(*count, Relaxed);
        }
    }

    pub(super) fn write(&self, out: &mut String) -> fmt::Result {
        let name = "hapax_unretried_total";
        head(out, name, "counter", "Reconciliations without a retry, by result.")?;
        for (result, count) in UnretriedResult::ALL.iter().zip(&self.results) {
            writeln!(out, "{name}{{result=\"{}\"}} {}", result.as_str(), count.load(Relaxed))?;
        }
        let name = "hapax_unretried_not_requested";
        let help = "Undecided records under reconcile about which the last pass sent no request.";
        head(out, name, "gauge", help)?;
        for (code, count) in NotRequested::CODES.iter().zip(&self.not_requested) {
            writeln!(out, "{name}{{reason=\"{code}\"}} {}", count.load(Relaxed))?;
        }
        Ok(())
    }
}
