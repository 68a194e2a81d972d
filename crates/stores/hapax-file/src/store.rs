//! The store.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use futures_channel::oneshot;
use hapax_core::store::parts::Admission;
use hapax_core::store::{BoxFuture, Capabilities, Page, Reaped, Snapshot, Stamp, Swap, Swapped};
use hapax_core::{
    Entropy, Inspect, Key, KeyRing, Namespace, OnUnknown, OperationId, Scope, Sealer, Secret,
    Store, StoreError, Timestamp,
};

use crate::backing::{Backing, FileBacking, sync_directory};
use crate::backup;
use crate::batch::{RawSwapped, SwapJob};
use crate::blocks::Damages;
use crate::budget::MemoryBudget;
use crate::clock::DatabaseClock;
use crate::database;
use crate::error::{FileStoreError, OpenError, check_place};
use crate::files::{absolute, with_suffix};
use crate::job::{Job, WriteJob};
use crate::lock_file::{self, LockFile, LockOwner};
use crate::options::{FileOptions, SecretSource};
use crate::pages::RawPage;
use crate::reader::{self, RawSnapshot, ReadJob};
use crate::record::{Epoch, SMALL, SealedRead, SealedRecord};
use crate::salvage;
use crate::scrub;
use crate::secret_file;
use crate::shared::Shared;
use crate::writer::{Writer, WriterExit};

/// Number of threads that read. Reads are rare: a claim expects an absent record, and its swap
/// returns the present one.
const READERS: usize = 2;

/// A durable store in one file, for one process.
///
/// Dropping it, like [`close`](Self::close), accepts no more requests and finishes those that wait;
/// only `close` reports when the file is closed.
pub struct FileStore {
    pub(crate) shared: Arc<Shared>,
    backing: Arc<dyn Backing>,
    pub(crate) sealer: Sealer,
    reading: MemoryBudget,
    ring: Option<KeyRing>,
    pub(crate) entropy: Arc<dyn Entropy>,
    lock: Option<Arc<LockFile>>,
    path: PathBuf,
    /// Time at which the database was created, in microseconds since 1970.
    made: u64,
    is_new: bool,
    /// True if it is not the expected database, and no operator confirmed it.
    replaced: AtomicBool,
}

/// Counters of a store since it was opened, and its current load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileStats {
    /// Transactions made durable.
    pub commits: u64,
    /// Swaps answered, conflicts included.
    pub swaps: u64,
    /// Records reaped.
    pub removed: u64,
    /// Times that the database was reopened after a write that failed.
    pub reopened: u64,
    /// Damaged blocks of the file that were read.
    pub damaged: usize,
    /// Requests that wait for the disk.
    pub queued: usize,
    /// Length of the file in bytes, if known.
    pub file_bytes: Option<u64>,
    /// Free bytes on its disk, if known.
    pub free_bytes: Option<u64>,
}

impl FileStore {
    /// Opens the database, or creates it with a warning in the log: takes the lock, reads or creates the secret, recovers the
    /// file after a crash, and begins a new epoch, in which every earlier lease has lapsed.
    ///
    /// Blocks on the disk, after a crash for seconds if the database is large: call it where
    /// blocking is allowed.
    ///
    /// # Errors
    /// [`OpenError`]; [`OpenError::InUse`] if another process has the database open,
    /// [`OpenError::Missing`] if there is none and [`FileOptions::must_exist`] is set.
    pub fn open(options: FileOptions) -> Result<Self, OpenError> {
        let path = options.path.clone();
        let backing = FileBacking::existing(&path);
        let exists = || {
            let exists = backing.exists().map_err(|error| OpenError::io(&path, error))?;
            if options.must_exist && !exists {
                return Err(OpenError::Missing { path: absolute(&path) });
            }
            Ok(exists)
        };
        // Also before the lock, whose file would be made.
        exists()?;
        check_place(&path)?;
        let lock = LockFile::take(with_suffix(&path, ".lock"), options.admin)?;
        let exists = exists()?;
        let ring = match &options.secret {
            SecretSource::File(file) => {
                Some(secret_file::read_or_make(file, exists, &*options.entropy)?)
            }
            given => given.ring(),
        };
        if !exists {
            let naming = ring.as_ref().and_then(KeyRing::naming);
            create(&path, naming, options.cache_bytes, options.clock.now())?;
        }
        let mut store = Self::start(Arc::new(backing), ring, Some(Arc::new(lock)), options)?;
        store.is_new = !exists;
        store.log_opened();
        Ok(store)
    }

