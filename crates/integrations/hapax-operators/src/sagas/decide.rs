//! Decisions about stuck sagas.
//!
//! A decision goes into the log of its saga and into the audit file, in the order of decisions about
//! keys: the intention is on the disk before the record is written, and the line `done` or
//! `rejected` follows.

use hapax_core::{ClaimError, Clock, Entropy, StoreError, SystemClock, SystemEntropy, WriteId};
use hapax_saga::log::{LoggedDecision, Stuck};
use hapax_saga::{DecisionMismatch, SagaDecision, SagaLookup, SagaOperatorError};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::id::{SagaId, seen};
use super::{Found, OperatorSagas};
use crate::audit::{Decider, DecisionChannel, cut, reason};
use crate::keys::{OperatorError, OperatorVerdict, rfc3339};

/// The reason for which a start is rejected.
pub(super) const KEY_REUSED: &str = "key-reused";

/// A decision of an operator about a stuck saga.
#[derive(Clone, Debug)]
pub struct SagaDecisionRequest {
    /// Write id of the record that the operator saw, of a start that no process has accepted the id of its
    /// entry. A saga that has changed since is not decided.
    pub write_id: WriteId,
    /// The decision.
    pub action: SagaAction,
    /// The reason, for the log and the audit file: one line of at most 1,000 bytes.
    pub reason: String,
}

/// A kind of decision about a stuck saga.
#[derive(Clone, PartialEq, Debug)]
pub enum SagaAction {
    /// The stuck step, undo or flow gets new tries. A `once` step that may have happened, or a step whose
    /// key has expired, is not called: only its reconcile function is, if it has one.
    Retry,
    /// The step that is stuck happened, with this result. `null` within it is a missing value, `null`
    /// alone the value of a step that returns `()`.
    Happened(Value),
    /// The step that is stuck did not happen: it is tried again under its key.
    DidNotHappen {
        /// Also while a try of it may still take effect.
        force: bool,
    },
    /// The undo that is stuck is skipped.
    Skip,
    /// The saga fails: what happened is undone. One that has run nothing ends at once, without a process;
    /// a rejected start is removed.
    Abort,
}

/// A saga before a decision.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SagaBefore {
    /// Name of its definition; `None` before its first step.
    pub definition: Option<String>,
    /// Version of its definition.
    pub version: Option<u32>,
    /// The reason for which it was stuck; `None` if it was not.
    pub stuck: Option<String>,
    /// Name of the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// `forward` or `undo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<String>,
}

/// An audit line of a decision about a saga.
#[derive(Serialize)]
struct Line<'a> {
    at: String,
    stage: &'static str,
    decision: &'a str,
    who: &'a str,
    role: &'static str,
    by: DecisionChannel,
    from: &'a str,
    id: String,
    saga: &'static str,
    outcome: Option<OperatorVerdict>,
    result_sha256: Option<&'a str>,
    write_id: String,
    before: &'a SagaBefore,
    why: &'a str,
    gateway: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'static str>,
}

/// A decision in progress.
struct Case {
    number: String,
    id: SagaId,
    found: Found,
    before: SagaBefore,
    expected: WriteId,
    action: SagaAction,
    decision: SagaDecision,
    result_sha256: Option<String>,
    decider: Decider,
    why: String,
}

impl Case {
    /// Returns whether the saga was decided about in the same way, by a request that perhaps could not
    /// wake it.
    fn is_repeated(&self) -> bool {
        match &self.found {
            Found::Saga(saga) => saga.has_decided(&self.decision, &self.decider.who, &self.why),
            Found::Start(_) | Found::Ended(_) => false,
        }
    }

    /// Returns whether the saga is the one that the operator saw.
    fn is_seen(&self) -> bool {
        match &self.found {
            Found::Saga(saga) => saga.write_id == self.expected,
            Found::Start(start) => seen(start) == self.expected,
            Found::Ended(_) => false,
        }
    }
}

/// A decision that ended with an error.
struct Failed {
    error: OperatorError,
    /// Stage of its second line in the audit file; `None` if it may have been written, which the
    /// intention alone says.
    audit: Option<&'static str>,
}

/// A result in JSON, to be encoded as serde would encode the value itself.
struct StepResult<'a> {
    value: &'a Value,
    is_inner: bool,
}

impl Serialize for StepResult<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let inner = |value| StepResult { value, is_inner: true };
        match self.value {
            Value::Null if self.is_inner => serializer.serialize_none(),
            Value::Array(items) => serializer.collect_seq(items.iter().map(inner)),
            Value::Object(fields) => {
                serializer.collect_map(fields.iter().map(|(name, value)| (name, inner(value))))
            }
            value => value.serialize(serializer),
        }
    }
}

