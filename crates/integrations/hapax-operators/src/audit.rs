//! The audit file: it has one line of JSON for each step of a decision, and is only appended to.
//!
//! 1. A decision has two lines with one `decision` id. The line `intended` is on the disk before
//!    the record is written; the line `done` or `rejected` follows.
//! 2. An intention without a second line means that the process ended in between, or that the
//!    store gave no answer: the record may or may not have been written, and `hapax keys show` says
//!    which.
//! 3. If the intention cannot be written, the decision is rejected.
//! 4. The file contains the operation id and a hash of the body, and neither key nor scope nor
//!    body.
//!
//! The file is opened for each line, so that it may be rotated by renaming.

mod reconcile;

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use hapax_core::{Clock, Entropy, Namespace, SystemClock, SystemEntropy};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::reconcile::ReconcileDecision;
use crate::keys::rfc3339;
use crate::{Decision, OperatorError, OperatorVerdict, QuarantineStart, RecordBefore};

/// The default file of a store that is not a file.
const IN_WORKING_DIRECTORY: &str = "./hapax.audit.jsonl";

/// The longest name of a decider or of its place, in bytes.
const MAX_NAME: usize = 128;

/// The longest reason, in bytes.
const MAX_REASON: usize = 1000;

/// The channel by which a decision was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecisionChannel {
    /// The operators' API.
    Api,
    /// `hapax keys` or `hapax saga` on a store that it opened itself.
    Cli,
    /// A reconcile URL, without a retry and without an operator.
    Hook,
}

/// The operator who made a decision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decider {
    /// The name that was given, or that of the user.
    pub who: String,
    /// The way by which the decision came.
    pub by: DecisionChannel,
    /// The address or the machine that it came from.
    pub from: String,
}

impl Decider {
    /// Returns the operator of a decision over the API: the name in the request and the address of
    /// the peer, if each is known.
    #[must_use]
    pub fn by_api(who: Option<String>, peer: Option<SocketAddr>) -> Self {
        let from = peer.map_or_else(|| "unknown".to_owned(), |peer| peer.to_string());
        let who = cut(&who.unwrap_or_else(|| "token".to_owned()));
        Self { who, by: DecisionChannel::Api, from }
    }
}

/// The decision of an operator or of a reconcile URL, as its record keeps it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DecisionNote {
    /// The id that its lines in the audit file have; empty without lines there.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub decision: String,
    /// The time, RFC 3339.
    pub at: String,
    /// The name that was given, or that of the user.
    pub who: String,
    /// The way by which it came.
    pub by: DecisionChannel,
    /// The address or the machine that it came from.
    pub from: String,
    /// The verdict on the operation.
    pub outcome: OperatorVerdict,
    /// The reason.
    pub why: String,
}

/// An audit file.
pub struct Audit {
    path: PathBuf,
    gateway: String,
    /// One line at a time within this process; among processes the file is opened for appending.
    permit: Mutex<()>,
}

/// A step of a decision.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AuditStage<'a> {
    Intended,
    Done,
    Rejected(&'a OperatorError),
}

#[derive(Serialize)]
struct Line<'a> {
    at: String,
    stage: &'static str,
    decision: &'a str,
    who: &'a str,
    role: &'static str,
    by: DecisionChannel,
    from: &'a str,
    id: &'a str,
    fence: u64,
    before: Option<&'a RecordBefore>,
    outcome: OperatorVerdict,
    status: Option<u16>,
    body_sha256: Option<String>,
    force: bool,
    forget: bool,
    why: &'a str,
    gateway: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// A decision about the store as a whole.
#[derive(Serialize)]
struct StoreLine<'a> {
    at: String,
    stage: &'static str,
    decision: &'a str,
    who: &'a str,
    role: &'static str,
    by: DecisionChannel,
    from: &'a str,
    #[serde(flatten)]
    about: &'a StoreDecision,
    why: &'a str,
    gateway: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// A decision about a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "store", rename_all = "kebab-case")]
pub enum StoreDecision {
    /// An emptied or replaced store is accepted.
    Confirmed,
    /// A quarantine begins, and replaces one of the same namespace and route.
    Quarantined {
        /// The namespace.
        namespace: String,
        /// The route that it is limited to.
        #[serde(skip_serializing_if = "Option::is_none")]
        route: Option<String>,
        /// The duration, in seconds.
        seconds: u64,
    },
    /// A quarantine ends.
    QuarantineEnded {
        /// The namespace.
        namespace: String,
        /// The route that it is limited to.
        #[serde(skip_serializing_if = "Option::is_none")]
        route: Option<String>,
    },
}

impl StoreDecision {
    /// Returns the decision that begins a quarantine.
    #[must_use]
    pub fn begin(start: &QuarantineStart) -> Self {
        Self::Quarantined {
            namespace: start.namespace.as_str().to_owned(),
            route: start.route.clone(),
            seconds: start.duration.as_secs(),
        }
    }

    /// Returns the decision that ends a quarantine.
    #[must_use]
    pub fn end(namespace: &Namespace, route: Option<&str>) -> Self {
        Self::QuarantineEnded {
            namespace: namespace.as_str().to_owned(),
            route: route.map(str::to_owned),
        }
    }
}

