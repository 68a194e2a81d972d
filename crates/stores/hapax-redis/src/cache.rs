//! A place for what can be looked up elsewhere.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::OperationId;
use redis::{Cmd, Value};

use crate::admission::{Admission, RequestLimit};
use crate::error::{RedisConnectError, RedisStoreError, RequestFailure};
use crate::key_names::KeyNames;
use crate::link::ConnectionHandle;
use crate::notify::Watchers;
use crate::options::RedisOptions;
use crate::reconnect::Reconnector;

/// Bytes by store key, each for a time, on a server that may forget: it may evict, and need not
/// persist. Names begin with the prefix and `cache:`, so that a store's are others.
///
/// Its user needs `+hello +info +get +set +del +ping` on those keys, and on a cluster
/// `+cluster|slots +asking`.
pub struct RedisCache {
    link: ConnectionHandle,
    names: KeyNames,
    limit: RequestLimit,
}

impl RedisCache {
    /// Connects, and keeps the connection as a store does. Secrets among the options are of no
    /// account: what is put here is stored as it is.
    ///
    /// # Errors
    /// [`RedisConnectError`]; [`RedisConnectError::Unfit`] where the server is a replica or too old.
    pub async fn connect(options: RedisOptions) -> Result<Self, RedisConnectError> {
        let options = options.allow_eviction();
        let url = options.target()?;
        let names = KeyNames::new(&format!("{}cache:", options.prefix));
        let limit = RequestLimit::new(options.queue_items, options.queue_bytes);
        let watchers = Arc::new(Watchers::default());
        let keeper = Reconnector::new(url, options, names.clone(), &watchers, None);
        let link = ConnectionHandle::open(keeper).await?;
        Ok(Self { link, names, limit })
    }

    /// What was put under `key`, if it is still there.
    ///
    /// # Errors
    /// [`RedisStoreError`]; it may be there.
    pub async fn get(&self, key: &OperationId) -> Result<Option<Bytes>, RedisStoreError> {
        match self.send(0, redis::cmd("GET").arg(self.names.name(key))).await? {
            Value::Nil => Ok(None),
            Value::BulkString(bytes) => Ok(Some(bytes.into())),
            _ => Err(RedisStoreError::Unreadable),
        }
    }

    /// Puts `bytes` under `key`, for so long, to the next millisecond.
    ///
    /// # Errors
    /// [`RedisStoreError`]; it may be there now.
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

    /// Forgets `key`.
    ///
    /// # Errors
    /// [`RedisStoreError`]; it may still be there.
    pub async fn remove(&self, key: &OperationId) -> Result<(), RedisStoreError> {
        self.send(0, redis::cmd("DEL").arg(self.names.name(key))).await.map(drop)
    }

    async fn send(&self, bytes: usize, command: &Cmd) -> Result<Value, RedisStoreError> {
        let full = |_| RedisStoreError::QueueFull;
        let _inside = self.limit.enter(bytes, Admission::Any).map_err(full)?;
        self.link.send(command).await.map_err(|failure| match failure {
            RequestFailure::Nothing(error) | RequestFailure::Unknown(error) => error,
            RequestFailure::Foreign => RedisStoreError::NoCell,
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
