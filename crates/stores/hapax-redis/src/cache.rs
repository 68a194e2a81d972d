//! A cache on a Redis server, for entries that are also stored elsewhere.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::OperationId;
use hapax_core::store::parts::Admission;
use redis::{Cmd, Value};

use crate::admission::RequestLimit;
use crate::error::{RedisConnectError, RedisStoreError, RequestFailure};
use crate::key_names::KeyNames;
use crate::link::ConnectionHandle;
use crate::notify::Watchers;
use crate::options::RedisOptions;
use crate::reconnect::Reconnector;

/// A map from operation id to bytes, each entry with a time to live, on a server that may lose
/// them: it may evict, and need not persist. Names begin with the prefix and `cache:`, so they
/// differ from the names of a store.
///
/// Its user needs `+hello +info +get +set +del +ping` on those keys, and on a cluster
/// `+cluster|slots +asking`.
pub struct RedisCache {
    link: ConnectionHandle,
    names: KeyNames,
    limit: RequestLimit,
}

impl RedisCache {
    /// Connects, and maintains the connection as a store does. Secrets in the options are ignored:
    /// entries are stored as given.
    ///
    /// # Errors
    /// [`RedisConnectError`]; [`RedisConnectError::Unfit`] where the server is a replica or too
    /// old.
    pub async fn connect(options: RedisOptions) -> Result<Self, RedisConnectError> {
        let options = options.allow_eviction();
        let url = options.target()?;
        let names = KeyNames::new(&format!("{}cache:", options.prefix));
        let limit = RequestLimit::new(options.queue);
        let watchers = Arc::new(Watchers::default());
        let keeper = Reconnector::new(url, options, names.clone(), &watchers, None);
        let link = ConnectionHandle::open(keeper).await?;
        Ok(Self { link, names, limit })
    }

    /// Returns the entry of `key`, if it is still there.
    ///
    /// # Errors
    /// [`RedisStoreError`]; the entry may exist.
    pub async fn get(&self, key: &OperationId) -> Result<Option<Bytes>, RedisStoreError> {
        match self.send(0, redis::cmd("GET").arg(self.names.name(key))).await? {
            Value::Nil => Ok(None),
            Value::BulkString(bytes) => Ok(Some(bytes.into())),
            _ => Err(RedisStoreError::Unreadable),
        }
    }

    /// Puts `bytes` under `key` for `ttl`, in whole milliseconds and at least one.
    ///
    /// # Errors
    /// [`RedisStoreError`]; the entry may have been put.
    pub async fn put(
        &self,
        key: &OperationId,
        bytes: &[u8],
        ttl: Duration,
    ) -> Result<(), RedisStoreError> {
        let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).clamp(1, u64::MAX >> 12);
        let mut set = redis::cmd("SET");
        set.arg(self.names.name(key)).arg(bytes).arg("PX").arg(millis);
        self.send(bytes.len(), &set).await.map(drop)
    }

    /// Removes the entry of `key`.
    ///
    /// # Errors
    /// [`RedisStoreError`]; the entry may still exist.
    pub async fn remove(&self, key: &OperationId) -> Result<(), RedisStoreError> {
        self.send(0, redis::cmd("DEL").arg(self.names.name(key))).await.map(drop)
    }

    async fn send(&self, bytes: usize, command: &Cmd) -> Result<Value, RedisStoreError> {
        let full = |_| RedisStoreError::QueueFull;
        let _inside = self.limit.enter(bytes, Admission::Any).map_err(full)?;
        self.link.send(command).await.map_err(|failure| match failure {
            RequestFailure::Nothing(error) | RequestFailure::Unknown(error) => error,
            RequestFailure::Foreign => RedisStoreError::ForeignValue,
        })
    }
}

impl fmt::Debug for RedisCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisCache")
            .field("link", &self.link)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}
