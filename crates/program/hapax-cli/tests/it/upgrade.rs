//! Stores, a journal and tables of messages of an earlier release (record version 2, without extensions,
//! namespaces and settle times), which `upgrade/make/make.py` made: this release goes on with them.

mod calls;
mod consume;
mod messages;
mod order;
mod records;
mod sagas;

use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hapax_testkit::servers::{PostgresServer, RedisServer};

/// The secret of every fixture.
const SECRET: &str = "1111111111111111111111111111111111111111111111111111111111111111\n";

/// Executes a command whose words are in hexadecimal digits.
const COMMAND: &str = "local words = {} \
    for at, word in ipairs(ARGV) do \
      words[at] = word:gsub('%x%x', function(it) return string.char(tonumber(it, 16)) end) \
    end \
    redis.call(unpack(words)) return 'done'";

fn fixture(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/upgrade/fixtures");
    std::fs::read_to_string(Path::new(folder).join(name)).unwrap()
}

/// A copy of the store of a fixture, with its secret and the line about its identity.
struct Upgraded {
    folder: tempfile::TempDir,
    store: String,
    is_file: bool,
}

impl Upgraded {
    fn file() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_parts("hapax.db.parts", &folder.path().join("hapax.db"));
        let store = crate::world::store(folder.path());
        Self::of(folder, store, "file.stores")
    }

    async fn redis(server: &RedisServer) -> Self {
        for line in fixture("redis.hex").lines() {
            let words: Vec<_> = ["EVAL", COMMAND, "0"].into_iter().chain(line.split(' ')).collect();
            let reply = server.command_of(&words).await;
            assert!(reply.ends_with("done"), "{line}: {reply}");
        }
        Self::of(tempfile::tempdir().unwrap(), server.url(), "redis.stores")
    }

    async fn postgres(server: &PostgresServer) -> Self {
        server.sql("postgres", &fixture("postgres.sql")).await;
        Self::of(tempfile::tempdir().unwrap(), server.url("postgres"), "postgres.stores")
    }

    fn of(folder: tempfile::TempDir, store: String, identity: &str) -> Self {
        let secret = folder.path().join("secret");
        write_secret(&secret);
        let identity = fixture(identity).replace("STORE", &store);
        std::fs::write(folder.path().join("secret.stores"), identity).unwrap();
        let is_file = store.starts_with("file:");
        Self { folder, store, is_file }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Options by which a command finds the store.
    fn at(&self) -> Vec<String> {
        let words = ["--store", &self.store, "--secret-file", &self.path("secret")];
        words.map(str::to_owned).into()
    }
}

/// Writes the file of a fixture: its length, then offset and bytes of each part that is not zero.
fn write_parts(name: &str, path: &Path) {
    let text = fixture(name);
    let (length, parts) = text.split_once('\n').unwrap();
    let mut file = std::fs::File::create(path).unwrap();
    file.set_len(length.parse().unwrap()).unwrap();
    for part in parts.lines() {
        let (at, bytes) = part.split_once(' ').unwrap();
        file.seek(SeekFrom::Start(at.parse().unwrap())).unwrap();
        file.write_all(&BASE64_STANDARD.decode(bytes).unwrap()).unwrap();
    }
}

fn write_secret(path: &Path) {
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.create_new(true).write(true).mode(0o600).open(path).unwrap();
    file.write_all(SECRET.as_bytes()).unwrap();
}

/// A journal of a fixture.
fn journal(folder: &Path) -> PathBuf {
    let path = folder.join("calls.db");
    write_parts("calls.db.parts", &path);
    write_secret(&folder.join("calls.db.secret"));
    path
}

fn words<'a>(words: &[&'a str], more: &'a [String]) -> Vec<&'a str> {
    words.iter().copied().chain(more.iter().map(String::as_str)).collect()
}
