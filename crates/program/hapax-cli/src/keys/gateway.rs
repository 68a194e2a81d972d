//! A client of the admin listener of a gateway that has the store open.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::Key;
use hapax_operators::{
    AccessHashes, AdminToken, Decision, FindQuery, FoundRecords, ListQuery, RecordBefore,
    RecordList, RecordView, UndecidedGroups, UndecidedPage,
};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::args::{RecordName, ScopeText};
use super::reconcile::ReconcileReply;
use super::user;
use crate::exit::CliError;

/// The time that a response may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The time that a response may take that waits for a step of a walk through the store, or for the service.
const LONG: Duration = Duration::from_secs(60);

/// The largest response, in bytes.
const MAX_RESPONSE: usize = 16 << 20;

#[derive(serde::Deserialize)]
struct DecisionReply {
    was: RecordBefore,
}

#[derive(serde::Deserialize)]
struct Hashed {
    hash: String,
}

#[derive(serde::Deserialize)]
struct Confirmed {
    replaced: bool,
}

/// Errors of a call.
pub(crate) struct RemoteError {
    pub(crate) failure: CliError,
    /// The code of the API's error; empty if there is none.
    pub(crate) code: String,
}

impl From<CliError> for RemoteError {
    fn from(failure: CliError) -> Self {
        Self { failure, code: String::new() }
    }
}

impl From<RemoteError> for CliError {
    fn from(error: RemoteError) -> Self {
        error.failure
    }
}

/// A gateway's admin listener.
#[derive(Debug)]
pub(crate) struct Remote {
    address: SocketAddr,
    token: Option<AdminToken>,
}

impl Remote {
    pub(super) fn new(mut address: SocketAddr, token: Option<AdminToken>) -> Self {
        // A gateway that listens on all addresses listens on loopback too.
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        Self { address, token }
    }

    pub(super) async fn list(&self, list: ListQuery) -> Result<RecordList, CliError> {
        let mut path = format!("/api/keys?limit={}", list.limit.unwrap_or(100));
        if let Some(state) = list.state {
            // The names of states need no escaping.
            let state = serde_json::to_value(state).unwrap_or_default();
            path.push_str(&format!("&state={}", state.as_str().unwrap_or_default()));
        }
        if let Some(after) = list.after {
            path.push_str(&format!("&after={after}"));
        }
        if let Some(hash) = list.caller {
            path.push_str(&format!("&caller={hash}"));
        }
        Ok(self.request(Method::GET, &path, None).await?)
    }

    pub(super) async fn caller_hash(&self, value: String) -> Result<String, CliError> {
        let value = json!({ "value": value });
        let hashed = self.request(Method::POST, "/api/callers/hash", Some(value)).await;
        let Hashed { hash } = hashed?;
        Ok(hash)
    }

    pub(super) async fn show(&self, named: RecordName) -> Result<RecordView, CliError> {
        let found = match named {
            // Digits need no escaping.
            RecordName::Id(id) => self.request(Method::GET, &format!("/api/keys/{id}"), None).await,
            RecordName::Key(key, scope) => {
                let lookup = json!({ "key": key.as_str(), "scope": scope.json() });
                self.request(Method::POST, "/api/keys/lookup", Some(lookup)).await
            }
        };
        Ok(found?)
    }

    pub(super) async fn find(&self, query: &FindQuery) -> Result<FoundRecords, CliError> {
        Ok(self.request(Method::POST, "/api/keys/find", Some(json!(query))).await?)
    }

    pub(super) async fn hash(
        &self,
        key: Option<&Key>,
        scope: &ScopeText,
    ) -> Result<AccessHashes, CliError> {
        let body = json!({ "key": key.map(Key::as_str), "scope": scope.json() });
        Ok(self.request(Method::POST, "/api/keys/hash", Some(body)).await?)
    }

    pub(super) async fn resolve(
        &self,
        id: &str,
        decision: &Decision,
    ) -> Result<RecordBefore, CliError> {
        let path = format!("/api/keys/{id}/resolve");
        let DecisionReply { was } =
            self.request(Method::POST, &path, Some(json!(decision))).await?;
        Ok(was)
    }

