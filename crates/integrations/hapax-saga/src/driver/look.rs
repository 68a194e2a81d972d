//! Looks for signals, and for cancellations.

use hapax_core::{LeaseHandle, OperationId};
use tokio::time::sleep;

use super::SAVE_AGAIN;
use crate::log::Blob;
use crate::node::Node;

/// Looks for a signal until the store answers. `None`: the lease is lost.
pub(super) async fn look(
    node: &Node,
    handle: &LeaseHandle,
    saga: &OperationId,
    name: &str,
) -> Option<Option<Blob>> {
    loop {
        match node.signal(saga, handle.generation(), name).await {
            Ok(value) => return Some(value),
            Err(_) if handle.is_lost() => return None,
            Err(error) => {
                tracing::debug!(operation = ?saga, %error, "a signal cannot be looked up yet");
                sleep(SAVE_AGAIN).await;
            }
        }
    }
}
