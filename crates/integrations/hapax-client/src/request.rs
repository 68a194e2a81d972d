//! Requests: under construction, and as the journal has them.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{Entropy, Fingerprint, Key, SystemEntropy};
use hapax_proxy::Origin;
use hapax_proxy::headers::hop_by_hop;
use hapax_saga::log::Blob;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST};
use http::{HeaderName, HeaderValue, Method, Uri};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::credentials::SECRET_HEADERS;
use crate::error::{RequestError, SendError};
use crate::response::Sent;

/// The largest body of a request.
pub(crate) const MAX_REQUEST: usize = (2 << 20) - (128 << 10);

/// Limit of the headers of a request together, and of its URL.
const MAX_HEADERS: usize = 32 << 10;

/// A request as the journal has it. It is what a name stands for: a request that differs in
/// anything is another one.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordedRequest {
    pub(crate) name: String,
    pub(crate) method: String,
    pub(crate) url: String,
    pub(crate) headers: Vec<(String, Blob)>,
    pub(crate) body: Blob,
}

impl RecordedRequest {
    /// Returns a hash of the request, with which a response is stored: a name that was released may have got
    /// another request since.
    pub(crate) fn fingerprint(&self) -> [u8; 32] {
        let mut hash = Fingerprint::builder("client-request/1");
        for field in [&self.method, &self.url] {
            hash.field(field.as_bytes());
        }
        hash.field(&self.body.0);
        for (name, value) in &self.headers {
            hash.field(name.as_bytes()).field(&value.0);
        }
        *hash.finish().as_bytes()
    }

    /// Returns the URL; `None` if the stored text is no URL.
    pub(crate) fn uri(&self) -> Option<Uri> {
        self.url.parse().ok()
    }
}

/// Returns the name of a server in the declarations of a client: scheme, host and port.
pub(crate) fn server_name(url: &Uri) -> Option<String> {
    let origin = Origin::of(url)?;
    let scheme = if origin.secure { "https" } else { "http" };
    Some(format!("{scheme}://{}:{}", origin.authority.host().to_ascii_lowercase(), origin.port()))
}

/// A request under construction. Its `Debug` form shows neither headers nor body.
#[must_use = "nothing is sent before `send`"]
pub struct OutgoingRequest {
    client: Client,
    method: Method,
    url: String,
    name: Option<String>,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Bytes,
    within: Duration,
    wait: Duration,
    error: Option<RequestError>,
}

impl fmt::Debug for OutgoingRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OutgoingRequest({} {})", self.method, self.name.as_deref().unwrap_or("unnamed"))
    }
}

impl OutgoingRequest {
    pub(crate) fn new(client: Client, method: Method, url: String) -> Self {
        let (within, wait) = (client.within(), Duration::from_secs(30));
        let headers = Vec::new();
        let (name, body, error) = (None, Bytes::new(), None);
        Self { client, method, url, name, headers, body, within, wait, error }
    }

