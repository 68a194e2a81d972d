//! The ways to run it that `examples/deploy` has.

use std::os::unix::net::UnixDatagram;
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::world::{TIMEOUT, hapax, ok};

const UNIT: &str = include_str!("../../../../../examples/deploy/hapax.service");
const README: &str = include_str!("../../../../../examples/deploy/README.md");
const CONTAINER: &str = include_str!("../../../../../examples/deploy/Containerfile");

/// A file as it would be there.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../examples/gateway/hapax.toml");

/// Has a command line checked that is to run the program where it is installed.
fn check(words: &[&str]) {
    let [program, words @ ..] = words else { panic!("no command") };
    assert_eq!(*program, "/usr/local/bin/hapax");
    let mut words = words.to_vec();
    let file = words.iter_mut().find(|word| **word == "/etc/hapax/hapax.toml");
    *file.expect("it has a configuration") = FILE;
    if !words.contains(&"--check") {
        words.push("--check");
    }
    assert!(ok(&words).contains("[[route]]"), "{words:?}");
}

fn lines<'a>(text: &'a str, field: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.strip_prefix(field)).collect()
}

#[test]
fn the_command_lines_of_the_systemd_unit_are_valid() {
    let starts = lines(UNIT, "ExecStart=");
    let reloads = lines(UNIT, "ExecReload=");
    assert_eq!(starts.len(), 1);
    // A bad file is told before the signal.
    assert_eq!(reloads, [&format!("{} --check", starts[0]), "/bin/kill -HUP $MAINPID"]);
    for line in [starts[0], reloads[0]] {
        check(&line.split(' ').collect::<Vec<_>>());
    }
    // The exit code of a configuration that cannot be.
    assert_eq!(lines(UNIT, "RestartPreventExitStatus="), ["64"]);
    // A store that is not there yet is waited for, however long; what limits that is of the unit.
    let (unit, _) = UNIT.split_once("\n[Service]\n").unwrap();
    assert_eq!(lines(unit, "StartLimitIntervalSec="), ["0"]);
}

#[test]
fn a_deployed_gateway_makes_a_store_at_its_first_start_only() {
    let required = "HAPAX_STORE_MUST_EXIST=true";
    assert_eq!(lines(UNIT, "Environment="), [required]);
    assert_eq!(lines(CONTAINER, "ENV "), [required]);
    // Of systemd's own, a file wins over the unit.
    let file = lines(UNIT, "EnvironmentFile=-")[0];
    let first = format!("echo HAPAX_STORE_MUST_EXIST=false | sudo tee -a {file}");
    let later = format!("sudo sed -i /^HAPAX_STORE_MUST_EXIST=/d {file}");
    let at = |line: &str| README.lines().position(|it| it.starts_with(line));
    let start = at("sudo systemctl enable --now hapax");
    assert!(at(&first).is_some() && at(&first) < start && start < at(&later));
    let once = "podman run --rm -e HAPAX_STORE_MUST_EXIST=false ";
    assert!(at(once).is_some() && at(once) < at("podman run --rm --stop-timeout"));
}

#[test]
fn the_units_configuration_file_is_readable_by_its_group_only() {
    let group = lines(UNIT, "SupplementaryGroups=");
    assert_eq!(group, ["hapax-config"]);
    assert_eq!(lines(README, "sudo groupadd --system --force "), group);
    let install = format!("-D -g {} -m 0640 examples/gateway/hapax.toml ", group[0]);
    let files = lines(README, "sudo install ");
    assert_eq!(files.iter().filter(|line| line.starts_with(&install)).count(), 1, "{files:?}");
}

#[test]
fn the_command_line_of_the_container_is_valid() {
    let words =
        |field| -> Vec<String> { serde_json::from_str(lines(CONTAINER, field)[0]).unwrap() };
    let line = [words("ENTRYPOINT "), words("CMD ")].concat();
    check(&line.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(lines(CONTAINER, "USER "), ["10001:10001"]);
}

#[test]
fn the_service_manager_is_notified_of_ready_and_stopping() {
    assert_eq!(lines(UNIT, "Type="), ["notify"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut said = [0; 256];
    let mut next = || {
        let length = manager.recv(&mut said).unwrap();
        String::from_utf8(said[..length].to_vec()).unwrap()
    };
    let nobody = ["--upstream", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin", "off"];
    let mut gateway = hapax(&[&["gateway", "--store", "memory:"], &nobody[..]].concat())
        .env("NOTIFY_SOCKET", &path)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(next().trim(), "READY=1");
    kill_process(Pid::from_child(&gateway), Signal::TERM).unwrap();
    assert_eq!(next().trim(), "STOPPING=1");
    assert!(gateway.wait().unwrap().success());
}
