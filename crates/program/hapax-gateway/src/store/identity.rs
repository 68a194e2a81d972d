//! Stored identity of the store, by which an emptied or replaced one is detected.
//!
//! Stores on servers compare the identity in each claim. A file cannot be emptied while it is open,
//! so its identity is compared when it is opened. The identities are in a small file next to the
//! secret, with a line for each store: its URL, a name that is derived from the secret and does not
//! reveal it, and the identity. Another secret names other records, so it has another line. If that
//! folder is not writable, as with mounted credentials, the file is in the working directory.
//! Without a secret there is no file, and the identity of a server is compared with that at the
//! gateway's connection.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use hapax_core::{Key, Namespace, OperationId, Scope, Secret};

use super::StoreUrl;

/// Returned in place of the identity of a store that was used with another secret.
const OTHER_SECRET: &str = "another secret";

/// The line of one store.
#[derive(Clone, Debug)]
pub(super) struct IdentityFile {
    /// The preferred path of the file, and the fallback.
    paths: [PathBuf; 2],
    store: String,
    secret: String,
}

impl IdentityFile {
    /// Returns the line of `store`; `None` for a store in memory, whose records do not outlive the
    /// process, and for a server without a secret.
    pub(super) fn of(
        store: &StoreUrl,
        secret_file: Option<&Path>,
        secret: Option<&Secret>,
    ) -> Option<Self> {
        let path = match (secret_file, store) {
            (_, StoreUrl::Memory) => return None,
            (Some(path), _) => with_suffix(path, ".stores"),
            (None, StoreUrl::File(path)) => with_suffix(path, ".secret.stores"),
            (None, _) => return None,
        };
        let named = store.absolute();
        let paths = [path, "hapax.stores".into()];
        Some(Self { paths, store: named.replace(['\t', '\n'], " "), secret: name(secret) })
    }

    /// Returns the identity; `None` if none is stored. For a store that was used with another
    /// secret it returns an identity that no store has: if the store opens with this secret, it is
    /// another store.
    pub(super) fn read(&self) -> Option<String> {
        let read = self.paths.iter().find_map(|path| self.read_in(path));
        read.or_else(|| self.paths.iter().find_map(|path| self.other_secret_in(path)))
    }

    fn other_secret_in(&self, path: &Path) -> Option<String> {
        let text = std::fs::read_to_string(path).ok()?;
        let store = format!("{}\t", self.store);
        text.lines().any(|line| line.starts_with(&store)).then(|| OTHER_SECRET.to_owned())
    }

    fn read_in(&self, path: &Path) -> Option<String> {
        let text = std::fs::read_to_string(path).ok()?;
        let found = text.lines().find_map(|line| self.identity(line).map(str::to_owned));
        found.filter(|identity| !identity.is_empty())
    }

    fn identity<'a>(&self, line: &'a str) -> Option<&'a str> {
        line.strip_prefix(&self.prefix())
    }

    fn prefix(&self) -> String {
        format!("{}\t{}\t", self.store, self.secret)
    }

    /// Stores `identity` in place of the previous one.
    pub(super) fn write(&self, identity: &str) {
        if self.read().as_deref() == Some(identity) {
            return;
        }
        let [path, other] = &self.paths;
        let written = self.write_in(path, identity);
        if let Err(error) = written.or_else(|_| self.write_in(other, identity)) {
            tracing::warn!(
                %error,
                path = %path.display(),
                other = %other.display(),
                "the identity of the store can be written in neither place: if the store is emptied while no \
                 gateway runs, that is not noticed"
            );
        }
    }

    fn write_in(&self, path: &Path, identity: &str) -> io::Result<()> {
        let before = match std::fs::read_to_string(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            read => read.unwrap_or_default(),
        };
        let others = before.lines().filter(|line| self.identity(line).is_none());
        let mut text = others.fold(String::new(), |text, line| text + line + "\n");
        text.push_str(&format!("{}{identity}\n", self.prefix()));
        // A crash leaves either the old or the new file. Gateways that share a secret may write at
        // once, also in one process: each uses a separate temporary name, and the last one counts.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let new = with_suffix(path, &format!(".{}-{number}", std::process::id()));
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all())?;
        std::fs::rename(&new, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        // Some systems cannot open folders.
        File::open(folder.unwrap_or(Path::new("."))).and_then(|folder| folder.sync_all()).or(Ok(()))
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns a name that is derived from the secret and does not reveal it.
fn name(secret: Option<&Secret>) -> String {
    let scope = Scope::of([("hapax-gateway", "identity of stores")]);
    let named = |secret| {
        Key::new("-")
            .ok()
            .map(|key| OperationId::derive(Some(secret), &Namespace::default(), &scope, &key))
    };
    let name = secret.and_then(named).map(|name| name.to_string());
    name.unwrap_or_else(|| "none".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_store_and_secret_has_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let secret_file = folder.path().join("hapax.secret");
        let of = |store: &str, secret: Option<u8>| {
            let secret = secret.map(|byte| Secret::new([byte; 32]));
            let store: StoreUrl = store.parse().unwrap();
            IdentityFile::of(&store, Some(&secret_file), secret.as_ref())
        };
        assert!(of("memory:", None).is_none());
        let lines = [
            of("postgres://u:p@db/x", None).unwrap(),
            of("postgres://u:p@db/x", Some(1)).unwrap(),
            of("redis://cache", Some(1)).unwrap(),
            of("file:./a.db", Some(1)).unwrap(),
        ];
        for round in 0..2 {
            for (number, line) in lines.iter().enumerate() {
                line.write(&format!("{round}-{number}"));
            }
            for (number, line) in lines.iter().enumerate() {
                assert_eq!(line.read(), Some(format!("{round}-{number}")));
            }
        }
        assert_eq!(of("redis://cache", Some(2)).unwrap().read().as_deref(), Some(OTHER_SECRET));
        assert_eq!(of("redis://cache/2", Some(1)).unwrap().read(), None);
        let text = std::fs::read_to_string(with_suffix(&secret_file, ".stores")).unwrap();
        assert_eq!(text.lines().count(), 4);
        assert!(!text.contains("u:p"), "{text}");
    }
}
