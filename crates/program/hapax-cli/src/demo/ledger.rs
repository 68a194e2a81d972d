//! The ledger of the payments service: an append-only file of lines.
//!
//! A charge was made if, and only if, it is in the ledger; a charge is synced before it is
//! answered. Therefore the ledger survives every kill of the service, and the demo counts charges
//! in it, not in the answers of the service or the results of clients.
//!
//! The service does *not* check for an earlier charge with the same key before it charges: only the
//! gateway in front of it, if there is one, prevents duplicates. The service does enforce fences:
//! once it has answered for a fence that nothing happened, it rejects that fence and every lower
//! one of the same operation, for ever.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plan::Fault;

/// An entry of the ledger: one line of JSON.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "entry")]
pub(crate) enum LedgerEntry {
    /// A request for a payment arrived, with this planned fault.
    Arrived {
        /// The number of the order.
        order: u32,
        /// The fault of this request.
        fault: Option<Fault>,
    },
    /// A request was slow: the gateway may have reached its timeout.
    Slow {
        /// The number of the order.
        order: u32,
    },
    /// A charge was made.
    Charged(Charge),
    /// A charge was not made, because its fence had been rejected.
    Stale {
        /// The operation id of the request.
        operation: String,
    },
    /// A reconcile request arrived.
    Reconciled {
        /// The operation id of the request.
        operation: String,
        /// The fence that is rejected from now on; `None` if a charge was found, or the service
        /// gave no verdict.
        rejected: Option<u64>,
    },
}

/// A charge that was made.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Charge {
    /// The number of the charge, from 1.
    pub(crate) id: u32,
    /// The number of the order.
    pub(crate) order: u32,
    /// The idempotency key of the request.
    pub(crate) key: String,
    /// The operation id of the request.
    pub(crate) operation: String,
}

/// A request for a charge.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    /// The number of the order.
    pub(crate) order: u32,
    /// The idempotency key of the request.
    pub(crate) key: String,
    /// The operation id of the request; its key if there is no gateway, which sends the id.
    pub(crate) operation: String,
    /// The fence of the request, if a gateway sent one.
    pub(crate) fence: Option<u64>,
}

/// The verdict of the ledger about an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ChargeLookup {
    /// The charge was made.
    Charged(Charge),
    /// No charge was made, and none will be under the fence of the reconcile request.
    Nothing,
}

/// The reconcile requests for an operation, and the largest fence that they rejected.
#[derive(Clone, Copy, Default, Debug)]
struct ReconcileCount {
    times: u32,
    rejected: Option<u64>,
}

/// The ledger, opened by its only writer.
#[derive(Debug)]
pub(crate) struct Ledger {
    file: File,
    arrivals: HashMap<u32, u32>,
    charges: HashMap<String, Charge>,
    reconciled: HashMap<String, ReconcileCount>,
    charged: u32,
    entries: usize,
}

impl Ledger {
    /// The most entries. A service left running with `--keep` stops charging at this number.
    const MAX_ENTRIES: usize = 1_000_000;

