//! One cap on the memory that is held for bodies.
//!
//! 1. A body that will be kept in memory whole gets its share before its first byte is read, so
//!    that nobody holds one part and waits for another. Until then nothing is read from its
//!    connection, and its sender is held up by TCP.
//! 2. Requests and responses have a half each: a request that holds its share may wait for that of
//!    its response, and those who hold one of these wait for nobody else's. So there is no deadlock.
//! 3. The share belongs to the bytes: it is given back when the last reference to them is dropped,
//!    wherever they went. For that a body arrives in one piece.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use hapax_http::BoxError;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What a permit stands for, in bytes.
const UNIT: usize = 1024;

/// A half of the cap.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    units: Arc<Semaphore>,
}

/// A part of it.
#[derive(Debug)]
pub(crate) struct Share {
    permit: OwnedSemaphorePermit,
}

impl Memory {
    /// Room for so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { units: Arc::new(Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS))) }
    }

    /// The halves of `bytes`: for requests, for responses.
    pub(crate) fn halves(bytes: usize) -> (Self, Self) {
        (Self::new(bytes / 2), Self::new(bytes / 2))
    }

    /// Waits, first come first served, for room for `bytes`, which must not be more than there is
    /// in all. `None` if it never comes.
    pub(crate) async fn share(&self, bytes: usize) -> Option<Share> {
        let permit = Arc::clone(&self.units).acquire_many_owned(units(bytes)).await.ok()?;
        Some(Share { permit })
    }

    /// Bytes that are free.
    #[cfg(test)]
    fn free(&self) -> usize {
        self.units.available_permits() * UNIT
    }
}

