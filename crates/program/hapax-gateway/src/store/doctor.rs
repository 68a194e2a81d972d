//! Diagnosis of a store: settings that would silently break a guarantee.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::Store;
use hapax_core::diagnose::{Finding, Severity};
use hapax_core::driver::StoreDriverErrorKind;
use hapax_file::{FileStore, OpenError};
use hapax_operators::{AdminToken, StoreRegister, StoreUser, is_open_to_others};

use super::url::{CacheUrl, StoreUrl};
use super::{OpenStore, StoreOpenError, StoreOpener, server};

/// Result of one check of a store.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct StoreFinding {
    /// Severity of the finding.
    pub severity: Severity,
    /// Subject, in a word.
    pub subject: String,
    /// State that was found.
    pub found: String,
    /// Fix; empty if nothing must be done.
    pub fix: String,
    /// Operators' address of the gateway that has the store open, and can report more.
    #[serde(skip)]
    pub gateway: Option<SocketAddr>,
}

impl From<Finding> for StoreFinding {
    fn from(finding: Finding) -> Self {
        let Finding { severity, subject, server, found, fix } = finding;
        let found = match server {
            Some(server) => format!("{found} ({server})"),
            None => found,
        };
        Self::new(severity, subject, found, fix)
    }
}

impl fmt::Display for StoreFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { severity, subject, found, fix, gateway: _ } = self;
        write!(f, "{severity:<7}  {subject}: {found}")?;
        if fix.is_empty() { Ok(()) } else { write!(f, "; {fix}") }
    }
}

impl StoreFinding {
    pub(crate) fn new(
        severity: Severity,
        subject: &str,
        found: impl Into<String>,
        fix: &str,
    ) -> Self {
        let (subject, found, fix) = (subject.into(), found.into(), fix.into());
        Self { severity, subject, found, fix, gateway: None }
    }

    /// Returns the finding of a store that is not the one that the gateway used before.
    #[must_use]
    pub fn unconfirmed() -> Self {
        Self::new(
            Severity::Broken,
            "unconfirmed store",
            "it was emptied or replaced since it was last used: operations whose records were lost would \
             execute again, so that new keys are rejected under block and reconcile",
            "restore the records, or accept the loss with `hapax store confirm`",
        )
    }

    /// Returns the finding of a gateway that has the store open and did not report whether it is
    /// confirmed.
    pub fn unchecked(error: impl fmt::Display) -> Self {
        let found = format!("the process that has it open did not report it: {error}");
        Self::new(Severity::Unknown, "unconfirmed store", found, "")
    }
}

/// Time after which a diagnosis at a start is given up.
const DIAGNOSIS: Duration = Duration::from_secs(30);

/// Free bytes below which a `file:` store rejects new keys soon, or already.
const LITTLE: u64 = 1 << 30;
const TOO_LITTLE: u64 = 64 << 20;

const MISSING: &str =
    "restore the store, mount its disk, or correct --store: until then no gateway starts";

const SALVAGE: &str = "stop the gateway, write the intact records to a new file with `hapax doctor \
                       --salvage OLD NEW`, and keep the old one";

impl StoreOpener {
    /// Logs, as a warning each, the settings of a server because of which the store does not keep its guarantee. Call
    /// it once the store is open. It uses a connection of its own.
    pub async fn warn_of_broken(&self) {
        for StoreFinding { subject, found, fix, .. } in self.broken().await {
            tracing::warn!(subject, found, fix, "the store does not keep its guarantee");
        }
    }

    /// Returns the settings of a server because of which the store does not keep its guarantee; none if the server
    /// became unreachable, which the store reports. It uses a connection of its own.
    pub async fn broken(&self) -> Vec<StoreFinding> {
        let StoreUrl::Server(url) = &self.store else { return Vec::new() };
        let Ok(driver) = self.driver(url) else { return Vec::new() };
        let options = self.options(url, self.memory, None);
        let diagnosed = tokio::time::timeout(DIAGNOSIS, driver.diagnose(options)).await;
        let findings = diagnosed.ok().and_then(Result::ok).unwrap_or_default().into_iter();
        let broken = findings.filter(|it| it.severity == Severity::Broken);
        broken.map(StoreFinding::from).collect()
    }

