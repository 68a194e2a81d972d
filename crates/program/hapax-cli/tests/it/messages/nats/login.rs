//! Logins at a server, by files.

use hapax_testkit::servers::NatsServer;

use crate::messages::blocking;
use crate::world::refused;

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_logs_in_by_a_file_of_credentials() {
    let server =
        NatsServer::with("authorization { users: [{ user: relay, password: \"p@ss\" }] }").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("credentials");
    let path = file.to_str().unwrap();
    // With the right password the next error is that of the database.
    for (password, expected) in [("p@ss", "--from: "), ("guess", "--to: ")] {
        std::fs::write(&file, format!("user=relay\npassword={password}\n")).unwrap();
        let (from, to) = ("postgres://127.0.0.1:1/x", server.url());
        let relay = ["relay", "--from", from, "--to", &to, "--broker-credentials", path];
        let quiet = ["--admin", "off", "--log-level", "off"];
        let (code, line) = blocking(|| refused(&[&relay[..], &quiet].concat()));
        assert!(code == 69 && line.starts_with(&format!("hapax: {expected}")), "{code} {line}");
        assert!(!line.contains(password), "{line}");
    }
}
