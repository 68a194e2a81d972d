//! Faults at selected messages. A file for each fault that happened makes sure that it happens once.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::process::{Signal, getpid, kill_process};

/// A fault of a consumer's process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FaultKind {
    /// The process freezes after it has received the message.
    FreezeReceived,
    /// The process freezes in the handler, before the effect.
    FreezeInHandler,
    /// The process is killed in the handler, before the effect.
    KillInHandler,
    /// The process is killed in the handler, after the effect.
    KillAfterEffect,
    /// The process is killed after the commit, before the acknowledgement.
    KillBeforeAck,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::FreezeReceived,
        Self::FreezeInHandler,
        Self::KillInHandler,
        Self::KillAfterEffect,
        Self::KillBeforeAck,
    ];

    /// Returns whether the process freezes, and is not killed.
    #[must_use]
    pub const fn is_freeze(self) -> bool {
        matches!(self, Self::FreezeReceived | Self::FreezeInHandler)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::FreezeReceived => "freeze-received",
            Self::FreezeInHandler => "freeze-in-handler",
            Self::KillInHandler => "kill-in-handler",
            Self::KillAfterEffect => "kill-after-effect",
            Self::KillBeforeAck => "kill-before-ack",
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A fault at a message: `KIND:ID`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Fault {
    /// The kind.
    pub kind: FaultKind,
    /// Id of the message.
    pub id: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.id)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = text.split_once(':').and_then(|(kind, id)| {
            let kind = FaultKind::ALL.into_iter().find(|known| known.name() == kind)?;
            Some(Self { kind, id: id.to_owned() })
        });
        fault.ok_or_else(|| format!("expected KIND:ID, found {text}"))
    }
}

/// Returns the file that exists once `fault` has happened. It has the id of the process.
pub(crate) fn marker(folder: &Path, fault: &Fault) -> PathBuf {
    folder.join(fault.to_string())
}

/// The faults of a consumer's process.
#[derive(Debug)]
pub(crate) struct Faults {
    folder: PathBuf,
    by_id: HashMap<String, Vec<Fault>>,
}

impl Faults {
    pub(crate) fn new(folder: PathBuf, faults: Vec<Fault>) -> Self {
        let mut by_id = HashMap::<_, Vec<_>>::new();
        for fault in faults {
            by_id.entry(fault.id.clone()).or_default().push(fault);
        }
        Self { folder, by_id }
    }

    /// Kills or freezes this process, if that is planned for the message and has not happened.
    #[allow(clippy::expect_used, reason = "a harness")]
    pub(crate) fn reach(&self, kind: FaultKind, id: &str) {
        let planned = self.by_id.get(id).into_iter().flatten();
        for fault in planned.filter(|fault| fault.kind == kind) {
            // Written in full before it has its name, under which other processes read it.
            let process = getpid();
            let part = self.folder.join(format!(".{fault}-{}", process.as_raw_nonzero()));
            std::fs::write(&part, process.as_raw_nonzero().to_string()).expect("a file");
            if std::fs::hard_link(&part, marker(&self.folder, fault)).is_err() {
                continue;
            }
            let signal = if kind.is_freeze() { Signal::STOP } else { Signal::KILL };
            kill_process(process, signal).expect("a process can signal itself");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_from_its_text() {
        for kind in FaultKind::ALL {
            let fault = Fault { kind, id: "m:1".to_owned() };
            assert_eq!(fault.to_string().parse(), Ok(fault));
        }
        assert!("kill:1".parse::<Fault>().is_err());
        assert!("kill-before-ack".parse::<Fault>().is_err());
    }
}
