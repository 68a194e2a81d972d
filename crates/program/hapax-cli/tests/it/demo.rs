//! `hapax demo`, as it is run: real processes, and nothing left of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

fn start(folder: &Path, arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_hapax"))
        .arg("demo")
        .args(arguments)
        .env("TMPDIR", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Reads standard error until a line holds `word`; everything up to there.
fn read_until(err: &mut impl BufRead, word: &str) -> String {
    let mut seen = String::new();
    while !seen.lines().last().is_some_and(|line| line.contains(word)) {
        assert_ne!(err.read_line(&mut seen).unwrap(), 0, "no {word:?} in:\n{seen}");
    }
    seen
}

fn interrupt(child: &Child) {
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// No file, and no process that was given one, but for the moment that a killed one takes to go.
fn assert_nothing_left(folder: &Path) {
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    // Looking takes a while.
    let left = (0..10_000).map_while(|_| process_of(folder)).last();
    let gone = left.is_none() || process_of(folder).is_none();
    assert!(gone, "still running: {}", String::from_utf8_lossy(&left.unwrap_or_default()));
}

fn process_of(folder: &Path) -> Option<Vec<u8>> {
    let name = folder.to_str().unwrap().as_bytes();
    let processes = std::fs::read_dir("/proc").unwrap();
    // A process may end while it is looked at.
    let lines = processes.map(|process| std::fs::read(process.unwrap().path().join("cmdline")));
    lines.flatten().find(|line| line.windows(name.len()).any(|part| part == name))
}

fn row<'a>(report: &'a Value, setup: &str) -> &'a Value {
    let rows = report["rows"].as_array().unwrap();
    rows.iter().find(|row| row["setup"] == setup).unwrap()
}

/// Sends a payment by hand; the answer as text.
fn pay(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let body = r#"{"order":100001,"amount":1999}"#;
    write!(
        stream,
        "POST /charges HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\nidempotency-key: mine\r\n\
         authorization: Bearer me\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn every_setup_of_the_demo_has_its_guarantee_and_keep_leaves_the_last_running() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--payments", "24", "--seed", "7", "--json", "--keep"];
    let mut child = start(folder.path(), &arguments);
    let mut err = BufReader::new(child.stderr.take().unwrap());
    let seen = read_until(&mut err, "curl -i ");

    let url = |name: &str| {
        let line = seen.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
        line.split("http://").nth(1).unwrap().to_owned()
    };
    let (first, second) = (pay(&url("gateway")), pay(&url("gateway")));
    assert!(first.starts_with("HTTP/1.1 201") && second.starts_with("HTTP/1.1 201"), "{first}");
    assert!(first.to_lowercase().contains("idempotency-replayed: false"), "{first}");
    assert!(second.to_lowercase().contains("idempotency-replayed: true"), "{second}");
    TcpStream::connect(url("admin")).unwrap();

    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{seen}");
    assert_nothing_left(folder.path());

    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["failings"], serde_json::json!([]), "{report:#}");
    for setup in ["no gateway", "reexecute", "block", "reconcile"] {
        let row = row(&report, setup);
        assert_eq!(row["payments"], 24, "{row:#}");
        assert!(row["requests"].as_u64() > Some(24), "{row:#}");
        assert_eq!(row["wrong_answers"], 0, "{row:#}");
        assert_eq!(row["faults"]["service_kills"], 1, "{row:#}");
        assert_eq!(row["faults"]["gateway_kills"], u64::from(setup != "no gateway"), "{row:#}");
    }
    for setup in ["no gateway", "reexecute"] {
        assert!(row(&report, setup)["server_side"].as_u64() > Some(0), "{report:#}");
    }
    // What the default does protect against.
    assert!(row(&report, "no gateway")["client_side"].as_u64() > Some(0), "{report:#}");
    assert_eq!(row(&report, "reexecute")["client_side"], 0, "{report:#}");
    let block = row(&report, "block");
    assert_eq!(block["duplicates"], 0, "{block:#}");
    assert!(block["unknown"].as_u64() > Some(0), "{block:#}");
    let reconcile = row(&report, "reconcile");
    assert_eq!(reconcile["duplicates"], 0, "{reconcile:#}");
    assert_eq!(reconcile["unknown"], 0, "{reconcile:#}");
    assert_eq!(reconcile["charges"], 24, "{reconcile:#}");
}

#[test]
fn the_demo_prints_its_steps_and_its_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_hapax"));
    let above = program.parent().unwrap().parent().unwrap();
    let output = Command::new(program)
        .args(["demo", "--payments", "24", "--seed", "5"])
        .env("TMPDIR", folder.path())
        .current_dir(above)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{err}");
    let head = out.lines().find(|line| line.starts_with("setup")).unwrap();
    for column in head.split_whitespace().skip(1) {
        assert!(err.lines().any(|line| line.starts_with(column)), "{column} is not said:\n{err}");
    }
    assert!(err.contains("--seed 5 gives the same payments"), "{err}");
    let called = program.strip_prefix(above).unwrap().display();
    assert!(out.contains(&format!("Next: {called} gateway --upstream ")), "{out}");
    assert!(out.contains(&format!("{called} demo --keep")), "{out}");
}

#[test]
fn an_interrupted_demo_leaves_no_process_and_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(folder.path(), &["--payments", "24"]);
    let mut err = BufReader::new(child.stderr.take().unwrap());
    read_until(&mut err, "killed the gateway");
    interrupt(&child);
    // What it still says, so that it is never held up saying it.
    std::io::copy(&mut err, &mut std::io::sink()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(output.stdout, b"");
    assert_nothing_left(folder.path());
}
