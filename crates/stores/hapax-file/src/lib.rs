//! Hapax in one file: a durable store for one process, with nothing to set up.
//!
//! 1. Acknowledged writes are on disk: claims and outcomes are synced before they are answered.
//!    Requests that wait while a commit is in progress share the next one.
//! 2. One process at a time. A second one is rejected with the process that has the file,
//!    [`OpenError::InUse`]. Replicas that have a file each execute a key once each, and nothing detects
//!    that: they need a store on a server.
//! 3. Records are named and sealed under a secret that is created next to the database. Without the
//!    secret the database is lost; a missing secret is never replaced silently.
//! 4. Opening the file begins an epoch. The process that had it before has ended, so all leases of
//!    that process have lapsed, and their keys can be taken over at once.
//! 5. Below [`FileOptions::min_free_bytes`] new keys are rejected, and requests in progress are still
//!    recorded. When the disk is full nevertheless, a reserve of 16 MiB is released for them; it is
//!    made again once there is space. Replays need no space. After a write that failed, the
//!    database is reopened automatically, with a pause between attempts that doubles from 0.1 to 5
//!    seconds.
//!
//! | file | content | if lost |
//! | --- | --- | --- |
//! | `hapax.db` | the records and the schedule | all of them are lost |
//! | `hapax.db.secret` | 64 hexadecimal digits, mode 0600 | the database does not open |
//! | `hapax.db.lock` | the process that has it open | created again |
//! | `hapax.db.reserve` | space for a full disk, 16 MiB | created again |
//!
//! # When it loses records
//! It loses none, as long as the disk keeps what it reported as synced. Every block of the file has
//! a checksum that every read compares. A key whose record, or whose path in the tree, is in a
//! damaged block is an error, never absent; all other keys work as before. A background thread
//! reads the records and the schedule, 8 MiB a second, once after opening and then once a day, so that damage is
//! visible in the log and in [`FileStats::damaged`] before a request needs the record. A file that
//! is damaged in a block on which everything depends, or in any block when a crash makes opening
//! walk the file, does not open: [`OpenError::Damaged`]. [`salvage`] writes the intact records to a
//! new file.
//!
//! Entries of the schedule are in the same file: they are synced, backed up and salvaged with the
//! records. An entry in a damaged block is an error in the reply, and those beside it are returned.
//!
//! A new file in place of a lost one has none of its records. A process that remembers the identity
//! of the file notices it ([`FileStore::expect`]).
//!
//! A copy of the file taken with `cp` while a process has it open does not open. Use
//! [`FileStore::backup`], [`backup_closed`] once the store is closed, or a snapshot of the file
//! system. [`restore`] creates a database from a backup, without anything written later.
//!
//! # The clock
//! Leases, retention and fences use the clock of the process ([`FileOptions::clock`]). A step
//! forward lapses leases and ends retentions early; executions of this process stay in flight
//! nevertheless, because its engine tracks them.
//!
//! The clock of the store does not step back, also between two openings: it never shows a time before the
//! latest one that it has written. While the process's clock is behind that by up to a minute, it stands
//! still. If it is further behind, it continues from the latest time, and opening logs a warning with both
//! times. So a key is never younger than the file shows, after a boot with a wrong clock too. Set the clock
//! of the machine then. If it was the *latest* time that was wrong, because the clock was ahead once,
//! nothing is to be done: leases, retentions, and pauses of the schedule go on from there. What ended
//! early by that stays ended, and times that the store reports stay ahead, until the clock of the
//! machine has passed them.
//!
//! Fences grow regardless: a record's next fence is larger than its last one, and a new record's is larger
//! than that of any record that was ever reaped.
//!
//! ```
//! use hapax_file::{FileStore, FileOptions};
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("hapax.db");
//! let store = FileStore::open(FileOptions::new(&path))?;
//! assert!(store.secret().is_some());
//! let second = FileStore::open(FileOptions::new(&path));
//! assert!(second.unwrap_err().to_string().contains("is open in process"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backing;
mod backup;
mod batch;
mod batch_context;
mod blocks;
mod budget;
mod clock;
mod database;
mod driver;
mod error;
mod files;
mod job;
mod lock_file;
mod options;
mod pages;
mod pause;
mod queue;
mod reader;
mod record;
mod salvage;
mod schedule;
mod scrub;
mod secret_file;
mod shared;
mod store;
mod writer;

#[doc(hidden)]
pub use backing::{Backing, Disk};
pub use backup::{RestoreReport, backup_closed, restore};
pub use error::{FileStoreError, OpenError};
pub use lock_file::LockOwner;
pub use options::{FileOptions, SecretSource};
pub use salvage::{SalvageReport, examine, salvage};
pub use store::{FileStats, FileStore};
