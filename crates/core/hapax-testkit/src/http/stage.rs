//! The environment in which a scenario is played.

use std::sync::Arc;

use bytes::Bytes;
use hapax_core::{Fingerprint, Namespace};
use hapax_http::Body;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use tokio::task::JoinHandle;

use crate::http::client::{Protocol, TestClient, TestResponse};
use crate::http::fixture::{HttpFixture, Instance, ScenarioPolicy};
use crate::http::handler::Handler;

/// A scenario's fixture, protocol and name.
#[derive(Clone)]
pub struct ScenarioContext {
    fixture: Arc<dyn HttpFixture>,
    protocol: Protocol,
    name: String,
}

impl ScenarioContext {
    pub(crate) fn new(fixture: Arc<dyn HttpFixture>, protocol: Protocol, name: &str) -> Self {
        Self { fixture, protocol, name: format!("{name}-{protocol:?}") }
    }

    /// Starts an instance under this policy.
    pub async fn start(&self, policy: ScenarioPolicy, handler: Handler) -> TestInstance {
        let instance = self.fixture.start(self.named(policy), handler).await;
        let instance = instance.unwrap_or_else(|error| panic!("it did not start: {error}"));
        let client = TestClient { address: instance.address(), protocol: self.protocol };
        TestInstance { instance, client, caller: self.unique("caller") }
    }

    /// Starts an instance that rejects its policy; returns its message.
    pub async fn refused(&self, policy: ScenarioPolicy, handler: Handler) -> String {
        match self.fixture.start(self.named(policy), handler).await {
            Ok(_) => panic!("it started"),
            Err(error) => error,
        }
    }

    /// Returns a namespace that no other scenario uses.
    #[must_use]
    pub fn namespace(&self, word: &str) -> Namespace {
        let digest = Fingerprint::builder("scenario").field(self.unique(word).as_bytes()).finish();
        let digits: String = digest.as_bytes()[..12].iter().map(|it| format!("{it:02x}")).collect();
        Namespace::new(digits).unwrap()
    }

    /// Scenarios run at the same time on one store, and their policies differ.
    fn named(&self, policy: ScenarioPolicy) -> ScenarioPolicy {
        let namespace = policy.namespace.unwrap_or_else(|| self.namespace(""));
        ScenarioPolicy { namespace: Some(namespace), ..policy }
    }

    /// Returns whether the store has a secret.
    #[must_use]
    pub fn has_secret(&self) -> bool {
        self.fixture.has_secret()
    }

    /// Returns the protocol of the scenario.
    #[must_use]
    pub const fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Returns a word that no other scenario uses: for keys of callers that share a scope.
    #[must_use]
    pub fn unique(&self, word: &str) -> String {
        format!("{word}-{}", self.name)
    }
}

/// An instance, and one caller of it.
pub struct TestInstance {
    instance: Box<dyn Instance>,
    client: TestClient,
    caller: String,
}

impl TestInstance {
    /// Returns the instance.
    #[must_use]
    pub fn instance(&self) -> &dyn Instance {
        &*self.instance
    }

    /// Returns the caller's client.
    #[must_use]
    pub const fn client(&self) -> TestClient {
        self.client
    }

    /// Returns the same client in another protocol.
    #[must_use]
    pub const fn client_in(&self, protocol: Protocol) -> TestClient {
        TestClient { protocol, ..self.client }
    }

    /// Returns a payment under this key, of the scenario's caller.
    #[must_use]
    pub fn post(&self, key: &str) -> TestRequest {
        self.plain().header("idempotency-key", key)
    }

    /// Returns a payment without a key.
    #[must_use]
    pub fn plain(&self) -> TestRequest {
        let post = TestRequest {
            method: Method::POST,
            target: "/payments".to_owned(),
            headers: HeaderMap::new(),
            body: Bytes::from_static(b"{\"amount\":100}"),
        };
        post.header(CONTENT_TYPE.as_str(), "application/json")
            .header(AUTHORIZATION.as_str(), format!("Bearer {}", self.caller))
    }

    /// Sends a request on a separate connection; returns the response.
    pub async fn send(&self, post: TestRequest) -> TestResponse {
        self.client.send(post.request()).await
    }

    /// Sends on a separate task; aborting the task closes the connection.
    #[must_use]
    pub fn begin(&self, post: TestRequest) -> JoinHandle<TestResponse> {
        self.client.begin(post.request())
    }

    /// Sends `count` identical requests at once; returns the responses.
    pub async fn duplicates(&self, count: usize, post: &TestRequest) -> Vec<TestResponse> {
        let copies: Vec<_> = (0..count).map(|_| self.begin(post.clone())).collect();
        let mut answers = Vec::new();
        for copy in copies {
            answers.push(copy.await.unwrap());
        }
        answers
    }

    /// Sends `post` until a response is `done`. Only time that passes elsewhere is awaited this
    /// way.
    pub async fn until(
        &self,
        post: &TestRequest,
        done: impl Fn(&TestResponse) -> bool,
    ) -> TestResponse {
        let attempts = async {
            loop {
                let answer = self.send(post.clone()).await;
                if done(&answer) {
                    return answer;
                }
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let found = tokio::time::timeout(crate::http::TIMEOUT, attempts).await;
        found.expect("the awaited answer never came")
    }

    /// Drains and ends the instance, so that another one may own the store.
    pub async fn end(self) {
        self.instance.drain().await;
    }

    /// Begins a quarantine of all operations of the scenario.
    pub async fn quarantine(&self) {
        let quarantine = self.instance.quarantine().expect("a fixture that begins quarantines");
        let begun = tokio::time::timeout(crate::http::TIMEOUT, quarantine).await;
        begun.expect("the quarantine was never applied");
    }

    /// Cuts the instance off from its store.
    pub async fn cut(&self) {
        self.instance.link().expect("outages need a link").cut().await;
    }

    /// Reconnects the instance to its store.
    pub async fn mend(&self) {
        self.instance.link().expect("outages need a link").mend().await;
    }
}

/// A builder of a request.
#[derive(Clone, Debug)]
pub struct TestRequest {
    method: Method,
    target: String,
    headers: HeaderMap,
    body: Bytes,
}

impl TestRequest {
    /// Sets another method.
    #[must_use]
    pub fn method(self, method: Method) -> Self {
        Self { method, ..self }
    }

    /// Sets another path and query.
    #[must_use]
    pub fn to(self, target: &str) -> Self {
        Self { target: target.to_owned(), ..self }
    }

    /// Sets the body.
    #[must_use]
    pub fn body(self, body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..self }
    }

    /// Sets this header, and removes others of that name.
    #[must_use]
    pub fn header(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.without(name).more(name, value)
    }

    /// Adds one more line of this name.
    #[must_use]
    pub fn more(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = HeaderValue::from_bytes(value.as_ref()).unwrap();
        self.headers.append(HeaderName::try_from(name).unwrap(), value);
        self
    }

    /// Removes all headers of this name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.headers.remove(name);
        self
    }

    /// Sets the type of the body.
    #[must_use]
    pub fn kind(self, kind: &str) -> Self {
        self.header(CONTENT_TYPE.as_str(), kind)
    }

    /// Returns the request.
    #[must_use]
    pub fn request(self) -> Request<Body> {
        let body = Body::from(self.body.clone());
        self.with(body)
    }

    /// Returns the request with a body that is not one piece of bytes.
    #[must_use]
    pub fn with(self, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.target.parse().unwrap();
        *request.headers_mut() = self.headers;
        request
    }
}
