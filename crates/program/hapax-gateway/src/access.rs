//! Access log: one JSON object a line for each request, with keyed hashes of its key and its caller, and
//! without its query.
//!
//! A thread writes the lines, so that no request waits for a disk. Lines that exceed its queue are
//! left out, and a warning has their number.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use hapax_core::{Clock, SystemClock, Timestamp};
use hapax_http::header::{Grammar, decode};
use hapax_http::server::{RequestNamesSlot, ResponseInfo, ResponseSource};
use hapax_operators::{open_log, rfc3339};
use http::{HeaderMap, Request, Response};
use serde::Serialize;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::snapshot::Route;

/// Largest number of lines that wait to be written.
const ROOM: usize = 8192;

/// Headers whose values are logged, unless they may be a key or a caller.
const TRACEPARENT: &str = "traceparent";
const REQUEST_ID: &str = "x-request-id";

/// Longest `traceparent` that is logged, in bytes; a method is cut off at this length.
const MAX_TRACE: usize = 64;

/// Longest `x-request-id` that is logged, in bytes.
const MAX_REQUEST_ID: usize = 128;

/// Length at which a path is cut off, in bytes: lines that wait are in memory.
const MAX_PATH: usize = 512;

/// Queue of the thread that writes the lines.
#[derive(Debug)]
pub(crate) struct AccessLog {
    lines: SyncSender<Message>,
    left_out: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Line(Vec<u8>),
    /// Answered once all earlier lines are written.
    Flush(oneshot::Sender<()>),
}

/// A request in progress. If it is dropped without a response, its line has the outcome `unanswered`:
/// the connection ended before the response began.
#[derive(Debug)]
pub(crate) struct AccessEntry {
    log: Arc<AccessLog>,
    at: Timestamp,
    since: Instant,
    method: String,
    path: String,
    /// Name of its route, once that is known.
    route: String,
    /// Filled by the layer.
    names: RequestNamesSlot,
    traceparent: Option<String>,
    request_id: Option<String>,
    is_answered: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    at: String,
    method: &'a str,
    path: &'a str,
    route: &'a str,
    status: Option<u16>,
    outcome: &'static str,
    operation: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_hash: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    caller_hash: Option<&'a str>,
    fence: Option<u64>,
    attempt: Option<u32>,
    milliseconds: f64,
    traceparent: Option<&'a str>,
    request_id: Option<&'a str>,
}

impl AccessLog {
    /// Opens the file for appending; `-` is standard output.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let out: Box<dyn Write + Send> =
            if path == Path::new("-") { Box::new(io::stdout()) } else { Box::new(open_log(path)?) };
        let (lines, written) = sync_channel(ROOM);
        let left_out = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&left_out);
        let run = move || write(BufWriter::new(out), &written, &counted);
        std::thread::Builder::new().name("access-log".into()).spawn(run)?;
        Ok(Self { lines, left_out })
    }

    /// Returns the entry of a request that begins now, and has the layer name it.
    pub(crate) fn begin<B>(self: &Arc<Self>, request: &mut Request<B>) -> AccessEntry {
        let header = |name: &str, most: usize| {
            let value = request.headers().get(name).filter(|it| it.len() <= most)?;
            value.to_str().ok().map(str::to_owned)
        };
        let path = request.uri().path();
        let entry = AccessEntry {
            log: Arc::clone(self),
            at: SystemClock.now(),
            since: Instant::now(),
            method: request.method().as_str().chars().take(MAX_TRACE).collect(),
            path: path[..path.floor_char_boundary(MAX_PATH)].to_owned(),
            route: String::new(),
            names: RequestNamesSlot::default(),
            traceparent: header(TRACEPARENT, MAX_TRACE),
            request_id: header(REQUEST_ID, MAX_REQUEST_ID),
            is_answered: false,
        };
        request.extensions_mut().insert(entry.names.clone());
        entry
    }

    /// Waits at most `limit` until every line before this call is written.
    pub(crate) async fn flush(&self, limit: Duration) {
        let flushed = async {
            let (done, flushed) = oneshot::channel();
            let mut message = Message::Flush(done);
            // The queue is full because the disk is slow; there is no signal for free capacity.
            while let Err(TrySendError::Full(back)) = self.lines.try_send(message) {
                message = back;
                sleep(Duration::from_millis(10)).await;
            }
            flushed.await
        };
        if !matches!(timeout(limit, flushed).await, Ok(Ok(()))) {
            tracing::warn!("the access log was not written completely: lines may be missing");
        }
    }
}

