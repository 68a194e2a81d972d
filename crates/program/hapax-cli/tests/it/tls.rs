//! TLS, as curl sees it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustix::process::Signal;

use crate::world::{Gateway, Upstream, refused, wait_for_log};

/// A certificate of its own for 127.0.0.1, and its key: as text.
fn certificate() -> (String, String) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    (cert.pem(), signing_key.serialize_pem())
}

/// What curl prints who trusts `ca` alone: the status, and the version of HTTP; or how it failed.
fn curl(gateway: &Gateway, ca: &Path) -> Result<String, i32> {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--output", "/dev/null", "--write-out", "%{http_code} %{http_version}"]);
    let url = format!("https://{}/orders", gateway.address);
    curl.args(["--header", "authorization: Bearer a", "--header", "idempotency-key: k"]);
    curl.args(["--data", "x", "--cacert"]).arg(ca).arg(url);
    let output = curl.output().unwrap();
    match output.status.code().unwrap() {
        0 => Ok(String::from_utf8(output.stdout).unwrap()),
        code => Err(code),
    }
}

/// curl's exit code for a certificate of somebody else.
const NOT_TRUSTED: i32 = 60;

#[test]
fn sighup_replaces_the_certificate_only_by_a_valid_one() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let path = |name: &str| folder.path().join(name);
    let [old, new] = [("old.pem", certificate()), ("new.pem", certificate())].map(
        |(name, (certificate, key))| {
            std::fs::write(path(name), &certificate).unwrap();
            (path(name), certificate, key)
        },
    );
    let (own, key) = (path("own.pem"), path("own.key"));
    std::fs::write(&own, &old.1).unwrap();
    std::fs::write(&key, &old.2).unwrap();
    let arguments = ["--tls-cert", own.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let gateway = Gateway::logged(upstream.address, folder.path(), &arguments);
    wait_for_log(
        folder.path(),
        "other users can read this private key: chmod 600 it, or 640 if root owns it",
        1,
    );
    let answering = std::thread::spawn(move || upstream.next().answer("201 Created", "ordered"));
    assert_eq!(curl(&gateway, &old.0).unwrap(), "201 2");
    answering.join().unwrap();
    assert_eq!(curl(&gateway, &new.0), Err(NOT_TRUSTED));

    // With another's key.
    std::fs::write(&own, &new.1).unwrap();
    gateway.signal(Signal::HUP);
    wait_for_log(
        folder.path(),
        "SIGHUP: the reload was rejected; the configuration in force stays",
        1,
    );
    assert_eq!(curl(&gateway, &old.0).unwrap(), "201 2");

    std::fs::write(&key, &new.2).unwrap();
    gateway.signal(Signal::HUP);
    wait_for_log(folder.path(), "SIGHUP: certificates were read again", 1);
    assert_eq!(curl(&gateway, &new.0).unwrap(), "201 2");
    assert_eq!(curl(&gateway, &old.0), Err(NOT_TRUSTED));
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
}

#[test]
fn certificates_that_are_being_replaced_end_a_start_with_exit_code_69() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let ((certificate, key), (_, other)) = (certificate(), certificate());
    let half = |text: &str| text[..text.len() / 2].to_owned();
    let (own, own_key) = (path("own.pem"), path("own.key"));
    let pair = |[certificate, key]: [&'static str; 2]| {
        [certificate, &own, key, &own_key].map(str::to_owned).to_vec()
    };
    let listener = pair(["--tls-cert", "--tls-key"]);
    let upstream =
        [pair(["--upstream-cert", "--upstream-key"]), vec!["--upstream-ca".into(), path("ca.pem")]];
    let postgres = format!(
        "postgres://127.0.0.1:1/x?sslrootcert={}&sslcert={own}&sslkey={own_key}",
        path("ca.pem")
    );
    std::fs::write(path("ca.pem"), &certificate).unwrap();
    let bundle = |text: &str| {
        ["--upstream-ca".to_owned(), {
            std::fs::write(path("bundle.pem"), text).unwrap();
            path("bundle.pem")
        }]
    };
    let start = |more: &[String], store: &str| {
        let given = [
            "gateway",
            "--upstream",
            "https://127.0.0.1:1",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "off",
        ];
        let store = ["--namespace", "", "--store", store];
        let more: Vec<_> = more.iter().map(String::as_str).collect();
        let (code, line) = refused(&[&given[..], &store, &more].concat());
        assert_eq!(code, 69, "{line}");
        // A library shows bytes as numbers.
        assert!(!line.contains(", 69, ") && !line.contains("KeyMismatch"), "{line}");
        line
    };
    for (certificate, key, says) in [
        (&*certificate, "", "expected a private key in PEM, found none"),
        (
            &certificate,
            &half(&key),
            "expected a private key in PEM, found a section without its end",
        ),
        (&certificate, &other, "found that of another key"),
        ("", &key, "there is no certificate in it"),
        (
            &half(&certificate),
            &key,
            "expected certificates in PEM, found a section without its end",
        ),
    ] {
        std::fs::write(&own, certificate).unwrap();
        std::fs::write(&own_key, key).unwrap();
        let line = start(&listener, "memory:");
        assert!(line.contains(says) && line.contains("--tls-"), "{line}");
        let line = start(&upstream.concat(), "memory:");
        assert!(line.contains(says) && line.contains("--upstream-"), "{line}");
        let line = start(&[], &postgres);
        assert!(line.contains("the certificates cannot be used"), "{line}");
    }
    for text in ["", &half(&certificate)] {
        assert!(start(&bundle(text), "memory:").contains("bundle.pem"));
    }
}