/// Whether a decision that ended with an error was written.
enum Written {
    Yes,
    No,
    Unknown,
}

impl SagaAction {
    /// Returns the name of the decision in the API.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Happened(_) | Self::DidNotHappen { .. } => "resolve",
            Self::Skip => "skip",
            Self::Abort => "abort",
        }
    }

    /// Returns the verdict on the step, if the decision has one.
    #[must_use]
    pub const fn outcome(&self) -> Option<OperatorVerdict> {
        match self {
            Self::Happened(_) => Some(OperatorVerdict::Happened),
            Self::DidNotHappen { .. } => Some(OperatorVerdict::DidNotHappen),
            Self::Retry | Self::Skip | Self::Abort => None,
        }
    }

    fn decision(&self) -> Result<SagaDecision, OperatorError> {
        Ok(match self {
            Self::Retry => SagaDecision::Retry,
            Self::Happened(result) => {
                SagaDecision::happened(&StepResult { value: result, is_inner: false }).map_err(
                    |_| {
                        OperatorError::Invalid(
                            "expected a result of at most 64 KiB and 128 levels, found a larger or deeper one: pass a shorter result",
                        )
                    },
                )?
            }
            Self::DidNotHappen { force } => SagaDecision::DidNotHappen { force: *force },
            Self::Skip => SagaDecision::Skip,
            Self::Abort => SagaDecision::Abort,
        })
    }
}

impl SagaBefore {
    fn of(found: &Found) -> Self {
        let log = match found {
            Found::Saga(saga) => saga.log.as_ref(),
            Found::Ended(_) => None,
            Found::Start(start) => {
                return Self {
                    definition: Some(start.definition.clone()),
                    version: Some(start.version),
                    stuck: start.is_rejected.then(|| KEY_REUSED.to_owned()),
                    step: None,
                    direction: None,
                };
            }
        };
        let stuck = log.and_then(|log| log.stuck.as_ref());
        let step = |stuck: &Stuck| Some(log?.steps.get(stuck.step?)?.name.clone());
        Self {
            definition: log.map(|log| log.definition.clone()),
            version: log.map(|log| log.version),
            stuck: stuck.map(|stuck| stuck.reason.as_str().to_owned()),
            step: stuck.and_then(step),
            direction: stuck.map(|stuck| stuck.direction.as_str().to_owned()),
        }
    }
}

impl OperatorSagas {
    /// Decides about a stuck saga, which then continues. Returns what it was just before.
    ///
    /// It runs on a task of its own: a caller that is dropped leaves no decision between its two
    /// lines in the audit file.
    ///
    /// # Errors
    /// [`OperatorError`]; after [`OperatorError::Engine`] and [`OperatorError::Store`] the decision
    /// may have been written: show the saga again.
    pub async fn decide(
        &self,
        id: &SagaId,
        request: SagaDecisionRequest,
        decider: Decider,
    ) -> Result<SagaBefore, OperatorError> {
        let (sagas, id) = (self.clone(), *id);
        let task = tokio::spawn(async move { sagas.execute(id, request, decider).await });
        task.await.unwrap_or(Err(OperatorError::Engine(ClaimError::Shutdown)))
    }

    async fn execute(
        self,
        id: SagaId,
        request: SagaDecisionRequest,
        decider: Decider,
    ) -> Result<SagaBefore, OperatorError> {
        let case = self.case(id, request, decider).await?;
        // On the disk before anything is written to the store: a process that ends in between
        // leaves an intention, never a decision without a line.
        self.note(&case, "intended", None).await.map_err(OperatorError::Audit)?;
        let decided = match case.is_seen() || case.is_repeated() {
            true => self.write(&case).await,
            false => Err(Failed { error: OperatorError::SagaChanged, audit: Some("rejected") }),
        };
        let (stage, code) = match &decided {
            Ok(()) => (Some("done"), None),
            Err(Failed { error, audit }) => (*audit, Some(error.code())),
        };
        if stage == Some("done") {
            tracing::info!(
                %id, action = case.decision.as_str(), decision = case.number,
                who = case.decider.who, why = case.why, was = ?case.before,
                "an operator decided about a saga"
            );
        }
        let noted = match stage {
            Some(stage) => self.note(&case, stage, code).await,
            None => Ok(()),
        };
        if let Err(error) = noted {
            tracing::error!(
                %error, decision = case.number, decided = decided.is_ok(),
                "expected to append the end of a decision to the audit file, found an error: the file has only its line `intended`; `decided` says whether it was made"
            );
        }
        decided.map(|()| case.before).map_err(|failed| failed.error)
    }

