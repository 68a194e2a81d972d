//! Scripts such as those of cron, which are killed (SIGKILL) and run again, and one on a full disk.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use super::{Act, Script};

/// Size of a response in bytes, larger than the buffer of a pipe: the call blocks while its output is not
/// read.
const LARGE: usize = 512 << 10;

/// The moment at which a script is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The server has executed the request and does not answer.
    Request,
    /// The answer is printed.
    Printing,
    /// As the first one, but only the shell is killed, and the call continues without it.
    Shell,
}

/// Returns the job of a crontab: a call, and a line in a file once it has succeeded.
fn job(script: &Script) -> Command {
    let text = r#"set -e
"$HAPAX" call --name invoice-17 --server hapax POST "$URL" --json '{"cents":1999}' --journal "$JOURNAL"
echo paid >> "$JOURNAL.paid"
"#;
    let mut command = Command::new("sh");
    command.args(["-c", text]).env("HAPAX", env!("CARGO_BIN_EXE_hapax"));
    command.env("URL", script.bank.url()).env("JOURNAL", script.journal());
    command.stdout(Stdio::piped()).process_group(0);
    command
}

fn kill(mut shell: Child, stage: Stage) {
    if stage == Stage::Shell {
        shell.kill().unwrap();
    } else {
        // The shell and the call.
        let group = Pid::from_raw(i32::try_from(shell.id()).unwrap()).unwrap();
        kill_process_group(group, Signal::KILL).unwrap();
    }
    let status = shell.wait().unwrap();
    assert!(!status.success(), "it was killed");
}

#[test]
fn a_script_that_is_killed_at_each_stage_and_run_again_pays_once() {
    for (stage, act, requests) in [
        (Stage::Request, Act::Hang, 2),
        (Stage::Printing, Act::Large(LARGE), 1),
        (Stage::Shell, Act::Slow(Duration::from_secs(1)), 1),
    ] {
        let script = Script::new();
        script.bank.act(act);
        let mut first = job(&script).spawn().unwrap();
        if stage == Stage::Printing {
            first.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        } else {
            while script.bank.requests().is_empty() {
                std::thread::yield_now();
            }
        }
        kill(first, stage);
        let again = job(&script).output().unwrap();
        assert!(again.status.success(), "{stage:?}: {again:?}");
        let expected = if stage == Stage::Printing { "x".repeat(LARGE) } else { "paid".to_owned() };
        assert!(again.stdout == expected.as_bytes(), "{stage:?}: {} bytes", again.stdout.len());
        assert_eq!(script.bank.requests().len(), requests, "{stage:?}");
        assert_eq!(script.bank.state.lock().unwrap().executions, 1, "{stage:?}");
        let paid = std::fs::read_to_string(script.folder.path().join("calls.db.paid")).unwrap();
        assert_eq!(paid, "paid\n", "{stage:?}: the first run did not end");
    }
}

/// Runs commands on a disk of this size in memory, which they mount in their own name space.
fn on_a_disk(script: &Script, size: &str, commands: &str) -> Output {
    let text = format!(
        r#"set -e
mount -t tmpfs -o size={size} none "$DISK"
call() {{ "$HAPAX" call --name "$1" --server hapax POST "$URL" --journal "$DISK/calls.db"; }}
fill() {{ ! cat /dev/zero > "$DISK/filler" 2> "$DISK.error" && grep -q 'No space' "$DISK.error"; }}
{commands}"#
    );
    let disk = script.folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &text]);
    command.env("HAPAX", env!("CARGO_BIN_EXE_hapax")).env("LC_ALL", "C");
    command.env("URL", script.bank.url()).env("DISK", disk).output().unwrap()
}

#[test]
fn a_call_on_a_full_disk_says_so_and_is_sent_once_there_is_space() {
    let script = Script::new();
    let commands = r#"call first
fill
code=0; call second || code=$?
test $code = 69
rm "$DISK/filler"
call second"#;
    let output = on_a_disk(&script, "96m", commands);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{error}");
    assert_eq!(output.stdout, b"paidpaid");
    let lines: Vec<_> = error.lines().collect();
    let [made, full] = lines[..] else { panic!("{error}") };
    assert!(made.contains("a new journal was created"), "{error}");
    assert!(full.contains("disk is full") || full.contains("free disk space"), "{error}");
    assert_eq!(script.bank.requests().len(), 2);
}

#[test]
fn a_journal_that_cannot_be_created_on_a_full_disk_sends_nothing() {
    let script = Script::new();
    let output = on_a_disk(&script, "4m", "fill\ncall first");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(69), "{error}");
    assert!(error.contains("No space left"), "{error}");
    assert_eq!(script.bank.requests().len(), 0);
}
