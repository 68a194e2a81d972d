//! `on_schedule`: calls the schedule of an engine's store, with its timeout.

use hapax_core::schedule::Schedule;
use hapax_core::store::BoxFuture;
use hapax_core::{Idempotency, StoreError};
use tokio::time::timeout;

/// Runs a call of the schedule within the timeout of the store.
pub(crate) async fn on_schedule<'a, T>(
    engine: &'a Idempotency,
    call: impl FnOnce(&'a dyn Schedule) -> BoxFuture<'a, Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let Some(schedule) = engine.schedule() else {
        return Err(StoreError::unavailable(
            "expected a store with a schedule, found none: use memory, a file, Redis or PostgreSQL; in PostgreSQL, run the SQL of `hapax sql --part store`",
        ));
    };
    match timeout(engine.store_timeout(), call(schedule)).await {
        Ok(result) => result,
        Err(_) => Err(StoreError::ambiguous(format!(
            "expected a reply of the schedule within {:?}, found none: retry",
            engine.store_timeout()
        ))),
    }
}
