//! Interface of stores that a program opens by a URL.
//!
//! A [`StoreDriver`] opens stores of one kind, checks their configuration and diagnoses their
//! servers; the [`DrivenStore`] that it opens is a store with an identity and counters. The gateway
//! has drivers for Redis and PostgreSQL, and takes further ones.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::diagnose::Finding;
use crate::secret::KeyRing;
use crate::store::{BoxFuture, Inspect};

/// Opens stores of one kind.
pub trait StoreDriver: fmt::Debug + Send + Sync + 'static {
    /// Returns the URL schemes of these stores, such as `redis` and `rediss`.
    fn schemes(&self) -> &'static [&'static str];

    /// Checks the options without a connection.
    ///
    /// # Errors
    /// [`StoreDriverError`] of the kind [`Options`](StoreDriverErrorKind::Options).
    fn check(&self, options: &DriverOptions) -> Result<(), StoreDriverError>;

    /// Opens the store.
    ///
    /// # Errors
    /// [`StoreDriverError`].
    fn open(
        &self,
        options: DriverOptions,
    ) -> BoxFuture<'_, Result<Arc<dyn DrivenStore>, StoreDriverError>>;

    /// Checks the server for settings that break a guarantee, also if the store would not open.
    /// Changes nothing.
    ///
    /// # Errors
    /// [`StoreDriverError`] if the server cannot be checked.
    fn diagnose(
        &self,
        options: DriverOptions,
    ) -> BoxFuture<'_, Result<Vec<Finding>, StoreDriverError>>;
}

/// Options with which a [`StoreDriver`] opens a store.
#[derive(Clone)]
pub struct DriverOptions {
    /// The URL, with its secrets.
    pub url: String,
    /// The secrets that name keys and seal records.
    pub secrets: Option<KeyRing>,
    /// The expected identity: [`DrivenStore::identity`] of an earlier process.
    pub identity: Option<String>,
    /// Limit of the requests that wait, in bytes of records.
    pub queue_bytes: usize,
    /// The timeout of a request.
    pub timeout: Duration,
    /// Whether missing parts are created, such as tables. Without them a store is read and resolved,
    /// and claims nothing.
    pub make: bool,
    /// Whether a store without an identity, which no process has used, is rejected with
    /// [`Missing`](StoreDriverErrorKind::Missing). Nothing is created; older tables are migrated.
    pub must_exist: bool,
}

/// Leaves out the URL, which may contain a password.
impl fmt::Debug for DriverOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverOptions")
            .field("identity", &self.identity)
            .field("queue_bytes", &self.queue_bytes)
            .field("timeout", &self.timeout)
            .field("make", &self.make)
            .field("must_exist", &self.must_exist)
            .finish_non_exhaustive()
    }
}

/// A store that a [`StoreDriver`] opened.
pub trait DrivenStore: Inspect {
    /// Returns a text that distinguishes the store from others at the same URL, as far as it can be
    /// known; for the names of cache entries.
    fn cache_name(&self) -> String;

    /// Returns the identity of the records, which is lost with them; `None` before it is known.
    fn identity(&self) -> Option<String>;

    /// Returns the time at which the store was created, by its own clock; `None` if it is not known, as
    /// for a store of an earlier release.
    fn created(&self) -> Option<Timestamp> {
        None
    }

    /// Returns whether the store was emptied or replaced, and no operator confirmed it.
    fn is_replaced(&self) -> bool;

    /// Accepts the store as it is, for every process that uses it.
    fn confirm(&self) -> BoxFuture<'_, Result<(), Box<dyn Error + Send + Sync>>>;

    /// Returns the counters and the current load, for metrics.
    fn counts(&self) -> Vec<StoreCount>;

    /// Writes the queue and closes the store, so that another process can open it at once.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// A counter or a load of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoreCount {
    /// The name within `hapax_store_…`. A name that ends in `_total` is a counter.
    pub name: &'static str,
    /// The help text.
    pub help: &'static str,
    /// The value.
    pub value: u64,
}

impl From<(&'static str, &'static str, u64)> for StoreCount {
    fn from((name, help, value): (&'static str, &'static str, u64)) -> Self {
        Self { name, help, value }
    }
}

/// Errors of a [`StoreDriver`].
#[derive(Debug)]
pub struct StoreDriverError {
    /// The kind.
    pub kind: StoreDriverErrorKind,
    /// The cause.
    pub source: Box<dyn Error + Send + Sync>,
}

/// Kinds of [`StoreDriverError`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StoreDriverErrorKind {
    /// The URL or an option is invalid.
    Options,
    /// The server was not reached or is starting up: another attempt may succeed.
    Unreachable,
    /// The server is a standby, as during a failover: another attempt may succeed.
    /// [`StoreDriver::diagnose`] finds it too.
    Standby,
    /// Other processes use the store with another secret.
    OtherSecret,
    /// The store must exist ([`DriverOptions::must_exist`]), and there is none.
    Missing,
    /// The server cannot give the guarantees, or lacks parts. [`StoreDriver::diagnose`] finds it too.
    Unfit,
    /// Any other error.
    Other,
}

impl StoreDriverError {
    /// Creates an error.
    pub fn new(
        kind: StoreDriverErrorKind,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { kind, source: source.into() }
    }

    /// Returns whether another attempt may succeed without a change of configuration.
    #[must_use]
    pub const fn is_unreachable(&self) -> bool {
        matches!(self.kind, StoreDriverErrorKind::Unreachable | StoreDriverErrorKind::Standby)
    }
}

impl fmt::Display for StoreDriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl Error for StoreDriverError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.source()
    }
}
