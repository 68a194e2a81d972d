//! The access log: one JSON object a line for each request, without its key and its caller.
//!
//! A thread writes the lines, so that no request waits for a disk. While it cannot keep up, lines
//! are left out, and a warning says how many.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use hapax::{Clock, SystemClock, Timestamp};
use hapax_http::server::{Answered, AnsweredBy};
use hapax_operators::rfc3339;
use http::{Request, Response};
use serde::Serialize;
use tokio::time::Instant;

/// Lines that wait to be written, at most.
const ROOM: usize = 8192;

/// The longest `traceparent` that is logged, in bytes; of a method as much is logged.
const MAX_TRACE: usize = 64;

/// Where lines go.
#[derive(Debug)]
pub(crate) struct AccessLog {
    lines: SyncSender<Vec<u8>>,
    left_out: Arc<AtomicU64>,
}

/// A request, as its line will say it.
#[derive(Debug)]
pub(crate) struct Begun {
    at: Timestamp,
    since: Instant,
    method: String,
    traceparent: Option<String>,
}

#[derive(Serialize)]
struct Line<'a> {
    at: String,
    method: &'a str,
    route: &'a str,
    status: u16,
    outcome: &'static str,
    operation: Option<String>,
    fence: Option<u64>,
    attempt: Option<u32>,
    milliseconds: f64,
    traceparent: Option<&'a str>,
}

impl AccessLog {
    /// Opens the file for appending; `-` is standard output.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            let mut options = OpenOptions::new();
            options.append(true).create(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            Box::new(options.open(path)?)
        };
        let (lines, written) = sync_channel(ROOM);
        let left_out = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&left_out);
        let run = move || write(BufWriter::new(out), &written, &counted);
        std::thread::Builder::new().name("access-log".into()).spawn(run)?;
        Ok(Self { lines, left_out })
    }

    /// Appends the line of a request whose answer begins now.
    pub(crate) fn end<B>(&self, begun: &Begun, route: &str, response: &Response<B>) {
        let answered = response.extensions().get::<Answered>();
        let (outcome, fence, attempt) = match answered.map(|answered| answered.by) {
            Some(AnsweredBy::Execution { fence, attempt }) => {
                ("executed", Some(fence.get()), Some(attempt))
            }
            Some(AnsweredBy::Replay) => ("replayed", None, None),
            Some(_) => ("rejected", None, None),
            None => ("passed", None, None),
        };
        let operation = answered.and_then(|answered| answered.operation);
        let line = Line {
            at: rfc3339(begun.at),
            method: &begun.method,
            route,
            status: response.status().as_u16(),
            outcome,
            operation: operation.map(|id| id.to_string()),
            fence,
            attempt,
            milliseconds: begun.since.elapsed().as_micros() as f64 / 1000.0,
            traceparent: begun.traceparent.as_deref(),
        };
        let line = serde_json::to_vec(&line).map(|mut line| {
            line.push(b'\n');
            line
        });
        if !line.is_ok_and(|line| self.lines.try_send(line).is_ok()) {
            self.left_out.fetch_add(1, Relaxed);
        }
    }
}

impl Begun {
    pub(crate) fn of<B>(request: &Request<B>) -> Self {
        let trace = request.headers().get("traceparent").filter(|it| it.len() <= MAX_TRACE);
        Self {
            at: SystemClock.now(),
            since: Instant::now(),
            method: request.method().as_str().chars().take(MAX_TRACE).collect(),
            traceparent: trace.and_then(|it| it.to_str().ok()).map(str::to_owned),
        }
    }
}

/// Writes until the gateway is gone. What waits is written at once, then flushed.
fn write(mut out: impl Write, lines: &Receiver<Vec<u8>>, left_out: &AtomicU64) {
    let mut failing = false;
    while let Ok(line) = lines.recv() {
        let mut count = 1;
        let mut written = out.write_all(&line);
        while written.is_ok()
            && let Ok(line) = lines.try_recv()
        {
            count += 1;
            written = out.write_all(&line);
        }
        let written = written.and_then(|()| out.flush());
        if let Err(error) = &written {
            left_out.fetch_add(count, Relaxed);
            if !failing {
                tracing::warn!(%error, "the access log cannot be written");
            }
        }
        failing = written.is_err();
        if failing {
            continue;
        }
        let count = left_out.swap(0, Relaxed);
        if count > 0 {
            tracing::warn!(
                count,
                "the access log could not be written for a time: lines were left out"
            );
        }
    }
}
