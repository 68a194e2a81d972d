//! Whose fault it is that a request was not sent whole.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use hapax_http::{Body, BoxError};
use http::Request;
use http_body::Body as _;
use http_body_util::BodyExt;

/// Why whoever a request is from did not send the rest of its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UploadError {
    /// It sends too slowly.
    Slow,
    /// It broke off, or sent what is no body.
    Broken,
}

impl fmt::Display for UploadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Slow => "the client sends too slowly",
            Self::Broken => "the client broke off",
        })
    }
}

impl Error for UploadError {}

impl UploadError {
    /// The error that a body fails with. One that comes too slowly has timed out, whoever reads it.
    pub(crate) fn into_error(self) -> BoxError {
        match self {
            Self::Slow => io::Error::new(io::ErrorKind::TimedOut, self).into(),
            Self::Broken => self.into(),
        }
    }

    fn of(error: &BoxError) -> Self {
        let io = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let of_io = io.and_then(|inner| inner.downcast_ref::<Self>());
        error.downcast_ref().or(of_io).copied().unwrap_or(Self::Broken)
    }
}

/// What became of an upload: of its errors a connection in HTTP/2 says nothing, and one in HTTP/1 no
/// more than that there was one.
#[derive(Clone, Debug, Default)]
pub(super) struct Upload(Arc<OnceLock<UploadError>>);

impl Upload {
    /// Watches a request's body.
    pub(super) fn watch(request: Request<Body>) -> (Request<Body>, Self) {
        let upload = Self::default();
        let watched = upload.clone();
        let note = move |error: BoxError| {
            let fault = UploadError::of(&error);
            // The first one counts.
            let _ = watched.0.set(fault);
            error
        };
        // Nothing can happen to what is not sent.
        let request = request.map(|body| match body.is_end_stream() {
            true => body,
            false => Body::new(body.map_err(note)),
        });
        (request, upload)
    }

    /// Why it ended early, if it did.
    pub(super) fn fault(&self) -> Option<UploadError> {
        self.0.get().copied()
    }
}