impl AccessEntry {
    /// Names the route; `None` if it is ambiguous. Removes ids of the request that may be its key or its caller:
    /// those in a header of its key or scope, and those that have the value of one.
    pub(crate) fn name_route(&mut self, route: Option<&Route>, headers: &HeaderMap) {
        let Some(route) = route else {
            (self.traceparent, self.request_id) = (None, None);
            return;
        };
        self.route = route.name.to_string();
        let reveals = |name: &str, text: &str| {
            let mut identity = std::iter::once(&route.key_header).chain(&route.scope);
            identity.any(|it| {
                let mut values = headers.get_all(it).iter();
                it == name || values.any(|value| is_same(value.as_bytes(), text.as_bytes()))
            })
        };
        self.traceparent.take_if(|text| reveals(TRACEPARENT, text));
        self.request_id.take_if(|text| reveals(REQUEST_ID, text));
    }

    /// Appends the line of a request whose response begins now.
    pub(crate) fn end<B>(mut self, response: &Response<B>) {
        self.is_answered = true;
        let answered = response.extensions().get::<ResponseInfo>();
        let (outcome, fence, attempt) = match answered.map(|answered| answered.by) {
            Some(ResponseSource::Execution { fence, attempt }) => {
                ("executed", Some(fence.get()), Some(attempt))
            }
            Some(ResponseSource::Replay) => ("replayed", None, None),
            Some(_) => ("rejected", None, None),
            None => ("passed", None, None),
        };
        let status = Some(response.status().as_u16());
        self.append(Line { status, fence, attempt, ..self.line(outcome) });
    }

    fn line(&self, outcome: &'static str) -> Line<'_> {
        let names = self.names.names();
        Line {
            at: rfc3339(self.at),
            method: &self.method,
            path: &self.path,
            route: &self.route,
            status: None,
            outcome,
            operation: names.map(|names| names.operation.to_string()),
            key_hash: names.and_then(|names| names.key_hash.as_deref()),
            caller_hash: names.and_then(|names| names.caller_hash.as_deref()),
            fence: None,
            attempt: None,
            milliseconds: self.since.elapsed().as_micros() as f64 / 1000.0,
            traceparent: self.traceparent.as_deref(),
            request_id: self.request_id.as_deref(),
        }
    }

    fn append(&self, line: Line<'_>) {
        let line = serde_json::to_vec(&line).map(|mut line| {
            line.push(b'\n');
            line
        });
        if !line.is_ok_and(|line| self.log.lines.try_send(Message::Line(line)).is_ok()) {
            self.log.left_out.fetch_add(1, Relaxed);
        }
    }
}

/// Returns whether two values are equal, or are the same key.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    let key = |value| decode(value, Grammar::Lenient).ok();
    a == b || key(a).is_some_and(|a| key(b) == Some(a))
}

impl Drop for AccessEntry {
    fn drop(&mut self) {
        if !self.is_answered {
            self.append(self.line("unanswered"));
        }
    }
}

/// Writes lines until the log is dropped: all that wait, then flushes.
fn write(mut out: impl Write, messages: &Receiver<Message>, left_out: &AtomicU64) {
    let mut failing = false;
    while let Ok(message) = messages.recv() {
        let (mut count, mut flushes) = (0, Vec::new());
        let mut written = Ok(());
        let mut next = Some(message);
        while let Some(message) = next {
            match message {
                Message::Line(line) => {
                    count += 1;
                    written = out.write_all(&line);
                }
                Message::Flush(done) => flushes.push(done),
            }
            next = written.as_ref().ok().and_then(|()| messages.try_recv().ok());
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
            // Dropping `flushes` reports that lines are missing.
            continue;
        }
        let count = left_out.swap(0, Relaxed);
        if count > 0 {
            tracing::warn!(
                count,
                "the access log could not be written for a time: lines were left out"
            );
        }
        for done in flushes {
            // The caller may have given up.
            done.send(()).ok();
        }
    }
}