/// The common content of both audit lines of a decision.
#[derive(Debug)]
pub(crate) struct AuditCase {
    pub(crate) id: String,
    pub(crate) decided: DecisionNote,
    fence: u64,
    status: Option<u16>,
    body_sha256: Option<String>,
    force: bool,
    forget: bool,
}

impl Audit {
    /// Creates the audit file at `path`. The file is created with the first line, readable by its
    /// owner alone. `gateway` is the name of this process in its lines.
    pub fn new(path: impl Into<PathBuf>, gateway: impl Into<String>) -> Self {
        Self { path: path.into(), gateway: cut(&gateway.into()), permit: Mutex::new(()) }
    }

    /// Returns the path of the file where neither the operator nor the configuration names one:
    /// beside a store that is a file, otherwise in the working directory.
    #[must_use]
    pub fn default_path(store: Option<&Path>) -> PathBuf {
        match store {
            Some(store) => {
                let mut path = store.to_owned().into_os_string();
                path.push(".audit.jsonl");
                path.into()
            }
            None => IN_WORKING_DIRECTORY.into(),
        }
    }

    /// Returns the name of this process in the lines.
    pub(crate) fn gateway(&self) -> &str {
        &self.gateway
    }

    /// Appends a line and waits until it is on the disk. Blocks for as long as that takes.
    pub(crate) fn append(
        &self,
        case: &AuditCase,
        stage: AuditStage<'_>,
        before: &RecordBefore,
    ) -> io::Result<()> {
        let AuditCase { id, decided, fence, status, body_sha256, force, forget } = case;
        let (stage, code) = match stage {
            AuditStage::Intended => ("intended", None),
            AuditStage::Done => ("done", None),
            AuditStage::Rejected(error) => ("rejected", Some(error.code())),
        };
        let line = Line {
            at: rfc3339(SystemClock.now()),
            stage,
            decision: &decided.decision,
            who: &decided.who,
            role: "decide",
            by: decided.by,
            from: &decided.from,
            id,
            fence: *fence,
            before: Some(before),
            outcome: decided.outcome,
            status: *status,
            body_sha256: body_sha256.clone(),
            force: *force,
            forget: *forget,
            why: &decided.why,
            gateway: &self.gateway,
            code,
        };
        self.write(serde_json::to_vec(&line)?)
    }

    /// Makes a decision about the store by calling `apply`, between two audit lines. Without
    /// a second line it is unknown whether it was applied.
    ///
    /// It runs on a task of its own: a caller that is dropped leaves no decision between its two lines.
    ///
    /// # Errors
    /// [`OperatorError::Invalid`] for a reason, and [`OperatorError::Audit`]: nothing was applied. The error of
    /// `apply`; after [`OperatorError::Store`] it may have been applied nevertheless.
    pub async fn decide<F, T>(
        self: &Arc<Self>,
        about: StoreDecision,
        why: &str,
        decider: Decider,
        apply: F,
    ) -> Result<T, OperatorError>
    where
        F: Future<Output = Result<T, OperatorError>> + Send + 'static,
        T: Send + 'static,
    {
        let why = reason(why)?.to_owned();
        let mut number = [0; 16];
        SystemEntropy.fill(&mut number).map_err(|error| OperatorError::Engine(error.into()))?;
        let (audit, decision) = (Arc::clone(self), crate::hex(&number));
        let confirmed = tokio::spawn(async move {
            let line = |stage, code| StoreLine {
                at: rfc3339(SystemClock.now()),
                stage,
                decision: &decision,
                who: &decider.who,
                role: "decide",
                by: decider.by,
                from: &decider.from,
                about: &about,
                code,
                why: &why,
                gateway: &audit.gateway,
            };
            audit.write_off(&line("intended", None)).await.map_err(OperatorError::Audit)?;
            let applied = apply.await;
            let last = match &applied {
                Ok(_) => line("done", None),
                // It may have been applied: that has no second line.
                Err(OperatorError::Store(_)) => return applied,
                Err(error) => line("rejected", Some(error.code())),
            };
            if let Err(error) = audit.write_off(&last).await {
                tracing::error!(%error, decision, "the second line of a decision could not be written to the audit file");
            }
            applied
        });
        confirmed.await.unwrap_or_else(|error| Err(OperatorError::Audit(io::Error::other(error))))
    }

