//! The session with curl: it runs, and what the documents show is what it prints.

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_session_in_the_documents_matches_the_output() {
    let script = repository().join("examples/gateway/session.sh");
    let run = Command::new(script).arg(env!("CARGO_BIN_EXE_hapax")).output().unwrap();
    let printed = String::from_utf8(run.stdout).unwrap();
    assert!(run.status.success(), "{printed}\n{}", String::from_utf8_lossy(&run.stderr));
    let seen = alike(&printed);
    assert_eq!(seen, alike(&shown("examples/gateway/README.md")));
    // The page of the gateway shows the beginning of it.
    let front = alike(&shown("docs/gateway.md"));
    assert!(front.len() > 20, "{front:?}");
    assert_eq!(seen[..front.len()], front);
}

/// What a document shows between `<!-- session -->` and the end of the block that follows.
fn shown(document: &str) -> String {
    let text = std::fs::read_to_string(repository().join(document)).unwrap();
    let (_, after) = text.split_once("<!-- session -->").unwrap();
    let (_, block) = after.split_once("```console\n").unwrap();
    block.split_once("\n```").unwrap().0.to_owned()
}

/// Its lines, without what differs from run to run.
fn alike(text: &str) -> Vec<String> {
    let varies = |line: &&str| !line.starts_with("date: ") && !line.starts_with("server: ");
    text.trim().lines().filter(varies).map(|line| without_numbers(line.trim_end())).collect()
}

/// Ports, process numbers, seconds, ids.
fn without_numbers(line: &str) -> String {
    let mut left = line;
    let mut out = String::new();
    let before = [
        "127.0.0.1:",
        "process ",
        "retry-after: ",
        "\"retry_after\":",
        "idempotency-operation-id: ",
    ];
    while let Some(at) = before.iter().filter_map(|it| after(left, it)).min() {
        out.push_str(&left[..at]);
        left = left[at..].trim_start_matches(|digit: char| digit.is_ascii_hexdigit());
        out.push('N');
    }
    out + left
}

fn after(text: &str, prefix: &str) -> Option<usize> {
    text.find(prefix).map(|at| at + prefix.len())
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}