    fn log_opened(&self) {
        let (path, created) = (absolute(&self.path), self.created());
        if self.is_new {
            tracing::warn!(
                path = %path.display(),
                %created,
                "a new store was created: it has no records, so a request that another store has \
                 recorded executes again"
            );
        } else {
            tracing::info!(path = %path.display(), %created, "the store is open");
        }
    }

    /// Opens a database that is not in a file, for tests: without a lock, and without a file for
    /// the secret.
    ///
    /// # Errors
    /// [`OpenError`].
    #[doc(hidden)]
    pub fn open_on(backing: Arc<dyn Backing>, options: FileOptions) -> Result<Self, OpenError> {
        let ring = options.secret.ring();
        Self::start(backing, ring, None, options)
    }

    /// Returns the secret that names records.
    #[must_use]
    pub fn secret(&self) -> Option<&Secret> {
        self.ring.as_ref().and_then(KeyRing::naming)
    }

    /// Returns the identity of this database: the time of its creation, in microseconds. A copy of
    /// the file has the same one.
    #[must_use]
    pub fn identity(&self) -> String {
        self.made.to_string()
    }

    /// Returns the time at which this database was created, by the clock of the process that created it.
    #[must_use]
    pub const fn created(&self) -> Timestamp {
        Timestamp::from_micros(self.made)
    }

    /// Returns whether this opening created the database.
    #[must_use]
    pub const fn is_new(&self) -> bool {
        self.is_new
    }

    /// Compares the [`identity`](Self::identity) with `known`, the one of the database that was
    /// used before. If they differ, operations of the earlier database would execute again: new
    /// keys are then rejected under `block` and `reconcile` ([`FileStoreError::Replaced`]), with an
    /// error in the log, until [`confirm`](Self::confirm). Returns whether they are equal.
    ///
    /// Call it before the first claim. A file cannot be emptied while it is open: the store
    /// continues with the file that it opened, and does not open an empty one in its place.
    pub fn expect(&self, known: &str) -> bool {
        let same = known == self.identity();
        if !same && !self.replaced.swap(true, Ordering::Relaxed) {
            tracing::error!(
                path = %self.path.display(),
                "expected the file that was used before, found another one: operations of the former \
                 file execute again under reexecute; under block and reconcile new keys are rejected until an operator runs \
                 `hapax store confirm`"
            );
        }
        same
    }

    /// Returns whether the file is not the [expected](Self::expect) one, and no operator confirmed
    /// it.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Accepts the file as it is: operations of the earlier one may execute again. This applies to
    /// this process; later ones [expect](Self::expect) the identity of this file.
    pub fn confirm(&self) {
        self.replaced.store(false, Ordering::Relaxed);
    }

    /// Returns whether a swap requires the expected file: one that begins an execution which must
    /// not be a second one.
    fn rejects(&self, swap: &Swap) -> bool {
        swap.draft.stamp == Stamp::NextFence
            && swap.draft.record.terms.on_unknown != OnUnknown::Reexecute
            && self.is_replaced()
    }

    /// Returns the path of the database.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the process that has the database at `path` open; `None` if there is none.
    ///
    /// # Errors
    /// Any error of reading the lock file.
    pub fn lock_owner(path: impl AsRef<Path>) -> io::Result<Option<LockOwner>> {
        lock_file::lock_owner(&with_suffix(path.as_ref(), ".lock"))
    }

    /// Returns the free bytes where `path` is or would be; `None` if unknown.
    ///
    /// # Errors
    /// Any error of reading the free space, such as a missing folder.
    pub fn free_bytes(path: impl AsRef<Path>) -> io::Result<Option<u64>> {
        FileBacking::existing(path.as_ref()).available()
    }

