//! A disk in memory that remembers every write and sync, fails when told to, and shows what a
//! power failure may leave of it.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use hapax_file::{Backing, Disk};
use hapax_testkit::SeededEntropy;

/// What a disk writes whole or not at all.
const SECTOR: usize = 512;
/// What a disk sets aside for a file.
const PAGE: usize = 4096;
/// Pages of a reserve.
const RESERVE: usize = 256;

/// What was asked of the disk.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Write {
        offset: usize,
        data: Vec<u8>,
    },
    SetLen(usize),
    Sync,
    /// A sync that failed. What it should have made durable may be lost in part, and no later
    /// sync makes up for it, although reads show it: the kernel calls those pages clean.
    FailedSync,
}

/// Which syncs a disk only pretends to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lies {
    None,
    Always,
    /// Every second one: of a commit in two phases, one phase.
    Odd,
    Even,
}

/// What the disk does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    None,
    /// Fails the sync after this many.
    Sync(u32),
    /// Has no room for anything, not even to be opened.
    Full,
    /// Panics in the next write.
    Panic,
}

#[derive(Clone, Debug)]
pub(crate) struct Medium(Arc<(Mutex<Inner>, Condvar)>);

#[derive(Debug)]
struct Inner {
    bytes: Vec<u8>,
    log: Vec<Op>,
    lies: Lies,
    fault: Fault,
    syncs: u32,
    reads: usize,
    free: u64,
    /// Pages that may still be written for the first time, and those that were.
    room: usize,
    pages: std::collections::HashSet<usize>,
    /// Pages that are set aside; they count against the room.
    reserve: Option<usize>,
    /// Syncs wait, but for this many.
    held: Option<u32>,
}

impl Medium {
    pub(crate) fn new(bytes: Vec<u8>, lies: Lies) -> Self {
        let (log, fault, free) = (Vec::new(), Fault::None, u64::MAX);
        let pages = (0..bytes.len().div_ceil(PAGE)).collect();
        let (room, reserve) = (usize::MAX, None);
        let inner = Inner {
            bytes,
            log,
            lies,
            fault,
            syncs: 0,
            reads: 0,
            free,
            room,
            pages,
            reserve,
            held: None,
        };
        Self(Arc::new((Mutex::new(inner), Condvar::new())))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.lock().bytes.clone()
    }

    /// Operations so far.
    pub(crate) fn operations(&self) -> usize {
        self.lock().log.len()
    }

    /// Reads so far.
    pub(crate) fn reads(&self) -> usize {
        self.lock().reads
    }

    pub(crate) fn log(&self) -> Vec<Op> {
        self.lock().log.clone()
    }

    /// Forgets the log, for long runs that show no images.
    pub(crate) fn forget_log(&self) {
        self.lock().log.clear();
    }

    pub(crate) fn set_fault(&self, fault: Fault) {
        self.lock().fault = fault;
    }

    pub(crate) fn fault(&self) -> Fault {
        self.lock().fault
    }

    /// Has room for so many pages that were never written, and no more.
    pub(crate) fn set_room(&self, pages: usize) {
        self.lock().room = pages;
    }

    /// Pages that are set aside, if any are.
    pub(crate) fn reserved(&self) -> Option<usize> {
        self.lock().reserve
    }

    pub(crate) fn set_free(&self, free: u64) {
        self.lock().free = free;
    }

    /// Makes every sync wait until [`Medium::release`].
    pub(crate) fn hold(&self) {
        self.lock().held = Some(0);
    }

    /// Lets so many syncs happen, and makes those after them wait.
    pub(crate) fn let_through(&self, syncs: u32) {
        self.lock().held = Some(syncs);
        self.0.1.notify_all();
    }

