//! Errors of clients, requests and sends.

use std::error::Error;
use std::time::Duration;

use hapax_proxy::tls::TlsError;
use http::{HeaderName, StatusCode};

use crate::journal::JournalError;
use crate::response::ClientResponse;
use crate::send::Handle;

/// Reasons for which a client cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The origin of a server is invalid.
    #[error(
        "expected http://HOST or https://HOST without a path, user or fragment, found `{found}`: remove the rest"
    )]
    Origin {
        /// The origin, without what is before `@`, which may be a password.
        found: String,
    },
    /// A server is declared twice.
    #[error("expected one declaration of `{found}`, found two: remove one")]
    DuplicateServer {
        /// The origin.
        found: String,
    },
    /// A time is zero.
    #[error("expected a time above zero for `{setting}`, found zero: set a longer one")]
    ZeroDuration {
        /// The method of the builder.
        setting: &'static str,
    },
    /// The retention of a server is no longer than a try takes: a try may arrive when the server has no record
    /// of the key any more.
    #[error(
        "expected a retention of more than {limit:?}, found {found:?}: declare the retention that the server documents, or the server as one without keys"
    )]
    Retention {
        /// The longest duration of a try.
        limit: Duration,
        /// The retention.
        found: Duration,
    },
    /// The root certificates cannot be used.
    #[error(transparent)]
    Certificates(TlsError),
    /// The system has no root certificates, and none were set.
    #[error(
        "expected root certificates of the system, found none: set a file of them by `ClientBuilder::root_certificates`"
    )]
    NoRootCertificates,
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Reasons for which a request is rejected before anything is stored or sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The name is invalid.
    #[error(
        "expected a name of 1 to 255 printable ASCII characters, found another: rename the operation"
    )]
    Name,
    /// There is no name, and the client is strict.
    #[error(
        "expected a name of the operation, found none: set one by `operation`, or by the extension `Operation`"
    )]
    NoName,
    /// The URL is invalid.
    #[error(
        "expected a URL such as https://HOST/PATH, without user, password and fragment, found another: correct it"
    )]
    Url,
    /// The method is CONNECT, which is not for a resource.
    #[error("expected a method for a resource, such as POST, found CONNECT")]
    Method,
    /// No server was declared for the URL.
    #[error(
        "expected the URL of a declared server, found `{origin}`: declare it by `ClientBuilder::server`"
    )]
    Undeclared {
        /// The origin of the URL.
        origin: String,
    },
    /// A header is invalid, or belongs to the connection or the client.
    #[error(
        "expected a valid header that the request may set, found `{name}`: it is invalid, or the client sets it (the key and other `Idempotency-` headers, `Host`, `Content-Length`, `Expect`, those of the connection): remove it"
    )]
    Header {
        /// Its name.
        name: String,
    },
    /// The headers are too large: the sum of names and values, with 4 bytes for each header.
    #[error(
        "expected headers of at most {limit} bytes together, found {found}: shorten them, or move them to the body"
    )]
    Headers {
        /// The limit.
        limit: usize,
        /// The size.
        found: usize,
    },
    /// The URL is too long.
    #[error("expected a URL of at most {limit} bytes, found {found}: shorten it")]
    UrlLength {
        /// The limit.
        limit: usize,
        /// The size.
        found: usize,
    },
    /// A header has a secret, which would be stored.
    #[error(
        "expected no secret among the stored headers, found `{name}`: supply it by `ClientBuilder::credentials`"
    )]
    SecretHeader {
        /// Its name.
        name: HeaderName,
    },
    /// The body is too large.
    #[error(
        "expected a body of at most {limit} bytes, found {found}: send a smaller one, or a reference to the content"
    )]
    Body {
        /// The limit.
        limit: usize,
        /// The size.
        found: usize,
    },
    /// The body is a stream, or has trailers. It could not be sent again.
    #[error("expected a body of bytes, found a stream or trailers: read it into memory first")]
    Stream,
    /// The body could not be read to the length that it declares.
    #[error("expected a complete body: {0}")]
    BrokenBody(#[source] Box<dyn Error + Send + Sync>),
    /// The body cannot be written as JSON.
    #[error("expected a value that can be written as JSON, found another: {0}: correct its type")]
    Json(#[from] serde_json::Error),
    /// The time is zero.
    #[error("expected a time above zero for `within`, found zero")]
    Within,
    /// There was no randomness for a name.
    #[error(transparent)]
    Entropy(#[from] hapax_core::EntropyError),
}

/// Reasons for which a send returns no response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The request is rejected. Nothing was stored or sent.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The name belongs to another request. Nothing was sent.
    #[error(
        "expected the first request of this name, found another method, URL, header or body: send the first one again, since it may have happened, or look it up at the server; a new name is for another operation"
    )]
    Reused,
    /// The server has another request under the key of this name: another program uses the secret of this
    /// journal, or the name was used for another request before. The operation is not sent again.
    #[error("expected the server to have this request under the key, found that it has another one ({}), which may have happened: find the program or the name that used the key", .0.status)]
    ReusedAtServer(Box<ClientResponse>),
    /// The operation has stopped and has not happened: each try failed before a byte was sent, or was rejected
    /// before anything was executed. The next send of the name tries again.
    #[error(
        "the operation has not happened, no try reached the service: {0}: send again with the same name"
    )]
    NotSent(String),
    /// The time to wait is over. The operation is in the journal, and this process tries it until it has a
    /// response, stops, or the client is closed.
    #[error(
        "expected a response within the time to wait, found none yet: wait by the handle, or send again with the same name"
    )]
    Pending(Handle),
    /// The operation may have happened, and no try determined it. The next send of the name sends the request
    /// again if the server honors keys, since that can have no second effect. Of an operation that was
    /// [acknowledged](crate::Client::acknowledge) nothing is sent.
    #[error(
        "it is unknown whether the operation happened: {0}: send again if the server honors keys, or look it up there"
    )]
    Unknown(String),
    /// A try may have arrived, and the server may have no record of the key any more: nothing is sent under this
    /// name.
    #[error(
        "the operation may have happened, and its key is too old to be sent again: look it up at the server, then acknowledge it"
    )]
    Expired,
    /// An earlier try may have arrived under other credentials, which the server may take for another caller:
    /// under them the same key is a new operation. Nothing was sent. The next send of the name compares again.
    #[error(
        "expected the credentials of the first try that may have arrived, found others: restore them; only if the server takes the account instead of the token, declare it by `Server::scoped_by_account`; if they are gone for good, look the operation up at the server, then acknowledge it, or forget it if it did not happen"
    )]
    CredentialsChanged,
    /// An earlier try may have arrived under another key, in another header, or without a key: the
    /// declaration of the server has changed since. Nothing was sent. The next send of the name compares
    /// again.
    #[error(
        "expected the same key in the same header as in a try that may have arrived, found that the declaration of the server has changed: declare it as for that try; if that is impossible, look the operation up at the server and acknowledge it"
    )]
    KeyChanged,
    /// The server rejected the credentials with 401, or with 403 after a try that may have arrived. The next
    /// send of the name calls the callback again.
    #[error(
        "expected credentials that the server accepts, found that it rejects them: send again with valid credentials of the same account"
    )]
    Unauthorized,
    /// A Hapax server answered 401 `invalid-token`: the bearer token that names the caller does not verify, or has
    /// expired. That try executed nothing. The next send of the name calls the callback again; after a try that may
    /// have arrived, another token needs [`Server::scoped_by_account`](crate::Server::scoped_by_account).
    #[error(
        "expected a bearer token that the server verifies, found one that does not verify or has expired (401 `invalid-token`), which executed nothing: send again with a new token of the same account"
    )]
    InvalidToken,
    /// The operation got a response whose body was not stored: it is larger than 1 MiB. The call that was
    /// waiting has got it, unless it was larger than 64 MiB, or there was no memory for it. No later call gets
    /// it.
    #[error(
        "the operation got a response with {status}, whose body of more than 1 MiB was not stored: look the result up at the server"
    )]
    ResponseNotRetained {
        /// The status of the response.
        status: StatusCode,
    },
    /// The client is closed. The operation continues when it is sent again, or the journal is resumed.
    #[error(
        "expected an open client, found a closed one: open a client on the journal, and send again with the same name, or resume"
    )]
    Closed,
    /// The journal is unavailable. Nothing was sent by this call, or its response is not stored yet: send again
    /// with the same name.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl From<TlsError> for ClientError {
    fn from(error: TlsError) -> Self {
        match error {
            // Its text names a flag of the gateway.
            TlsError::NoRoots => Self::NoRootCertificates,
            error => Self::Certificates(error),
        }
    }
}

impl SendError {
    pub(crate) fn journal(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Journal(JournalError::Write(error.into()))
    }
}
