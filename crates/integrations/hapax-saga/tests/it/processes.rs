//! Processes that are killed (SIGKILL) in the middle of a step and of an undo: the test's own program
//! is started again to play a role.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::future::pending;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, Store};
use hapax_file::{FileOptions, FileStore};
use hapax_postgres::{PostgresOptions, PostgresStore};
use hapax_redis::{RedisOptions, RedisStore};
use hapax_saga::{Saga, Sagas, StepContext, StepEffect, StepError, UndoError};
use tokio::time::{Instant, sleep, timeout};

use crate::shop::DAY;
use crate::world::{key, scope};

/// The variables by which a process gets its role: the location of the store, the file of calls, and
/// whether it starts the saga.
const STORE: &str = "HAPAX_SAGA_STORE";
const CALLS: &str = "HAPAX_SAGA_CALLS";
const START: &str = "HAPAX_SAGA_START";

const LEASE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);
const STEPS: [&str; 5] = ["one", "two", "three", "four", "five"];

/// The file in which the called system writes each call: its name, its key and its argument.
#[derive(Clone)]
struct Calls(PathBuf);

impl Calls {
    /// Writes a call, which then takes a while.
    async fn call(at: &StepContext<Self>, name: &str, argument: u32) {
        let mut file = OpenOptions::new().create(true).append(true).open(&at.0).unwrap();
        // A single write, so that lines of two processes do not mix.
        let line = format!("{name} {} {argument}\n", at.key().as_str());
        file.write_all(line.as_bytes()).unwrap();
        sleep(Duration::from_millis(200)).await;
    }

    /// Returns the calls of the saga with this input.
    fn lines(&self, input: u32) -> Vec<String> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        let end = format!(" {input}");
        text.lines().filter(|line| line.ends_with(&end)).map(str::to_owned).collect()
    }

    async fn until(&self, input: u32, is_there: impl Fn(&[String]) -> bool) {
        let waiting = async {
            while !is_there(&self.lines(input)) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LIMIT, waiting).await.expect("a process goes on");
    }
}

/// Returns a saga of five steps, which are undone if its input is odd.
fn five(calls: &Calls) -> Saga<u32, u32, String> {
    let mut saga = Saga::define("five", 1, calls.clone());
    let steps = STEPS.map(|name| {
        let run = move |at: StepContext<Calls>, n: u32| async move {
            Calls::call(&at, name, n).await;
            Ok::<_, StepError<String>>(n)
        };
        let undo = move |at: StepContext<Calls>, n: u32, _: StepEffect<u32>| async move {
            Calls::call(&at, &format!("undo-{name}"), n).await;
            Ok::<_, UndoError>(())
        };
        saga.keyed(name, DAY, run).settle(Duration::ZERO).undo(undo)
    });
    saga.flow(move |op, n: u32| async move {
        for step in steps {
            op.run(step, n).await?;
        }
        if n % 2 == 1 { Err("odd".to_owned()) } else { Ok(n) }
    })
    .unwrap()
}

async fn open(location: &str) -> Arc<dyn Store> {
    if location.starts_with("redis") {
        Arc::new(RedisStore::connect(RedisOptions::new(location)).await.unwrap())
    } else if location.starts_with("postgres") {
        let options: PostgresOptions = location.parse().unwrap();
        Arc::new(PostgresStore::connect(options).await.unwrap())
    } else {
        Arc::new(FileStore::open(FileOptions::new(location)).unwrap())
    }
}

/// Plays the role of a process, until it is killed. Without a role it does nothing.
#[tokio::test]
async fn role_of_a_process() {
    let variable = |name| std::env::var(name).ok();
    let (Some(location), Some(calls)) = (variable(STORE), variable(CALLS)) else { return };
    let saga = five(&Calls(calls.into()));
    let engine = Idempotency::builder(open(&location).await).namespace("").build().unwrap();
    let sagas = Sagas::builder(engine).register(&saga).lease(LEASE).build().unwrap();
    if let Some(input) = variable(START) {
        let input = input.parse().unwrap();
        sagas.start(&saga, &scope(), &key(&format!("k-{input}")), &input).await.unwrap();
    }
    sagas.run(pending(), Duration::ZERO).await;
}

/// A process of this test.
struct Process(Child);

impl Process {
    fn start(location: &str, calls: &Calls, input: Option<u32>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["processes::role_of_a_process", "--exact", "--nocapture"]);
        command.env(STORE, location).env(CALLS, &calls.0).stdout(Stdio::null());
        if let Some(input) = input {
            command.env(START, input.to_string());
        }
        Self(command.spawn().unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills a process in a step, and another one in an undo. A further process continues each saga, at the
/// latest two seconds after the lease.
pub(crate) async fn another_process_continues_in_time(location: &str, is_shared: bool) {
    let folder = tempfile::tempdir().unwrap();
    for (input, place) in [(2, "three "), (3, "undo-three ")] {
        let calls = Calls(folder.path().join(input.to_string()));
        let mut first = Process::start(location, &calls, Some(input));
        calls.until(input, |lines| !lines.is_empty()).await;
        let other = is_shared.then(|| Process::start(location, &calls, None));
        calls.until(input, |lines| lines.iter().any(|line| line.starts_with(place))).await;
        first.kill();
        let (killed, before) = (Instant::now(), calls.lines(input).len());
        // A file belongs to one process at a time.
        let _other = other.unwrap_or_else(|| Process::start(location, &calls, None));
        calls.until(input, |lines| lines.len() > before).await;
        assert!(killed.elapsed() <= LEASE + Duration::from_secs(2), "{:?}", killed.elapsed());
        let last = if input % 2 == 1 { "undo-one " } else { "five " };
        calls.until(input, |lines| lines.iter().any(|line| line.starts_with(last))).await;
        check(&calls, input);
    }
}

/// The system saw one key and one argument for each step and each undo.
fn check(calls: &Calls, input: u32) {
    let mut seen: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in calls.lines(input) {
        let (name, call) = line.split_once(' ').unwrap();
        seen.entry(name.to_owned()).or_default().insert(call.to_owned());
    }
    let mut expected: BTreeSet<String> = STEPS.map(str::to_owned).into();
    if input % 2 == 1 {
        expected.extend(STEPS.map(|name| format!("undo-{name}")));
    }
    assert_eq!(seen.keys().cloned().collect::<BTreeSet<_>>(), expected);
    assert!(seen.values().all(|calls| calls.len() == 1), "{seen:#?}");
}

fn location(file: &Path) -> &str {
    file.to_str().unwrap()
}

#[tokio::test]
async fn a_killed_process_with_a_file_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    another_process_continues_in_time(location(&folder.path().join("sagas.db")), false).await;
}
