//! Rules of a function in two real processes: the test's own program is started again to play a
//! role.

use std::fs::OpenOptions;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use hapax_core::{
    Function, Idempotency, Key, OnUnknown, OutcomeClass, Policy, Receipt, RunError, Scope,
};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::TIMEOUT;
use crate::servers::signal;

const PART: &str = "HAPAX_TEST_PART";
const STORE: &str = "HAPAX_TEST_STORE";
const LEDGER: &str = "HAPAX_TEST_LEDGER";
/// Prefix of the lines that a role prints; it distinguishes them from those of the test harness.
const LINE_PREFIX: &str = "part: ";
/// Functions whose lease lapses.
const LAPSES: [&str; 3] = ["hangs", "hangs blocked", "stops"];
/// Lease of these functions: long enough for a process that runs, short enough to be waited for.
const LEASE: Duration = Duration::from_secs(3);

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Declined {
    by: u128,
}

type Counted = Function<String, Declined>;
type Said = Result<Receipt<String>, RunError<String, Declined>>;

fn declare(engine: &Idempotency, name: &str, on_unknown: OnUnknown) -> Counted {
    let mut policy = Policy::default();
    if LAPSES.contains(&name) {
        policy.terms.lease = LEASE;
    }
    let function = engine.function(name).policy(policy).on_unknown(on_unknown).wait(TIMEOUT);
    function.classify(|_| OutcomeClass::Final).build().unwrap()
}

async fn call<F>(function: &Counted, work: F) -> Said
where
    F: Future<Output = Result<String, Declined>> + Send + 'static,
{
    let key = Key::new("k-1").unwrap();
    function.run(&Scope::shared(), &key, "the request", |_| work).await
}

/// File in which every process counts executions: each appends a line.
#[derive(Clone)]
struct Ledger(PathBuf);

impl Ledger {
    fn write(&self, line: &str) {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.0).unwrap();
        // A single write, so that lines of two processes do not mix.
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Returns how often this line was written.
    fn count(&self, line: &str) -> usize {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        text.lines().filter(|written| *written == line).count()
    }
}

/// Role of this process in the test of another one.
#[derive(Debug)]
pub struct ProcessRole {
    name: String,
    store: String,
    ledger: PathBuf,
}

impl ProcessRole {
    /// Returns the role of this process; `None` if it runs the test itself.
    #[must_use]
    pub fn of_this_process() -> Option<Self> {
        let var = |name| std::env::var(name).ok();
        let (name, store, ledger) = (var(PART)?, var(STORE)?, var(LEDGER)?);
        Some(Self { name, store, ledger: ledger.into() })
    }

    /// Returns the location of the store that both processes share.
    #[must_use]
    pub fn store(&self) -> &str {
        &self.store
    }

