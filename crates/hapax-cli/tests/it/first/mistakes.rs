//! Configurations and services with a mistake in them.

use super::services::Service;
use super::{HOLD, Killed, Line, paid, pay};
use crate::world::{Gateway, receive, refused, send_fields, wait_for_log};

const CALLER: (&str, &str) = ("authorization", "Bearer a");

mod npm {
    use super::*;

    #[test]
    fn a_mistyped_reconcile_url_executes_nothing_twice() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        // The service would have to answer at /outcome; Express answers 404 to this.
        let url = format!("http://{}/outcom", service.address);
        let reconcile = ["--on-unknown", "reconcile", "--reconcile-url", &*url];
        let more = [&reconcile[..], &["--lease", "1s", "--upstream-timeout", "1s"]].concat();
        let gateway = Gateway::logged(service.address, folder.path(), &more);
        let client = pay(gateway.address, CALLER, "order-1", 301, HOLD);
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
            let retry = paid(gateway.address, CALLER, "order-1", 301, HOLD);
            assert_eq!((retry.status, &*retry.code()), (409, "outcome-unknown"), "{}", retry.body);
        }
        service.was_charged_once_each(&[301]);
    }

    #[test]
    fn a_503_after_the_effect_is_not_executed_again() {
        let folder = tempfile::tempdir().unwrap();
        let (service, _process) = Service::express(folder.path());
        let gateway = Line::start(service.address, folder.path(), &[]);
        let fail = r#", "fail": true"#;
        let first = paid(gateway.address(), CALLER, "order-1", 302, fail);
        assert_eq!(first.status, 503);
        for _ in 0..3 {
            let retry = paid(gateway.address(), CALLER, "order-1", 302, fail);
            assert_eq!((retry.status, &*retry.code()), (409, "outcome-unknown"), "{}", retry.body);
        }
        service.was_charged_once_each(&[302]);
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
        let send = |key: Option<&str>| {
            let fields = [("content-type", "application/json"), CALLER];
            let key = key.map(|key| ("idempotency-key", key));
            let fields = [&fields[..], key.as_slice()].concat();
            let body = r#"{"amount": 303}"#;
            receive(&send_fields(gateway.address, "/charges/card", &fields, body)).unwrap()
        };
        assert_eq!(send(None).code(), "missing-key");
        assert_eq!([send(Some("order-1")).status, send(Some("order-1")).status], [201, 201]);
        service.was_charged_once_each(&[303]);
    }
}
