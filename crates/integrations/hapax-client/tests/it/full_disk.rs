//! A journal on a disk that is full: a small file system in memory, which a process of its own mounts
//! in its own name space.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hapax_client::{Client, Journal, SendError, Server};

use crate::bank::{Act, Bank, answer};
use crate::cutter::Cutter;
use crate::roles::{self, Role};
use crate::world::{LONG, process};

/// Size of the disk. The store wants 64 MiB to be free, and reserves 16 MiB.
const SIZE: &str = "96m";

/// A disk of this process.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Returns the disk of this process; `None` after a further process has run this test on one.
    fn of(test: &str) -> Option<Self> {
        if let Some(path) = roles::argument() {
            return Some(Self(path.into()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let mount = format!(
            "mount -t tmpfs -o size={SIZE},mode=700 none {path} && exec {} \"$@\"",
            roles::program().display()
        );
        // It needs no rights: in its own user name space the process may mount.
        let words = ["--user", "--map-root-user", "--mount", "sh", "-ec", &mount, "sh"];
        let said = Role::of(roles::command("unshare", &words, test, path)).ends_well();
        assert_eq!(said, ["the disk was full"]);
        None
    }

    fn journal(&self) -> PathBuf {
        self.0.join("journal")
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Fills the disk to its last byte.
    fn fill(&self) {
        let mut filler = File::create(self.filler()).unwrap();
        let mut length = 1 << 20;
        while length > 0 {
            match filler.write(&vec![b'x'; length]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => length /= 2,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Leaves fewer free bytes than the store wants.
    fn fill_most(&self) {
        self.fill();
        OpenOptions::new().write(true).open(self.filler()).unwrap().set_len(64 << 20).unwrap();
    }

    fn free(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }
}

async fn open(journal: &Path, origin: &str) -> Client {
    let journal = Journal::file_within(journal, LONG).await.unwrap();
    Client::open(journal).server(origin, Server::hapax()).build().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_sent_on_a_full_disk_until_it_has_space() {
    let test = "full_disk::nothing_is_sent_on_a_full_disk_until_it_has_space";
    let Some(disk) = SmallDisk::of(test) else { return };
    let bank = Bank::start().await;
    let client = open(&disk.journal(), &bank.origin()).await;
    for fill in [SmallDisk::fill_most, SmallDisk::fill] {
        fill(&disk);
        let end = client.post(bank.url("/")).operation("n").send().await;
        let Err(SendError::Journal(error)) = end else { panic!("{end:?}") };
        // The causes are sources.
        let causes = std::iter::successors(Some(&error as &dyn Error), |it| (*it).source());
        let text = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        assert!(text.contains("nothing was written"), "{text}");
        assert!(text.contains("free disk space"), "{text}");
        assert_eq!(bank.connections(), 0);
    }
    disk.free();
    let sent = loop {
        // The store looks at its disk from time to time.
        match client.post(bank.url("/")).operation("n").send().await {
            Err(SendError::Journal(_)) => tokio::task::yield_now().await,
            end => break end.unwrap(),
        }
    };
    assert_eq!((sent.response.status.as_u16(), bank.effects()), (201, vec![1]));
    roles::say("the disk was full");
}

/// Sends an operation whose large answer finds the disk full, and not even a reserve.
async fn responded_on_a_full_disk(disk: &SmallDisk, bank: &Bank, client: &Client, held: &Cutter) {
    held.hold(true);
    let answer = answer(201, &[], &"x".repeat(LARGE));
    bank.act([Act::Execute(answer)]);
    let post = client.post(format!("{}/", held.origin())).operation("n");
    let sending = tokio::spawn(post.wait(LONG).send());
    bank.wait_for(1).await;
    // What happens if other operations have used it up.
    std::fs::remove_file(disk.0.join("journal.reserve")).unwrap();
    disk.fill();
    held.hold(false);
    // The call has no answer before that is durable.
    match tokio::time::timeout(Duration::from_secs(2), sending).await {
        Err(_) | Ok(Ok(Err(SendError::Journal(_)))) => {}
        end => panic!("{end:?}"),
    }
    if let Ok(finished) = client.finished().await {
        assert!(finished.is_empty(), "{finished:?}");
    }
}

const LARGE: usize = 900 << 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_finds_the_disk_full_is_stored_once_it_has_space() {
    let test = "full_disk::a_response_that_finds_the_disk_full_is_stored_once_it_has_space";
    let Some(disk) = SmallDisk::of(test) else { return };
    let bank = Bank::start().await;
    let held = Cutter::start(bank.address, None, false).await;
    let client = open(&disk.journal(), &held.origin()).await;
    responded_on_a_full_disk(&disk, &bank, &client, &held).await;
    disk.free();
    let post = || client.post(format!("{}/", held.origin())).operation("n").wait(LONG);
    let sent = loop {
        match post().send().await {
            Err(SendError::Journal(_)) => tokio::task::yield_now().await,
            end => break end.unwrap(),
        }
    };
    assert_eq!((sent.response.status.as_u16(), sent.response.body.len()), (201, LARGE));
    assert_eq!((bank.arrived().len(), bank.effects()), (1, vec![1]));
    roles::say("the disk was full");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_dies_on_a_full_disk_loses_no_operation() {
    let test = "full_disk::a_process_that_dies_on_a_full_disk_loses_no_operation";
    let Some(disk) = SmallDisk::of(test) else { return };
    let bank = Bank::start().await;
    let held = Cutter::start(bank.address, None, false).await;
    process(async || {
        let client = open(&disk.journal(), &held.origin()).await;
        responded_on_a_full_disk(&disk, &bank, &client, &held).await;
    });
    disk.free();
    let client = open(&disk.journal(), &held.origin()).await;
    let pending = client.pending().await.unwrap();
    assert!(pending.len() == 1 && pending[0].may_have_happened, "{pending:?}");
    let sent = client.post(format!("{}/", held.origin())).operation("n").send().await.unwrap();
    assert_eq!((sent.response.status.as_u16(), sent.replayed), (201, true));
    assert_eq!((bank.arrived().len(), bank.effects()), (2, vec![1]));
    roles::say("the disk was full");
}