    /// Plays the role to its end, or until the process is killed.
    pub async fn play(self, engine: Idempotency) {
        let ledger = Ledger(self.ledger);
        // The execution is counted before the line is printed, so that its reader finds it counted.
        let begin = |name: &str| {
            let (ledger, name) = (ledger.clone(), name.to_owned());
            async move {
                ledger.write(&name);
                say("begun");
            }
        };
        match &*self.name {
            "many" => {
                let function = declare(&engine, "many", OnUnknown::Block);
                say("ready");
                hear().await;
                let mut calls = JoinSet::new();
                for _ in 0..25 {
                    let (function, work) = (function.clone(), begin("many"));
                    calls.spawn(async move {
                        let work = async {
                            work.await;
                            tokio::time::sleep(Duration::from_millis(50)).await;
                            Ok("one".to_owned())
                        };
                        call(&function, work).await.unwrap()
                    });
                }
                for answer in calls.join_all().await {
                    say(&format!("{} {}", answer.value, answer.replayed));
                }
            }
            name @ ("hangs" | "hangs blocked" | "stops") => {
                let policy = match name {
                    "hangs blocked" => OnUnknown::Block,
                    _ => OnUnknown::Reexecute,
                };
                let begin = begin(name);
                let work = async {
                    begin.await;
                    hear().await;
                    Ok("late".to_owned())
                };
                match call(&declare(&engine, name, policy), work).await {
                    Err(RunError::Superseded { result }) => {
                        say(&format!("superseded {}", result.unwrap()));
                    }
                    other => say(&format!("{other:?}")),
                }
            }
            "fails" => {
                let begin = begin("fails");
                let work = async {
                    begin.await;
                    Err(Declined { by: u128::MAX })
                };
                let said = call(&declare(&engine, "fails", OnUnknown::Reexecute), work).await;
                assert!(matches!(said, Err(RunError::Failed { replayed: false, .. })), "{said:?}");
            }
            "panics" => {
                for (name, policy) in
                    [("panics", OnUnknown::Reexecute), ("panics blocked", OnUnknown::Block)]
                {
                    let begin = begin(name);
                    let work = async {
                        begin.await;
                        panic!("in the middle")
                    };
                    let said = call(&declare(&engine, name, policy), work).await;
                    assert!(matches!(said, Err(RunError::Panicked)), "{said:?}");
                }
            }
            "drops" => {
                let function = declare(&engine, "drops", OnUnknown::Block);
                let (tell, begun) = tokio::sync::oneshot::channel();
                let begin = begin("drops");
                let work = async {
                    begin.await;
                    tell.send(()).unwrap();
                    hear().await;
                    Ok("after all".to_owned())
                };
                let caller = tokio::spawn(async move { call(&function, work).await });
                begun.await.unwrap();
                caller.abort();
                assert!(caller.await.unwrap_err().is_cancelled());
                say("dropped");
                engine.drain().await;
            }
            other => panic!("there is no part {other:?}"),
        }
    }
}

fn say(what: &str) {
    let mut out = io::stdout().lock();
    // The harness leaves its lines unfinished, so that this output begins a line.
    writeln!(out, "\n{LINE_PREFIX}{what}").unwrap();
    out.flush().unwrap();
}

/// Waits for a line from the process that runs the test.
async fn hear() {
    let read = || io::stdin().lock().read_line(&mut String::new());
    tokio::task::spawn_blocking(read).await.unwrap().unwrap();
}

/// A process that plays a role.
struct Player {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
    tell: ChildStdin,
}

impl Player {
    fn start(test: &str, name: &str, store: &str, ledger: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(PART, name)
            .env(STORE, store)
            .env(LEDGER, ledger)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        let tell = child.stdin.take().unwrap();
        Self { child, said, tell }
    }

    /// Returns the next line of the role; `None` once it has ended.
    async fn says(&mut self) -> Option<String> {
        let line = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                if let Some(said) = line.strip_prefix(LINE_PREFIX) {
                    return Some(said.to_owned());
                }
            }
            None
        };
        timeout(TIMEOUT, line).await.expect("it says something, or ends")
    }

    async fn expect(&mut self, what: &str) {
        assert_eq!(self.says().await.as_deref(), Some(what));
    }

    async fn go(&mut self) {
        self.tell.write_all(b"go\n").await.unwrap();
    }

    async fn ends_well(mut self) -> Vec<String> {
        let mut said = Vec::new();
        while let Some(line) = self.says().await {
            said.push(line);
        }
        assert!(self.child.wait().await.unwrap().success());
        said
    }
}

/// Checks fifty calls over two processes, and every way in which one of them can fail the other.
/// `test` is the name of the test that calls this, as its program lists it: the program is started
/// again, finds its [`ProcessRole`] and plays it over the store at `store`. `engine` belongs to
/// this process and uses that store, which is empty.
pub async fn two_processes(test: &str, store: &str, engine: &Idempotency) {
    let folder = tempfile::tempdir().unwrap();
    let ledger = Ledger(folder.path().join("ledger"));
    let start = |name| Player::start(test, name, store, &ledger.0);
    fifty_calls(start, &ledger).await;
    a_killed_process_goes_by_the_policy(start, &ledger, engine).await;
    a_stopped_process_is_superseded(start, &ledger, engine).await;
    a_dropped_caller_loses_nothing(start, &ledger, engine).await;
    an_error_and_a_panic_reach_the_other_process(start, &ledger, engine).await;
}

