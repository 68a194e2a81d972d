//! Tokens that rotate between the tries of an operation which a client sends through the gateway.

use std::path::Path;
use std::sync::{Arc, Mutex};

use hapax_client::{Client, Credentials, Journal, SendError, Sent, Server};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::world::{Gateway, TIMEOUT, Upstream};

/// A client of a gateway, whose callback supplies the token of the moment.
struct Caller {
    runtime: Runtime,
    client: Client,
    gateway: Gateway,
    token: Arc<Mutex<&'static str>>,
}

impl Caller {
    fn start(service: &Upstream, folder: &Path, server: Server, more: &[&str]) -> Self {
        let hook = format!("http://{}/outcome", service.address);
        let reconcile = ["--on-unknown", "reconcile", "--reconcile-url", &hook];
        let gateway = Gateway::start(service.address, folder, &[&reconcile, more].concat());
        let runtime = Runtime::new().unwrap();
        let token = Arc::new(Mutex::new("alice-1"));
        let supplied = Arc::clone(&token);
        let builder = Client::open(Journal::file(folder.join("journal")).unwrap())
            .server(format!("http://{}", gateway.address), server)
            .credentials(move |_| {
                let token = *supplied.lock().unwrap();
                async move { Ok(Credentials::bearer(token)?) }
            });
        let client = runtime.block_on(builder.build()).unwrap();
        Self { runtime, client, gateway, token }
    }

    fn send(&self) -> JoinHandle<Result<Sent, SendError>> {
        let url = format!("http://{}/pay", self.gateway.address);
        let post = self.client.post(url).operation("invoice/17").body("1999 cents");
        self.runtime.spawn(post.wait(TIMEOUT).send())
    }

    fn end(&self, sending: JoinHandle<Result<Sent, SendError>>) -> Result<Sent, SendError> {
        self.runtime.block_on(sending).unwrap()
    }

    /// Sends the operation. The service has its effect and fails; meanwhile the token rotates.
    fn has_an_effect(&self, service: &Upstream) -> JoinHandle<Result<Sent, SendError>> {
        let sending = self.send();
        let paid = service.next();
        assert!(paid.head.starts_with("POST /pay "), "{}", paid.head);
        assert_eq!(paid.header("authorization"), "Bearer alice-1");
        *self.token.lock().unwrap() = "alice-2";
        paid.answer("500 Internal Server Error", "failed after the charge");
        sending
    }

    /// Lets the service say that the operation happened, and checks that it gets nothing else.
    fn is_reconciled(&self, sending: JoinHandle<Result<Sent, SendError>>, service: &Upstream) {
        let asked = service.next();
        assert!(asked.head.starts_with("GET /outcome "), "{}", asked.head);
        asked.answer("200 OK\r\nidempotency-status: 201", "paid");
        let sent = self.end(sending).unwrap();
        assert_eq!((sent.response.status.as_u16(), &sent.response.body[..]), (201, &b"paid"[..]));
        assert!(service.is_idle(), "a second effect");
    }
}

#[test]
fn a_rotated_token_is_rejected_where_the_token_is_the_scope() {
    let (service, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let caller = Caller::start(&service, folder.path(), Server::hapax(), &[]);
    let sending = caller.has_an_effect(&service);
    for sending in [sending, caller.send()] {
        let end = caller.end(sending);
        assert!(matches!(end, Err(SendError::CredentialsChanged)), "{end:?}");
    }
    assert!(service.is_idle(), "a second effect");
    // With the token of the first try the operation continues.
    *caller.token.lock().unwrap() = "alice-1";
    caller.is_reconciled(caller.send(), &service);
}

#[test]
fn a_rotated_token_continues_where_forward_authorisation_names_the_account() {
    let (service, auth) = (Upstream::start(), Upstream::start());
    let url = format!("http://{}/check", auth.address);
    std::thread::spawn(move || {
        while let Some(asked) = auth.next_within(TIMEOUT) {
            let token = asked.header("authorization");
            let user = token.strip_prefix("Bearer ").and_then(|token| token.split_once('-'));
            let (user, _) = user.unwrap_or_default();
            asked.answer(&format!("200 OK\r\nx-user: {user}"), "");
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let server = Server::hapax().scoped_by_account();
    let more = ["--auth-url", &url, "--auth-scope", "x-user"];
    let caller = Caller::start(&service, folder.path(), server, &more);
    let sending = caller.has_an_effect(&service);
    caller.is_reconciled(sending, &service);
}

/// Shows that the first test can fail: for this gateway a new token is another caller.
#[test]
fn a_gateway_that_is_wrongly_declared_as_scoped_by_account_executes_twice() {
    let (service, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let server = Server::hapax().scoped_by_account();
    let caller = Caller::start(&service, folder.path(), server, &[]);
    let sending = caller.has_an_effect(&service);
    let again = service.next();
    assert!(again.head.starts_with("POST /pay "), "{}", again.head);
    assert_eq!(again.header("authorization"), "Bearer alice-2");
    again.answer("201 Created", "paid again");
    assert_eq!(caller.end(sending).unwrap().response.status.as_u16(), 201);
}
