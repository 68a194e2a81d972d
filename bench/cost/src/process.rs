//! Times of processes and cores.

use crate::Any;

/// Microseconds of a tick in `/proc`: a hundred ticks a second, on every Linux.
const TICK: u64 = 10_000;

/// Processor times, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// User and system time of the measured process.
    pub process: u64,
    /// User and system time of this process.
    pub own: u64,
    /// User and system time of all processes on the core of the measured one.
    pub core: Option<u64>,
    /// User and system time of all processes on the core of the load generator.
    pub load_core: Option<u64>,
}

/// Cores to which processes are pinned.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Cores {
    /// Core of the measured process, if it is pinned
    #[arg(long)]
    pub core: Option<usize>,
    /// Core of the load generator, if it is pinned
    #[arg(long)]
    pub load_core: Option<usize>,
}

impl Times {
    /// Returns the times so far of the process `id` and of `cores`.
    ///
    /// # Errors
    /// The process has ended, or the system is not Linux.
    pub fn now(id: u32, cores: Cores) -> Result<Self, Any> {
        Ok(Self {
            process: process(id)?,
            own: process(std::process::id())?,
            core: cores.core.map(core).transpose()?,
            load_core: cores.load_core.map(core).transpose()?,
        })
    }

    /// Returns the times from `earlier` to these.
    pub fn since(&self, earlier: &Self) -> Self {
        let between = |now: Option<u64>, earlier: Option<u64>| Some(now?.saturating_sub(earlier?));
        Self {
            process: self.process - earlier.process,
            own: self.own - earlier.own,
            core: between(self.core, earlier.core),
            load_core: between(self.load_core, earlier.load_core),
        }
    }
}

fn process(id: u32) -> Result<u64, Any> {
    let text = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
    // The name before the state is in brackets and may contain anything.
    let (_, status) = text.rsplit_once(") ").ok_or("/proc/PID/stat has another form")?;
    sum(status.split(' ').skip(11).take(2))
}

fn core(number: usize) -> Result<u64, Any> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let name = format!("cpu{number} ");
    let times = text.lines().find_map(|line| line.strip_prefix(&name));
    // User, nice, system; interrupts are not counted for processes either.
    sum(times.ok_or("/proc/stat lacks a core")?.split(' ').take(3))
}

fn sum<'a>(ticks: impl Iterator<Item = &'a str>) -> Result<u64, Any> {
    let ticks = ticks.map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    Ok(ticks * TICK)
}
