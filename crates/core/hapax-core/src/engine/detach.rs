//! Futures that run to their end, whether or not their caller does.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tracing::{Instrument, Span};

use super::execution::OperationPanicked;
use crate::store::BoxFuture;

/// A future that its caller polls, and that continues on a task if the caller drops it before its
/// end.
///
/// It is never polled in two places: the future is in a box, which `Drop` moves to the task. The
/// task polls it at once, so that an event between the last poll of the caller and that one is not
/// missed, and from then on it wakes the task. The output of a detached future is dropped where it
/// ends.
///
/// A panic ends the future: it is not polled again and does not detach.
///
/// Nothing proceeds between two polls. A future that holds a lock across an await, for which another
/// future of the same task may wait, belongs on its own task instead.
#[must_use = "the future runs where this is polled"]
pub struct DetachOnDrop<T: 'static> {
    /// `None` while it is polled, and after its end.
    future: Option<BoxFuture<'static, T>>,
    /// `None` if it detaches from the beginning.
    switch: Option<DetachSwitch>,
    runtime: Handle,
    span: Span,
}

/// The moment from which a [`DetachOnDrop`] detaches. If it is dropped before, it is cancelled.
#[derive(Clone, Debug, Default)]
pub struct DetachSwitch(Arc<AtomicBool>);

impl DetachSwitch {
    /// Detaches the future from now on, if it is dropped.
    pub fn turn_on(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<T: 'static> DetachOnDrop<T> {
    /// Creates the future. Its task is spawned on `runtime`, within the present span.
    pub(super) fn new(
        runtime: &Handle,
        switch: Option<DetachSwitch>,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        let span = Span::current();
        Self { future: Some(Box::pin(future)), switch, runtime: runtime.clone(), span }
    }
}

impl<T: 'static> Future for DetachOnDrop<T> {
    type Output = Result<T, OperationPanicked>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // As futures may, it stays pending if it is polled again after it was ready.
        let Some(mut future) = self.future.take() else { return Poll::Pending };
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Ok(Poll::Pending) => {
                self.future = Some(future);
                Poll::Pending
            }
            Err(_) => Poll::Ready(Err(OperationPanicked)),
        }
    }
}

impl<T: 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        let detaches = self.switch.as_ref().is_none_or(DetachSwitch::is_on);
        if let Some(future) = self.future.take().filter(|_| detaches) {
            // A runtime that shuts down drops the future instead, as it drops every task.
            let span = std::mem::replace(&mut self.span, Span::none());
            self.runtime.spawn(async move { drop(future.await) }.instrument(span));
        }
    }
}

impl<T: 'static> fmt::Debug for DetachOnDrop<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = self.future.is_none();
        f.debug_struct("DetachOnDrop").field("ended", &ended).finish_non_exhaustive()
    }
}