    /// Diagnoses the store without changing its records, on a server even if the store could not be
    /// opened.
    ///
    /// # Errors
    /// [`StoreOpenError`] if the store cannot be checked.
    pub async fn diagnose(&self) -> Result<Vec<StoreFinding>, StoreOpenError> {
        let mut findings = self.secret();
        findings.extend(self.admin_token());
        match &self.store {
            StoreUrl::Memory => findings.push(StoreFinding::new(
                Severity::Risk,
                "memory",
                "records are lost when the process ends",
                "use a file or Postgres for records that matter",
            )),
            StoreUrl::File(path) => findings.extend(self.file_findings(path).await?),
            StoreUrl::Server(url) => {
                let found = self.driver(url)?.diagnose(self.options(url, self.memory, None)).await;
                let found = found.map_err(|error| server(url, error))?;
                findings.extend(found.into_iter().map(StoreFinding::from));
            }
        }
        if let StoreUrl::Server(url) = &self.store {
            let opens = self.opens().await;
            if self.secret_file.is_none() && opens.iter().any(|it| it.subject == "secret") {
                // There is a secret: advice to create another one would be wrong.
                findings.retain(|finding| finding.subject != "secret");
            }
            if url.is_unencrypted() {
                findings.push(StoreFinding::new(
                    Severity::Risk,
                    "transport",
                    "passwords and unsealed data can be read on the network",
                    "use rediss://, or sslmode=require, unless the network is trusted",
                ));
            }
            findings.extend(opens);
        }
        if let Some(CacheUrl::Redis(url)) = &self.cache {
            let up = hapax_redis::RedisCache::connect(self.redis(url, self.memory)).await;
            findings.push(match up {
                Ok(_) if self.secret_file.is_none() && !matches!(self.store, StoreUrl::File(_)) => {
                    StoreFinding::new(
                        Severity::Broken,
                        "cache",
                        "there is no secret: other writers to the cache could forge responses",
                        "name one by --secret-file; without it no gateway starts with a cache",
                    )
                }
                Ok(_) => StoreFinding::new(Severity::Fine, "cache", "it answers", ""),
                Err(error) => StoreFinding::new(
                    Severity::Risk,
                    "cache",
                    error.to_string(),
                    "without it replays are slower, and nothing else",
                ),
            });
        }
        Ok(findings)
    }

    fn secret(&self) -> Vec<StoreFinding> {
        let path = match (&self.secret_file, &self.store) {
            (Some(path), _) => path.clone(),
            (None, StoreUrl::File(store)) => {
                let beside = self.store.secret_file().unwrap_or_default();
                if !store.exists() && !beside.exists() {
                    let found = "there is none yet; it is made beside the store";
                    return vec![StoreFinding::new(Severity::Fine, "secret", found, "")];
                }
                beside
            }
            (None, _) => {
                return vec![StoreFinding::new(
                    Severity::Risk,
                    "secret",
                    "there is none: a reader of the store can read responses and guess keys",
                    "before the store is first used make one (umask 077; openssl rand -hex 32) and \
                     name it by --secret-file everywhere; later it is rejected, except in a ring with `name none`, \
                     where it seals responses",
                )];
            }
        };
        let mut findings = vec![match self.read_ring(&path) {
            Ok(ring) if ring.naming().is_some() => {
                StoreFinding::new(Severity::Fine, "secret", "it is readable", "")
            }
            Ok(ring) if ring.seals() => StoreFinding::new(
                Severity::Risk,
                "secret",
                "it seals responses and names no records: a reader of the store can guess keys",
                "only a new store can have a secret that names records",
            ),
            Ok(_) => StoreFinding::new(
                Severity::Risk,
                "secret",
                "it opens records and seals none: a reader of the store can read responses and guess keys",
                "once every process has this ring, make the secret `seal` in place of `open` everywhere",
            ),
            Err(error) => StoreFinding::new(
                Severity::Broken,
                "secret",
                error.to_string(),
                "put the secret of this store there",
            ),
        }];
        if is_open_to_others(&path) {
            let found = format!("users other than its owner can read or write {}", path.display());
            findings.push(StoreFinding::new(Severity::Risk, "secret", found, "chmod 600 it"));
        }
        findings
    }

