//! What can go wrong, and what each failure says about the write.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::StoreError;
use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::server_info::UnfitServer;

/// Why a store was not opened, or lost its server.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisConnectError {
    /// The URL cannot be understood, or needs a feature that this build lacks.
    #[error("the store's URL: {0}")]
    Url(String),
    /// An option that goes with nothing.
    #[error("{0}")]
    Option(&'static str),
    /// The server was not reached, or did not let us in.
    #[error("the server was not reached: {0}")]
    Unreachable(#[source] RedisError),
    /// The server took too long.
    #[error("the server did not answer within {0:?}")]
    TimedOut(Duration),
    /// The server lets us in, and denies a command that the store needs.
    #[error("the server refuses {command}: {source}")]
    Denied {
        /// Which.
        command: &'static str,
        /// What it said.
        source: RedisError,
    },
    /// The server cannot keep what a store promises.
    #[error(transparent)]
    Unfit(#[from] UnfitServer),
    /// Other processes write under another secret, or under none while one is given here, or the
    /// other way round: their keys would be other keys, and nothing would protect one from the
    /// other.
    #[error(
        "the server is used with another secret than was given, or none was: give the secret of the \
         other processes; to begin with another, empty the store, and confirm that"
    )]
    OtherSecret,
}

impl RedisConnectError {
    /// Returns whether another attempt may succeed without any change to the server's configuration or
    /// to the options: the server was not reached, did not answer in time, or is starting up.
    ///
    /// A wrong password, a certificate that is not trusted, another secret and a server that evicts are
    /// none of these.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::TimedOut(_) => true,
            Self::Unreachable(error) | Self::Denied { source: error, .. } => is_away(error),
            Self::Url(_) | Self::Option(_) | Self::Unfit(_) | Self::OtherSecret => false,
        }
    }

    /// Whether the server was heard, and is no place for this store.
    pub(crate) const fn is_refusal(&self) -> bool {
        matches!(self, Self::Unfit(_) | Self::OtherSecret)
    }

    /// For a command that is part of connecting.
    pub(crate) fn of(command: &'static str, source: RedisError) -> Self {
        if breaks(&source) { Self::Unreachable(source) } else { Self::Denied { command, source } }
    }
}

/// Why the store gave no answer: the source within a [`StoreError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisStoreError {
    /// Too much is waiting for the server already.
    #[error("too many requests wait for the server")]
    QueueFull,
    /// There is no connection, and none could be made in time.
    #[error("there is no connection: {0}")]
    NotConnected(#[source] Arc<RedisConnectError>),
    /// There was no connection in time.
    #[error("there was no connection within {0:?}")]
    Connecting(Duration),
    /// The server did not answer in time.
    #[error("the server did not answer within {0:?}")]
    TimedOut(Duration),
    /// The server, or the connection to it, failed.
    #[error("{0}")]
    Redis(#[source] RedisError),
    /// An answer that no script of ours gives, or to another request.
    #[error("the server's answer cannot be understood")]
    Unreadable,
    /// Part of the cluster is served by nobody: a page would look whole and is not.
    #[error("not every slot of the cluster is served")]
    Incomplete,
    /// A new key, in a store that was opened to look ([`Options::make`](crate::RedisOptions::make)).
    #[error("the store was opened to look: it claims no new keys")]
    ReadOnly,
    /// The store is not the one that was used before: new keys are rejected under `block` and
    /// `reconcile`. See [`RedisStore::confirm`](crate::RedisStore::confirm).
    #[error(
        "the store was emptied or replaced since it was last used, so that what it held would execute \
         again: `hapax store confirm` accepts that"
    )]
    Replaced,
    /// The key holds something that no store of ours wrote.
    #[error("the key holds something that is no cell")]
    NoCell,
}

/// A request that got no answer, by what that says about it.
#[derive(Debug)]
pub(crate) enum RequestFailure {
    /// It was not sent, or the server said that it did nothing.
    Nothing(RedisStoreError),
    /// It may have been done, or may yet be.
    Unknown(RedisStoreError),
    /// The server looked and found what is not ours.
    Foreign,
}

impl RequestFailure {
    /// Whether the server that was asked last does not know the script.
    pub(crate) fn is_unknown_script(&self) -> bool {
        let unknown = ErrorKind::Server(ServerErrorKind::NoScript);
        matches!(self, Self::Nothing(RedisStoreError::Redis(error)) if error.kind() == unknown)
    }