    /// Writes the operators' address of this process into the lock file, or removes it.
    ///
    /// # Errors
    /// Any error of writing the lock file.
    pub fn set_admin(&self, admin: Option<SocketAddr>) -> io::Result<()> {
        self.lock.as_ref().map_or(Ok(()), |lock| lock.set_admin(admin))
    }

    /// Returns the counters and the current load.
    #[must_use]
    pub fn stats(&self) -> FileStats {
        let counters = &self.shared.counters;
        FileStats {
            commits: counters.commits.load(Ordering::Relaxed),
            swaps: counters.swaps.load(Ordering::Relaxed),
            removed: counters.removed.load(Ordering::Relaxed),
            reopened: counters.reopened.load(Ordering::Relaxed),
            damaged: self.shared.damages.count(),
            queued: self.shared.jobs.len(),
            file_bytes: self.backing.length().ok(),
            free_bytes: self.backing.available().ok().flatten(),
        }
    }

    /// Writes a consistent copy of the database, without its secret, to a new file at `to`, while
    /// the store continues. Returns the number of its records. [`restore`](crate::restore) creates
    /// a database from it. If the future is dropped, the copy is still made.
    ///
    /// # Errors
    /// [`OpenError`]: there is a file at `to`, a block is damaged, or it cannot be written.
    pub async fn backup(&self, to: &Path) -> Result<u64, OpenError> {
        let (reply, answer) = oneshot::channel();
        let path = to.to_owned();
        self.spawn("hapax-file-backup", move |shared| {
            reply.send(backup::backup_open(&shared, &path)).ok();
        })
        .map_err(|error| OpenError::io(to, error))?;
        let interrupted = |_| Err(OpenError::io(to, io::Error::other(FileStoreError::Interrupted)));
        answer.await.unwrap_or_else(interrupted)
    }

