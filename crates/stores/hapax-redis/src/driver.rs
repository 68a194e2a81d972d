//! Redis as a store that a program opens by its URL.

use std::error::Error;
use std::sync::Arc;

use hapax_core::diagnose::Finding;
use hapax_core::driver::{
    DrivenStore, DriverOptions, StoreCount, StoreDriver, StoreDriverError, StoreDriverErrorKind,
};
use hapax_core::store::BoxFuture;
use hapax_core::store::parts::QueueLimits;
use hapax_core::{SystemClock, Timestamp};

use crate::error::RedisConnectError;
use crate::options::RedisOptions;
use crate::store::RedisStore;

/// The driver of `redis:`, `rediss:` and their sentinels.
#[derive(Clone, Copy, Default, Debug)]
pub struct RedisDriver;

impl From<DriverOptions> for RedisOptions {
    fn from(options: DriverOptions) -> Self {
        let DriverOptions { url, secrets, identity, queue_bytes, timeout, make, must_exist } =
            options;
        let options = Self::new(url)
            .timeout(timeout)
            .queue(QueueLimits::default().items, queue_bytes)
            .make(make)
            .must_exist(must_exist);
        let options = secrets.into_iter().fold(options, Self::key_ring);
        identity.into_iter().fold(options, Self::identity)
    }
}

impl From<RedisConnectError> for StoreDriverError {
    fn from(error: RedisConnectError) -> Self {
        let kind = match &error {
            RedisConnectError::Url(_) => StoreDriverErrorKind::Options,
            RedisConnectError::Missing => StoreDriverErrorKind::Missing,
            RedisConnectError::OtherSecret => StoreDriverErrorKind::OtherSecret,
            RedisConnectError::Unfit(_) => StoreDriverErrorKind::Unfit,
            _ if error.is_unreachable() => StoreDriverErrorKind::Unreachable,
            _ => StoreDriverErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

impl StoreDriver for RedisDriver {
    fn schemes(&self) -> &'static [&'static str] {
        &["redis", "rediss", "redis+sentinel", "rediss+sentinel"]
    }

    fn check(&self, options: &DriverOptions) -> Result<(), StoreDriverError> {
        Ok(RedisOptions::from(options.clone()).check()?)
    }

    fn open(
        &self,
        options: DriverOptions,
    ) -> BoxFuture<'_, Result<Arc<dyn DrivenStore>, StoreDriverError>> {
        Box::pin(async {
            let store = RedisStore::connect(options.into()).await?;
            Ok(Arc::new(store) as Arc<dyn DrivenStore>)
        })
    }

    fn diagnose(
        &self,
        options: DriverOptions,
    ) -> BoxFuture<'_, Result<Vec<Finding>, StoreDriverError>> {
        Box::pin(async { Ok(crate::diagnose(&options.into(), &SystemClock).await?) })
    }
}

impl DrivenStore for RedisStore {
    /// Returns nothing: a cache in front of Redis would be no faster.
    fn cache_name(&self) -> String {
        String::new()
    }

    fn identity(&self) -> Option<String> {
        self.known_identity()
    }

    fn created(&self) -> Option<Timestamp> {
        Self::created(self)
    }

    fn is_replaced(&self) -> bool {
        Self::is_replaced(self)
    }

    fn confirm(&self) -> BoxFuture<'_, Result<(), Box<dyn Error + Send + Sync>>> {
        Box::pin(async { Ok(Self::confirm(self).await?) })
    }

    fn counts(&self) -> Vec<StoreCount> {
        let stats = self.stats();
        [
            ("connections_total", "Connections made.", stats.connections),
            ("queued", "Requests that wait for an answer.", stats.waiting as u64),
            ("awaited", "Keys that duplicates wait for at this gateway.", stats.awaited as u64),
        ]
        .map(StoreCount::from)
        .into()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}
