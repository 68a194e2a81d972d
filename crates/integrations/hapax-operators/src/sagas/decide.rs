//! Decisions about stuck sagas.
//!
//! A decision goes into the log of its saga and into the audit file, in the order of decisions about
//! keys: the intention is on the disk before the record is written, and the line `done` or
//! `rejected` follows.

use hapax_core::{
    ClaimError, Clock, Entropy, OperationId, StoreError, SystemClock, SystemEntropy, WriteId,
};
use hapax_saga::log::{Log, Stuck};
use hapax_saga::{SagaDecision, SagaLookup, SagaView};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::OperatorSagas;
use crate::audit::{Decider, DecisionChannel, cut, reason};
use crate::keys::{OperatorError, OperatorVerdict, rfc3339};

/// A decision of an operator about a stuck saga.
#[derive(Clone, Debug)]
pub struct SagaDecisionRequest {
    /// Write id of the record that the operator saw. A saga that has changed since is not decided.
    pub write_id: WriteId,
    /// The decision.
    pub action: SagaAction,
    /// The reason, for the log and the audit file: one line of at most 1,000 bytes.
    pub reason: String,
}

/// A kind of decision about a stuck saga.
#[derive(Clone, PartialEq, Debug)]
pub enum SagaAction {
    /// The step that is stuck is tried again.
    Retry,
    /// The step that is stuck happened, with this result. `null` within it is a missing value, `null`
    /// alone the value of a step that returns `()`.
    Happened(Value),
    /// The step that is stuck did not happen: it is tried again under its key.
    DidNotHappen,
    /// The undo that is stuck is skipped.
    Skip,
    /// The saga fails: what happened is undone.
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

/// A decision under way.
struct Case {
    number: String,
    saga: SagaView,
    before: SagaBefore,
    expected: WriteId,
    action: SagaAction,
    decision: SagaDecision,
    result_sha256: Option<String>,
    decider: Decider,
    why: String,
}

/// A decision that was not made, as far as is known.
struct Failed {
    error: OperatorError,
    may_be_written: bool,
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
            Self::Happened(_) | Self::DidNotHappen => "resolve",
            Self::Skip => "skip",
            Self::Abort => "abort",
        }
    }

    /// Returns the verdict on the step, if the decision has one.
    #[must_use]
    pub const fn outcome(&self) -> Option<OperatorVerdict> {
        match self {
            Self::Happened(_) => Some(OperatorVerdict::Happened),
            Self::DidNotHappen => Some(OperatorVerdict::DidNotHappen),
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
                            "expected a result of at most 64 KiB, found more: no step can have it",
                        )
                    },
                )?
            }
            Self::DidNotHappen => SagaDecision::DidNotHappen,
            Self::Skip => SagaDecision::Skip,
            Self::Abort => SagaDecision::Abort,
        })
    }
}

impl SagaBefore {
    fn of(saga: &SagaView) -> Self {
        let log = saga.log.as_ref();
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
        id: &OperationId,
        request: SagaDecisionRequest,
        decider: Decider,
    ) -> Result<SagaBefore, OperatorError> {
        let (sagas, id) = (self.clone(), *id);
        let task = tokio::spawn(async move { sagas.execute(id, request, decider).await });
        task.await.unwrap_or(Err(OperatorError::Engine(ClaimError::Shutdown)))
    }

