//! Errors, and the meaning of each failure for the write.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::StoreError;
use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::server_info::UnfitServer;

/// Reasons for which a store was not opened, or lost its server.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisConnectError {
    /// The URL cannot be parsed, or needs a feature that this build lacks.
    #[error("the store's URL: {0}")]
    Url(String),
    /// An option is invalid, or cannot be combined with another.
    #[error("{0}")]
    Option(&'static str),
    /// The file of a certificate or key cannot be read.
    #[error("expected the file of a certificate or key, found an error: {path}: {error}")]
    CertificateFile {
        /// The path.
        path: String,
        /// The error.
        error: String,
    },
    /// The server was not reached, or rejected the login.
    #[error("the server was not reached: {0}")]
    Unreachable(#[source] RedisError),
    /// The server did not answer in time.
    #[error("the server did not answer within {0:?}")]
    TimedOut(Duration),
    /// The server denies a command that the store needs.
    #[error("the server denied {command}: {source}")]
    Denied {
        /// The command.
        command: &'static str,
        /// The server's error.
        source: RedisError,
    },
    /// The server cannot give the store's guarantees.
    #[error(transparent)]
    Unfit(#[from] UnfitServer),
    /// No process has used the store, or it was emptied, and the options require one that was used before.
    /// Nothing was written.
    #[error(
        "expected a store that was used before, found none: restore it, or correct the URL or the \
         prefix; a store that is created in its place has no records"
    )]
    Missing,
    /// Other processes use another secret, or none while one is given here, or one while none is
    /// given. Their names of keys would differ, so that one key could execute twice.
    #[error(
        "expected the secret that names the stored records, found another secret, or one on one \
         side only: set the secret of the other processes, or none if they have none; a ring with `name \
         none` seals the records of a store that began without a secret"
    )]
    OtherSecret,
}

impl RedisConnectError {
    /// Returns whether another attempt may succeed without any change to the server's configuration
    /// or to the options: the server was not reached, did not answer in time, or is starting up.
    ///
    /// A wrong password, an untrusted certificate, another secret and a server that evicts are none
    /// of these.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::TimedOut(_) => true,
            Self::Unreachable(error) | Self::Denied { source: error, .. } => is_away(error),
            Self::Url(_)
            | Self::Option(_)
            | Self::CertificateFile { .. }
            | Self::Unfit(_)
            | Self::Missing
            | Self::OtherSecret => false,
        }
    }

    /// Returns whether the server answered and is unfit for this store.
    pub(crate) const fn is_refusal(&self) -> bool {
        matches!(self, Self::Unfit(_) | Self::OtherSecret)
    }

    /// Returns the error of a command that is part of connecting.
    pub(crate) fn of(command: &'static str, source: RedisError) -> Self {
        if breaks(&source) { Self::Unreachable(source) } else { Self::Denied { command, source } }
    }
}

/// Reasons for which the store gave no answer: the source within a [`StoreError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisStoreError {
    /// Too many requests wait for the server already.
    #[error("too many requests wait for the server")]
    QueueFull,
    /// There is no connection, and the attempt to make one failed.
    #[error("there is no connection: {0}")]
    NotConnected(#[source] Arc<RedisConnectError>),
    /// No connection was made in time.
    #[error("there was no connection within {0:?}")]
    Connecting(Duration),
    /// The server did not answer in time.
    #[error("the server did not answer within {0:?}")]
    TimedOut(Duration),
    /// The server or the connection failed.
    #[error("{0}")]
    Redis(#[source] RedisError),
    /// The answer is none of the script's, or belongs to another request.
    #[error(
        "expected an answer of the store's script, found another one: check proxies between client and server"
    )]
    Unreadable,
    /// Part of the cluster has no owner: a page would look complete and would not be.
    #[error("not every slot of the cluster has a master: repair the cluster, then retry")]
    Incomplete,
    /// A new key was claimed in a store that was opened read-only
    /// ([`RedisOptions::make`](crate::RedisOptions::make)).
    #[error(
        "expected a store that was opened for writing, found one with `RedisOptions::make(false)`: it accepts no new key and no new entry of the schedule"
    )]
    ReadOnly,
    /// The store is not the one that was used before: new keys are rejected under `block` and
    /// `reconcile`. See [`RedisStore::confirm`](crate::RedisStore::confirm).
    #[error(
        "expected the store that was used before, found an emptied or replaced one; operations whose \
         records were lost would execute again: restore the records, or accept the store with \
         `hapax store confirm`"
    )]
    Replaced,
    /// The key has a value that no store wrote.
    #[error(
        "expected a record or an entry of this store under the key, found another value: delete it, or set another prefix"
    )]
    ForeignValue,
}

