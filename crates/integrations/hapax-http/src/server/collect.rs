//! Reading of a body up to a limit.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body as _;
use http_body_util::BodyExt;

use super::budget::{MemoryBudget, Reservation, SMALL};
use crate::body::{BoxError, Erased};
use crate::length::DeclaredLength;

/// Result of reading a body.
pub(super) enum Collected {
    /// The whole body.
    Whole { body: Bytes, trailers: Option<HeaderMap>, reservation: Reservation },
    /// The body is larger than the limit. This much was read; the rest is still to come.
    TooLarge { read: Bytes, reservation: Reservation },
    /// There was no memory for the body in time.
    MemoryFull,
    /// The body broke off, or its length differs from the declared one.
    Broken(BoxError),
}

/// Reads at most `limit` bytes and one frame, however small the frames are. More than [`SMALL`]
/// bytes need a reservation of `budget`, for which this waits up to `wait_for`. `headers` are those
/// of the message, if a length among them is that of its body.
///
/// The reservation is for the whole body, or for the limit if the length is unknown. It is taken
/// once: while it waits, it holds nothing that others wait for.
pub(super) async fn collect(
    body: &mut Erased,
    headers: Option<&HeaderMap>,
    limit: usize,
    budget: &MemoryBudget,
    wait_for: Option<Duration>,
) -> Collected {
    let mut reservation = Reservation::none();
    let declared = headers.map(|headers| DeclaredLength::new(headers, &body.size_hint()));
    let declared = match declared.transpose() {
        Ok(declared) => declared.unwrap_or_default(),
        Err(mismatch) => return Collected::Broken(mismatch.into()),
    };
    if body.size_hint().lower() > limit as u64 {
        return Collected::TooLarge { read: Bytes::new(), reservation };
    }
    let upper = body.size_hint().upper().and_then(|upper| usize::try_from(upper).ok());
    let most = upper.map_or(limit, |upper| upper.min(limit));
    // A body with a reservation is read into a buffer of the final size: growing takes up to twice
    // as much.
    let length = body.size_hint().exact().map_or(0, |length| length as usize);
    let mut read = Read { first: Bytes::new(), more: BytesMut::new(), length };
    let mut trailers = None;
    loop {
        let known = read.length.max(read.len());
        if known > SMALL && reservation.is_none() {
            let Some(taken) = budget.reserve(most, wait_for).await else {
                return Collected::MemoryFull;
            };
            reservation = taken;
            read.length = most;
        }
        let Some(frame) = body.frame().await else { break };
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return Collected::Broken(error),
        };
        match frame.into_data() {
            Ok(data) => {
                read.push(data);
                if let Err(mismatch) = declared.check_so_far(read.len()) {
                    return Collected::Broken(mismatch.into());
                }
                if read.len() > limit {
                    return Collected::TooLarge { read: read.finish(), reservation };
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
        }
    }
    if let Err(mismatch) = declared.check_end(read.len()) {
        return Collected::Broken(mismatch.into());
    }
    reservation.trim(read.len());
    Collected::Whole { body: read.finish(), trailers, reservation }
}

/// A body being read. Most bodies are one frame, which is not copied.
struct Read {
    first: Bytes,
    more: BytesMut,
    /// Returns the length of the whole body, or its upper bound; at most the limit.
    length: usize,
}

impl Read {
    fn len(&self) -> usize {
        self.first.len() + self.more.len()
    }

    fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        if self.more.capacity() < self.length {
            self.more.reserve(self.length - self.more.len());
        }
        if !self.first.is_empty() {
            self.more.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.more.extend_from_slice(&data);
    }

    fn finish(self) -> Bytes {
        if self.more.is_empty() { self.first } else { self.more.freeze() }
    }
}