    pub(crate) fn release(&self) {
        self.lock().held = None;
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backing for Medium {
    fn open(&self) -> io::Result<Disk> {
        Ok(Disk::new(self.clone()))
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.lock().bytes.len() as u64)
    }

    fn available(&self) -> io::Result<Option<u64>> {
        Ok(Some(self.lock().free))
    }

    fn reserve(&self) -> io::Result<()> {
        let mut inner = self.lock();
        if inner.reserve.is_none() {
            inner.room = inner.room.checked_sub(RESERVE).ok_or(io::ErrorKind::StorageFull)?;
            inner.reserve = Some(RESERVE);
        }
        Ok(())
    }

    fn release_reserve(&self) -> io::Result<bool> {
        let mut inner = self.lock();
        let released = inner.reserve.take();
        inner.room = inner.room.saturating_add(released.unwrap_or(0));
        Ok(released.is_some())
    }
}

impl redb::StorageBackend for Medium {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut inner = self.lock();
        inner.reads += 1;
        let from = inner.bytes.get(offset as usize..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut inner = self.lock();
        inner.check(false)?;
        inner.bytes.resize(len as usize, 0);
        inner.log.push(Op::SetLen(len as usize));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let waited = self.0.1.wait_while(self.lock(), |inner| inner.held == Some(0));
        let mut inner = waited.unwrap_or_else(PoisonError::into_inner);
        inner.held = inner.held.map(|syncs| syncs - 1);
        if let Err(error) = inner.check(true) {
            inner.log.push(Op::FailedSync);
            return Err(error);
        }
        inner.syncs += 1;
        let lies = match inner.lies {
            Lies::None => false,
            Lies::Always => true,
            Lies::Odd => inner.syncs % 2 == 1,
            Lies::Even => inner.syncs.is_multiple_of(2),
        };
        if !lies {
            inner.log.push(Op::Sync);
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut inner = self.lock();
        inner.check(false)?;
        let offset = offset as usize;
        for page in offset / PAGE..(offset + data.len()).div_ceil(PAGE) {
            if !inner.pages.contains(&page) {
                inner.room = inner.room.checked_sub(1).ok_or(io::ErrorKind::StorageFull)?;
                inner.pages.insert(page);
            }
        }
        inner.bytes[offset..offset + data.len()].copy_from_slice(data);
        inner.log.push(Op::Write { offset, data: data.to_vec() });
        Ok(())
    }
}

impl Inner {
    fn check(&mut self, sync: bool) -> io::Result<()> {
        match (self.fault, sync) {
            (Fault::Full, _) => Err(io::ErrorKind::StorageFull.into()),
            (Fault::Sync(0), true) => {
                self.fault = Fault::None;
                Err(io::Error::other("the disk failed to sync"))
            }
            (Fault::Sync(left), true) => {
                self.fault = Fault::Sync(left - 1);
                Ok(())
            }
            (Fault::Panic, false) => {
                self.fault = Fault::None;
                panic!("planted");
            }
            (Fault::None | Fault::Sync(_) | Fault::Panic, _) => Ok(()),
        }
    }
}

/// How a power failure treats what was not synced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loss {
    /// All of it is gone.
    Everything,
    /// All of it got through.
    Nothing,
    /// Some writes got through, in whatever order.
    Writes,
    /// Writes got through up to one that is torn.
    Torn,
    /// Some sectors got through, each as some write left it.
    Sectors,
}

impl Loss {
    pub(crate) const ALL: [Self; 5] =
        [Self::Everything, Self::Nothing, Self::Writes, Self::Torn, Self::Sectors];
}

/// Replays a log up to moments of power failure, in ascending order.
pub(crate) struct Crashes<'a> {
    durable: Vec<u8>,
    log: &'a [Op],
    /// Operations that `durable` has.
    synced: usize,
}

impl<'a> Crashes<'a> {
    pub(crate) fn new(start: Vec<u8>, log: &'a [Op]) -> Self {
        Self { durable: start, log, synced: 0 }
    }

    /// What may be left when power fails after `at` operations.
    pub(crate) fn image(&mut self, at: usize, loss: Loss, dice: &SeededEntropy) -> Vec<u8> {
        for end in self.synced..at {
            let failed = match self.log[end] {
                Op::Sync => false,
                Op::FailedSync => true,
                Op::Write { .. } | Op::SetLen(_) => continue,
            };
            for op in &self.log[self.synced..end] {
                apply(&mut self.durable, op, |_| !failed || dice.below(2) == 0);
            }
            self.synced = end + 1;
        }
        let pending = &self.log[self.synced..at];
        let mut image = self.durable.clone();
        let torn = dice.below(pending.len() as u64 + 1) as usize;
        for (index, op) in pending.iter().enumerate() {
            // A longer file may have kept its old length, which cuts off what lies beyond; a
            // sector never goes back to an older write once it has a newer one.
            let whole = match loss {
                Loss::Everything => false,
                Loss::Nothing => true,
                Loss::Writes => dice.below(2) == 0,
                Loss::Torn if index < torn => true,
                Loss::Torn if index > torn => false,
                Loss::Torn | Loss::Sectors => {
                    if let Op::SetLen(_) = op {
                        dice.below(2) == 0
                    } else {
                        let share = 1 + dice.below(9);
                        apply(&mut image, op, |_| dice.below(10) < share);
                        continue;
                    }
                }
            };
            if whole {
                apply(&mut image, op, |_| true);
            }
        }
        image
    }
}

/// Applies the sectors that `keep` says, as far as the file reaches.
fn apply(bytes: &mut Vec<u8>, op: &Op, mut keep: impl FnMut(usize) -> bool) {
    match op {
        Op::Sync | Op::FailedSync => {}
        Op::SetLen(len) => bytes.resize(*len, 0),
        Op::Write { offset, data } => {
            let mut from = 0;
            while from < data.len() {
                // Sectors lie on the disk, not in the write.
                let to = data.len().min((offset + from) / SECTOR * SECTOR + SECTOR - offset);
                let end = bytes.len().min(offset + to);
                if offset + from < end && keep(from) {
                    bytes[offset + from..end].copy_from_slice(&data[from..end - offset]);
                }
                from = to;
            }
        }
    }
}
