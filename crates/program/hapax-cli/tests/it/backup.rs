//! `hapax backup` and `hapax restore`, through a gateway and on the file of a stopped one.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::world::{
    Answer, Gateway, Upstream, log_line, ok, post, receive, refused, run, send, store,
};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes another secret than that of any store.
fn write_secret(path: &Path) {
    std::fs::write(path, "ab".repeat(32)).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// Sends `body` to the API, with the token or without.
fn ask(gateway: &Gateway, token: bool, body: &str) -> Answer {
    let token = match token {
        true => std::fs::read_to_string(&gateway.token).unwrap(),
        false => "none".to_owned(),
    };
    let mut stream = TcpStream::connect(gateway.admin).unwrap();
    let head = format!(
        "POST /api/backup HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        token.trim(),
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    receive(&stream).unwrap()
}

#[test]
fn a_backup_of_a_running_gateway_restores_earlier_records_only() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::logged(upstream.address, folder.path(), &[]);
    let of_store = store(folder.path());
    let asked = send(gateway.address, "done", "x");
    upstream.next().answer("201 Created", "first");
    receive(&asked).unwrap();
    let in_progress = send(gateway.address, "under-way", "x");
    let executing = upstream.next();

    let backup = folder.path().join("backup.db");
    let said = ok(&["backup", text(&backup), "--store", &of_store]);
    assert!(said.starts_with("2 records written to "), "{said}");
    assert!(said.contains("The secret is not in it"), "{said}");
    let logged = log_line(folder.path(), "a backup was written");
    assert_eq!((&logged["records"], &logged["path"]), (&2.into(), &text(&backup).into()));
    // The gateway goes on, and what it does now is not in the backup.
    executing.answer("201 Created", "second");
    assert_eq!(receive(&in_progress).unwrap().status, 201);
    let asked = send(gateway.address, "later", "x");
    upstream.next().answer("201 Created", "third");
    receive(&asked).unwrap();
    gateway.kill();

    let restored = folder.path().join("restored.db");
    let secret = folder.path().join("hapax.db.secret");
    let restore = ["restore", text(&backup), text(&restored), "--secret-file", text(&secret)];
    let (code, line) = refused(&restore);
    assert!(code == 64 && line.contains("pass --accept-forgetting"), "{line}");
    assert!(!restored.exists());
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = run(&[&restore[..], &["--accept-forgetting"]].concat());
    let warned = String::from_utf8(output.stderr).unwrap();
    assert!(warned.contains("other users can read this secret: chmod 600 it"), "{warned}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("1 of them were in flight and are unknown now"), "{said}");
    assert!(said.contains("The records written after the backup are lost"), "{said}");
    for name in ["backup.db.secret", "restored.db.secret", "backup.db.new"] {
        assert!(!folder.path().join(name).exists(), "{name}");
    }

    let of_restored = format!("file:{}", restored.display());
    let with = ["--store", &of_restored, "--secret-file", text(&secret)];
    let gateway = Gateway::start(upstream.address, folder.path(), &with);
    let replay = post(gateway.address, "done", "x");
    assert_eq!((replay.status, replay.body.as_str()), (201, "first"));
    let unknown = post(gateway.address, "under-way", "x");
    assert_eq!((unknown.status, unknown.code()), (409, "outcome-unknown".into()));
    assert!(upstream.is_idle());
    let asked = send(gateway.address, "later", "x");
    upstream.next().answer("201 Created", "again");
    assert_eq!(receive(&asked).unwrap().body, "again");
}

#[test]
fn a_backup_of_a_stopped_gateway_is_made_of_its_file() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let of_store = store(folder.path());
    let backup = folder.path().join("backup.db");
    let (code, line) = refused(&["backup", text(&backup), "--store", &of_store]);
    assert!(code == 64 && line.contains("name a database that exists"), "{line}");
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let asked = send(gateway.address, "done", "x");
    upstream.next().answer("201 Created", "first");
    receive(&asked).unwrap();
    // Not even closed: the backup is of what was durable.
    gateway.kill();
    let said = ok(&["backup", text(&backup), "--store", &of_store]);
    assert!(said.starts_with("1 records written to "), "{said}");
    // Beside its secret under its own name no flag is needed.
    let restored = folder.path().join("restored.db");
    let secret = |name: &str| folder.path().join(name);
    std::fs::copy(secret("hapax.db.secret"), secret("restored.db.secret")).unwrap();
    ok(&["restore", text(&backup), text(&restored), "--accept-forgetting"]);
    let of_restored = format!("file:{}", restored.display());
    let listed = ok(&["keys", "list", "--store", &of_restored]);
    assert!(listed.contains("done"), "{listed}");
}

#[test]
fn errors_of_backup_state_the_remedy() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let of_store = store(folder.path());
    let database = folder.path().join("hapax.db");
    let nowhere = folder.path().join("none").join("backup.db");
    let misnamed = |state: &str| {
        for (to, advice) in [
            (folder.path(), "name a file in it"),
            (&nowhere, "create it, or name another one"),
            (&database, "name one that does not exist"),
        ] {
            let (code, line) = refused(&["backup", text(to), "--store", &of_store]);
            assert!(code == 64 && line.contains(advice), "{state}: {line}");
        }
    };
    misnamed("through the gateway");
    let answer = ask(&gateway, false, r#"{"path": "/x"}"#);
    assert_eq!(answer.status, 401, "{answer:?}");
    for (body, reason) in [(r#"{"path": "x.db"}"#, "relative"), ("{}", "path")] {
        let answer = ask(&gateway, true, body);
        assert!(matches!(answer.status, 400 | 422) && answer.body.contains(reason), "{answer:?}");
    }
    assert!(gateway.admin("/").body.contains("/api/backup"));
    let backup = folder.path().join("backup.db");
    ok(&["backup", text(&backup), "--store", &of_store]);
    gateway.kill();
    misnamed("on the file");

    let (code, line) = refused(&["backup", text(&nowhere), "--store", "redis://localhost"]);
    assert!(code == 64 && line.contains("copies `file:` stores"), "{line}");
    let restored = folder.path().join("restored.db");
    let other = folder.path().join("other");
    let gateway = Gateway::start(upstream.address, folder.path(), &["--store", "memory:"]);
    let (admin, token) = (gateway.admin.to_string(), text(&gateway.token));
    let at = ["--admin", &admin, "--admin-token-file", token];
    let (code, line) = refused(&[&["backup", text(&restored)], &at[..]].concat());
    assert!(code == 64 && line.contains("no `file:` store"), "{line}");

    write_secret(&other);
    let restore = ["restore", text(&backup), text(&restored), "--accept-forgetting"];
    let (code, line) = refused(&[&restore[..], &["--secret-file", text(&other)]].concat());
    assert!(code == 64 && line.contains("is not the secret under which"), "{line}");
    let (code, line) = refused(&restore);
    assert!(code == 64 && line.contains("put the secret of the store there"), "{line}");
    assert!(!restored.exists());
    let secret = folder.path().join("hapax.db.secret");
    let with = ["--accept-forgetting", "--secret-file", text(&secret)];
    let (code, line) = refused(&[&["restore", text(&backup), text(&database)], &with[..]].concat());
    assert!(code == 64 && line.contains("name one that does not exist"), "{line}");
}

#[test]
fn a_wrong_file_or_secret_is_an_error_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let start = |store: &Path, more: &[&str]| {
        let store = format!("file:{}", store.display());
        let gateway = ["gateway", "--upstream", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"];
        refused(&[&gateway[..], &["--store", &store, "--admin", "off"], more].concat()).1
    };
    let line = start(folder.path(), &[]);
    assert!(line.contains("this is a folder: name a file in it"), "{line}");
    let line = start(&folder.path().join("none").join("hapax.db"), &[]);
    assert!(line.contains("there is no folder") && line.contains("create it"), "{line}");
    let upstream = Upstream::start();
    Gateway::start(upstream.address, folder.path(), &[]).kill();
    let other = folder.path().join("other");
    write_secret(&other);
    let line = start(&folder.path().join("hapax.db"), &["--secret-file", text(&other)]);
    assert!(line.contains("set the secret of the database"), "{line}");
}
