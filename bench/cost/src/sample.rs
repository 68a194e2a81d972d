//! Result of one measurement of one case.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::process::Times;

/// Requests of one window, and their cost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Requests that were answered in the window.
    pub requests: u64,
    /// Length of the window.
    pub seconds: f64,
    /// Median of the latencies, in microseconds.
    pub p50_us: u32,
    /// 99th percentile of the latencies, in microseconds.
    pub p99_us: u32,
    /// Processor time of the measured process in the window, in microseconds.
    pub cpu_us: u64,
    /// Processor time of the load generator in the window, in microseconds.
    pub load_cpu_us: u64,
    /// Time for which the core of the measured process was busy, if it is pinned to one, in
    /// microseconds.
    pub core_us: Option<u64>,
    /// The same of the load generator's core.
    pub load_core_us: Option<u64>,
}

impl Sample {
    /// Summarises `latencies`, in microseconds, of a window in which this much time was `used`.
    pub fn of(latencies: &mut [u32], window: Duration, used: &Times) -> Self {
        latencies.sort_unstable();
        let at = |part: f64| {
            let last = latencies.len().saturating_sub(1);
            latencies.get((last as f64 * part) as usize).copied().unwrap_or_default()
        };
        Self {
            requests: latencies.len() as u64,
            seconds: window.as_secs_f64(),
            p50_us: at(0.5),
            p99_us: at(0.99),
            cpu_us: used.process,
            load_cpu_us: used.own,
            core_us: used.core,
            load_core_us: used.load_core,
        }
    }

    /// Returns the requests per second.
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds
    }

    /// Returns the processor time of the measured process for a request, in microseconds.
    pub fn cpu_per_request(&self) -> f64 {
        self.cpu_us as f64 / self.requests.max(1) as f64
    }

    /// Returns the share of the measured process's core that other processes had.
    pub fn others(&self) -> Option<f64> {
        Some(self.core_us?.saturating_sub(self.cpu_us) as f64 / 1e6 / self.seconds)
    }

    /// Returns the share of the load generator's core that other processes had, upstream and
    /// databases included.
    pub fn beside_load(&self) -> Option<f64> {
        Some(self.load_core_us?.saturating_sub(self.load_cpu_us) as f64 / 1e6 / self.seconds)
    }

    /// Returns the share of a core that the measured process had.
    pub fn busy(&self) -> f64 {
        self.cpu_us as f64 / 1e6 / self.seconds
    }
}

/// Returns a duration in whole microseconds.
pub fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
