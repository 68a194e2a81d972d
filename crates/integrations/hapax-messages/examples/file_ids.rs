//! Memory of a consumer in claim mode whose ids are in a file, and the time until it goes on
//! after it was killed.
//!
//! `cargo run --release -p hapax-messages --example file_ids -- RECORDS DIRECTORY` fills a new file
//! with records as an inbox leaves them, some 0.8 GiB for each million, in an order that is quick
//! to write; runs a consumer on it; kills its process, and starts it again.
#![allow(clippy::expect_used, clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::{Draft, Stamp, Swap};
use hapax_core::{
    Entropy as _, Fingerprint, FingerprintScheme, Idempotency, LeaseId, Notes, OnUnknown,
    OperationId, Outcome, Record, RecordState, Store as _, SystemEntropy, Terms, WriteId,
};
use hapax_file::{FileOptions, FileStore};
use hapax_messages::{Consumer, ConsumerLimits, Inbox, Message, MessageExecution, MessageFailure};
use hapax_testkit::messages::{MemoryBroker, MemoryDeadLetters};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

const RETENTION: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Swaps in progress while the file is filled: enough for the largest commits.
const FILLERS: usize = 2048;

/// Duration of the consumer before and after the kill.
const RUN: Duration = Duration::from_secs(10);

/// Returns the record of a handled message, with an id in the order of `number`.
fn record(number: u64, step: u64) -> Swap {
    let mut id = [0; 32];
    SystemEntropy.fill(&mut id).unwrap();
    id[..8].copy_from_slice(&(number * step).to_be_bytes());
    let lease_id = LeaseId::fresh(&SystemEntropy).unwrap();
    let (lease, on_unknown) = (Duration::from_secs(30), OnUnknown::Reexecute);
    let record = Record {
        scheme: FingerprintScheme::new("message/1").unwrap(),
        fingerprint: Fingerprint::from_bytes(id),
        lease_id,
        generation: lease_id,
        attempt: 1,
        terms: Terms { lease, retention: RETENTION, on_unknown },
        checkpoint: None,
        notes: Notes::default(),
        extensions: hapax_core::Extensions::default(),
        state: RecordState::Done(Outcome::new("message/1", "handled")),
    };
    let draft =
        Draft { record, stamp: Stamp::NextFence, lease: Duration::ZERO, keep: Some(RETENTION) };
    let write_id = WriteId::fresh(&SystemEntropy).unwrap();
    Swap { id: OperationId::from_bytes(id), expected: None, write_id, draft }
}

async fn fill(store: &Arc<FileStore>, records: u64) {
    let next = Arc::new(AtomicU64::new(0));
    let mut fillers = JoinSet::new();
    for _ in 0..FILLERS {
        let (store, next) = (Arc::clone(store), Arc::clone(&next));
        fillers.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= records {
                    return;
                }
                store.swap(record(number, u64::MAX / records)).await.unwrap();
            }
        });
    }
    fillers.join_all().await;
}

/// Starts a consumer, whose messages come for ever. Returns its broker.
fn consume(store: Arc<FileStore>) -> MemoryBroker {
    let engine = Idempotency::builder(store).build().unwrap();
    let inbox = Inbox::builder("ids", engine)
        .reexecute()
        .dead_letters(Arc::new(MemoryDeadLetters::default()))
        .build()
        .unwrap();
    let broker = MemoryBroker::default();
    let handler = |_: MessageExecution| std::future::ready(Ok::<_, MessageFailure>(()));
    let source = Arc::new(broker.clone());
    let consumer = Consumer::new(inbox, source, handler, ConsumerLimits::default()).unwrap();
    tokio::spawn(consumer.run(std::future::pending()));
    let sending = broker.clone();
    tokio::spawn(async move {
        loop {
            // Few at a time: they count as memory of this process.
            while sending.backlog() < 1_000 {
                let mut id = [0; 16];
                SystemEntropy.fill(&mut id).unwrap();
                let id = format!("{:032x}", u128::from_be_bytes(id));
                let message = Message::new("memory://ids", vec![b'x'; 200]);
                sending.send(message.with_header("message-id", id));
            }
            sleep(Duration::from_millis(1)).await;
        }
    });
    broker
}

/// Opens the file, and runs a consumer until the process is killed.
async fn child(directory: &Path, records: Option<u64>) {
    let begun = Instant::now();
    let store = FileStore::open(FileOptions::new(directory.join("records"))).unwrap();
    let store = Arc::new(store);
    let opened = begun.elapsed();
    if let Some(records) = records {
        fill(&store, records).await;
        println!("filled in {:.0} s", begun.elapsed().as_secs_f64());
    }
    let begun = Instant::now();
    let broker = consume(store);
    while broker.acknowledgements() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    println!(
        "opened in {:.3} s, first message after {:.3} s more",
        opened.as_secs_f64(),
        begun.elapsed().as_secs_f64()
    );
    let before = broker.acknowledgements();
    sleep(RUN).await;
    let rate = (broker.acknowledgements() - before) as f64 / RUN.as_secs_f64();
    println!("{rate:.0} messages/s");
    std::future::pending().await
}

/// Starts a child, prints its lines up to the rate, and kills it.
fn run_and_kill(arguments: &[&str]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let mut child: Child = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        println!("{line}");
        if line.ends_with("messages/s") {
            break;
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    for line in status.lines().filter(|it| it.starts_with("VmHWM") || it.starts_with("VmRSS")) {
        println!("{line}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let block_on = |future| tokio::runtime::Runtime::new().unwrap().block_on(future);
    match arguments[..] {
        ["fill", records, directory] => {
            block_on(child(Path::new(directory), Some(records.parse().unwrap())));
        }
        ["open", directory] => block_on(child(Path::new(directory), None)),
        [records, directory] => {
            std::fs::create_dir(directory).unwrap();
            run_and_kill(&["fill", records, directory]);
            let size = std::fs::metadata(Path::new(directory).join("records")).unwrap().len();
            println!("killed: the file has {} MiB", size >> 20);
            run_and_kill(&["open", directory]);
        }
        _ => println!("expected RECORDS DIRECTORY"),
    }
}
