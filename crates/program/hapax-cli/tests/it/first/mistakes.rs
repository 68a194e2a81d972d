//! Configurations and services with a mistake in them.

use std::net::SocketAddr;

use super::services::Service;
use super::{
    Caller, HOLD, Killed, Line, a_client_hangs_up, a_client_is_killed, paid, pay,
    two_callers_with_one_key,
};
use crate::world::{Gateway, receive, refused, send_fields, wait_for_log};

const CALLER: Caller = ("authorization", "Bearer a");
const OTHER: Caller = ("authorization", "Bearer b");

/// What clients do all the time, whatever the mistake is.
fn clients_do_what_they_do(to: SocketAddr, service: &Service) {
    two_callers_with_one_key(to, service, [CALLER, OTHER]);
    a_client_hangs_up(to, service, CALLER);
    a_client_is_killed(to, service, CALLER);
}

/// The amounts that were charged for them, and this one.
fn with(amount: u32) -> [u32; 5] {
    [101, 102, 201, 202, amount]
}

mod npm {
    use super::*;

    #[test]
    fn a_mistyped_reconcile_url_executes_nothing_twice() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        // The service would have to answer at /outcome; Express answers 404 to this.
        let url = format!("http://{}/outcom", service.address);
        let reconcile = ["--on-unknown", "reconcile", "--reconcile-url", &*url];
        // Under the default times: nobody is late here.
        let gateway = Gateway::start(service.address, folder.path(), &reconcile);
        clients_do_what_they_do(gateway.address, &service);
        gateway.kill();

        let more = [&reconcile[..], &["--lease", "1s", "--upstream-timeout", "1s"]].concat();
        let gateway = Gateway::logged(service.address, folder.path(), &more);
        let client = pay(gateway.address, CALLER, "order-5", 301, HOLD);
        service.wait_for_charge(301);
        gateway.kill();
        drop(client);
        service.release();

        let gateway = Gateway::logged(service.address, folder.path(), &more);
        wait_for_log(folder.path(), "the reconcile URL failed its probe", 1);
        let requests = || service.seen().iter().filter(|it| *it == "GET /outcom").count();
        let at_start = requests();
        // Retries until the service was asked about this very key, twice.
        while requests() < at_start + 2 {
            let retry = paid(gateway.address, CALLER, "order-5", 301, HOLD);
            assert_eq!((retry.status, &*retry.code()), (409, "outcome-unknown"), "{}", retry.body);
        }
        service.was_charged_once_each(&with(301));
    }

    #[test]
    fn a_503_after_the_effect_is_not_executed_again() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        let gateway = Line::start(service.address, folder.path(), &[]);
        clients_do_what_they_do(gateway.address(), &service);
        let fail = r#", "fail": true"#;
        let first = paid(gateway.address(), CALLER, "order-5", 302, fail);
        assert_eq!(first.status, 503);
        for _ in 0..3 {
            let retry = paid(gateway.address(), CALLER, "order-5", 302, fail);
            assert_eq!((retry.status, &*retry.code()), (409, "outcome-unknown"), "{}", retry.body);
        }
        service.was_charged_once_each(&with(302));
    }

    #[test]
    fn wildcard_routes_are_rejected_until_they_are_written_as_routes() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        let file = folder.path().join("hapax.toml");
        let configure = |path: &str| {
            let text = format!(
                "[gateway]\nupstream = \"http://{}\"\n\n[policy]\nkey = \"optional\"\n\n\
                 [[route]]\npath = \"{path}\"\nkey = \"required\"\n",
                service.address
            );
            std::fs::write(&file, text).unwrap();
            file.display().to_string()
        };
        for (path, right) in [("/charges/*", "{*rest}"), ("/charges/:kind", "{kind}")] {
            let (code, line) = refused(&["gateway", "--config", &configure(path), "--check"]);
            assert!(code == 64 && line.contains(right), "{code} {line}");
        }
        let config = configure("/charges/{*rest}");
        let gateway = Gateway::start(service.address, folder.path(), &["--config", &config]);
        clients_do_what_they_do(gateway.address, &service);
        let send = |key: Option<&str>| {
            let fields = [("content-type", "application/json"), CALLER];
            let key = key.map(|key| ("idempotency-key", key));
            let fields = [&fields[..], key.as_slice()].concat();
            let body = r#"{"amount": 303}"#;
            receive(&send_fields(gateway.address, "/charges/card", &fields, body)).unwrap()
        };
        assert_eq!(send(None).code(), "missing-key");
        assert_eq!([send(Some("order-5")).status, send(Some("order-5")).status], [201, 201]);
        service.was_charged_once_each(&with(303));
    }
}