    async fn execute(
        self,
        id: OperationId,
        request: SagaDecisionRequest,
        decider: Decider,
    ) -> Result<SagaBefore, OperatorError> {
        let case = self.case(id, request, decider).await?;
        // On the disk before anything is written to the store: a process that ends in between
        // leaves an intention, never a decision without a line.
        self.note(&case, "intended", None).await.map_err(OperatorError::Audit)?;
        let decided = match case.saga.write_id == case.expected {
            true => self.write(&case).await,
            false => Err(Failed { error: OperatorError::SagaChanged, may_be_written: false }),
        };
        let noted = match &decided {
            Ok(()) => {
                tracing::info!(
                    %id, action = case.decision.as_str(), decision = case.number,
                    who = case.decider.who, why = case.why, was = ?case.before,
                    "an operator decided about a saga"
                );
                self.note(&case, "done", None).await
            }
            // The intention alone says so.
            Err(Failed { may_be_written: true, .. }) => Ok(()),
            Err(Failed { error, .. }) => self.note(&case, "rejected", Some(error.code())).await,
        };
        if let Err(error) = noted {
            tracing::error!(
                %error, decision = case.number, decided = decided.is_ok(),
                "the second line of a decision could not be written to the audit file"
            );
        }
        decided.map(|()| case.before).map_err(|failed| failed.error)
    }

    /// Checks a request and loads its saga.
    async fn case(
        &self,
        id: OperationId,
        request: SagaDecisionRequest,
        decider: Decider,
    ) -> Result<Case, OperatorError> {
        let SagaDecisionRequest { write_id, action, reason: why } = request;
        let why = reason(&why)?.to_owned();
        let decision = action.decision()?;
        let mut number = [0; 16];
        SystemEntropy.fill(&mut number).map_err(|error| OperatorError::Engine(error.into()))?;
        let saga = match self.within(self.sagas.show(&id)).await? {
            SagaLookup::NotFound => return Err(OperatorError::NoSaga),
            SagaLookup::Ended(_) => return Err(OperatorError::SagaEnded),
            SagaLookup::Unfinished(saga) => *saga,
        };
        let result_sha256 = match &action {
            SagaAction::Happened(result) => {
                Some(crate::hex(&Sha256::digest(result.to_string().as_bytes())))
            }
            _ => None,
        };
        let decider = Decider { who: cut(&decider.who), from: cut(&decider.from), ..decider };
        let before = SagaBefore::of(&saga);
        let (number, expected) = (crate::hex(&number), write_id);
        Ok(Case { number, saga, before, expected, action, decision, result_sha256, decider, why })
    }

    /// Writes a decision. If it is written and only its saga could not be woken, that is no error:
    /// the saga continues when its entry is due.
    async fn write(&self, case: &Case) -> Result<(), Failed> {
        let (who, why) = (&case.decider.who, &case.why);
        let decided = self.sagas.decide(&case.saga, &case.decision, who, why).await;
        let Err(error) = decided.map_err(OperatorError::from) else { return Ok(()) };
        let is_of_store = matches!(error, OperatorError::Store(_) | OperatorError::Engine(_));
        let may_be_written = is_of_store
            && match self.written(case).await {
                Written::Yes => {
                    tracing::warn!(
                        id = %case.saga.id, %error,
                        "a saga was decided, but not woken: it continues when its entry is due"
                    );
                    return Ok(());
                }
                // A write that got no answer may be applied later.
                Written::No => !matches!(
                    error,
                    OperatorError::Store(StoreError::Unavailable(_))
                        | OperatorError::Engine(ClaimError::Store(StoreError::Unavailable(_)))
                ),
                Written::Unknown => true,
            };
        Err(Failed { error, may_be_written })
    }

    async fn written(&self, case: &Case) -> Written {
        let log = match self.within(self.sagas.show(&case.saga.id)).await {
            Ok(SagaLookup::Unfinished(saga)) if saga.write_id == case.saga.write_id => {
                return Written::No;
            }
            Ok(SagaLookup::Unfinished(saga)) => saga.log,
            // One that was decided may have ended since.
            Ok(_) | Err(_) => return Written::Unknown,
        };
        let count = |log: &Option<Log>| log.as_ref().map_or(0, |log| log.decisions.len());
        let decision = log.as_ref().and_then(|log| log.decisions.get(count(&case.saga.log)));
        match decision {
            Some(it) if it.by == case.decider.who && it.reason == case.why => Written::Yes,
            _ => Written::Unknown,
        }
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
            id: case.saga.id.to_string(),
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
