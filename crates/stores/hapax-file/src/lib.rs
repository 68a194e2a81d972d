//! Hapax in one file: a durable store for one process, with nothing to set up.
//!
//! 1. What was acknowledged is on disk: claims and outcomes are synced before they are answered.
//!    Requests that wait while one commit is under way share the next one.
//! 2. One process at a time. A second one hears who has the file, [`OpenError::InUse`].
//! 3. Records are named and sealed under a secret that is made beside the database. Lose it, and
//!    the database is lost; it is never replaced by a new one silently.
//! 4. Whoever opens the file begins an epoch. The process that had it before is gone, so every
//!    lease it granted has lapsed, and its keys can be taken over at once.
//! 5. Below [`FileOptions::min_free_bytes`] new keys are rejected, and what is under way is still
//!    recorded. When the disk is full all the same, a reserve of 16 MiB is given up for that; it is
//!    made again once there is room. Replays need no room. When a write fails, the database is
//!    opened again by itself, after a pause that doubles from 0.1 to 5 seconds where that fails.
//!
//! | file | what | lost |
//! | --- | --- | --- |
//! | `hapax.db` | the records | everything is forgotten |
//! | `hapax.db.secret` | 64 hexadecimal digits, mode 0600 | the database does not open |
//! | `hapax.db.lock` | who has it open | made anew |
//! | `hapax.db.reserve` | room for a full disk, 16 MiB | made anew |
//!
//! # When it forgets
//! It does not, as long as the disk keeps what it says it has synced. Every block of the file has a
//! checksum that every read compares. A key whose record, or whose place in the tree, is in a
//! damaged block is an error, never taken for absent; all other keys are as before. A background
//! thread reads the records, 8 MiB a second, once after opening and then once a day, so that damage
//! shows in the log and in [`FileStats::damaged`] before a request needs it. A file that is
//! damaged where all of it hangs, or anywhere when a crash makes opening walk it, does not open:
//! [`OpenError::Damaged`]. [`salvage`] writes what is whole to a new file.
//! A new file in place of a lost one knows nothing of what that held. A process that remembers the
//! identity of the file notices it ([`FileStore::expect`]).
//! A copy of the file taken with `cp` while a process has it open does not open. Use
//! [`FileStore::backup`], [`backup_closed`] once the store is closed, or a snapshot of the file
//! system. [`restore`] makes a database of a backup, and forgets what came after it.
//!
//! # The clock
//! Leases, retention and fences go by the clock of the process ([`FileOptions::clock`]). A step
//! forward lapses leases and ends retentions early; what this process itself is executing stays in
//! flight all the same, because its engine knows of it. A step back makes both last longer, and does
//! no other harm: between two openings leases do not count at all, and fences grow regardless,
//! because a cell's next fence is larger than its last one and a new cell's larger than that of any
//! cell that was ever reaped.
//!
//! ```
//! use hapax_file::{FileStore, FileOptions};
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("hapax.db");
//! let store = FileStore::open(FileOptions::new(&path))?;
//! assert!(store.secret().is_some());
//! let second = FileStore::open(FileOptions::new(&path));
//! assert!(second.unwrap_err().to_string().contains("is held by process"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backing;
mod backup;
mod batch;
mod blocks;
mod budget;
mod database;
mod error;
mod files;
mod lock_file;
mod options;
mod queue;
mod reader;
mod record;
mod salvage;
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