    /// Returns whether a gateway used the store before, with any secret.
    fn is_remembered(&self) -> bool {
        self.known(None).is_some()
    }

    /// Returns the finding about the admin token; `None` if there is no token file.
    fn admin_token(&self) -> Option<StoreFinding> {
        let path = self.token_file.clone().unwrap_or_else(|| self.store.token_file());
        if !path.exists() {
            return None;
        }
        let finding = |severity, found, fix| StoreFinding::new(severity, "admin token", found, fix);
        Some(match AdminToken::read(&path) {
            Err(error) => finding(
                Severity::Broken,
                format!("{}: {error}", path.display()),
                "write a token of 16 or more characters there, or remove the file: the gateway makes one",
            ),
            Ok(_) if is_open_to_others(&path) => finding(
                Severity::Risk,
                format!("users other than its owner can read or write {}", path.display()),
                "chmod 600 it: with this token anyone can release and resolve keys",
            ),
            Ok(_) => finding(Severity::Fine, "it is readable".to_owned(), ""),
        })
    }

    /// Returns the findings that keep a gateway from starting on a server.
    async fn opens(&self) -> Vec<StoreFinding> {
        let opened = (Self { cache: None, make: false, ..self.clone() }).open().await;
        let error = match opened {
            Ok(opened) => {
                let mut findings = vec![unreadable(&opened).await];
                findings.extend(opened.is_replaced().then(StoreFinding::unconfirmed));
                findings.extend(namespaces(&opened, self.timeout).await);
                opened.close().await;
                return findings;
            }
            Err(error) => error,
        };
        let broken = |subject, found: String, fix| {
            vec![StoreFinding::new(Severity::Broken, subject, found, fix)]
        };
        if let StoreOpenError::Missing { .. } = &error {
            return broken("store", error.to_string(), MISSING);
        }
        let source = match &error {
            // The file of the secret has a finding of its own.
            StoreOpenError::Secret { path, .. } if self.secret_file.as_ref() == Some(path) => {
                return Vec::new();
            }
            StoreOpenError::Secret { .. } => {
                let found = match self.secret_file {
                    Some(_) => {
                        "the store is used with another secret, or with none: no gateway starts with \
                         this one"
                    }
                    None => "the store is used with a secret: no gateway starts without it",
                };
                return broken(
                    "secret",
                    found.into(),
                    "set --secret-file to the secret of the other processes; if they use none, leave it out, or begin \
                     to seal with a ring with `name none`",
                );
            }
            StoreOpenError::Server { source, .. } => source,
            _ => return Vec::new(),
        };
        match source.kind {
            // Other findings cover it.
            StoreDriverErrorKind::Unfit | StoreDriverErrorKind::Standby => Vec::new(),
            _ => broken("start", error.to_string(), "fix this before a gateway starts"),
        }
    }