    /// Makes the gateway request its reconcile URL about a record.
    pub(super) async fn reconcile(&self, id: &str) -> Result<ReconcileReply, CliError> {
        let path = format!("/api/keys/{id}/reconcile");
        let body = json!({ "who": user::user() });
        Ok(self.request_within(LONG, Method::POST, &path, Some(body)).await?)
    }

    /// Returns a page of a walk over the records whose outcome is unknown.
    pub(super) async fn undecided(&self, from: Option<&str>) -> Result<UndecidedPage, CliError> {
        // A position has hexadecimal digits, which need no escaping.
        let from = from.map_or(String::new(), |from| format!("?from={from}"));
        let path = format!("/api/keys/undecided{from}");
        Ok(self.request_within(LONG, Method::GET, &path, None).await?)
    }

    pub(super) async fn count(&self) -> Result<UndecidedGroups, CliError> {
        Ok(self.request(Method::GET, "/api/keys/count", None).await?)
    }

    /// Makes the gateway accept its store. Returns whether the store had been emptied or replaced.
    pub(super) async fn confirm(&self, reason: &str, who: &str) -> Result<bool, CliError> {
        let body = json!({ "confirm": true, "reason": reason, "who": who });
        let confirmed = self.request(Method::POST, "/api/store/confirm", Some(body)).await;
        let Confirmed { replaced } = confirmed?;
        Ok(replaced)
    }

    /// Returns whether the gateway's store was emptied or replaced, and no operator confirmed that.
    pub(super) async fn is_replaced(&self) -> Result<bool, CliError> {
        let Confirmed { replaced } = self.request(Method::GET, "/api/store", None).await?;
        Ok(replaced)
    }

    pub(crate) async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<T, RemoteError> {
        self.request_within(TIMEOUT, method, path, body).await
    }

    /// Sends a request and reads the JSON of its response, within `limit`.
    pub(super) async fn request_within<T: DeserializeOwned>(
        &self,
        limit: Duration,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<T, RemoteError> {
        let received = timeout(limit, self.send(method, path, body)).await;
        let failed = |error: &dyn std::fmt::Display| {
            CliError::unavailable(format!("the gateway at {}: {error}", self.address))
        };
        let (status, body) =
            received.map_err(|_| failed(&"no answer in time"))?.map_err(|error| failed(&error))?;
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(|error| failed(&error).into());
        }
        let problem: Value = serde_json::from_slice(&body).unwrap_or_default();
        let reason = problem["error"].as_str().unwrap_or("it gave no reason");
        let failure = match status {
            StatusCode::UNAUTHORIZED => {
                let found = match self.token {
                    Some(_) => "a different one",
                    None => "none",
                };
                CliError::usage(format!(
                    "the gateway at {} expects its admin token, found {found}: pass its file with \
                     --admin-token-file",
                    self.address
                ))
            }
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => CliError::no(reason),
            StatusCode::BAD_REQUEST => CliError::usage(reason),
            _ => failed(&format!("{status}: {reason}")),
        };
        let code = problem["code"].as_str().unwrap_or_default().to_owned();
        let failure = if code.is_empty() { failure } else { failure.named(code.clone()) };
        Err(RemoteError { failure, code })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
    ) -> Result<(StatusCode, Bytes), Box<dyn std::error::Error + Send + Sync>> {
        let stream = TcpStream::connect(self.address).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::builder().method(method).uri(path);
        let mut request = request
            .header(HOST, self.address.to_string())
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.map(|it| it.to_string()).unwrap_or_default())))?;
        if let Some(token) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, token.header());
        }
        let exchange = async {
            let response = sender.send_request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_RESPONSE).collect().await?;
            Ok((status, body.to_bytes()))
        };
        tokio::select! {
            response = exchange => response,
            ended = connection => {
                ended?;
                Err("the connection ended".into())
            }
        }
    }
}
