//! The gateway's guard against hyper: requests that can be read in two ways.
//!
//! What the guard lets through is given to hyper, all at once, and hyper must find the requests
//! that the guard found: the same lines, the same bodies. It may end the connection earlier, but
//! it never serves what the guard did not see.
#![no_main]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use hapax_proxy::guard::head::{Framing, framing};
use hapax_proxy::guard::scan::{ScanResult, Scanner};
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

/// A request: its method and target, and its body if that ended.
type Seen = (String, Option<Vec<u8>>);

fuzz_target!(|input: &[u8]| {
    let (passed, guarded) = guard(input);
    let served = serve(&passed);
    assert!(served.len() <= guarded.len(), "hyper serves more: {served:?} {guarded:?}");
    for (served, guarded) in served.iter().zip(&guarded) {
        assert_eq!(served.0, guarded.0);
        // Where hyper finds an end, it is the end.
        assert!(served.1.is_none() || served.1 == guarded.1, "{served:?} {guarded:?}");
    }
});

/// The bytes that the guard lets through, and the requests it finds in them.
fn guard(input: &[u8]) -> (Vec<u8>, Vec<Seen>) {
    let mut scanner = Scanner::default();
    let mut at = 0;
    let mut heads: Vec<(usize, usize)> = Vec::new();
    let mut broken = false;
    while at < input.len() {
        match scanner.judge(&input[at..]) {
            ScanResult::Pass(count) => {
                assert!(count > 0);
                at += count;
            }
            ScanResult::Head(count) => {
                heads.push((at, at + count));
                at += count;
            }
            ScanResult::More | ScanResult::Reject(_) => break,
            // The gateway then breaks the connection.
            ScanResult::BrokenChunk => {
                broken = true;
                break;
            }
        }
    }
    let passed = input[..at].to_vec();
    let seen = heads.iter().enumerate().map(|(index, &(start, end))| {
        let last = index + 1 == heads.len();
        let until = heads.get(index + 1).map_or(at, |next| next.0);
        let head = &input[start..end];
        let body = body(head, &input[end..until]).filter(|_| !(last && broken));
        (line(head), body)
    });
    let seen = seen.collect();
    (passed, seen)
}

/// Method and target.
fn line(head: &[u8]) -> String {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    line.rsplit_once(' ').map(|(line, _)| line.to_owned()).unwrap_or_default()
}

/// What a body says, from its bytes on the wire, if it ends in them.
fn body(head: &[u8], wire: &[u8]) -> Option<Vec<u8>> {
    match framing(head).expect("it passed") {
        Framing::Empty => Some(Vec::new()),
        Framing::Length(length) => {
            let length = usize::try_from(length).ok()?;
            wire.get(..length).map(<[u8]>::to_vec)
        }
        Framing::Chunked => {
            let mut said = Vec::new();
            let mut rest = wire;
            loop {
                let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
                let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
                let digits = std::str::from_utf8(&rest[..digits]).expect("hexadecimal");
                let size = usize::from_str_radix(digits, 16).ok()?;
                rest = &rest[end + 2..];
                if size == 0 {
                    break;
                }
                said.extend_from_slice(rest.get(..size)?);
                rest = rest.get(size + 2..)?;
            }
            // Trailers, up to an empty line.
            let ended = rest.starts_with(b"\r\n") || rest.windows(4).any(|end| end == b"\r\n\r\n");
            ended.then_some(said)
        }
    }
}

/// The requests that hyper finds.
fn serve(bytes: &[u8]) -> Vec<Seen> {
    let seen = Arc::new(Mutex::new(Vec::<Seen>::new()));
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (mut client, server) = duplex(bytes.len() + 1);
        client.write_all(bytes).await.expect("it fits");
        let service = service_fn(|request: Request<Incoming>| {
            let seen = seen.clone();
            async move {
                let target = request.uri().path_and_query().map(ToString::to_string);
                let target = target.unwrap_or_else(|| request.uri().to_string());
                let line = format!("{} {target}", request.method());
                let index = {
                    let mut seen = seen.lock().expect("not poisoned");
                    seen.push((line, None));
                    seen.len() - 1
                };
                if let Ok(body) = request.into_body().collect().await {
                    let body = body.to_bytes().to_vec();
                    seen.lock().expect("not poisoned")[index].1 = Some(body);
                }
                Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
            }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(server), service);
        let (mut out, mut into) = tokio::io::split(client);
        // hyper's answers have to go somewhere, or it stops.
        let answers = async move {
            let mut sink = Vec::new();
            let _ = out.read_to_end(&mut sink).await;
        };
        let ended = async move { into.shutdown().await };
        let (connection, (), _) = tokio::join!(connection, answers, ended);
        let _ = connection;
    });
    Arc::try_unwrap(seen).expect("hyper is gone").into_inner().expect("not poisoned")
}