    /// Accepts no more requests, finishes those that wait, and closes the file cleanly. Resolves
    /// when another process can open it. If the future is dropped, all of that still happens.
    pub fn close(&self) -> impl Future<Output = ()> + Send + 'static {
        self.shared.close();
        let closed = self.shared.closed();
        // The drop of the sender at the end is the notification.
        async move { closed.await.unwrap_or_default() }
    }

    fn start(
        backing: Arc<dyn Backing>,
        ring: Option<KeyRing>,
        lock: Option<Arc<LockFile>>,
        options: FileOptions,
    ) -> Result<Self, OpenError> {
        let damages = Damages::default();
        if options.verify {
            salvage::verify(&*backing, &options.path)?;
        }
        let mut database = database::open(&*backing, options.cache_bytes, &damages)
            .map_err(OpenError::database)?;
        let made_at = options.clock.now();
        let check = check(ring.as_ref().and_then(KeyRing::naming));
        let adopted = match database::adopt(&database, &check, made_at) {
            // Recording requests in progress is worth more than the writes of an opening, but without
            // the opening nothing can be recorded.
            Err(error) if error.is_full() && backing.release_reserve().unwrap_or(false) => {
                database::close(Some(database));
                database = database::open(&*backing, options.cache_bytes, &damages)
                    .map_err(OpenError::database)?;
                database::adopt(&database, &check, made_at)?
            }
            Ok(adopted) => adopted,
            Err(error) => {
                database::close(Some(database));
                return Err(error);
            }
        };
        let reserve = backing.reserve();
        if let Err(error) = &reserve {
            tracing::warn!(
                %error,
                "the reserve of 16 MiB (PATH.reserve) cannot be made: free disk space, or requests \
                 in progress cannot be recorded when the disk is full"
            );
        }
        let reserve = reserve.is_ok();
        let clock = DatabaseClock::new(options.clock, adopted.mark);
        let epoch = Epoch { number: adopted.epoch, opened_at: clock.now() };
        let shared = Arc::new(Shared::new(database, options.queue, clock, epoch, damages));
        let threads = |error| OpenError::io(&options.path, error);
        // Dropped on an early return, which ends the threads that were started.
        let store = Self {
            sealer: ring.as_ref().map_or_else(Sealer::checksum, KeyRing::sealer),
            reading: MemoryBudget::new(options.reading_bytes),
            shared,
            backing,
            ring,
            entropy: options.entropy,
            lock,
            path: options.path.clone(),
            made: adopted.made,
            is_new: false,
            replaced: AtomicBool::new(false),
        };
        let mut readers = (0..READERS)
            .map(|_| store.spawn("hapax-file-read", |shared| reader::run(&shared)))
            .collect::<io::Result<Vec<_>>>()
            .map_err(threads)?;
        let round = scrub::begin(&store.shared, options.check_for);
        let scrub = store.spawn("hapax-file-scrub", move |shared| scrub::run(&shared, round));
        readers.push(scrub.map_err(threads)?);
        let writer = Writer {
            shared: Arc::clone(&store.shared),
            backing: Arc::clone(&store.backing),
            cache_bytes: options.cache_bytes,
            min_free_bytes: options.min_free_bytes,
            quick_recovery_above: options.quick_recovery_above,
            floor: adopted.floor,
            mark: adopted.mark,
            no_mark: false,
            readers,
            lock: store.lock.clone(),
            pending: Default::default(),
            reaps: Default::default(),
            reserve,
            full_since: None,
            no_index: false,
        };
        store
            .spawn("hapax-file-write", |shared| writer.run(&WriterExit(shared)))
            .map_err(threads)?;
        Ok(store)
    }

    fn spawn(
        &self,
        name: &str,
        run: impl FnOnce(Arc<Shared>) + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        std::thread::Builder::new().name(name.into()).spawn(move || run(shared))
    }

    /// Opens a record once there is memory for it. A large record is read again, and may be another
    /// one by then. That is correct: a snapshot may be of any moment between call and answer, also
    /// a conflict's, because a write id that was absent when the swap was applied is never written
    /// later.
    async fn opened(
        &self,
        key: &OperationId,
        mut seen: RawSnapshot,
    ) -> Result<Snapshot, StoreError> {
        let mut taken = None;
        loop {
            let RawSnapshot { now, stored } = seen;
            let bytes = match stored.transpose()? {
                None => return Ok(Snapshot { now, stored: None }),
                Some(SealedRead::Record(stored)) => {
                    let stored = stored.open(key, now, self.shared.epoch, &self.sealer)?;
                    return Ok(Snapshot { now, stored: Some(stored) });
                }
                Some(SealedRead::Large(bytes)) => bytes,
            };
            // Releases the smaller reservation before it waits for a larger one.
            drop(taken.take());
            // A swap that found this record did nothing.
            let Some(reservation) = self.reading.reserve(bytes).await else {
                return Err(StoreError::unavailable(FileStoreError::ReadersFull));
            };
            let room = reservation.bytes();
            taken = Some(reservation);
            seen = self.read(|reply| ReadJob::Load { key: *key, room, reply }).await?;
        }
    }

    pub(crate) async fn read<T>(
        &self,
        job: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> ReadJob,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.shared
            .reads
            .push(job(reply), 0, Admission::Any)
            .map_err(|refused| StoreError::unavailable(FileStoreError::from(refused)))?;
        answer.await.unwrap_or_else(|_| Err(StoreError::unavailable(FileStoreError::Interrupted)))
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore")
            .field("path", &self.path)
            .field("epoch", &self.shared.epoch.number)
            .field("sealer", &self.sealer)
            .finish_non_exhaustive()
    }
}

