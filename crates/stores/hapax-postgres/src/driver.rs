//! PostgreSQL as a store that a program opens by its URL.

use std::error::Error;
use std::sync::Arc;

use hapax_core::diagnose::Finding;
use hapax_core::driver::{
    DrivenStore, DriverOptions, StoreCount, StoreDriver, StoreDriverError, StoreDriverErrorKind,
};
use hapax_core::store::BoxFuture;
use hapax_core::store::parts::QueueLimits;
use hapax_core::{SystemClock, Timestamp};

use crate::error::PostgresConnectError;
use crate::options::PostgresOptions;
use crate::store::PostgresStore;

/// The driver of `postgres:`.
#[derive(Clone, Copy, Default, Debug)]
pub struct PostgresDriver;

impl TryFrom<DriverOptions> for PostgresOptions {
    type Error = PostgresConnectError;

    fn try_from(options: DriverOptions) -> Result<Self, PostgresConnectError> {
        let DriverOptions { url, secrets, identity, queue_bytes, timeout, make, must_exist } =
            options;
        let options = url
            .parse::<Self>()?
            .timeout(timeout)
            .queue(QueueLimits::default().items, queue_bytes)
            .listen(true)
            .migrate(make)
            .must_exist(must_exist);
        let options = secrets.into_iter().fold(options, Self::key_ring);
        Ok(identity.into_iter().fold(options, Self::identity))
    }
}

impl From<PostgresConnectError> for StoreDriverError {
    fn from(error: PostgresConnectError) -> Self {
        let kind = match &error {
            PostgresConnectError::Url(_) | PostgresConnectError::CertificateParameters(_) => {
                StoreDriverErrorKind::Options
            }
            PostgresConnectError::Missing { .. } => StoreDriverErrorKind::Missing,
            PostgresConnectError::OtherSecret => StoreDriverErrorKind::OtherSecret,
            PostgresConnectError::Standby => StoreDriverErrorKind::Standby,
            _ if error.is_unreachable() => StoreDriverErrorKind::Unreachable,
            PostgresConnectError::NotMigrated { .. }
            | PostgresConnectError::TooOld { .. }
            | PostgresConnectError::Forgetful(_) => StoreDriverErrorKind::Unfit,
            _ => StoreDriverErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

impl StoreDriver for PostgresDriver {
    fn schemes(&self) -> &'static [&'static str] {
        &["postgres", "postgresql"]
    }

    fn check(&self, options: &DriverOptions) -> Result<(), StoreDriverError> {
        Ok(PostgresOptions::try_from(options.clone()).map(drop)?)
    }

    fn open(
        &self,
        options: DriverOptions,
    ) -> BoxFuture<'_, Result<Arc<dyn DrivenStore>, StoreDriverError>> {
        Box::pin(async {
            let store = PostgresStore::connect(options.try_into()?).await?;
            Ok(Arc::new(store) as Arc<dyn DrivenStore>)
        })
    }

    fn diagnose(
        &self,
        options: DriverOptions,
    ) -> BoxFuture<'_, Result<Vec<Finding>, StoreDriverError>> {
        Box::pin(async { Ok(crate::diagnose(&options.try_into()?, &SystemClock).await?) })
    }
}

impl DrivenStore for PostgresStore {
    fn cache_name(&self) -> String {
        Self::identity(self)
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
            ("batches_total", "Transactions with swaps that were sent.", stats.batches),
            ("batched_swaps_total", "Swaps in those.", stats.swaps),
            ("again_total", "Swaps sent again because of a race.", stats.again),
            ("alone_total", "Swaps that went alone.", stats.alone),
            ("connections_total", "Connections made.", stats.connections),
            ("queued", "Swaps that wait.", stats.queued as u64),
            (
                "awaited_elsewhere",
                "Keys that duplicates wait for at other gateways.",
                stats.awaited as u64,
            ),
        ]
        .map(StoreCount::from)
        .into()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(Self::close(self))
    }
}