    /// Writes a line on a thread that may block.
    pub(crate) async fn write_off(self: &Arc<Self>, line: &impl Serialize) -> io::Result<()> {
        let (audit, line) = (Arc::clone(self), serde_json::to_vec(line)?);
        let written = tokio::task::spawn_blocking(move || audit.write(line));
        written.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    fn write(&self, mut line: Vec<u8>) -> io::Result<()> {
        line.push(b'\n');
        let _turn = self.permit.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = crate::open_log(&self.path)?;
        let length = file.metadata()?.len();
        if length > 0 {
            // A crash may have left half a line; this one must not become a part of it.
            let mut last = [0];
            file.seek(SeekFrom::Start(length - 1))?;
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                line.insert(0, b'\n');
            }
        }
        // In one write, so that lines of several processes do not mix.
        file.write_all(&line)?;
        file.sync_data()?;
        if length == 0 {
            let folder = self.path.parent().filter(|it| !it.as_os_str().is_empty());
            sync_folder(folder.unwrap_or(Path::new(".")))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Audit").field("path", &self.path).finish_non_exhaustive()
    }
}

impl AuditCase {
    /// # Errors
    /// [`OperatorError::Invalid`] without a reason, and for one that is too long.
    pub(crate) fn new(
        number: [u8; 16],
        id: &hapax_core::OperationId,
        decision: &Decision,
        decider: &Decider,
    ) -> Result<Self, OperatorError> {
        let why = reason(&decision.reason)?;
        let body = decision.body_bytes()?;
        let decided = DecisionNote {
            decision: crate::hex(&number),
            at: rfc3339(SystemClock.now()),
            who: cut(&decider.who),
            by: decider.by,
            from: cut(&decider.from),
            outcome: decision.outcome,
            why: why.to_owned(),
        };
        let happened = decision.outcome == OperatorVerdict::Happened;
        Ok(Self {
            id: id.to_string(),
            decided,
            fence: decision.fence,
            status: happened.then(|| decision.status.unwrap_or(200)),
            body_sha256: happened.then(|| crate::hex(&Sha256::digest(&body))),
            force: decision.force,
            forget: decision.forget,
        })
    }
}

pub(crate) fn reason(text: &str) -> Result<&str, OperatorError> {
    let why = text.trim();
    if why.is_empty() {
        return Err(OperatorError::Invalid(
            "expected a reason, found none: say why it is decided so",
        ));
    }
    if why.len() > MAX_REASON || why.chars().any(char::is_control) {
        return Err(OperatorError::Invalid(
            "expected a reason of at most 1,000 bytes on one line, without control characters",
        ));
    }
    Ok(why)
}

/// Returns `text` without control characters, cut to [`MAX_NAME`] bytes.
pub(crate) fn cut(text: &str) -> String {
    let mut text: String = text.chars().filter(|char| !char.is_control()).collect();
    text.truncate(text.floor_char_boundary(MAX_NAME));
    text
}

#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    std::fs::File::open(folder)?.sync_all()
}

#[cfg(not(unix))]
const fn sync_folder(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use hapax_core::OperationId;

    use super::*;
    use crate::StateView;

    fn case(reason: &str) -> Result<AuditCase, OperatorError> {
        let decision = serde_json::json!({
            "fence": 7, "outcome": "happened", "status": 201, "body": "hi", "reason": reason,
        });
        let decision: Decision = serde_json::from_value(decision).unwrap();
        let decider = Decider {
            who: "an\noperator".into(),
            by: DecisionChannel::Api,
            from: "127.0.0.1".into(),
        };
        AuditCase::new([1; 16], &OperationId::from_bytes([2; 32]), &decision, &decider)
    }

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_default()).collect()
    }

    #[test]
    fn after_a_partial_line_later_lines_are_complete() {
        let folder = tempfile::tempdir().unwrap();
        let path = Audit::default_path(Some(&folder.path().join("a.db")));
        assert_eq!(path, folder.path().join("a.db.audit.jsonl"));
        let audit = Audit::new(&path, "host:1");
        let was = RecordBefore { state: StateView::Unknown, ended: None, status: Some(500) };
        let case = case("the bank's statement has it").unwrap();
        audit.append(&case, AuditStage::Intended, &was).unwrap();
        assert!(!crate::is_open_to_others(&path));
        let half = OpenOptions::new().append(true).open(&path).unwrap().write(b"{\"at\":").unwrap();
        assert_eq!(half, 6);
        audit.append(&case, AuditStage::Rejected(&OperatorError::InFlight), &was).unwrap();
        let lines = lines(&path);
        assert_eq!(lines.len(), 3);
        let (first, last) = (&lines[0], &lines[2]);
        assert_eq!((&first["stage"], &last["stage"]), (&"intended".into(), &"rejected".into()));
        assert_eq!(
            (&first["code"], &last["code"]),
            (&serde_json::Value::Null, &"in-flight".into())
        );
        let expected = serde_json::json!({
            "who": "anoperator", "role": "decide", "by": "api", "from": "127.0.0.1",
            "id": "02".repeat(32), "fence": 7, "before": {"state": "unknown", "status": 500},
            "outcome": "happened", "status": 201, "force": false, "forget": false,
            "body_sha256": "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4",
            "why": "the bank's statement has it", "gateway": "host:1", "decision": "01".repeat(16),
        });
        for (field, value) in expected.as_object().unwrap() {
            assert_eq!(&last[field], value, "{field}");
        }
    }

    #[test]
    fn a_decision_without_a_reason_is_rejected() {
        for bad in ["", "  ", "two\nlines", &"x".repeat(1001)] {
            assert!(matches!(case(bad), Err(OperatorError::Invalid(_))), "{bad:?}");
        }
        assert_eq!(case(" why ").unwrap().decided.why, "why");
    }
}
