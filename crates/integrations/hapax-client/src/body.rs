//! Bodies of responses, and the memory for those that the journal does not keep.

use std::sync::Arc;

use bytes::Bytes;
use hapax_proxy::{BodyError, ReceivedBody};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::response::{MAX_BODY, MAX_RECORDED};

/// A body of a response, with the permits of its bytes.
#[derive(Debug)]
pub(crate) struct LargeBody {
    pub(crate) bytes: Bytes,
    _permits: Vec<OwnedSemaphorePermit>,
}

#[cfg(test)]
impl LargeBody {
    pub(crate) const fn small(bytes: Bytes) -> Self {
        Self { bytes, _permits: Vec::new() }
    }
}

/// Reads a body to its end; `None` for one that is too large to be returned, or for which the others have
/// left no memory. If the body breaks off, the result is an error.
pub(crate) async fn read_body(
    large: &Arc<Semaphore>,
    mut body: ReceivedBody,
    has_caller: bool,
) -> Result<Option<LargeBody>, BodyError> {
    let limit = if has_caller { MAX_BODY } else { MAX_RECORDED };
    let (mut bytes, mut permits, mut is_larger) = (Vec::new(), Vec::new(), false);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        is_larger |= bytes.len() + data.len() > limit;
        if !is_larger && bytes.len() + data.len() > bytes.capacity() {
            // What a stored response needs is bounded by the permits for tries.
            let capacity = (bytes.len() + data.len()).next_power_of_two().min(limit);
            while !is_larger && capacity > MAX_RECORDED + (permits.len() << 20) {
                match Arc::clone(large).try_acquire_owned() {
                    Ok(permit) => permits.push(permit),
                    Err(_) => is_larger = true,
                }
            }
            bytes.reserve_exact(capacity - bytes.len());
        }
        if is_larger {
            (bytes, permits) = (Vec::new(), Vec::new());
        } else {
            bytes.extend_from_slice(&data);
        }
    }
    Ok((!is_larger).then(|| LargeBody { bytes: bytes.into(), _permits: permits }))
}