    /// Names the operation: 1 to 255 printable ASCII characters. While the journal has the operation, the name
    /// stands for this request, in every process that uses the journal, and after every crash: until it has a
    /// response, and then for [`ClientBuilder::remember`](crate::ClientBuilder::remember) (30 days). Never use
    /// a name for another operation, also after that: its key is the same. Without a name the operation gets a
    /// random one, with which only [`Client::resume`] can finish it.
    pub fn operation(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Adds a header, which is stored, sealed, and compared when the name is used again. An invalid one is an
    /// error of [`send`](Self::send). Credentials, and values that
    /// [differ between tries](crate::Credentials::varying_header), are supplied by
    /// [`ClientBuilder::credentials`](crate::ClientBuilder::credentials).
    pub fn header(mut self, name: impl AsRef<str>, value: impl AsRef<[u8]>) -> Self {
        let header = (HeaderName::try_from(name.as_ref()), HeaderValue::from_bytes(value.as_ref()));
        match header {
            (Ok(name), Ok(value)) => self.headers.push((name, value)),
            _ => {
                self.error.get_or_insert(RequestError::Header { name: name.as_ref().to_owned() });
            }
        }
        self
    }

    /// Sets the body, at most 1.875 MiB. A stream cannot be sent again, so that a body is bytes:
    ///
    /// ```compile_fail,E0277
    /// # fn send(client: hapax_client::Client, stream: impl futures_util::Stream<Item = bytes::Bytes>) {
    /// client.post("https://api.example.com/").operation("report/1").body(stream);
    /// # }
    /// ```
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Sets the body to a value as JSON, and `Content-Type` to `application/json`. Use values with a fixed order
    /// of members (structs, `BTreeMap`): with a `HashMap` the bytes differ between two runs, and the second one
    /// is [`SendError::Reused`].
    ///
    /// # Errors
    /// [`RequestError::Json`].
    pub fn json<T: Serialize + ?Sized>(mut self, value: &T) -> Result<Self, RequestError> {
        self.body = serde_json::to_vec(value)?.into();
        self.headers.retain(|(name, _)| *name != CONTENT_TYPE);
        self.headers.push((CONTENT_TYPE, HeaderValue::from_static("application/json")));
        Ok(self)
    }

    /// Sets the time for which the operation is tried, from its first try; then it stops without a response. The
    /// next send of its name, or [`Client::resume`], begins the time anew. Pauses and `Retry-After` count.
    /// Above zero. Default 1 h.
    pub const fn within(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }

    /// Sets the time for which [`send`](Self::send) waits; then it returns [`SendError::Pending`], and the
    /// operation is tried further in this process. Zero: it returns once the journal has the request. Default
    /// 30 s.
    pub const fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sends the request, repeatedly if necessary, and returns its response once the journal has it. If the
    /// journal has an operation of this name already, nothing is sent for a response that is stored; an
    /// operation in progress is waited for; one that stopped is tried again, if that can have no second effect.
    /// Dropping the future does not stop the operation.
    ///
    /// # Errors
    /// [`SendError`].
    pub async fn send(self) -> Result<Sent, SendError> {
        let (client, within, wait) = (self.client.clone(), self.within, self.wait);
        let (name, request) = self.checked()?;
        client.send(name, request, within, wait).await
    }

    /// Checks the request, and returns its name and what is recorded of it.
    fn checked(self) -> Result<(Key, RecordedRequest), RequestError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        if self.within.is_zero() {
            return Err(RequestError::Within);
        }
        let name = match &self.name {
            Some(name) => Key::new(name).map_err(|_| RequestError::Name)?,
            None if self.client.is_strict() => return Err(RequestError::NoName),
            None => random_name()?,
        };
        if self.method == Method::CONNECT {
            return Err(RequestError::Method);
        }
        let url: Uri = self.url.parse().map_err(|_| RequestError::Url)?;
        if self.url.contains('#') {
            return Err(RequestError::Url);
        }
        let server = server_name(&url).ok_or(RequestError::Url)?;
        let Some(host) = self.client.host(&server) else {
            return Err(RequestError::Undeclared { origin: server });
        };
        for (name, _) in &self.headers {
            let is_protocol = name.as_str().starts_with("idempotency-");
            if is_framing(name) || is_protocol || *name == host.server.key_header {
                return Err(RequestError::Header { name: name.to_string() });
            }
            if SECRET_HEADERS.contains(name) || self.client.is_secret(name) {
                return Err(RequestError::SecretHeader { name: name.clone() });
            }
        }
        let size = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
        let size: usize = size.sum();
        let limit = MAX_HEADERS;
        if size > limit {
            return Err(RequestError::Headers { limit, found: size });
        }
        if self.url.len() > limit {
            return Err(RequestError::UrlLength { limit, found: self.url.len() });
        }
        if self.body.len() > MAX_REQUEST {
            let (limit, found) = (MAX_REQUEST, self.body.len());
            return Err(RequestError::Body { limit, found });
        }
        // The order of names means nothing, and libraries change it.
        let mut headers = self.headers;
        headers.sort_by(|(one, _), (other, _)| one.as_str().cmp(other.as_str()));
        let headers = headers.iter().map(|(name, value)| {
            (name.as_str().to_owned(), Blob(Bytes::copy_from_slice(value.as_bytes())))
        });
        let request = RecordedRequest {
            name: name.as_str().to_owned(),
            method: self.method.as_str().to_owned(),
            url: self.url,
            headers: headers.collect(),
            body: Blob(self.body),
        };
        Ok((name, request))
    }
}

/// Returns whether a header belongs to the connection or to the message.
pub(crate) fn is_framing(name: &HeaderName) -> bool {
    [CONTENT_LENGTH, EXPECT, HOST].contains(name) || hop_by_hop(name)
}

/// Returns a random name of 128 bits.
fn random_name() -> Result<Key, RequestError> {
    let mut bytes = [0; 16];
    SystemEntropy.fill(&mut bytes)?;
    let name = format!("unnamed-{:032x}", u128::from_be_bytes(bytes));
    Key::new(name).map_err(|_| RequestError::Name)
}