async fn fifty_calls(start: impl Fn(&'static str) -> Player, ledger: &Ledger) {
    let mut players = [start("many"), start("many")];
    for player in &mut players {
        player.expect("ready").await;
    }
    for player in &mut players {
        player.go().await;
    }
    let [one, other] = players;
    let mut said = one.ends_well().await;
    said.extend(other.ends_well().await);
    let count = |what: &str| said.iter().filter(|said| *said == what).count();
    assert_eq!((count("one false"), count("one true")), (1, 49), "{said:?}");
    assert_eq!(ledger.count("many"), 1);
}

async fn a_killed_process_goes_by_the_policy(
    start: impl Fn(&'static str) -> Player,
    ledger: &Ledger,
    engine: &Idempotency,
) {
    let mut killed = [start("hangs"), start("hangs blocked")];
    for player in &mut killed {
        player.expect("begun").await;
        player.child.kill().await.unwrap();
    }
    let again = declare(engine, "hangs", OnUnknown::Reexecute);
    let written = ledger.clone();
    let work = async move {
        written.write("hangs");
        Ok("second".to_owned())
    };
    let said = call(&again, work).await.unwrap();
    assert_eq!((&*said.value, said.replayed), ("second", false));
    assert_eq!(ledger.count("hangs"), 2);
    let block = declare(engine, "hangs blocked", OnUnknown::Block);
    let said = call(&block, async { panic!("it was executed") }).await;
    assert!(matches!(said, Err(RunError::OutcomeUnknown)), "{said:?}");
    assert_eq!(ledger.count("hangs blocked"), 1);
}

async fn a_stopped_process_is_superseded(
    start: impl Fn(&'static str) -> Player,
    ledger: &Ledger,
    engine: &Idempotency,
) {
    let function = declare(engine, "stops", OnUnknown::Reexecute);
    let mut stopped = start("stops");
    stopped.expect("begun").await;
    signal(&stopped.child, Signal::STOP);
    let said = call(&function, async { Ok("successor".to_owned()) }).await.unwrap();
    assert_eq!((&*said.value, said.replayed), ("successor", false));
    signal(&stopped.child, Signal::CONT);
    stopped.go().await;
    stopped.expect("superseded late").await;
    stopped.ends_well().await;
    let said = call(&function, async { panic!("it was executed") }).await.unwrap();
    assert_eq!((&*said.value, said.replayed), ("successor", true));
    assert_eq!(ledger.count("stops"), 1);
}

async fn a_dropped_caller_loses_nothing(
    start: impl Fn(&'static str) -> Player,
    ledger: &Ledger,
    engine: &Idempotency,
) {
    let mut drops = start("drops");
    drops.expect("begun").await;
    drops.expect("dropped").await;
    drops.go().await;
    let function = declare(engine, "drops", OnUnknown::Block);
    let said = call(&function, async { panic!("it was executed") }).await.unwrap();
    assert_eq!((&*said.value, said.replayed), ("after all", true));
    drops.ends_well().await;
    assert_eq!(ledger.count("drops"), 1);
}

async fn an_error_and_a_panic_reach_the_other_process(
    start: impl Fn(&'static str) -> Player,
    ledger: &Ledger,
    engine: &Idempotency,
) {
    start("fails").ends_well().await;
    let fails = declare(engine, "fails", OnUnknown::Reexecute);
    let said = call(&fails, async { panic!("it was executed") }).await;
    let Err(RunError::Failed { error, replayed: true, .. }) = said else { panic!("{said:?}") };
    assert_eq!(error, Declined { by: u128::MAX });
    assert_eq!(ledger.count("fails"), 1);

    start("panics").ends_well().await;
    let again = declare(engine, "panics", OnUnknown::Reexecute);
    assert!(!call(&again, async { Ok("second".to_owned()) }).await.unwrap().replayed);
    let block = declare(engine, "panics blocked", OnUnknown::Block);
    let said = call(&block, async { panic!("it was executed") }).await;
    assert!(matches!(said, Err(RunError::OutcomeUnknown)), "{said:?}");
    assert_eq!((ledger.count("panics"), ledger.count("panics blocked")), (1, 1));
}
