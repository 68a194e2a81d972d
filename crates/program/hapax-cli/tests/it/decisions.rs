//! `hapax keys resolve --from-file` and `hapax keys count`, on a file and through the gateway that has it open.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use crate::world::{Gateway, Upstream, hapax, ok, post, receive, refused, run, send, store};

/// A cell of each line by its key: column and text.
type Cells<'a> = &'a [(&'a str, &'a [(&'a str, &'a str)])];

/// Makes undecided records: `s-…` with a response of status 500, `n-…` without one.
fn undecided(gateway: &Gateway, upstream: &Upstream, keys: &[&str]) {
    for key in keys {
        let asked = send(gateway.address, key, "x");
        let request = upstream.next();
        if key.starts_with("s-") {
            request.answer("500 Oh", "");
        } else {
            drop(request);
        }
        receive(&asked).unwrap();
    }
}

/// Writes the list of undecided records with these cells to a file.
fn filled(folder: &Path, at: &[&str], cells: Cells<'_>) -> PathBuf {
    let listed = ok(&[&["keys", "list", "--state", "unknown", "--csv"], at].concat());
    let mut reader = csv::Reader::from_reader(listed.as_bytes());
    let header = reader.headers().unwrap().clone();
    let place = |column: &str| header.iter().position(|it| it == column).unwrap();
    let mut writer = csv::Writer::from_path(folder.join("decisions.csv")).unwrap();
    writer.write_record(&header).unwrap();
    for row in reader.records() {
        let mut row: Vec<String> = row.unwrap().iter().map(str::to_owned).collect();
        let key = row[place("key")].clone();
        for (column, text) in cells.iter().filter(|(it, _)| *it == key).flat_map(|(_, it)| *it) {
            row[place(column)] = (*text).to_owned();
        }
        writer.write_record(&row).unwrap();
    }
    writer.flush().unwrap();
    folder.join("decisions.csv")
}

