//! Profiles of servers: how they treat keys, and what a response means for the operation.

mod follow;

use std::time::Duration;

use hapax_core::Key;
use hapax_http::header::{IDEMPOTENCY_KEY, encode};
use hapax_proxy::ConnectProxy;
use http::{HeaderName, HeaderValue};

use crate::flow::TRY;

pub(crate) use follow::{Follow, MAX_PROBLEM, Profile, follow, is_replayed, retry_after};

/// Retention of keys if none is declared.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// Declaration of a server: its profile, for how long it keeps a key, and whose a key is.
///
/// | profile | key | whether a response is final is decided by |
/// | --- | --- | --- |
/// | [`hapax`](Self::hapax) | `Idempotency-Key`, quoted | the codes of its problems, `Idempotency-Replayed`, `Idempotency-Outcome` |
/// | [`stripe`](Self::stripe) | `Idempotency-Key`, without quotes | `Stripe-Should-Retry`, `Idempotent-Replayed`, the type of its errors |
/// | [`plain`](Self::plain) | `Idempotency-Key`, quoted | the status, `Retry-After` of a 409, and `Idempotency-Outcome: retryable` |
/// | [`without_keys`](Self::without_keys) | none | every response is final, and nothing is sent again once a byte may have arrived |
///
/// A key has 64 hexadecimal digits. Quoted, as the draft of the header says, it has 66 characters:
/// `Idempotency-Key: "9f86d081…"`. If the server documents keys without quotes, declare
/// [`stripe`](Self::stripe): every 409 is then tried again. If it documents a shorter limit, declare
/// [`without_keys`](Self::without_keys).
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Server {
    pub(crate) profile: Profile,
    pub(crate) retention: Duration,
    pub(crate) key_header: HeaderName,
    pub(crate) scoped_by_account: bool,
    pub(crate) http2: bool,
    pub(crate) follows_accepted: bool,
    pub(crate) proxy: Option<ConnectProxy>,
}

impl Server {
    /// Declares a server behind the Hapax layer or gateway, or one that honors the same contract.
    pub const fn hapax() -> Self {
        Self::new(Profile::Hapax)
    }

    /// Declares a server that treats keys as Stripe's API v1 does.
    pub const fn stripe() -> Self {
        Self::new(Profile::Stripe)
    }

    /// Declares a server that honors keys and documents no codes: 401, 408, 409 with `Retry-After`, 425, 429,
    /// 500, 502, 503 and 504 are tried again, any other response is final. Set the
    /// [`retention`](Self::retention) that it documents: the default, 24 h, is a second effect at a server that
    /// keeps keys for a shorter time.
    pub const fn plain() -> Self {
        Self::new(Profile::Plain)
    }

    /// Declares a server that ignores keys; none is sent. Every response is final, also a 503. If none arrives
    /// and a byte may have arrived, the outcome is unknown
    /// ([`SendError::Unknown`](crate::SendError::Unknown)) and nothing is sent again.
    pub const fn without_keys() -> Self {
        Self::new(Profile::WithoutKeys)
    }

    const fn new(profile: Profile) -> Self {
        Self {
            profile,
            retention: RETENTION,
            key_header: IDEMPOTENCY_KEY,
            scoped_by_account: false,
            http2: false,
            follows_accepted: false,
            proxy: None,
        }
    }

    /// Sets the time for which the server keeps a key, as its documentation states it: more than 60 s. A time
    /// longer than the server's own can cause a second effect; if it is not documented, set less. Once a try may have
    /// arrived, no further try begins at an age of 0.9 of this time, or of this time less 60 s, whichever is
    /// less: of 24 h, after 21.6 h. `Idempotency-Expires` of a server with the profile `hapax` takes its place.
    /// Default 24 h.
    pub const fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Declares that the server takes the account behind the credentials, and not the credentials, as part of a
    /// key: operations continue with another token of the same account. *If that is wrong, a retry with a
    /// refreshed token is a second operation.* Default: other credentials are rejected once a try may have
    /// arrived.
    pub const fn scoped_by_account(mut self) -> Self {
        self.scoped_by_account = true;
        self
    }

    /// Sets the name of the header of the key. Without effect for [`without_keys`](Self::without_keys). Default
    /// `Idempotency-Key`.
    pub fn key_header(mut self, name: HeaderName) -> Self {
        self.key_header = name;
        self
    }

    /// Uses HTTP/2 from the first byte, also without TLS. Default: what TLS negotiates, else HTTP/1.1.
    pub const fn http2_prior_knowledge(mut self) -> Self {
        self.http2 = true;
        self
    }

    /// Sets the proxy through which the server is reached, by a tunnel (`CONNECT`). A proxy that opens none is a
    /// server that could not be reached: nothing was sent. Default: none, whatever the environment says.
    pub fn proxy(mut self, proxy: ConnectProxy) -> Self {
        self.proxy = Some(proxy);
        self
    }

    /// Declares that a response 202 with `Location` accepts the operation, as
    /// [the routes of a saga](https://docs.rs/hapax-saga) do, and that `Location` shows its state: it is
    /// read by GET, not before `Retry-After`, until it answers otherwise than 202, or shows the end of the
    /// saga. A `Location` at another server is not read, and the 202 is the response, as without this.
    ///
    /// The request is sent again after a crash, and once a saga has ended, so that the
    /// [retention](Self::retention) has to be longer than the operation takes.
    pub const fn follows_accepted(mut self) -> Self {
        self.follows_accepted = true;
        self
    }

    /// Returns the header of a key, if this server honors keys.
    pub(crate) fn key(&self, key: &Key) -> Option<(HeaderName, HeaderValue)> {
        let value = match self.profile {
            Profile::Hapax | Profile::Plain => encode(key),
            // Derived keys are hexadecimal digits, which every header value may contain.
            Profile::Stripe => HeaderValue::try_from(key.as_str()).unwrap_or_else(|_| encode(key)),
            Profile::WithoutKeys => return None,
        };
        Some((self.key_header.clone(), value))
    }

    /// Returns whether the server keeps a key, if it honors keys, for longer than a try takes.
    pub(crate) fn outlasts_a_try(&self) -> bool {
        self.profile == Profile::WithoutKeys || self.retention > TRY
    }

    /// Returns the age of the first try that may have arrived at which no further try begins. A try may arrive
    /// until its timeout has passed; then the server must still have the key. The tenth is for clocks that run
    /// at different rates.
    ///
    /// A retention that the server itself has stated takes the place of the declared one.
    pub(crate) fn last_age(&self, stated: Option<Duration>) -> Duration {
        let retention = stated.unwrap_or(self.retention);
        retention.mul_f64(0.9).min(retention.saturating_sub(TRY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_try_can_end_after_the_retention() {
        for (retention, last) in [(61, 1), (100, 40), (600, 540), (1_000, 900), (86_400, 77_760)] {
            let server = Server::plain().retention(Duration::from_secs(retention));
            assert_eq!(server.last_age(None), Duration::from_secs(last), "{retention} s");
            assert!(server.outlasts_a_try() && server.last_age(None) + TRY <= server.retention);
        }
        for (stated, last) in [(0, 0), (30, 0), (61, 1), (600, 540), (864_000, 777_600)] {
            let stated = Some(Duration::from_secs(stated));
            assert_eq!(Server::plain().last_age(stated), Duration::from_secs(last));
        }
        assert!(!Server::plain().retention(TRY).outlasts_a_try());
        assert!(Server::without_keys().retention(TRY).outlasts_a_try(), "it has no keys");
    }
}