// Cancellation: each method queues a job and then awaits the answer. If it is dropped before the
// first, nothing happened; if after, the thread executes the whole job and drops the answer. There
// is no other await.
impl Store for FileStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<Swapped, StoreError>> {
        Box::pin(async move {
            if self.rejects(&swap) {
                // An existing record answers the claim. A record that another claim writes
                // meanwhile is not seen, and this claim is rejected: nothing executes.
                let seen = self.load(&swap.id).await?;
                return match seen.stored {
                    Some(_) => Ok(Swapped::Conflict(seen)),
                    None => Err(StoreError::unavailable(FileStoreError::Replaced)),
                };
            }
            let Swap { id: key, expected, write_id, draft } = swap;
            // Sealed here and not on the writer's thread, so that many records are sealed in
            // parallel.
            let sealed = self
                .sealer
                .seal(&key, write_id, &draft.record, &*self.entropy)
                .map_err(StoreError::unavailable)?;
            let (reply, answer) = oneshot::channel();
            let bytes = sealed.len();
            let grace = draft.record.terms.lease;
            let (stamp, lease, keep) = (draft.stamp, draft.lease, draft.keep);
            let job = SwapJob { key, expected, write_id, stamp, lease, keep, grace, sealed, reply };
            let admission = Admission::of(expected.as_ref());
            self.shared
                .jobs
                .push(Job::Write(WriteJob::Swap(job)), bytes, admission)
                .map_err(|refused| StoreError::unavailable(FileStoreError::from(refused)))?;
            // Without an answer the thread has ended, before or after the commit.
            let answer = answer
                .await
                .unwrap_or_else(|_| Err(StoreError::ambiguous(FileStoreError::Interrupted)))?;
            Ok(match answer {
                RawSwapped::Stored(stamped) => Swapped::Stored(stamped),
                RawSwapped::Conflict { now, stored } => Swapped::Conflict(
                    self.opened(&key, RawSnapshot { now, stored: stored.map(Ok) }).await?,
                ),
            })
        })
    }

    fn load<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move {
            let seen = self.read(|reply| ReadJob::Load { key: *key, room: SMALL, reply }).await?;
            self.opened(key, seen).await
        })
    }

    fn reap(&self, limit: NonZeroU32) -> BoxFuture<'_, Result<Reaped, StoreError>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let job = Job::Reap { limit: limit.get(), reply };
            self.shared
                .jobs
                .push(job, 0, Admission::NewKey)
                .map_err(|refused| StoreError::unavailable(FileStoreError::from(refused)))?;
            answer.await.unwrap_or_else(|_| Err(StoreError::ambiguous(FileStoreError::Interrupted)))
        })
    }

    fn capabilities(&self) -> Capabilities<'_> {
        let secrets = self.ring.as_ref();
        Capabilities { secrets, notify: None, shared: false, schedule: Some(self) }
    }
}

impl Inspect for FileStore {
    fn page(
        &self,
        after: Option<OperationId>,
        limit: NonZeroU32,
    ) -> BoxFuture<'_, Result<Page, StoreError>> {
        Box::pin(async move {
            let limit = limit.get();
            let RawPage { now, found, more } =
                self.read(|reply| ReadJob::Page { after, limit, reply }).await?;
            let records = found.into_iter().map(|(key, stored)| {
                let key = OperationId::from_bytes(key);
                let open =
                    |stored: SealedRecord| stored.open(&key, now, self.shared.epoch, &self.sealer);
                (key, stored.and_then(open))
            });
            Ok(Page { now, records: records.collect(), more })
        })
    }
}

/// Creates an empty database under another name and renames it: the engine cannot open a file whose
/// creation was interrupted, and a file with the final name is complete. The caller has the lock.
fn create(
    path: &Path,
    secret: Option<&Secret>,
    cache_bytes: usize,
    now: Timestamp,
) -> Result<(), OpenError> {
    let unfinished = with_suffix(path, ".new");
    let failed = |error| OpenError::io(&unfinished, error);
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let database = database::open(&FileBacking::new(&unfinished), cache_bytes, &Damages::default())
        .map_err(OpenError::database)?;
    database::adopt(&database, &check(secret), now)?;
    drop(database);
    File::open(&unfinished).and_then(|file| file.sync_all()).map_err(failed)?;
    std::fs::rename(&unfinished, path).map_err(failed)?;
    sync_directory(path).map_err(|error| OpenError::io(path, error))
}

/// Returns a value that differs for each secret and does not reveal it.
pub(crate) fn check(secret: Option<&Secret>) -> Vec<u8> {
    let Some(secret) = secret else { return Vec::new() };
    let scope = Scope::of([("hapax-file", "secret check")]);
    // The shortest key: any would do, within a scope that no caller has.
    let key = Key::new("-").ok();
    key.map(|key| {
        OperationId::derive(Some(secret), &Namespace::default(), &scope, &key).as_bytes().to_vec()
    })
    .unwrap_or_default()
}
