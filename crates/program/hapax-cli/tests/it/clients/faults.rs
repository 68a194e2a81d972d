//! The faults between a client and a service, one after the other.
//!
//! The test passes each message between the client and the gateway, and answers for the service: it
//! knows how often the service executed, and that each fault occurred.

use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;

use super::Client;
use crate::world::{Answer, Gateway, Upstream, Waiting, receive};

const PAYMENT: &str = r#"{"amount":100,"currency":"usd"}"#;
const RECEIPT: &str = r#"{"id":"pay_1","object":"payment_intent"}"#;
const FAILURE: &str = r#"{"error":{"code":"broken","message":"It failed halfway."}}"#;
const TOKEN: &str = "first";

/// Asserts that the recipe has one effect and ends with the right answer under each fault.
pub(super) fn pays_once_under_each_fault(recipe: impl Fn() -> Command + 'static) {
    let scene = Scene::new(Box::new(recipe));
    scene.the_answer_is_lost();
    scene.the_answer_breaks_off();
    scene.the_service_is_busy();
    scene.the_first_try_is_in_flight();
    scene.the_failure_is_replayed();
    scene.the_outcome_is_unknown();
    scene.the_client_is_killed();
    scene.the_answer_is_a_redirect();
    scene.the_key_is_too_old();
    scene.the_token_has_changed();
}

/// A client, in front of a gateway, in front of a service.
struct Scene {
    recipe: Box<dyn Fn() -> Command>,
    front: Upstream,
    gateway: Gateway,
    service: Upstream,
    folder: TempDir,
}

impl Scene {
    fn new(recipe: Box<dyn Fn() -> Command>) -> Self {
        let (front, service) = (Upstream::start(), Upstream::start());
        let folder = tempfile::tempdir().unwrap();
        let gateway = Gateway::start(service.address, folder.path(), &[]);
        Self { recipe, front, gateway, service, folder }
    }

    /// Lets the service execute, and loses the answer.
    fn the_answer_is_lost(&self) {
        let client = self.client("lost", TOKEN);
        let first = self.front.next();
        assert_eq!(self.executed(&first, "201 Created", RECEIPT).status, 201);
        let retry = self.retry(first);
        self.replays(retry);
        self.is_paid(client);
    }

    /// Lets the service execute, and loses the last byte of the answer.
    fn the_answer_breaks_off(&self) {
        let client = self.client("broken-off", TOKEN);
        let first = self.front.next();
        let mut answer = self.executed(&first, "201 Created", RECEIPT);
        // Its head still has the length of the whole.
        assert_eq!(answer.body.pop(), Some('}'));
        let retry = self.retry_after(first, &answer);
        self.replays(retry);
        self.is_paid(client);
    }

    /// Answers 503 before the effect.
    fn the_service_is_busy(&self) {
        let client = self.client("busy", TOKEN);
        let first = self.front.next();
        let busy = "503 Service Unavailable\r\nretry-after: 1\r\nidempotency-outcome: retryable";
        let answer = self.executed(&first, busy, FAILURE);
        assert_eq!((answer.status, &*answer.header("retry-after")), (503, "1"));
        let since = Instant::now();
        let retry = self.retry_after(first, &answer);
        assert!(since.elapsed() >= Duration::from_millis(900), "it ignores Retry-After");
        let answer = self.executed(&retry, "201 Created", RECEIPT);
        retry.relay(&answer);
        self.is_paid(client);
    }

    /// Closes the connection of the client while the service executes.
    fn the_first_try_is_in_flight(&self) {
        let client = self.client("in-flight", TOKEN);
        let first = self.front.next();
        let sent = first.forward(self.gateway.address);
        let executing = self.service.next();
        let second = self.retry(first);
        let answer = self.answered(&second);
        assert_eq!((answer.status, &*answer.code()), (409, "in-flight"));
        executing.answer("201 Created", RECEIPT);
        // The outcome is recorded.
        assert_eq!(receive(&sent).unwrap().status, 201);
        let third = self.retry_after(second, &answer);
        self.replays(third);
        self.is_paid(client);
    }

    /// Answers 500, which is the outcome.
    fn the_failure_is_replayed(&self) {
        let client = self.client("failed", TOKEN);
        let first = self.front.next();
        let failed = "500 Internal Server Error\r\nidempotency-outcome: final";
        let answer = self.executed(&first, failed, FAILURE);
        let retry = self.retry_after(first, &answer);
        let replay = self.answered(&retry);
        assert_eq!((replay.status, &*replay.header("idempotency-replayed")), (500, "true"));
        retry.relay(&replay);
        self.ends_with(client, 500, "broken");
    }

    /// Answers 500, which leaves the outcome unknown.
    fn the_outcome_is_unknown(&self) {
        let client = self.client("unknown", TOKEN);
        let first = self.front.next();
        let answer = self.executed(&first, "500 Internal Server Error", FAILURE);
        let retry = self.retry_after(first, &answer);
        let answer = self.answered(&retry);
        assert_eq!((answer.status, &*answer.code()), (409, "outcome-unknown"));
        assert_eq!(answer.header("retry-after"), "");
        retry.relay(&answer);
        self.ends_with(client, 409, "outcome-unknown");
    }

