//! The progress of the demo: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of all set-ups together.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    done: AtomicU64,
}

impl Progress {
    /// Starts with 0 of `total` payments.
    pub(crate) fn new(total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:40} {pos}/{len} payments, {elapsed}");
            ProgressBar::new(total)
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { bar, total, done: AtomicU64::new(0) }
    }

    /// Adds to the payments that are done.
    pub(crate) fn advance(&self, payments: u32) {
        let payments = u64::from(payments);
        let before = self.done.fetch_add(payments, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => bar.inc(payments),
            None => {
                let quarter = |done: u64| done * 4 / self.total.max(1);
                if quarter(before + payments) > quarter(before) {
                    self.note(&format!("{} of {} payments", before + payments, self.total));
                }
            }
        }
    }

    /// Prints a line above the bar.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}