    /// Of a request after which nothing else was sent, and which changes nothing.
    pub(crate) fn did_nothing(self) -> Self {
        match self {
            Self::Unknown(source) => Self::Nothing(source),
            other => other,
        }
    }

    /// For a swap.
    pub(crate) fn of_write(self) -> StoreError {
        match self {
            Self::Nothing(source) => StoreError::unavailable(source),
            Self::Unknown(source) => StoreError::ambiguous(source),
            Self::Foreign => StoreError::corrupt(RedisStoreError::NoCell),
        }
    }

    /// For what changes nothing: that it is unknown whether it was done does not matter.
    pub(crate) fn of_read(self) -> StoreError {
        match self {
            Self::Nothing(source) | Self::Unknown(source) => StoreError::unavailable(source),
            Self::Foreign => StoreError::corrupt(RedisStoreError::NoCell),
        }
    }
}

/// What an error says, once the request was handed to a cluster's client.
///
/// When that one cannot learn who serves what, it tells so everybody who waits, also those whose
/// request a node is carrying out. So an error means that nothing was done only where it can be
/// none but a node's answer to the request itself.
#[cfg(feature = "cluster")]
pub(crate) fn classify_of_cluster(error: RedisError) -> RequestFailure {
    let answered = crate::cluster::was_not_looked_at(&error)
        || error.kind() == ErrorKind::Server(ServerErrorKind::NoScript);
    match classify(error) {
        RequestFailure::Nothing(source) if !answered => RequestFailure::Unknown(source),
        failure => failure,
    }
}

/// What an error says, once the request was handed to a connection that sends it once.
///
/// A server's error is the answer of our script, or a refusal to run it. Either way nothing was
/// written, because the only write is the last thing in the script that can fail. Only codes that
/// servers and the script are known to send are read that way: a proxy in between may use any
/// other for "I lost the server after I had sent it".
pub(crate) fn classify(error: RedisError) -> RequestFailure {
    let nothing = match error.kind() {
        ErrorKind::Server(kind) => match kind {
            // Not asked of the right node, or of one that cannot serve: refused before it runs.
            ServerErrorKind::Moved
            | ServerErrorKind::Ask
            | ServerErrorKind::TryAgain
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::CrossSlot
            | ServerErrorKind::MasterDown
            | ServerErrorKind::BusyLoading => true,
            // A replica ran it up to the write and refused that.
            ServerErrorKind::ReadOnly => true,
            // Permissions are checked before a command is run, the script's as well.
            ServerErrorKind::NoPerm => true,
            // The script is not known there; whoever sent it sends its text instead.
            ServerErrorKind::NoScript => true,
            // "ERR": servers say it of commands they do not know, but proxies say it of anything.
            // The others never answer a script.
            ServerErrorKind::ResponseError
            | ServerErrorKind::ExecAbort
            | ServerErrorKind::NotBusy
            | ServerErrorKind::NoSub => false,
            // A kind that a newer client knows.
            _ => false,
        },
        // An error whose code the client does not know. Of a script's, these are refusals:
        ErrorKind::Extension => match error.code() {
            // The key holds another type, or bytes that are no cell.
            Some("HAPAX" | "WRONGTYPE") => return RequestFailure::Foreign,
            // The script's own, see swap.lua: its write was refused.
            Some("NOTWRITTEN" | "NOTREAD") => true,
            // No memory, no disk, too few replicas, another script at work, not logged in.
            Some("OOM" | "MISCONF" | "NOREPLICAS" | "BUSY" | "NOAUTH") => true,
            _ => false,
        },
        // No node to send it to.
        ErrorKind::ClusterConnectionNotFound
        // Refused by the client itself, before it sends.
        | ErrorKind::InvalidClientConfig
        | ErrorKind::EmptySentinelList
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        // Both while a connection is made: nothing else was sent on it yet.
        | ErrorKind::AuthenticationFailed
        | ErrorKind::RESP3NotSupported => true,
        // The connection broke, or was found broken: the client does not tell before from after
        // it was sent.
        ErrorKind::Io => false,
        // An answer that cannot be parsed, or is of another type: something was done.
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => false,
        // The client's own, at any time.
        ErrorKind::Client => false,
        // A kind that a newer client knows.
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
        // TLS reports a certificate that is not trusted as invalid data.
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

/// Whether the connection is of no use after this error, or leads to the wrong server.
pub(crate) fn breaks(error: &RedisError) -> bool {
    match error.kind() {
        // It leads to a server that is no master any more.
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
    fn what_a_clusters_client_says_may_be_meant_for_another_request() {
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