/// A request without an answer, by its effect.
#[derive(Debug)]
pub(crate) enum RequestFailure {
    /// The request was not sent, or the server answered that it did nothing.
    Nothing(RedisStoreError),
    /// The request may have been executed, or may still be.
    Unknown(RedisStoreError),
    /// The server found a value that is no record.
    Foreign,
}

impl RequestFailure {
    /// Returns whether the server does not have the script.
    pub(crate) fn is_unknown_script(&self) -> bool {
        let unknown = ErrorKind::Server(ServerErrorKind::NoScript);
        matches!(self, Self::Nothing(RedisStoreError::Redis(error)) if error.kind() == unknown)
    }

    /// Converts the failure of a request that changes nothing and was the last one sent.
    pub(crate) fn did_nothing(self) -> Self {
        match self {
            Self::Unknown(source) => Self::Nothing(source),
            other => other,
        }
    }

    /// Returns the error of a swap.
    pub(crate) fn of_write(self) -> StoreError {
        match self {
            Self::Nothing(source) => StoreError::unavailable(source),
            Self::Unknown(source) => StoreError::ambiguous(source),
            Self::Foreign => StoreError::corrupt(RedisStoreError::ForeignValue),
        }
    }

    /// Returns the error of a request that changes nothing, for which it does not matter whether it
    /// was executed.
    pub(crate) fn of_read(self) -> StoreError {
        match self {
            Self::Nothing(source) | Self::Unknown(source) => StoreError::unavailable(source),
            Self::Foreign => StoreError::corrupt(RedisStoreError::ForeignValue),
        }
    }
}

/// Classifies an error of a request that was passed to a cluster's client.
///
/// When the client cannot learn the slot owners, it returns that error to every request in progress,
/// also to those that a node is executing. So an error means that nothing was done only if it can
/// only be a node's answer to the request itself.
#[cfg(feature = "cluster")]
pub(crate) fn classify_of_cluster(error: RedisError) -> RequestFailure {
    let answered = crate::cluster::was_not_processed(&error)
        || error.kind() == ErrorKind::Server(ServerErrorKind::NoScript);
    match classify(error) {
        RequestFailure::Nothing(source) if !answered => RequestFailure::Unknown(source),
        failure => failure,
    }
}

