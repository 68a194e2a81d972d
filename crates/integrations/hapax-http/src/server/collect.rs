//! Reads a body up to a limit.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body as _;
use http_body_util::BodyExt;

use super::budget::{MemoryBudget, Reservation, SMALL};
use crate::body::{BoxError, Erased};
use crate::length::DeclaredLength;

/// What was read of a body.
pub(super) enum Collected {
    /// All of it.
    Whole { body: Bytes, trailers: Option<HeaderMap>, reservation: Reservation },
    /// It is larger than the limit. This much was read; the rest is still to come.
    TooLarge { read: Bytes, reservation: Reservation },
    /// There was no room for it in time.
    MemoryFull,
    /// It broke off, or is not as long as its message says.
    Broken(BoxError),
}

/// Holds at most `limit` bytes and one frame, however small the frames are, with a share of `pool`
/// for what is more than [`SMALL`]; `patience` is how long it may wait for that. `headers` are
/// those of the message, where a length among them is that of its body.
///
/// The share is of the whole body, or of the limit where the length is unknown, and it is taken
/// once: what waits for it holds nothing that others wait for.
pub(super) async fn collect(
    body: &mut Erased,
    headers: Option<&HeaderMap>,
    limit: usize,
    budget: &MemoryBudget,
    wait_for: Option<Duration>,
) -> Collected {
    let mut reservation = Reservation::none();
    let announced = headers.map(|headers| DeclaredLength::new(headers, &body.size_hint()));
    let announced = match announced.transpose() {
        Ok(announced) => announced.unwrap_or_default(),
        Err(contradicted) => return Collected::Broken(contradicted.into()),
    };
    if body.size_hint().lower() > limit as u64 {
        return Collected::TooLarge { read: Bytes::new(), reservation };
    }
    let upper = body.size_hint().upper().and_then(|upper| usize::try_from(upper).ok());
    let most = upper.map_or(limit, |upper| upper.min(limit));
    // What has a share is read without growing, which would take up to twice as much.
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
                if let Err(contradicted) = announced.check_so_far(read.len()) {
                    return Collected::Broken(contradicted.into());
                }
                if read.len() > limit {
                    return Collected::TooLarge { read: read.finish(), reservation };
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
        }
    }
    if let Err(contradicted) = announced.check_end(read.len()) {
        return Collected::Broken(contradicted.into());
    }
    reservation.trim(read.len());
    Collected::Whole { body: read.finish(), trailers, reservation }
}

/// Most bodies are one frame, which need not be copied.
struct Read {
    first: Bytes,
    more: BytesMut,
    /// Of the whole body, or the most that it can be; not above the limit.
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
