//! The ledger of the payments service: an append-only file of lines.
//!
//! A charge was made if and only if it is written here; a write is synced before it is
//! acknowledged. So the ledger survives every kill of the service, and the demo counts in it, not
//! in the responses.
//! the service or its clients say.
//! The service does *not* look for an earlier charge with the same key before it charges: only the
//! gateway prevents duplicates. It does enforce fences: once it has answered that an operation did
//! not happen, it rejects the fence of that request, and every lower one of the same operation, for
//! ever.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::Fault;

/// One line of the ledger.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "entry")]
pub(crate) enum LedgerEntry {
    /// A request for a payment arrived, and gets this fault.
    Arrived {
        /// The order.
        order: u32,
        /// The fault.
        fault: Option<Fault>,
    },
    /// A request took long without a planned fault: the gateway may have timed out.
    Slow {
        /// The order.
        order: u32,
    },
    /// A charge was made.
    Charged(Charge),
    /// A charge under a rejected fence: not made.
    Stale {
        /// The operation.
        operation: String,
    },
    /// A reconcile request for an operation.
    Asked {
        /// The operation.
        operation: String,
        /// The fence that is rejected from now on; `None` if a charge was found, or no answer was
        /// given.
        refused: Option<u64>,
    },
}

/// A charge that was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Charge {
    /// Its number, from 1.
    pub(crate) id: u32,
    /// The order.
    pub(crate) order: u32,
    /// The idempotency key of the request.
    pub(crate) key: String,
    /// The operation id of the request.
    pub(crate) operation: String,
}

/// A request to charge.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// The number of the order.
    pub(crate) order: u32,
    /// The idempotency key of the request.
    pub(crate) key: String,
    /// The operation id of the request; its key where no gateway sends one.
    pub(crate) operation: String,
    /// The fence of the request, if a gateway sent one.
    pub(crate) fence: Option<u64>,
}

/// Result of looking an operation up in the ledger.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ChargeLookup {
    /// The charge was made.
    Charged(Charge),
    /// The charge was not made, and will not be under the given fence.
    Nothing,
}

/// The reconcile requests of one operation.
#[derive(Clone, Copy, Default, Debug)]
struct ReconcileCount {
    times: u32,
    refused: Option<u64>,
}

/// The ledger, opened by its only writer.
#[derive(Debug)]
pub(crate) struct Ledger {
    file: File,
    arrivals: HashMap<u32, u32>,
    charges: HashMap<String, Charge>,
    asked: HashMap<String, ReconcileCount>,
    charged: u32,
    entries: usize,
}

impl Ledger {
    /// The limit of lines. A service that is left running with `--keep` stops charging there.
    const MAX_ENTRIES: usize = 1_000_000;

