//! Drivers of the stores that a gateway opens.

use std::sync::Arc;

use hapax_core::driver::StoreDriver;
use hapax_postgres::PostgresDriver;
use hapax_redis::RedisDriver;

/// Drivers by the schemes of their URLs. The default has those of Redis and PostgreSQL.
#[derive(Clone, Debug)]
pub struct StoreDrivers(Vec<Arc<dyn StoreDriver>>);

impl Default for StoreDrivers {
    fn default() -> Self {
        Self(vec![Arc::new(RedisDriver), Arc::new(PostgresDriver)])
    }
}

impl StoreDrivers {
    /// Adds a driver. It takes precedence over earlier ones with the same scheme.
    #[must_use]
    pub fn with(mut self, driver: Arc<dyn StoreDriver>) -> Self {
        self.0.insert(0, driver);
        self
    }

    /// Returns the driver of a scheme.
    #[must_use]
    pub fn of(&self, scheme: &str) -> Option<&Arc<dyn StoreDriver>> {
        self.0.iter().find(|driver| driver.schemes().contains(&scheme))
    }
}