    async fn file_findings(&self, path: &Path) -> Result<Vec<StoreFinding>, StoreOpenError> {
        let mut findings = vec![disk(path)];
        if !path.exists() {
            if let Ok(Some(holder)) = FileStore::lock_owner(path) {
                findings.push(StoreFinding::new(
                    Severity::Broken,
                    "file",
                    match holder.pid {
                        Some(pid) => format!("it was removed while process {pid} has it open"),
                        None => "it was removed while a process has it open".to_owned(),
                    },
                    "its records end with that process: copy them with `hapax backup PATH` before you \
                     stop it",
                ));
                return Ok(findings);
            }
            if self.is_remembered() {
                findings.push(StoreFinding::new(
                    Severity::Broken,
                    "file",
                    "the file is missing, and a gateway used it before",
                    "restore the file before a gateway starts. Otherwise the gateway creates an empty \
                     file and rejects new keys under block and reconcile until `hapax store confirm`. A \
                     copy of an earlier time lacks later records: use `hapax restore` for it",
                ));
                return Ok(findings);
            }
            if self.must_exist {
                let error = self.missing().to_string();
                findings.push(StoreFinding::new(Severity::Broken, "file", error, MISSING));
                return Ok(findings);
            }
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            findings.push(writable(folder.unwrap_or(Path::new("."))));
            return Ok(findings);
        }
        // Before it is opened: after a crash, opening reads the complete file and reports fewer
        // details.
        let examined = path.to_owned();
        let examined = tokio::task::spawn_blocking(move || hapax_file::examine(&examined));
        match examined.await.map_err(|_| StoreOpenError::Shutdown)? {
            Ok(found) if found.damaged + found.lost() + found.lost_entries() == 0 => {
                findings.push(StoreFinding::new(
                    Severity::Fine,
                    "records",
                    format!("all {} can be read", found.expected),
                    "",
                ))
            }
            Ok(found) => findings.push(StoreFinding::new(
                Severity::Broken,
                "records",
                format!(
                    "{} of {} can be read, {} blocks of the file are damaged; requests whose keys \
                     may be there are rejected",
                    found.read, found.expected, found.damaged
                ),
                SALVAGE,
            )),
            Err(error @ OpenError::Damaged(_)) => findings.push(StoreFinding::new(
                Severity::Broken,
                "records",
                error.to_string(),
                "restore a backup, or begin with an empty store: then the records of this file are lost",
            )),
            // Opening returns the same error.
            Err(_) => {}
        }
        // The cache is diagnosed separately.
        match (Self { cache: None, make: false, ..self.clone() }).open().await {
            Ok(opened) => {
                findings.push(StoreFinding::new(Severity::Fine, "file", "it opens", ""));
                findings.push(unreadable(&opened).await);
                findings.extend(opened.is_replaced().then(StoreFinding::unconfirmed));
                opened.close().await;
            }
            // The process that has it open could report more.
            Err(StoreOpenError::File { source: OpenError::InUse { pid, admin, .. }, .. }) => {
                let who = pid.map_or("another process".into(), |pid| format!("process {pid}"));
                let found = format!("it is open in {who}");
                let finding = StoreFinding::new(Severity::Fine, "file", found, "");
                findings.push(StoreFinding { gateway: admin, ..finding });
                if admin.is_none() {
                    findings.push(StoreFinding::unchecked(
                        "it has no operators' address: read its log",
                    ));
                }
            }
            Err(error) => findings.push(StoreFinding::new(
                Severity::Broken,
                "file",
                error.to_string(),
                "no gateway can start on this file: correct the error",
            )),
        }
        Ok(findings)
    }
}

/// Number of sampled records. Ids are hashes, so the first ones are a fair sample.
const SAMPLE: u32 = 10_000;