    /// Checks a request and loads its saga.
    async fn case(
        &self,
        id: SagaId,
        request: SagaDecisionRequest,
        decider: Decider,
    ) -> Result<Case, OperatorError> {
        let SagaDecisionRequest { write_id, action, reason: why } = request;
        let why = reason(&why)?.to_owned();
        let decision = action.decision()?;
        let mut number = [0; 16];
        SystemEntropy.fill(&mut number).map_err(|error| OperatorError::Engine(error.into()))?;
        let found = self.look_up(&id).await?;
        if matches!(found, Found::Ended(_)) {
            return Err(OperatorError::SagaEnded);
        }
        let result_sha256 = match &action {
            SagaAction::Happened(result) => {
                Some(crate::hex(&Sha256::digest(result.to_string().as_bytes())))
            }
            _ => None,
        };
        let decider = Decider { who: cut(&decider.who), from: cut(&decider.from), ..decider };
        let before = SagaBefore::of(&found);
        let (number, expected) = (crate::hex(&number), write_id);
        Ok(Case {
            number,
            id,
            found,
            before,
            expected,
            action,
            decision,
            result_sha256,
            decider,
            why,
        })
    }

    /// Writes a decision and wakes the saga.
    async fn write(&self, case: &Case) -> Result<(), Failed> {
        let (who, why) = (&case.decider.who, &case.why);
        let decide = async || {
            let decided = match (&case.found, &case.decision) {
                (Found::Saga(saga), decision) => self.sagas.decide(saga, decision, who, why).await,
                (Found::Start(start), SagaDecision::Abort) => {
                    self.sagas.abort_start(start, who, why).await
                }
                (Found::Start(_), _) => {
                    Err(SagaOperatorError::Mismatch(DecisionMismatch::NotAccepted))
                }
                (Found::Ended(_), _) => return Err(OperatorError::SagaEnded),
            };
            decided.map_err(OperatorError::from)
        };
        let Err(mut error) = decide().await else { return Ok(()) };
        let failed = match &error {
            OperatorError::Store(failed) | OperatorError::Engine(ClaimError::Store(failed)) => {
                Some(matches!(failed, StoreError::Unavailable(_)))
            }
            _ => None,
        };
        let audit = match failed {
            // A write that got no answer may be applied later.
            Some(is_unavailable) => match self.written(case).await {
                Written::Yes => match decide().await {
                    Ok(()) => return Ok(()),
                    Err(again) => {
                        error = again;
                        Some("done")
                    }
                },
                Written::No if is_unavailable => Some("rejected"),
                Written::No | Written::Unknown => None,
            },
            None => match &error {
                OperatorError::SagaNotWoken => Some("done"),
                OperatorError::Engine(_) => None,
                _ => Some("rejected"),
            },
        };
        Err(Failed { error, audit })
    }

    async fn written(&self, case: &Case) -> Written {
        // Of a start nothing remains to be read.
        let Found::Saga(before) = &case.found else { return Written::Unknown };
        let log = match self.within(self.sagas.show(&before.id)).await {
            Ok(SagaLookup::Unfinished(saga)) if saga.write_id == before.write_id => {
                return Written::No;
            }
            Ok(SagaLookup::Unfinished(saga)) => saga.log,
            // One that was decided may have ended since.
            Ok(_) | Err(_) => return Written::Unknown,
        };
        let seen = before.log.as_ref().map_or(&[][..], |log| &log.decisions);
        let last = seen.last().map(|last| last.at);
        // Of equal ones in a row the last replaces the one before it, and is later.
        let is_new = |at: usize, it: &LoggedDecision| at >= seen.len() || Some(it.at) > last;
        let found = log.as_ref().map_or(&[][..], |log| &log.decisions);
        let is_written = found
            .iter()
            .enumerate()
            .any(|(at, it)| is_new(at, it) && it.by == case.decider.who && it.reason == case.why);
        if is_written { Written::Yes } else { Written::Unknown }
    }

    /// Appends a line to the audit file.
    async fn note(
        &self,
        case: &Case,
        stage: &'static str,
        code: Option<&'static str>,
    ) -> std::io::Result<()> {
        let line = Line {
            at: rfc3339(SystemClock.now()),
            stage,
            decision: &case.number,
            who: &case.decider.who,
            role: "decide",
            by: case.decider.by,
            from: &case.decider.from,
            id: case.id.to_string(),
            saga: case.action.as_str(),
            outcome: case.action.outcome(),
            result_sha256: case.result_sha256.as_deref(),
            write_id: crate::hex(case.expected.as_bytes()),
            before: &case.before,
            why: &case.why,
            gateway: self.audit.gateway(),
            code,
        };
        self.audit.write_off(&line).await
    }
}