/// Runs the decisions of a file: exit code, and results of the lines and their counts.
fn resolve(file: &Path, at: &[&str], more: &[&str]) -> (i32, Value) {
    let words = ["keys", "resolve", "--reason", "by the ledger", "--json", "--from-file"];
    let output = run(&[&words[..], &[file.to_str().unwrap()], at, more].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    let found = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    (output.status.code().unwrap(), found)
}

fn counts(found: &Value) -> [u64; 4] {
    ["decided", "skipped", "rejected", "open"].map(|name| found[name].as_u64().unwrap())
}

fn audit(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("hapax.db.audit.jsonl")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const FOUR: Cells<'_> = &[
    ("s-happened", &[("outcome", "happened"), ("status", "201"), ("body_file", "body.json")]),
    ("s-not", &[("outcome", "did-not-happen")]),
    ("n-not", &[("outcome", "did-not-happen")]),
];

fn the_file_decides_each_line(through_the_gateway: bool) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    let mut gateway = Some(Gateway::start(upstream.address, folder, &[]));
    let keys = ["s-happened", "s-not", "n-not", "n-open"];
    undecided(gateway.as_ref().unwrap(), &upstream, &keys);
    if !through_the_gateway {
        gateway.take().unwrap().kill();
    }
    let store = store(folder);
    let at = ["--store", &store];
    std::fs::write(folder.join("body.json"), r#"{"id":7}"#).unwrap();
    let file = filled(folder, &at, FOUR);
    let header = ["--header", "content-type: application/json"];

    let (code, would) = resolve(&file, &at, &[&header[..], &["--dry-run"]].concat());
    assert_eq!((code, counts(&would)), (1, [0, 0, 1, 1]), "{would}");
    assert_eq!(would["would_be_decided"], 2, "{would}");
    assert!(audit(folder).is_empty(), "a dry run decides nothing");
    assert!(!folder.join("decisions.csv.released").exists());

    let (code, found) = resolve(&file, &at, &header);
    assert_eq!((code, counts(&found)), (1, [2, 0, 1, 1]), "{found}");
    let lines = found["lines"].as_array().unwrap();
    let rejected = lines.iter().find(|line| line["result"] == "rejected").unwrap();
    assert_eq!((&rejected["code"], &rejected["line"]), (&"may-execute".into(), &4.into()));
    let stages: Vec<_> = audit(folder).iter().map(|line| line["stage"].clone()).collect();
    assert_eq!(stages, ["intended", "done", "intended", "done"]);

    // Again: what is decided is skipped.
    let (code, found) = resolve(&file, &at, &header);
    assert_eq!((code, counts(&found)), (1, [0, 2, 1, 1]), "{found}");
    assert_eq!(audit(folder).len(), 4, "{found}");
    let other = ["--header", "content-type: text/plain"];
    let (code, found) = resolve(&file, &at, &other);
    assert_eq!((code, counts(&found)), (1, [0, 1, 2, 1]), "another response: {found}");

    let gateway = gateway.unwrap_or_else(|| Gateway::start(upstream.address, folder, &[]));
    let replayed = post(gateway.address, "s-happened", "x");
    assert_eq!((replayed.status, &*replayed.body), (201, r#"{"id":7}"#));
    assert_eq!(replayed.header("content-type"), "application/json");
    let asked = send(gateway.address, "s-not", "x");
    upstream.next().answer("201 Created", "again");
    assert_eq!(receive(&asked).unwrap().body, "again");
    // The line is about the execution before: it has no effect on the later one.
    let (code, found) = resolve(&file, &at, &header);
    assert_eq!((code, counts(&found)), (1, [0, 2, 1, 1]), "{found}");
    assert_eq!(post(gateway.address, "s-not", "x").body, "again");
}

#[test]
fn a_file_of_decisions_decides_each_line_through_the_gateway() {
    the_file_decides_each_line(true);
}

#[test]
fn a_file_of_decisions_decides_each_line_in_the_file_of_the_store() {
    the_file_decides_each_line(false);
}

#[test]
fn results_are_printed_line_by_line_with_a_summary() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    undecided(&gateway, &upstream, &["s-not", "n-not"]);
    let store = store(folder.path());
    let at = ["--store", &store];
    let file = filled(folder.path(), &at, FOUR);
    let words = ["keys", "resolve", "--reason", "r", "--from-file", file.to_str().unwrap()];
    let output = run(&[&words[..], &at].concat());
    let said = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = said.lines().collect();
    assert!(lines[0].starts_with("line 2: ") && lines[0].ends_with(" did-not-happen: decided"));
    assert!(lines[1].contains(": rejected: its request may still execute until 20"), "{said}");
    assert_eq!(lines[2], "1 decided, 0 skipped, 1 rejected, 0 without an outcome");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "hapax: 1 line was rejected\n");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_broken_line_is_named_and_nothing_is_decided() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    let gateway = Gateway::start(upstream.address, folder, &[]);
    undecided(&gateway, &upstream, &["s-1"]);
    let store = store(folder);
    let at = ["--store", &store];
    let listed = ok(&[&["keys", "list", "--json"], &at[..]].concat());
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let (id, fence) = (listed["keys"][0]["id"].as_str().unwrap(), &listed["keys"][0]["fence"]);
    let good = format!("{id},{fence},did-not-happen");
    let other = "0".repeat(64);
    let long = "x".repeat(70_000);
    let head = "id,fence,outcome";
    let file = folder.join("decisions.csv");
    for (text, line, words) in [
        (format!("{head}\n{good}\n{other},1,maybe\n"), 3, "found \"maybe\""),
        (format!("{head}\n{good}\n{other},1.7E+15,happened\n"), 3, "found \"1.7E+15\""),
        (format!("{head}\n{good}\n{other},1\n"), 3, "expected 3 columns"),
        (format!("{head}\n{good}\nabc,1,happened\n"), 3, "found \"abc\""),
        (format!("{head}\n{good}\n\n{good}\n"), 4, "found that of line 2"),
        (format!("{head}\r\n{good}\r\n\r\n{good}\r\n"), 4, "found that of line 2"),
        (format!("{head},body\n{other},1,happened,\"\n\"\nabc,,,\n"), 4, "found \"abc\""),
        (format!("{head},staus\n{good},\n"), 1, "found \"staus\""),
        (format!("id,outcome\n{id},happened\n"), 1, "a column fence"),
        (format!("{head},status\n{good},201\n"), 2, "expected no status"),
        (format!("{head},status\n{id},{fence},,201\n"), 2, "expected happened or did-not-happen"),
        (format!("{head},status\n{id},{fence},happened,99\n"), 2, "a status from 200 to 599"),
        (format!("{head},body_file\n{id},{fence},happened,none.json\n"), 2, "\"none.json\""),
        (format!("{head},body,body_file\n{id},{fence},happened,x,y\n"), 2, "found \"y\""),
        (format!("{head},body\n{id},{fence},happened,{long}\n"), 2, "at most 64 KiB"),
    ] {
        std::fs::write(&file, text).unwrap();
        let words_of = ["keys", "resolve", "--reason", "r", "--from-file", file.to_str().unwrap()];
        let (code, said) = refused(&[&words_of[..], &at].concat());
        assert_eq!(code, 64, "{said}");
        for word in [&format!("decisions.csv:{line}: "), words, "nothing was decided"] {
            assert!(said.contains(word), "expected {word:?} in {said}");
        }
    }
    let many: String = (0..10_001).map(|number| format!("{number:064x},1,\n")).collect();
    std::fs::write(&file, format!("{head}\n{many}")).unwrap();
    let words_of = ["keys", "resolve", "--reason", "r", "--from-file", file.to_str().unwrap()];
    let (code, said) = refused(&[&words_of[..], &at].concat());
    assert!(code == 64 && said.contains(":10002: expected at most 10000 lines"), "{said}");
    let (code, said) = refused(&[&words_of[..], &at, &["--force"]].concat());
    assert!(code == 64 && said.contains("--force"), "a file has no force: {said}");
    assert!(audit(folder).is_empty());
}

#[test]
fn a_file_that_a_spreadsheet_saved_is_read() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    let gateway = Gateway::start(upstream.address, folder, &[]);
    undecided(&gateway, &upstream, &["s-1"]);
    let store = store(folder);
    let at = ["--store", &store];
    let file = filled(folder, &at, &[("s-1", &[("outcome", "happened"), ("body", "ä;\"ö\"\n")])]);
    let mut reader = csv::Reader::from_path(&file).unwrap();
    let mut writer = csv::WriterBuilder::new()
        .delimiter(b';')
        .terminator(csv::Terminator::CRLF)
        .from_writer("\u{feff}".as_bytes().to_vec());
    writer.write_record(reader.headers().unwrap()).unwrap();
    for row in reader.records() {
        writer.write_record(&row.unwrap()).unwrap();
    }
    writer.write_record([""; 15]).unwrap();
    std::fs::write(&file, writer.into_inner().unwrap()).unwrap();
    let (code, found) = resolve(&file, &at, &[]);
    assert_eq!((code, counts(&found)), (0, [1, 0, 0, 0]), "{found}");
    let replayed = post(gateway.address, "s-1", "x");
    assert_eq!((replayed.status, &*replayed.body), (200, "ä;\"ö\"\n"));
}

