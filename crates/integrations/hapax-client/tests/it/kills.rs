//! The example, in processes that are killed (SIGKILL) before and after each write to the journal.

use std::path::Path;
use std::sync::Arc;

use hapax_client::{Client, Journal};
use hapax_file::{FileOptions, FileStore, OpenError};

use crate::bank::Bank;
use crate::examples::invoices::pay_all;
use crate::hooked_store::{HookedStore, Moment};
use crate::roles::{self, Role};
use crate::world::LONG;

const TEST: &str = "kills::a_job_that_is_killed_at_every_write_pays_each_invoice_once";
const INVOICES: u32 = 2;

/// Plays the role: pays the invoices, and stops at a write.
async fn job(argument: &str) {
    let words: Vec<&str> = argument.split(' ').collect();
    let [journal, origin, number, moment] = words[..] else { panic!("{argument}") };
    let moment = if moment == "before" { Moment::Before } else { Moment::After };
    let at: (u32, Moment) = (number.parse().unwrap(), moment);
    let inner = loop {
        match FileStore::open(FileOptions::new(journal)) {
            // The process that looked at it has not closed it yet.
            Err(OpenError::InUse { .. }) => tokio::task::yield_now().await,
            opened => break opened.unwrap(),
        }
    };
    // The process is killed where it stops. The runtime has one thread, so that nothing else continues.
    let store = Arc::new(HookedStore::new(inner, move |number, moment| {
        if at == (number, moment) {
            roles::say("stopped");
            loop {
                std::thread::park();
            }
        }
    }));
    let journal = Journal::over(Arc::clone(&store)).unwrap();
    for line in pay_all(journal, origin, "one".to_owned(), 1..=INVOICES).await.unwrap() {
        roles::say(&line);
    }
    roles::say(&format!("{} writes", store.writes()));
}

/// Starts the job; it stops at this write.
fn start(journal: &Path, bank: &Bank, number: u32, moment: Moment) -> Role {
    let moment = if moment == Moment::Before { "before" } else { "after" };
    let argument = format!("{} {} {number} {moment}", journal.display(), bank.origin());
    Role::start(TEST, &argument)
}

/// Runs the job to its end; returns the number of its writes.
fn run(journal: &Path, bank: &Bank) -> u32 {
    let mut said = start(journal, bank, 0, Moment::Before).ends_well();
    let writes = said.pop().unwrap();
    let paid = (1..=INVOICES).map(|number| format!("invoice {number}: 201 Created"));
    assert_eq!(said, paid.collect::<Vec<_>>());
    writes.strip_suffix(" writes").unwrap().parse().unwrap()
}

/// Returns the number of invoices whose answers the journal has.
async fn finished(path: &Path) -> usize {
    let journal = Journal::file_within(path, LONG).await.unwrap();
    let client = Client::open(journal).build().await.unwrap();
    let finished = client.finished().await.unwrap().len();
    assert!(client.close(LONG).await);
    finished
}

#[tokio::test]
async fn a_job_that_is_killed_at_every_write_pays_each_invoice_once() {
    if let Some(argument) = roles::argument() {
        return job(&argument).await;
    }
    // The server answers while this test waits for its processes.
    let bank = serve;
    let folder = tempfile::tempdir().unwrap();
    let writes = run(&folder.path().join("unharmed"), &bank());
    // Claim, entry, try, answer, and the removal of the entry.
    assert!(writes >= 5 * INVOICES, "{writes}");
    let (mut points, mut sent_again, mut kept) = (0, 0, 0);
    for number in 1..=writes {
        for moment in [Moment::Before, Moment::After] {
            let (bank, path) = (bank(), folder.path().join(format!("{number}-{moment:?}")));
            let mut killed = start(&path, &bank, number, moment);
            assert_eq!(killed.next().as_deref(), Some("stopped"), "{moment:?} write {number}");
            killed.kill();
            let (before, finished) = (bank.arrived().len(), finished(&path).await);
            run(&path, &bank);
            assert_eq!(bank.effects(), [1; INVOICES as usize], "{moment:?} write {number}");
            // An answer that is kept needs no request, whether or not a caller got it.
            let requests = bank.arrived().len() - before;
            assert_eq!(requests, INVOICES as usize - finished, "{moment:?} write {number}");
            points += 1;
            sent_again += usize::from(before > finished);
            kept += usize::from(finished == INVOICES as usize);
        }
    }
    assert_eq!(points, 2 * writes);
    assert!(sent_again >= 2 && kept >= 1, "{sent_again} of {points} sent again, {kept} kept");
}

/// Starts a server on a thread of its own.
fn serve() -> Bank {
    let (started, bank) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            started.send(Bank::start().await).unwrap();
            std::future::pending::<()>().await;
        });
    });
    bank.recv().unwrap()
}
