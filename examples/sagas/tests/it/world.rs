//! A process under test, and a fake of a system that it calls.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use hapax_sagas_examples::{Remote, RemoteAnswer};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio::time::sleep;

pub(crate) const EVERY: Duration = Duration::from_millis(10);

/// A process that listens, and is killed when it is dropped.
pub(crate) struct Listening {
    child: Child,
    pub(crate) remote: Remote,
}

impl Listening {
    /// Starts a program whose first argument is its address.
    pub(crate) async fn start(program: &str, port: u16, arguments: &[&str]) -> Self {
        let mut child = Command::new(program)
            .arg(format!("127.0.0.1:{port}"))
            .args(arguments)
            .env("APPROVAL_SECRET", crate::approval::SECRET)
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            assert!(child.try_wait().unwrap().is_none(), "{program} has ended");
            sleep(EVERY).await;
        }
        Self { child, remote: Remote::new(format!("http://127.0.0.1:{port}")) }
    }

    /// Kills the process (SIGKILL).
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Starts a saga by a request that does not wait for its end.
    pub(crate) async fn begin(&self, path: &str, key: &str, input: &Value) {
        let headers = [("idempotency-key", key), ("prefer", "respond-async")];
        let body = input.to_string().into_bytes();
        let answer = self.remote.send(Method::POST, path, &headers, body).await.unwrap();
        assert!(answer.status.is_success() || answer.status == StatusCode::CONFLICT, "{answer:?}");
    }

    /// Returns the status resource of a saga.
    pub(crate) async fn status(&self, path: &str, key: &str) -> Value {
        let answer: RemoteAnswer =
            self.remote.send(Method::GET, &format!("{path}/{key}"), &[], Vec::new()).await.unwrap();
        answer.body
    }

    /// Waits until the state of a saga is one of `states`. Returns its status resource.
    pub(crate) async fn until(&self, path: &str, key: &str, states: &[&str]) -> Value {
        loop {
            let status = self.status(path, key).await;
            if status["state"].as_str().is_some_and(|state| states.contains(&state)) {
                return status;
            }
            sleep(EVERY).await;
        }
    }
}

/// A system that honors keys. It has a permit for each answer.
pub(crate) struct Honoring {
    /// Effects, by path and body: the keys under which it was called.
    calls: Mutex<BTreeMap<(String, String), Vec<String>>>,
    pub(crate) answers: Semaphore,
}

impl Honoring {
    /// Serves it. Returns it with its URL.
    pub(crate) async fn serve(answers: usize) -> (Arc<Self>, String) {
        let new = Self { calls: Mutex::default(), answers: Semaphore::new(answers) };
        let system = Arc::new(new);
        let routes = Router::new().route("/{path}", post(answer)).with_state(Arc::clone(&system));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async { axum::serve(listener, routes).await });
        (system, url)
    }

    /// Returns the keys under which each body was sent to `path`.
    pub(crate) fn calls(&self, path: &str) -> BTreeMap<String, Vec<String>> {
        let calls = self.calls.lock().unwrap();
        let of_path = calls.iter().filter(|((of, _), _)| of == path);
        of_path.map(|((_, body), keys)| (body.clone(), keys.clone())).collect()
    }

    /// Waits until `bodies` different ones were sent to `path`.
    pub(crate) async fn has(&self, path: &str, bodies: usize) {
        while self.calls(path).len() < bodies {
            sleep(EVERY).await;
        }
    }
}

async fn answer(
    State(system): State<Arc<Honoring>>,
    Path(path): Path<String>,
    headers: HeaderMap,
    body: String,
) -> Response {
    let key = headers["idempotency-key"].to_str().unwrap().to_owned();
    let is_rejected = body.contains("closed");
    system.calls.lock().unwrap().entry((path, body)).or_default().push(key);
    system.answers.acquire().await.unwrap().forget();
    match is_rejected {
        true => (StatusCode::CONFLICT, Json(json!("the account is closed"))).into_response(),
        false => Json(json!("accepted")).into_response(),
    }
}

/// Returns a free port below those that the system gives to clients, so that no client takes the port
/// of a process that is down.
pub(crate) fn port() -> u16 {
    let from = 20_000 + u16::try_from(std::process::id() % 10_000).unwrap();
    let is_free = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (from..from + 100).find(is_free).expect("a free port")
}
