//! Configurations that differ in who the callers are and in what serves them.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;

use hapax_testkit::servers::free_port;

use super::services::{Axum, Service, script, serve_axum};
use super::{
    Caller, HOLD, Killed, Line, Process, a_client_hangs_up, a_client_is_killed, paid,
    the_keeper_is_killed, two_callers_with_one_key,
};
use crate::world::installed;

const TOKENS: [Caller; 2] = [("authorization", "Bearer a"), ("authorization", "Bearer b")];
const COOKIES: [Caller; 2] = [("cookie", "session=a"), ("cookie", "session=b")];
const API_KEYS: [Caller; 2] = [("x-api-key", "a"), ("x-api-key", "b")];

/// Everything that may go wrong before the process that keeps the records is killed, and that.
fn exercise(keeper: impl Killed, front: Option<SocketAddr>, service: &Service, by: [Caller; 2]) {
    let to = front.unwrap_or_else(|| keeper.address());
    two_callers_with_one_key(to, service, by);
    a_client_hangs_up(to, service, by[0]);
    a_client_is_killed(to, service, by[0]);
    the_keeper_is_killed(keeper, front, service, by[0]);
}

/// Starts a gateway as the README does, and sees these callers rejected: the detail says what they
/// lack, and what to write.
fn rejected(service: &Service, folder: &Path, caller: Caller) {
    let first = Line::start(service.address, folder, &[]);
    let answer = paid(first.address(), caller, "order-1", 1, "");
    assert_eq!((answer.status, &*answer.code()), (400, "missing-scope"), "{}", answer.body);
    service.was_charged_once_each(&[]);
    let problem: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("`scope`") && detail.contains("`authorization`"), "{detail}");
}

mod npm {
    use super::*;

    #[test]
    fn express_with_tokens_is_safe_without_any_setting() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        let gateway = Line::start(service.address, folder.path(), &[]);
        exercise(gateway, None, &service, TOKENS);
    }

    #[test]
    fn api_keys_are_rejected_until_they_are_the_scope() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        rejected(&service, folder.path(), API_KEYS[0]);
        let gateway = Line::start(service.address, folder.path(), &["--scope", "x-api-key"]);
        exercise(gateway, None, &service, API_KEYS);
    }

    #[test]
    fn cookies_behind_nginx_are_rejected_until_they_are_the_scope() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        rejected(&service, folder.path(), COOKIES[0]);
        let gateway = Line::start(service.address, folder.path(), &["--scope", "cookie"]);
        let front = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let _nginx = nginx(front, gateway.address(), folder.path());
        exercise(gateway, Some(front), &service, COOKIES);
    }
}

mod pypi {
    use super::*;

    #[test]
    fn fastapi_with_tokens_is_safe_without_any_setting() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::fastapi(folder.path());
        let gateway = Line::start(service.address, folder.path(), &[]);
        exercise(gateway, None, &service, TOKENS);
    }

    /// The clients follow the redirect of a path without its last slash; one of them is killed before it has
    /// the second response.
    #[test]
    fn fastapi_with_slashes_has_one_effect_for_clients_that_follow() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::fastapi(folder.path());
        let gateway = Line::start(service.address, folder.path(), &[]);
        let pay = |key: &str, amount: u32, more: &str| {
            let mut python = Command::new(installed("pypi").join("bin/python"));
            python.arg("-I").arg(script("pay_following.py"));
            let url = format!("http://{}/orders", gateway.address());
            python.args([url, key.to_owned(), format!(r#"{{"amount": {amount}{more}}}"#)]);
            python
        };
        let paid = |key, amount, more| {
            let output = pay(key, amount, more).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{error}");
            serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
        };
        let first = paid("order-1", 1, "");
        assert_eq!(
            (&first[0], &first[1], &first[2]),
            (&[307].into(), &201.into(), &"false".into())
        );
        let again = paid("order-1", 1, "");
        assert_eq!((&again[0], &again[1], &again[2]), (&[307].into(), &201.into(), &"true".into()));
        assert_eq!(first[3], again[3]);

        let killed = Process::start(&mut pay("order-2", 2, HOLD));
        service.wait_for_charge(2);
        drop(killed);
        service.release();
        let retried = loop {
            let answer = paid("order-2", 2, HOLD);
            if answer[1] != 409 {
                break answer;
            }
        };
        assert_eq!((&retried[0], &retried[1]), (&[307].into(), &201.into()), "{retried}");
        service.was_charged_once_each(&[1, 2]);
    }
}

#[test]
fn axum_with_the_layer_is_safe_without_any_setting() {
    let folder = tempfile::tempdir().unwrap();
    let axum = Axum::start("first::callers::the_axum_service", folder.path());
    let service = axum.service();
    exercise(axum, None, &service, TOKENS);
}

/// Serves in the processes that the test above starts; elsewhere it has nothing to do.
#[tokio::test(flavor = "multi_thread")]
async fn the_axum_service() {
    serve_axum().await;
}

/// Starts nginx with a plain `proxy_pass` to the gateway.
fn nginx(front: SocketAddr, gateway: SocketAddr, folder: &Path) -> Process {
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|module| format!("{module}_temp_path {module};\n"))
        .concat();
    let config = format!(
        "daemon off; master_process off; pid nginx.pid; error_log stderr;\n\
         events {{}}\n\
         http {{ access_log off;\n{temporary}\
         server {{ listen {front}; location / {{ proxy_pass http://{gateway}; }} }} }}\n"
    );
    let file = folder.join("nginx.conf");
    std::fs::write(&file, config).unwrap();
    let mut nginx = Command::new("nginx");
    // Debian keeps it where only root's paths lead.
    nginx.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin");
    nginx.args(["-e", "stderr", "-p"]).arg(folder).arg("-c").arg(&file);
    Process::start(&mut nginx).serving(front)
}