impl Share {
    /// Gives back what is more than `bytes` need.
    fn shrink(&mut self, bytes: usize) {
        let surplus = self.permit.num_permits().saturating_sub(units(bytes) as usize);
        drop(self.permit.split(surplus));
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// How much memory a body of this size takes at most when up to `limit` bytes of it are kept.
pub(crate) fn need(hint: &SizeHint, limit: usize) -> usize {
    let length = hint.upper().and_then(|length| usize::try_from(length).ok());
    length.map_or(limit, |length| length.min(limit))
}

/// A body in one piece: up to `limit` bytes are gathered into one frame that holds the share; what
/// is longer is passed on from there, frame by frame.
#[derive(Debug)]
pub(crate) struct Gathered<B> {
    body: B,
    limit: usize,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Gathering { gathered: BytesMut, share: Share },
    Trailers(HeaderMap),
    Passing,
    Done,
}

impl<B: Body<Data = Bytes>> Gathered<B> {
    pub(crate) fn new(body: B, limit: usize, share: Share) -> Self {
        let room = need(&body.size_hint(), limit);
        // A length that was only announced takes no memory yet.
        let gathered = BytesMut::with_capacity(room.min(64 * UNIT));
        Self { body, limit, stage: Stage::Gathering { gathered, share } }
    }
}

impl<B> Body for Gathered<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        loop {
            match &mut this.stage {
                Stage::Done => return Poll::Ready(None),
                Stage::Trailers(trailers) => {
                    let trailers = std::mem::take(trailers);
                    this.stage = Stage::Done;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                Stage::Passing => {
                    return Pin::new(&mut this.body)
                        .poll_frame(cx)
                        .map(|frame| frame.map(|frame| frame.map_err(Into::into)));
                }
                Stage::Gathering { gathered, .. } => {
                    let next = match Pin::new(&mut this.body).poll_frame(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(Some(Err(error))) => {
                            this.stage = Stage::Done;
                            return Poll::Ready(Some(Err(error.into())));
                        }
                        Poll::Ready(None) => Stage::Done,
                        Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                            Ok(data) => {
                                gathered.extend_from_slice(&data);
                                if gathered.len() <= this.limit {
                                    continue;
                                }
                                Stage::Passing
                            }
                            Err(frame) => {
                                Stage::Trailers(frame.into_trailers().unwrap_or_default())
                            }
                        },
                    };
                    let stage = std::mem::replace(&mut this.stage, next);
                    if let Some(frame) = piece(stage) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.stage {
            Stage::Done => true,
            Stage::Trailers(_) => false,
            Stage::Passing => self.body.is_end_stream(),
            Stage::Gathering { gathered, .. } => gathered.is_empty() && self.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.stage {
            Stage::Done | Stage::Trailers(_) => SizeHint::with_exact(0),
            Stage::Passing => self.body.size_hint(),
            Stage::Gathering { gathered, .. } => {
                let (here, rest) = (gathered.len() as u64, self.body.size_hint());
                let mut hint = SizeHint::new();
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(here)) {
                    hint.set_upper(upper);
                }
                hint.set_lower(rest.lower().saturating_add(here));
                hint
            }
        }
    }
}

/// What was gathered, with its share; nothing if there was nothing.
fn piece(stage: Stage) -> Option<Frame<Bytes>> {
    let Stage::Gathering { gathered, mut share } = stage else { return None };
    share.shrink(gathered.len());
    (!gathered.is_empty())
        .then(|| Frame::data(Bytes::from_owner(Piece { bytes: gathered, _share: share })))
}

struct Piece {
    bytes: BytesMut,
    _share: Share,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use http_body_util::BodyExt;

    use super::*;

    /// A body of these frames.
    struct Frames(VecDeque<Frame<Bytes>>);

    impl Body for Frames {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(Ok))
        }
    }

    fn data(bytes: &'static [u8]) -> Frame<Bytes> {
        Frame::data(Bytes::from_static(bytes))
    }

    #[tokio::test]
    async fn a_body_within_its_limit_is_one_piece_and_keeps_its_share() {
        let memory = Memory::new(8 * UNIT);
        let share = memory.share(4 * UNIT).await.unwrap();
        let mut trailers = HeaderMap::new();
        trailers.insert("x", "y".parse().unwrap());
        let frames = Frames([data(b"ab"), data(b"c"), Frame::trailers(trailers)].into());
        let mut body = Gathered::new(frames, 4 * UNIT, share);
        assert_eq!(memory.free(), 4 * UNIT);
        let piece = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(piece, "abc");
        assert_eq!(memory.free(), 7 * UNIT, "the surplus is given back at once");
        assert_eq!(body.frame().await.unwrap().unwrap().into_trailers().unwrap()["x"], "y");
        assert!(body.frame().await.is_none());
        drop(body);
        let slice = piece.slice(1..);
        drop(piece);
        assert_eq!(memory.free(), 7 * UNIT, "a slice holds it as well");
        drop(slice);
        assert_eq!(memory.free(), 8 * UNIT);
    }

    #[tokio::test]
    async fn what_is_longer_passes_on() {
        let memory = Memory::new(8 * UNIT);
        let share = memory.share(3).await.unwrap();
        let frames = Frames([data(b"ab"), data(b"cd"), data(b"ef")].into());
        let mut body = Gathered::new(frames, 3, share);
        let mut pieces = Vec::new();
        while let Some(frame) = body.frame().await {
            pieces.push(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(pieces, ["abcd", "ef"]);
    }

    #[tokio::test]
    async fn the_next_waits_until_there_is_room() {
        let memory = Memory::new(2 * UNIT);
        let first = memory.share(2 * UNIT).await.unwrap();
        let waiting = tokio::spawn({
            let memory = memory.clone();
            async move { memory.share(1).await.is_some() }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(first);
        assert!(waiting.await.unwrap());
    }

    #[test]
    fn an_unknown_length_needs_the_limit() {
        assert_eq!(need(&SizeHint::new(), 10), 10);
        assert_eq!(need(&SizeHint::with_exact(3), 10), 3);
        assert_eq!(need(&SizeHint::with_exact(30), 10), 10);
    }
}
