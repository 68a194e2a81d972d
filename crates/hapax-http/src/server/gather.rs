//! Reads a body up to a limit.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::Body as _;
use http_body_util::BodyExt;

use crate::body::{BoxError, Erased};

/// What was read of a body.
pub(super) enum Gathered {
    /// All of it.
    Whole { body: Bytes, trailers: Option<HeaderMap> },
    /// It is larger than the limit. This much was read; the rest is still to come.
    TooLarge { read: Bytes },
    /// It broke off.
    Broken(BoxError),
}

/// Holds at most `limit` bytes and one frame, however small the frames are.
pub(super) async fn gather(body: &mut Erased, limit: usize) -> Gathered {
    if body.size_hint().lower() > limit as u64 {
        return Gathered::TooLarge { read: Bytes::new() };
    }
    // Known lengths are read without growing, which would take up to twice as much.
    let length = body.size_hint().exact().map_or(0, |length| length as usize);
    let mut read = Read { first: Bytes::new(), more: BytesMut::new(), length };
    let mut trailers = None;
    while let Some(frame) = body.frame().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return Gathered::Broken(error),
        };
        match frame.into_data() {
            Ok(data) => {
                read.push(data);
                if read.len() > limit {
                    return Gathered::TooLarge { read: read.finish() };
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
        }
    }
    Gathered::Whole { body: read.finish(), trailers }
}

/// Most bodies are one frame, which need not be copied.
struct Read {
    first: Bytes,
    more: BytesMut,
    /// Of the whole body, where it is known; not above the limit.
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
        if !self.first.is_empty() {
            self.more.reserve(self.length);
            self.more.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.more.extend_from_slice(&data);
    }

    fn finish(self) -> Bytes {
        if self.more.is_empty() { self.first } else { self.more.freeze() }
    }
}
