//! Cache on a server that may be unreachable when the gateway starts.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::OperationId;
use hapax_core::store::BoxFuture;
use hapax_operators::supervised;
use hapax_redis::{RedisCache, RedisOptions};
use hapax_tiered::{Cache, CacheError};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::url::ServerUrl;

/// Pauses between attempts: they double from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// A cache that connects in the background. Until then its calls fail, which only makes replays
/// slower.
pub(super) struct BackgroundCache {
    cache: Arc<OnceLock<RedisCache>>,
    connecting: JoinHandle<()>,
}

impl BackgroundCache {
    pub(super) fn new(url: &ServerUrl, options: RedisOptions) -> Self {
        let cache = Arc::new(OnceLock::new());
        let (url, connected) = (url.to_string(), Arc::clone(&cache));
        let connecting = tokio::spawn(async move {
            let connect = || connect(url.clone(), options.clone(), Arc::clone(&connected));
            supervised("the connection to the cache", connect).await;
        });
        Self { cache, connecting }
    }

    fn cache(&self) -> Result<&RedisCache, CacheError> {
        self.cache.get().ok_or_else(|| "it was not reached yet".into())
    }
}

async fn connect(url: String, options: RedisOptions, cache: Arc<OnceLock<RedisCache>>) {
    let mut pause = FIRST_PAUSE;
    loop {
        match RedisCache::connect(options.clone()).await {
            Ok(connected) => {
                let _ = cache.set(connected);
                if pause > FIRST_PAUSE {
                    tracing::info!(url, "the cache was reached");
                }
                return;
            }
            Err(error) => {
                tracing::warn!(url, %error, "the cache was not reached: replays are slower")
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

impl Drop for BackgroundCache {
    fn drop(&mut self) {
        self.connecting.abort();
    }
}

impl fmt::Debug for BackgroundCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateCache").field("reached", &self.cache.get().is_some()).finish()
    }
}

impl Cache for BackgroundCache {
    fn get<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<Option<Bytes>, CacheError>> {
        Box::pin(async move { Ok(self.cache()?.get(key).await?) })
    }

    fn put<'a>(
        &'a self,
        key: &'a OperationId,
        entry: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move { Ok(self.cache()?.put(key, &entry, ttl).await?) })
    }

    fn remove<'a>(&'a self, key: &'a OperationId) -> BoxFuture<'a, Result<(), CacheError>> {
        Box::pin(async move { Ok(self.cache()?.remove(key).await?) })
    }
}