#[test]
fn a_run_that_was_killed_is_completed_by_the_next_one_and_decides_nothing_twice() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let folder = folder.path();
    // The records of released keys expire soon.
    let gateway = Gateway::start(upstream.address, folder, &["--lease", "1s"]);
    let keys: Vec<String> = (0..40).map(|number| format!("s-{number}")).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    undecided(&gateway, &upstream, &names);
    gateway.kill();
    let store = store(folder);
    let at = ["--store", &store];
    let cells: Vec<(&str, &[(&str, &str)])> = names
        .iter()
        .enumerate()
        .map(|(number, name)| match number % 2 {
            0 => (*name, &[("outcome", "did-not-happen")][..]),
            _ => (*name, &[("outcome", "happened"), ("status", "202")][..]),
        })
        .collect();
    let file = filled(folder, &at, &cells);
    let words = ["keys", "resolve", "--reason", "r", "--from-file", file.to_str().unwrap()];
    let mut child = hapax(&[&words[..], &at].concat()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        assert!(lines.next().unwrap().unwrap().ends_with(": decided"));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let is_released = |line: &Value| line["outcome"] == "did-not-happen";
    let first = audit(folder).iter().find(|line| is_released(line)).unwrap()["id"].clone();
    let show = [&["keys", "show", "--json", "--id", first.as_str().unwrap()], &at[..]].concat();
    let shows = |state: &str| {
        let output = run(&show);
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        !output.status.success() || shown["state"] == state
    };
    while !shows("expired") {
        std::thread::yield_now();
    }

    let (code, found) = resolve(&file, &at, &[]);
    let [decided, skipped, rejected, open] = counts(&found);
    assert_eq!((code, rejected, open, decided + skipped), (0, 0, 0, 40), "{found}");
    assert!(skipped >= 3, "{found}");
    let mut done: HashMap<String, u32> = HashMap::new();
    for line in audit(folder).iter().filter(|line| line["stage"] == "done") {
        *done.entry(line["id"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    assert!(done.values().all(|count| *count == 1), "{done:?}");
    // Without the file of released keys nothing distinguishes them from those of another store.
    let copy = folder.join("copy.csv");
    std::fs::copy(&file, &copy).unwrap();
    let (code, found) = resolve(&copy, &at, &["--dry-run"]);
    let lines = found["lines"].as_array().unwrap();
    let of_first = lines.iter().find(|line| line["id"] == first).unwrap();
    assert_eq!((code, &of_first["code"]), (1, &"not-found".into()), "{found}");
}

#[test]
fn an_outage_ends_the_run_and_names_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("decisions.csv");
    let text = format!("id,fence,outcome\n{},1,did-not-happen\n", "0".repeat(64));
    std::fs::write(&file, text).unwrap();
    let words = ["keys", "resolve", "--reason", "r", "--admin", "127.0.0.1:1", "--from-file"];
    let output = run(&[&words[..], &[file.to_str().unwrap()]].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("the run ended at line 2: run it again"), "{said}");
    assert_eq!(output.status.code(), Some(69));
}

#[test]
fn undecided_records_are_counted_by_route_reason_and_minute() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    undecided(&gateway, &upstream, &["s-1", "s-2", "n-1"]);
    let store = store(folder.path());
    let count = ["keys", "count", "--store", &store];
    let look = || {
        let counted: Value =
            serde_json::from_str(&ok(&[&count[..], &["--json"]].concat())).unwrap();
        let mut by_reason = HashMap::new();
        for group in counted["groups"].as_array().unwrap() {
            assert_eq!(group["operation"], "POST /pay", "{counted}");
            assert!(group["minute"].as_str().unwrap().ends_with('Z'), "{counted}");
            let reason = group["reason"].as_str().unwrap().to_owned();
            *by_reason.entry(reason).or_insert(0) += group["records"].as_u64().unwrap();
        }
        assert_eq!(counted["records"], 3, "{counted}");
        by_reason
    };
    let by_reason = HashMap::from([("status-500".to_owned(), 2), ("no-response".to_owned(), 1)]);
    assert_eq!(look(), by_reason);
    assert!(ok(&count).contains("waiting for a decision: 3\n"));
    gateway.kill();
    assert_eq!(look(), by_reason);
    let said = ok(&count);
    assert!(said.contains("may still execute until 20"), "{said}");
    assert!(said.lines().any(|line| line.ends_with("  status-500    POST /pay")), "{said}");
}

#[test]
fn a_file_without_lines_and_an_unknown_id_are_reported_as_such() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let _gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let (store, file) = (store(folder.path()), folder.path().join("decisions.csv"));
    let at = ["keys", "resolve", "--reason", "r", "--store", &store, "--from-file"];
    let at = [&at[..], &[file.to_str().unwrap()]].concat();
    std::fs::write(&file, "id,fence,outcome\n").unwrap();
    let dry = [&at[..], &["--dry-run"]].concat();
    for words in [&dry, &at] {
        assert!(ok(words).contains("the file has no lines after its header"));
    }
    std::fs::write(&file, format!("id,fence,outcome\n{},f1,happened\n", "a".repeat(64))).unwrap();
    let output = run(&dry);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("a record with this id") && !said.contains("--scope"), "{said}");
}