/// Classifies an error of a request that was passed to a connection, which sends it once.
///
/// A server's error is either the script's answer or a rejection of the script. Either way nothing
/// was written, because the only write is the last command in the script that can fail. This holds
/// only for codes that servers and the script are known to send: a proxy in between may use any
/// other code for "the server was lost after the request was sent".
pub(crate) fn classify(error: RedisError) -> RequestFailure {
    let nothing = match error.kind() {
        ErrorKind::Server(kind) => match kind {
            // Sent to the wrong node, or to one that cannot serve: rejected before execution.
            ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::CrossSlot
            | ServerErrorKind::MasterDown
            | ServerErrorKind::BusyLoading => true,
            // A replica executed the script up to the write and rejected that.
            ServerErrorKind::ReadOnly => true,
            // Permissions are checked before a command is executed, also within the script.
            ServerErrorKind::NoPerm => true,
            // The server does not have the script; the caller then sends its text.
            ServerErrorKind::NoScript => true,
            // Code "ERR": servers use it for unknown commands, but proxies for anything. The other
            // three are never the answer to a script.
            ServerErrorKind::ResponseError
            | ServerErrorKind::ExecAbort
            | ServerErrorKind::NotBusy
            | ServerErrorKind::NoSub => false,
            // A kind of a later version of the client.
            _ => false,
        },
        // A code that the client does not know. From a script, these are rejections:
        ErrorKind::Extension => match error.code() {
            // The key has another type, or bytes that are no record.
            Some("HAPAX" | "WRONGTYPE") => return RequestFailure::Foreign,
            // The script's own codes, see swap.lua: its write was rejected.
            Some("NOTWRITTEN" | "NOTREAD") => true,
            // No memory, no disk, too few replicas, another script in progress, not logged in.
            Some("OOM" | "MISCONF" | "NOREPLICAS" | "BUSY" | "NOAUTH") => true,
            _ => false,
        },
        // There is no node to send the request to.
        ErrorKind::ClusterConnectionNotFound
        // Rejected by the client before it sends.
        | ErrorKind::InvalidClientConfig
        | ErrorKind::EmptySentinelList
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        // Both occur while a connection is made, before any other request is sent on it.
        | ErrorKind::AuthenticationFailed
        | ErrorKind::RESP3NotSupported => true,
        // The connection broke, or was found broken: the client does not distinguish before from
        // after sending.
        ErrorKind::Io => false,
        // The answer cannot be parsed, or has another type: something was done.
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => false,
        // The client's own errors can occur at any time.
        ErrorKind::Client => false,
        // A kind of a later version of the client.
        _ => false,
    };
    if nothing {
        RequestFailure::Nothing(RedisStoreError::Redis(error))
    } else {
        RequestFailure::Unknown(RedisStoreError::Redis(error))
    }
}

fn is_away(error: &RedisError) -> bool {
    match error.kind() {
        // TLS reports an untrusted certificate as invalid data.
        ErrorKind::Io => {
            let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
            source.is_none_or(|source| source.kind() != io::ErrorKind::InvalidData)
        }
        ErrorKind::Server(kind) => matches!(
            kind,
            ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::TryAgain
        ),
        ErrorKind::ClusterConnectionNotFound => true,
        _ => false,
    }
}

/// Returns whether the connection is unusable after this error, or leads to the wrong server.
pub(crate) fn breaks(error: &RedisError) -> bool {
    match error.kind() {
        // The server is no longer the master.
        ErrorKind::Server(ServerErrorKind::ReadOnly) => true,
        ErrorKind::Io | ErrorKind::Parse => true,
        _ => error.is_unrecoverable_error(),
    }
}

#[cfg(all(test, feature = "cluster"))]
mod tests {
    use redis::{ErrorKind, RedisError};

    use super::{RequestFailure, classify, classify_of_cluster};

    fn said(line: &str) -> Option<RedisError> {
        let said = redis::parse_redis_value(format!("-{line}\r\n").as_bytes());
        said.and_then(redis::Value::extract_error).err()
    }

    #[test]
    fn an_error_of_the_cluster_client_is_ambiguous() {
        let [refusals, answers] =
            [["CLUSTERDOWN x", "READONLY x", "OOM x"], ["TRYAGAIN x", "MOVED 1 h:1", "ASK 1 h:1"]];
        let mut errors: Vec<_> = refusals.into_iter().filter_map(said).collect();
        errors.push((ErrorKind::ClusterConnectionNotFound, "none").into());
        assert_eq!(errors.len(), refusals.len() + 1);
        for error in errors {
            let text = error.to_string();
            let (one, of_cluster) = (classify(error.clone()), classify_of_cluster(error));
            assert!(matches!(one, RequestFailure::Nothing(_)), "{text}");
            assert!(matches!(of_cluster, RequestFailure::Unknown(_)), "{text}");
        }
        for answer in answers {
            let failure = said(answer).map(classify_of_cluster);
            assert!(matches!(failure, Some(RequestFailure::Nothing(_))), "{answer}");
        }
        assert!(matches!(said("HAPAX x").map(classify_of_cluster), Some(RequestFailure::Foreign)));
        let unknown = said("NOSCRIPT x").map(classify_of_cluster);
        assert!(unknown.is_some_and(|failure| failure.is_unknown_script()));
    }
}