    /// Opens or creates the ledger at `path`. A line that a kill cut short was never acknowledged,
    /// and is dropped.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut file =
            OpenOptions::new().create(true).read(true).write(true).truncate(false).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let length = u64::try_from(whole).map_err(io::Error::other)?;
        file.set_len(length)?;
        file.seek(SeekFrom::Start(length))?;
        let mut ledger = Self {
            file,
            arrivals: HashMap::new(),
            charges: HashMap::new(),
            asked: HashMap::new(),
            charged: 0,
            entries: 0,
        };
        for entry in parse(&text[..whole])? {
            ledger.remember(entry);
        }
        Ok(ledger)
    }

    /// Records a request for `order`, the `n`th (from 0), with its fault `meets(n)`.
    pub(crate) fn arrive(
        &mut self,
        order: u32,
        meets: impl FnOnce(u32) -> Option<Fault>,
    ) -> io::Result<Option<Fault>> {
        let fault = meets(self.arrivals.get(&order).copied().unwrap_or(0));
        self.append(LedgerEntry::Arrived { order, fault })?;
        Ok(fault)
    }

    /// Makes the charge, unless the fence is rejected (`None`).
    pub(crate) fn charge(&mut self, order: Order) -> io::Result<Option<Charge>> {
        let Order { order, key, operation, fence } = order;
        let refused = self.asked.get(&operation).and_then(|asked| asked.refused);
        if let (Some(fence), Some(refused)) = (fence, refused)
            && fence <= refused
        {
            self.append(LedgerEntry::Stale { operation })?;
            return Ok(None);
        }
        let charge = Charge { id: self.charged + 1, order, key, operation };
        self.append(LedgerEntry::Charged(charge.clone()))?;
        self.file.sync_data()?;
        Ok(Some(charge))
    }

    /// Looks `operation` up. If there is no charge, `fence` is rejected from then on, durably,
    /// before the answer.
    pub(crate) fn look_up(&mut self, operation: &str, fence: u64) -> io::Result<ChargeLookup> {
        if let Some(charge) = self.charges.get(operation).cloned() {
            self.append(LedgerEntry::Asked { operation: operation.to_owned(), refused: None })?;
            return Ok(ChargeLookup::Charged(charge));
        }
        self.append(LedgerEntry::Asked { operation: operation.to_owned(), refused: Some(fence) })?;
        self.file.sync_data()?;
        Ok(ChargeLookup::Nothing)
    }

    /// Records that a request for `order` took long.
    pub(crate) fn slow(&mut self, order: u32) -> io::Result<()> {
        self.append(LedgerEntry::Slow { order })
    }

    /// Returns the number of reconcile requests for `operation`.
    pub(crate) fn times_asked(&self, operation: &str) -> u32 {
        self.asked.get(operation).map_or(0, |asked| asked.times)
    }

    /// Records a reconcile request without an answer.
    pub(crate) fn withhold(&mut self, operation: &str) -> io::Result<()> {
        self.append(LedgerEntry::Asked { operation: operation.to_owned(), refused: None })
    }

    fn append(&mut self, entry: LedgerEntry) -> io::Result<()> {
        if self.entries >= Self::MAX_ENTRIES {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "the ledger is full"));
        }
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.remember(entry);
        Ok(())
    }

    fn remember(&mut self, entry: LedgerEntry) {
        self.entries += 1;
        match entry {
            LedgerEntry::Arrived { order, .. } => *self.arrivals.entry(order).or_default() += 1,
            LedgerEntry::Charged(charge) => {
                self.charged = self.charged.max(charge.id);
                // The first charge: its response is repeated.
                self.charges.entry(charge.operation.clone()).or_insert(charge);
            }
            LedgerEntry::Asked { operation, refused } => {
                let asked = self.asked.entry(operation).or_default();
                asked.times += 1;
                asked.refused = asked.refused.max(refused);
            }
            LedgerEntry::Stale { .. } | LedgerEntry::Slow { .. } => {}
        }
    }
}

/// Reads the ledger of a service that has ended.
pub(crate) fn read(path: &Path) -> io::Result<Vec<LedgerEntry>> {
    let text = std::fs::read_to_string(path)?;
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    parse(&text[..whole])
}

fn parse(text: &str) -> io::Result<Vec<LedgerEntry>> {
    text.lines().map(|line| serde_json::from_str(line).map_err(io::Error::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(key: &str, fence: Option<u64>) -> Order {
        Order { order: 1, key: key.into(), operation: key.into(), fence }
    }

    fn charges(path: &Path) -> usize {
        read(path).unwrap().iter().filter(|entry| matches!(entry, LedgerEntry::Charged(_))).count()
    }

    #[test]
    fn the_same_key_is_charged_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge(order("a", None)).unwrap().unwrap().id, 1);
        assert_eq!(ledger.charge(order("a", None)).unwrap().unwrap().id, 2);
        assert_eq!(charges(&path), 2);
        let ChargeLookup::Charged(first) = ledger.look_up("a", 9).unwrap() else { panic!() };
        assert_eq!((first.id, ledger.times_asked("a")), (1, 1));
    }

    #[test]
    fn a_refused_fence_stays_refused_after_a_restart_and_a_later_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.look_up("a", 10).unwrap(), ChargeLookup::Nothing);
        drop(ledger);
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge(order("a", Some(10))).unwrap(), None);
        assert_eq!(ledger.charge(order("a", Some(9))).unwrap(), None);
        assert!(ledger.charge(order("b", Some(10))).unwrap().is_some());
        assert!(ledger.charge(order("a", Some(11))).unwrap().is_some());
        assert_eq!(charges(&path), 2);
    }

    #[test]
    fn arrivals_are_counted_over_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let first_is_refused = |arrival| (arrival == 0).then_some(Fault::Refuse);
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.arrive(5, first_is_refused).unwrap(), Some(Fault::Refuse));
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.arrive(5, first_is_refused).unwrap(), None);
    }

    #[test]
    fn a_line_cut_short_is_dropped_and_a_damaged_one_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        Ledger::open(&path).unwrap().charge(order("a", None)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], b"{\"entry\":\"char"].concat()).unwrap();
        assert_eq!(charges(&path), 1);
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge(order("b", None)).unwrap().unwrap().id, 2);
        assert_eq!(charges(&path), 2);
        std::fs::write(&path, b"nonsense\n").unwrap();
        assert!(Ledger::open(&path).is_err());
    }
}
