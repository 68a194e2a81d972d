//! Panics of a store of dead letters.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt as _;
use hapax_core::store::BoxFuture;

use super::{DeadLetter, DeadLetterError, DeadLetterStore, OrderKeyQuery, OrderKeyState};

/// A store of dead letters whose panics are errors: its message is held, as after another error. The
/// panic of a task would drop the message, and the broker would deliver it behind later ones of its
/// order key, and again and again.
#[derive(Clone, Debug)]
pub(crate) struct CaughtPanics(pub(crate) Arc<dyn DeadLetterStore>);

/// Awaits a call, which begins within the future: its creation may panic too.
async fn caught<T>(
    call: impl Future<Output = Result<T, DeadLetterError>>,
) -> Result<T, DeadLetterError> {
    let ended = AssertUnwindSafe(call).catch_unwind().await;
    ended.unwrap_or_else(|_| Err(DeadLetterError::new("the store of dead letters panicked")))
}

#[deny(clippy::missing_trait_methods)]
impl DeadLetterStore for CaughtPanics {
    fn park<'a>(
        &'a self,
        dead_letter: &'a DeadLetter,
    ) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(caught(async move { self.0.park(dead_letter).await }))
    }

    fn remove<'a>(&'a self, id: &'a [u8; 32]) -> BoxFuture<'a, Result<(), DeadLetterError>> {
        Box::pin(caught(async move { self.0.remove(id).await }))
    }

    fn finds_order_keys(&self) -> bool {
        self.0.finds_order_keys()
    }

    fn order_key<'a>(
        &'a self,
        query: OrderKeyQuery<'a>,
    ) -> BoxFuture<'a, Result<OrderKeyState, DeadLetterError>> {
        Box::pin(caught(async move { self.0.order_key(query).await }))
    }
}
