//! A body whose frames a task sends.
//!
//! [`http_body_util::channel::Channel`] (0.1.5) can lose its last frame: it looks for a frame, and then
//! for the end of its sender, and a frame that is sent between the two is not looked for again.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;
use tokio::sync::mpsc;

/// An error of a body that breaks off.
type FrameError = Box<dyn Error + Send + Sync>;

/// Returns a sender and its body, which buffers up to `capacity` frames.
#[must_use]
pub fn frames(capacity: usize) -> (FrameSender, FrameBody) {
    let (sender, receiver) = mpsc::channel(capacity);
    (FrameSender(sender), FrameBody(receiver))
}

/// The sender of a [`FrameBody`]. Dropping it ends the body.
#[derive(Debug)]
pub struct FrameSender(mpsc::Sender<Result<Frame<Bytes>, FrameError>>);

impl FrameSender {
    /// Sends data; returns whether the body is still read.
    pub async fn data(&self, data: impl Into<Bytes>) -> bool {
        self.frame(Frame::data(data.into())).await
    }

    /// Sends a frame; returns whether the body is still read.
    pub async fn frame(&self, frame: Frame<Bytes>) -> bool {
        self.0.send(Ok(frame)).await.is_ok()
    }

    /// Breaks the body off.
    pub async fn abort(self, error: impl Into<FrameError>) {
        let _ = self.0.send(Err(error.into())).await;
    }

    /// Resolves when the body is no longer read.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// A body of frames that a [`FrameSender`] sends.
#[derive(Debug)]
pub struct FrameBody(mpsc::Receiver<Result<Frame<Bytes>, FrameError>>);

impl http_body::Body for FrameBody {
    type Data = Bytes;
    type Error = FrameError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, FrameError>>> {
        self.0.poll_recv(cx)
    }
}