    /// Kills the client while the service executes, and starts it again.
    fn the_client_is_killed(&self) {
        let client = self.client("killed", TOKEN);
        let first = self.front.next();
        let sent = first.forward(self.gateway.address);
        let executing = self.service.next();
        drop(client);
        executing.answer("201 Created", RECEIPT);
        assert_eq!(receive(&sent).unwrap().status, 201);
        let client = self.client("killed", TOKEN);
        let retry = self.retry(first);
        self.replays(retry);
        self.is_paid(client);
    }

    fn the_answer_is_a_redirect(&self) {
        let client = self.client("redirected", TOKEN);
        let moved =
            format!("307 Temporary Redirect\r\nlocation: http://{}/new", self.front.address);
        let body = r#"{"error":{"code":"moved","message":"It is elsewhere."}}"#;
        self.front.next().answer(&moved, body);
        self.ends_with(client, 307, "moved");
    }

    /// Starts the client that was killed once more, a day later.
    fn the_key_is_too_old(&self) {
        let kept = |change: Duration| {
            let mut kept: Value =
                serde_json::from_slice(&std::fs::read(self.file("killed")).unwrap()).unwrap();
            let since = kept["since"].as_u64().unwrap() - change.as_millis() as u64;
            kept["since"] = json!(since);
            std::fs::write(self.file("killed"), kept.to_string()).unwrap();
        };
        // Nine tenths of a day are 21.6 hours.
        kept(Duration::from_secs(21 * 3600));
        let client = self.client("killed", TOKEN);
        self.replays(self.front.next());
        self.is_paid(client);
        kept(Duration::from_secs(3600));
        self.fails(self.client("killed", TOKEN), "too old");
    }

    fn the_token_has_changed(&self) {
        self.fails(self.client("lost", "second"), "the token has changed");
    }

    /// Starts the recipe for this operation.
    fn client(&self, operation: &str, token: &str) -> Client {
        let url = format!("http://{}", self.front.address);
        let mut command = (self.recipe)();
        Client::start(command.arg(url).arg(self.file(operation)).arg(PAYMENT).env("TOKEN", token))
    }

    fn file(&self, operation: &str) -> PathBuf {
        self.folder.path().join(operation)
    }

    /// Passes a try to the service, which answers; returns the answer of the gateway.
    fn executed(&self, request: &Waiting, status: &str, body: &str) -> Answer {
        let sent: TcpStream = request.forward(self.gateway.address);
        self.service.next().answer(status, body);
        receive(&sent).expect("the gateway answers")
    }

    /// Passes a try to the gateway, which answers by itself.
    fn answered(&self, request: &Waiting) -> Answer {
        receive(&request.forward(self.gateway.address)).expect("the gateway answers")
    }

    /// Closes the connection of a try, and returns the next one.
    fn retry(&self, request: Waiting) -> Waiting {
        let (key, body) = (request.header("idempotency-key"), request.body.clone());
        drop(request);
        self.next_like(&key, &body)
    }

    /// Passes the answer to the client, and returns its next try.
    fn retry_after(&self, request: Waiting, answer: &Answer) -> Waiting {
        let (key, body) = (request.header("idempotency-key"), request.body.clone());
        request.relay(answer);
        self.next_like(&key, &body)
    }

    fn next_like(&self, key: &str, body: &[u8]) -> Waiting {
        let next = self.front.next();
        assert!(!key.is_empty());
        assert_eq!((&*next.header("idempotency-key"), &*next.body), (key, body));
        next
    }

    /// Passes the replay of the receipt to the client.
    fn replays(&self, request: Waiting) {
        let replay = self.answered(&request);
        assert_eq!((replay.status, &*replay.header("idempotency-replayed")), (201, "true"));
        assert_eq!(replay.body, RECEIPT);
        request.relay(&replay);
    }

    fn is_paid(&self, mut client: Client) {
        self.sends_no_more(&mut client);
        let (status, body) = client.printed();
        assert_eq!((status, &body["id"]), (201, &json!("pay_1")), "{body}");
    }

    /// Asserts that the client gives up with this answer.
    fn ends_with(&self, mut client: Client, status: u16, code: &str) {
        self.sends_no_more(&mut client);
        let (printed, body) = client.printed();
        let found = if body["code"].is_null() { &body["error"]["code"] } else { &body["code"] };
        assert_eq!((printed, found), (status, &json!(code)), "{body}");
    }

    fn fails(&self, mut client: Client, error: &str) {
        self.sends_no_more(&mut client);
        let printed = client.failed();
        assert!(printed.contains(error), "{printed}");
    }

    /// Asserts that neither a try nor an execution comes until the client has ended.
    fn sends_no_more(&self, client: &mut Client) {
        while client.is_running() {
            let another = self.front.next_within(Duration::from_millis(10));
            assert!(another.is_none(), "another try: {another:?}");
        }
        assert!(self.front.is_idle() && self.service.is_idle());
    }
}