/// Returns a finding for each namespace that processes use: how many, and whether they should share it.
async fn namespaces(opened: &OpenStore, timeout: Duration) -> Vec<StoreFinding> {
    const SUBJECT: &str = "namespaces";
    if !opened.store.capabilities().shared {
        return Vec::new();
    }
    let register = StoreRegister::new(Arc::clone(&opened.store) as Arc<dyn Store>, timeout);
    let users = match register.users().await {
        Ok(users) => users,
        Err(error) => {
            return vec![StoreFinding::new(Severity::Unknown, SUBJECT, error.to_string(), "")];
        }
    };
    let mut names: Vec<_> = users.iter().map(|user| &user.namespace).collect();
    names.sort_unstable();
    names.dedup();
    let finding = |name: &String| {
        let users: Vec<_> = users.iter().filter(|user| user.namespace == *name).collect();
        let processes = match users.len() {
            1 => "1 process".to_owned(),
            count => format!("{count} processes"),
        };
        let found = format!("{name:?} has {processes}");
        let pairs =
            || users.iter().enumerate().flat_map(|(at, a)| users[..at].iter().map(move |b| (a, b)));
        if let Some(difference) = pairs().find_map(|(a, b)| a.difference(b)) {
            let found = format!(
                "{found}, which differ in {} for {}: a key executes once in each",
                difference.setting, difference.subject
            );
            return StoreFinding::new(
                Severity::Broken,
                SUBJECT,
                found,
                "give each service a namespace of its own; if they are one service, give all its processes the same \
                 settings",
            );
        }
        if let Some((a, b)) = pairs().find(|(a, b)| a.differs_in_upstream(b)) {
            let upstream = |user: &StoreUser| user.upstream.clone().unwrap_or_default();
            let found = format!(
                "{found} in front of two upstreams, {} and {}: if these are two services, one gets responses of the \
                 other",
                upstream(b),
                upstream(a)
            );
            return StoreFinding::new(
                Severity::Risk,
                SUBJECT,
                found,
                "give each service a namespace of its own",
            );
        }
        StoreFinding::new(Severity::Fine, SUBJECT, found, "")
    };
    names.into_iter().map(finding).collect()
}

/// Returns whether the secrets open what is in the store: an operator may have replaced one in the
/// ring that records were sealed under.
async fn unreadable(opened: &OpenStore) -> StoreFinding {
    let page = opened.store.page(None, NonZeroU32::MIN.saturating_add(SAMPLE - 1)).await;
    let page = match page {
        Ok(page) => page,
        Err(error) => {
            return StoreFinding::new(Severity::Unknown, "key ring", error.to_string(), "");
        }
    };
    let all = page.records.len();
    let failed: Vec<_> =
        page.records.iter().filter_map(|(_, stored)| stored.as_ref().err()).collect();
    let Some(first) = failed.first() else {
        let found = format!("all of the {all} records that were read can be opened");
        return StoreFinding::new(Severity::Fine, "key ring", found, "");
    };
    let reason = first.source().map_or_else(|| first.to_string(), ToString::to_string);
    StoreFinding::new(
        Severity::Broken,
        "key ring",
        format!(
            "{} of the {all} records that were read cannot be opened, the first because {reason}",
            failed.len()
        ),
        "add the secret that sealed them to the ring, on a line `open`",
    )
}

/// Returns the finding about whether a file can be created in `folder`.
fn writable(folder: &Path) -> StoreFinding {
    let probe = folder.join(format!(".hapax-doctor-{}", std::process::id()));
    let made = File::create_new(&probe).and_then(|file| file.sync_all());
    let _ = std::fs::remove_file(&probe);
    match made {
        Ok(()) => {
            StoreFinding::new(Severity::Fine, "file", "there is none yet; it can be made", "")
        }
        Err(error) => StoreFinding::new(
            Severity::Broken,
            "file",
            format!("there is none, and none can be made: {error}"),
            "give the process a folder that it can write to",
        ),
    }
}

/// Returns the finding about the free space of the disk of `path`.
fn disk(path: &Path) -> StoreFinding {
    let free = match FileStore::free_bytes(path) {
        Ok(Some(free)) => free,
        Ok(None) => return StoreFinding::new(Severity::Unknown, "disk", "not reported", ""),
        Err(error) => return StoreFinding::new(Severity::Unknown, "disk", error.to_string(), ""),
    };
    let found = format!("{} MiB are free", free >> 20);
    match free {
        0..TOO_LITTLE => StoreFinding::new(
            Severity::Broken,
            "disk",
            found,
            "new keys are rejected: free disk space",
        ),
        TOO_LITTLE..LITTLE => StoreFinding::new(
            Severity::Risk,
            "disk",
            found,
            "free disk space before new keys are rejected",
        ),
        LITTLE.. => StoreFinding::new(Severity::Fine, "disk", found, ""),
    }
}
