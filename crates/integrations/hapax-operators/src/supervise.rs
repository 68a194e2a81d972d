//! Tasks that run beside requests, and that no caller awaits.
//!
//! Without supervision a panic ends such a task, and nothing shows it while requests are served as before.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// First and longest pause before a task begins anew. One that has run for the longest pause begins with the first one.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(30)];

/// The panic of a task.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Panic(String);

impl Panic {
    fn new(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Self(text.unwrap_or("no text").to_owned())
    }
}

impl fmt::Display for Panic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the result of a future.
///
/// The future is not polled again after a panic. What it shares must be consistent whenever it can panic: behind locks
/// that ignore poison, or replaced as a whole.
///
/// # Errors
/// [`Panic`].
pub async fn caught<F: Future>(future: F) -> Result<F::Output, Panic> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(Panic::new(&*panic))),
    })
    .await
}

/// Runs a task, which begins anew after a panic; returns its result once it ends. Each panic is an error in the log, and
/// pauses grow from 100 ms to 30 s. `what` is the subject of that error, such as "the removal of expired records".
///
/// Dropping the future ends the task at an await, or the pause.
pub async fn supervised<F: Future>(what: &str, mut begin: impl FnMut() -> F) -> F::Output {
    let [first, longest] = PAUSES;
    let mut pause = first;
    loop {
        let begun = Instant::now();
        let panic = match caught(begin()).await {
            Ok(result) => return result,
            Err(panic) => panic,
        };
        if begun.elapsed() >= longest {
            pause = first;
        }
        tracing::error!(%panic, ?pause, "{what} panicked, and begins anew after a pause: report this as a bug");
        sleep(pause).await;
        pause = longest.min(pause * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn panics_with(text: &'static str) {
        tokio::task::yield_now().await;
        assert!(text.is_empty(), "{text}");
    }

    #[tokio::test]
    async fn a_panic_is_returned_with_its_text() {
        assert_eq!(caught(async { 7 }).await, Ok(7));
        let panic = caught(panics_with("a bug")).await.unwrap_err();
        assert_eq!(panic.to_string(), "a bug");
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_begins_anew_after_a_pause_that_grows() {
        let (origin, mut begun) = (Instant::now(), Vec::new());
        let result = supervised("a task", || {
            begun.push(origin.elapsed().as_millis());
            let number = begun.len();
            async move {
                match number {
                    // After a long run the pause is the first one again.
                    4 => sleep(Duration::from_secs(30)).await,
                    6 => return number,
                    _ => {}
                }
                panics_with("a bug").await;
                number
            }
        });
        assert_eq!(result.await, 6);
        assert_eq!(begun, [0, 100, 300, 700, 30_800, 31_000]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_has_a_limit() {
        let (origin, mut last, mut count) = (Instant::now(), Duration::ZERO, 0);
        let task = supervised("a task", || {
            count += 1;
            let (is_last, now) = (count == 30, origin.elapsed());
            assert!(now - last <= PAUSES[1], "{count}");
            last = now;
            panics_with(if is_last { "" } else { "a bug" })
        });
        task.await;
    }
}
