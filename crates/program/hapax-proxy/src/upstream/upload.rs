//! Failures of the upload of a request's body.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt;

use crate::{BodyError, BoxedBody};

/// Reasons for which a client did not send the rest of its body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UploadError {
    /// The client sends too slowly.
    Slow,
    /// The client broke off, or sent an invalid body.
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
    /// Returns the error of a body. For a slow client it is a timeout error to all readers.
    #[must_use]
    pub fn into_error(self) -> BodyError {
        match self {
            Self::Slow => io::Error::new(io::ErrorKind::TimedOut, self).into(),
            Self::Broken => self.into(),
        }
    }

    fn of(error: &BodyError) -> Self {
        let io = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let of_io = io.and_then(|inner| inner.downcast_ref::<Self>());
        error.downcast_ref().or(of_io).copied().unwrap_or(Self::Broken)
    }
}

/// Failure of an upload, if any: an HTTP/2 connection does not return such errors, and an HTTP/1
/// connection returns only that there was one.
#[derive(Clone, Debug, Default)]
pub(super) struct Upload(Arc<OnceLock<UploadError>>);

impl Upload {
    /// Watches a request's body.
    pub(super) fn watch<B>(request: Request<B>) -> (Request<BoxedBody>, Self)
    where
        B: http_body::Body<Data = Bytes, Error: Into<BodyError>> + Send + 'static,
    {
        let upload = Self::default();
        let watched = upload.clone();
        let note = move |error: B::Error| {
            let error = error.into();
            let fault = UploadError::of(&error);
            // The first one counts.
            let _ = watched.0.set(fault);
            error
        };
        // An empty body cannot fail.
        let request = request.map(|body| match body.is_end_stream() {
            true => BoxedBody::new(body.map_err(Into::into)),
            false => BoxedBody::new(body.map_err(note)),
        });
        (request, upload)
    }

    /// Returns the reason for which the upload ended early, if it did.
    pub(super) fn fault(&self) -> Option<UploadError> {
        self.0.get().copied()
    }
}
