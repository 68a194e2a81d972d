//! Responses as real services send them.
//!
//! The files in `shapes/` are heads and bodies as they were on the connection: a line with the
//! status, header lines, an empty line, the body. Megabytes and trailers, which do not fit in a
//! file, are built here.

use crate::http::frames::frames;
use bytes::Bytes;
use hapax_core::OnUnknown;
use hapax_http::Body;
use hapax_http::classify::{OutcomeClass, Profile, is_redirect};
use hapax_http::header::IDEMPOTENCY_OUTCOME;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body::Frame;

/// A sample response.
#[derive(Clone, Debug)]
pub struct ResponseSample {
    /// Name of the sample.
    pub name: String,
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// Its trailers.
    pub trailers: Option<HeaderMap>,
    /// True if the body is sent in chunks.
    chunked: bool,
}

impl ResponseSample {
    fn new(name: &str, body: impl Into<Bytes>) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/octet-stream"));
        let (status, name) = (StatusCode::OK, name.to_owned());
        Self { name, status, headers, body: body.into(), trailers: None, chunked: false }
    }

    fn trailers(mut self, trailers: &[(&'static str, &'static str)]) -> Self {
        let names: Vec<_> = trailers.iter().map(|(name, _)| *name).collect();
        self.headers.insert("trailer", HeaderValue::from_str(&names.join(", ")).unwrap());
        let map = self.trailers.get_or_insert_default();
        for (name, value) in trailers {
            map.append(*name, HeaderValue::from_static(value));
        }
        self
    }

    /// Parses the text of a file.
    fn parse(name: &str, file: &'static [u8]) -> Self {
        let end = file.windows(4).position(|part| part == b"\r\n\r\n").unwrap();
        let (head, body) = (&file[..end], &file[end + 4..]);
        let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_end);
        let status = StatusCode::from_bytes(lines.next().unwrap()).unwrap();
        let mut headers = HeaderMap::new();
        for line in lines {
            let colon = line.iter().position(|byte| *byte == b':').unwrap();
            let name = HeaderName::from_bytes(&line[..colon]).unwrap();
            let value = line[colon + 1..].trim_ascii_start();
            headers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let body = Bytes::from_static(body);
        // The body is in one piece here, and is sent in chunks as the original was.
        let chunked = headers.get("transfer-encoding").is_some();
        Self { name: name.to_owned(), status, headers, body, trailers: None, chunked }
    }

    /// Makes the body chunked, so that its length is not known before its end.
    fn chunked(self) -> Self {
        Self { chunked: true, ..self }
    }

    /// Adds this header.
    fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.append(name, HeaderValue::from_static(value));
        self
    }

    /// Returns the response of a handler. If the status does not imply that the outcome is final, a
    /// header states it.
    #[must_use]
    pub fn response(&self) -> Response<Body> {
        let body = match self.chunked || self.trailers.is_some() {
            false => Body::from(self.body.clone()),
            true => in_frames(self.body.clone(), self.trailers.clone()),
        };
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers.clone();
        let class = Profile::Standard.classify(self.status, OnUnknown::Block);
        if class != OutcomeClass::Final || is_redirect(self.status, &self.headers) {
            let said = HeaderValue::from_static("final");
            response.headers_mut().insert(IDEMPOTENCY_OUTCOME, said);
        }
        response
    }
}

/// Returns the body in frames of 1000 bytes, with its trailers.
fn in_frames(body: Bytes, trailers: Option<HeaderMap>) -> Body {
    let (sender, channel) = frames(4);
    tokio::spawn(async move {
        for chunk in body.chunks(1000) {
            if !sender.data(body.slice_ref(chunk)).await {
                return;
            }
        }
        if let Some(trailers) = trailers {
            sender.frame(Frame::trailers(trailers)).await;
        }
    });
    Body::new(channel)
}

/// Returns bytes that neither compress nor are text.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

/// Returns all samples: those of files, and those that are built.
#[must_use]
pub fn all() -> Vec<ResponseSample> {
    let mut all: Vec<_> =
        FILES.iter().map(|(name, file)| ResponseSample::parse(name, file)).collect();
    all.extend([
        ResponseSample::new("made_five_mebibytes", noise(5 << 20)),
        ResponseSample::new("made_a_frame_of_http2", noise(16 * 1024)),
        ResponseSample::new("made_a_window_of_http2_and_one", noise(65_536)),
        ResponseSample::new("made_zeros", vec![0; 100_000]),
        ResponseSample::new("made_chunks", noise(70_000)).chunked(),
        ResponseSample::new("made_chunks_of_nothing", "").chunked(),
        ResponseSample::new("made_chunks_as_was_said", noise(3000))
            .header("transfer-encoding", "chunked")
            .chunked(),
        ResponseSample::new("made_trailers", "hello").trailers(&[("x-checksum", "5d41402a")]),
        ResponseSample::new("made_trailers_without_a_body", "").trailers(&[("x-end", "1")]),
        ResponseSample::new("made_repeated_trailers", noise(10_500)).trailers(&[
            ("server-timing", "db;dur=1"),
            ("server-timing", "app;dur=2"),
            ("x-md5", "="),
        ]),
    ]);
    all
}

macro_rules! files {
    ($($name:ident)*) => {
        &[$((stringify!($name), include_bytes!(concat!("../../shapes/", stringify!($name), ".http")))),*]
    };
}

const FILES: &[(&str, &[u8])] = files! {
    accepted
    as_sent_by_a_cdn
    as_sent_by_a_legacy_server
    as_sent_by_a_json_api
    as_sent_by_a_payment_api
    as_sent_by_a_proxy_that_closes
    as_sent_by_an_object_store
    as_sent_by_kestrel
    as_sent_by_nginx
    as_sent_by_php
    as_sent_by_tomcat
    as_sent_with_nothing_to_say
    as_sent_unchanged
    as_sent_in_chunks
    all_bytes
    bad_gateway
    bad_request_html
    cbor
    cookies
    csv_with_bom
    deflate_text
    digests
    empty_json
    forbidden_xml
    found_without_body
    gone
    graphql_errors
    gzip_json
    gzip_twice
    http_in_the_body
    internal_error_stack
    jose
    latin1_header
    legal_reasons
    line_ends
    method_not_allowed
    moved_permanently
    msgpack
    multi_status
    multipart_byteranges
    multipart_form
    multiple_choices
    ndjson
    no_content
    no_content_type
    no_content_with_cookie
    not_acceptable
    not_found_empty
    not_modified
    odd_header_values
    one_byte
    partial_content
    payment_created
    payment_declined
    pdf
    permanent_redirect
    png
    precondition_failed
    problem
    problem_that_looks_like_ours
    protobuf
    quoted_printable_mail
    repeated_headers
    reset_content
    security_headers
    see_other
    service_unavailable
    shift_jis
    sixty_headers
    soap
    status_without_a_name
    teapot
    temporary_redirect
    too_many_requests
    unauthorized
    unsupported_media_type
    utf16_json
    wasm
    zip
};