    /// Opens the ledger at `path`, or creates it. Drops a last line without end: a kill cut it
    /// short, and its request was never answered.
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
            reconciled: HashMap::new(),
            charged: 0,
            entries: 0,
        };
        for entry in parse(&text[..whole])? {
            ledger.count(entry);
        }
        Ok(ledger)
    }

    /// Appends the arrival of a request for `order` with its fault, `fault_of(n)`, where `n` counts
    /// earlier requests for that order. Returns the fault.
    pub(crate) fn arrive(
        &mut self,
        order: u32,
        fault_of: impl FnOnce(u32) -> Option<Fault>,
    ) -> io::Result<Option<Fault>> {
        let fault = fault_of(self.arrivals.get(&order).copied().unwrap_or(0));
        self.append(LedgerEntry::Arrived { order, fault })?;
        Ok(fault)
    }

    /// Makes a charge. Returns `None` if the fence has been rejected.
    pub(crate) fn charge(&mut self, order: Order) -> io::Result<Option<Charge>> {
        let Order { order, key, operation, fence } = order;
        let rejected = self.reconciled.get(&operation).and_then(|count| count.rejected);
        if let (Some(fence), Some(rejected)) = (fence, rejected)
            && fence <= rejected
        {
            self.append(LedgerEntry::Stale { operation })?;
            return Ok(None);
        }
        let charge = Charge { id: self.charged + 1, order, key, operation };
        self.append(LedgerEntry::Charged(charge.clone()))?;
        self.file.sync_data()?;
        Ok(Some(charge))
    }

    /// Returns the verdict about `operation`. If no charge was made, `fence` is rejected durably
    /// before this returns.
    pub(crate) fn look_up(&mut self, operation: &str, fence: u64) -> io::Result<ChargeLookup> {
        if let Some(charge) = self.charges.get(operation).cloned() {
            self.append(LedgerEntry::Reconciled {
                operation: operation.to_owned(),
                rejected: None,
            })?;
            return Ok(ChargeLookup::Charged(charge));
        }
        self.append(LedgerEntry::Reconciled {
            operation: operation.to_owned(),
            rejected: Some(fence),
        })?;
        self.file.sync_data()?;
        Ok(ChargeLookup::Nothing)
    }

    /// Appends that a request for `order` was slow.
    pub(crate) fn slow(&mut self, order: u32) -> io::Result<()> {
        self.append(LedgerEntry::Slow { order })
    }

    /// Returns the number of reconcile requests for `operation`.
    pub(crate) fn times_reconciled(&self, operation: &str) -> u32 {
        self.reconciled.get(operation).map_or(0, |count| count.times)
    }

    /// Appends a reconcile request that gets no verdict.
    pub(crate) fn withhold(&mut self, operation: &str) -> io::Result<()> {
        self.append(LedgerEntry::Reconciled { operation: operation.to_owned(), rejected: None })
    }

    /// Writes an entry, and counts it once it is written.
    fn append(&mut self, entry: LedgerEntry) -> io::Result<()> {
        if self.entries >= Self::MAX_ENTRIES {
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, "the ledger is full"));
        }
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.count(entry);
        Ok(())
    }

    /// Adds an entry to the counts in memory.
    fn count(&mut self, entry: LedgerEntry) {
        self.entries += 1;
        match entry {
            LedgerEntry::Arrived { order, .. } => *self.arrivals.entry(order).or_default() += 1,
            LedgerEntry::Charged(charge) => {
                self.charged = self.charged.max(charge.id);
                // The first charge of an operation: reconcile requests are answered with it.
                self.charges.entry(charge.operation.clone()).or_insert(charge);
            }
            LedgerEntry::Reconciled { operation, rejected } => {
                let count = self.reconciled.entry(operation).or_default();
                count.times += 1;
                count.rejected = count.rejected.max(rejected);
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
    fn a_second_charge_with_the_same_key_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.charge(order("a", None)).unwrap().unwrap().id, 1);
        assert_eq!(ledger.charge(order("a", None)).unwrap().unwrap().id, 2);
        assert_eq!(charges(&path), 2);
        let ChargeLookup::Charged(first) = ledger.look_up("a", 9).unwrap() else { panic!() };
        assert_eq!((first.id, ledger.times_reconciled("a")), (1, 1));
    }

    #[test]
    fn a_rejected_fence_stays_rejected_after_a_restart_and_a_later_one_is_accepted() {
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
        let reject_first = |arrival| (arrival == 0).then_some(Fault::Reject);
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.arrive(5, reject_first).unwrap(), Some(Fault::Reject));
        let mut ledger = Ledger::open(&path).unwrap();
        assert_eq!(ledger.arrive(5, reject_first).unwrap(), None);
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
