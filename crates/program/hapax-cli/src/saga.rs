//! `hapax saga`.

mod args;
mod render;

use std::process::ExitCode;
use std::sync::Arc;

use hapax_core::{Idempotency, Store};
use hapax_operators::{
    Audit, DefinitionList, OperatorSagas, OperatorVerdict, SagaAction, SagaBefore,
    SagaDecisionRequest, SagaDetails, SagaId, SagaList, SagaQuery, parse_write_id,
};
use http::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::exit::CliError;
use crate::keys::{
    self, OpenedStore, Remote, RemoteError, StoreSelector, TIMEOUT, VerdictArg, decider, failure,
    force_hint, id,
};
use crate::output::{self, print};
pub(crate) use args::SagaArgs;
use args::{SagaCommand, SagaDecisionArgs, SagaName, SagaSelector};

/// Runs `hapax saga`.
pub(crate) async fn run(args: SagaArgs) -> Result<ExitCode, CliError> {
    // A misspelt variable for the store would select another store.
    crate::gateway::environment::warn_of_unknown();
    match args.command {
        SagaCommand::List { at, state, definition, after, limit, json } => {
            let after = after.as_deref().map(id).transpose()?;
            let state = state.map(Into::into);
            let query = SagaQuery { state, definition, after, limit: Some(limit) };
            let listed = Sagas::find(&at).await?.list(query).await?;
            print(&if json { output::json(&listed)? } else { render::list(&listed) });
        }
        SagaCommand::Show { at, target, json } => {
            let name = target.parse()?;
            let shown = Sagas::find(&at).await?.show(&name).await?;
            print(&if json { output::json(&shown)? } else { render::show(&shown) });
        }
        SagaCommand::Retry { at, target, sure, json } => {
            decide(&at, &target, &sure, SagaAction::Retry, json).await?;
        }
        SagaCommand::Resolve { at, target, sure, outcome, result, force, json } => {
            let action = verdict(outcome, result.as_deref(), force)?;
            decide(&at, &target, &sure, action, json).await?;
        }
        SagaCommand::Skip { at, target, sure, json } => {
            decide(&at, &target, &sure, SagaAction::Skip, json).await?;
        }
        SagaCommand::Abort { at, target, sure, json } => {
            decide(&at, &target, &sure, SagaAction::Abort, json).await?;
        }
        SagaCommand::Definitions { at, json } => {
            let found = Sagas::find(&at).await?.definitions().await?;
            print(&if json { output::json(&found)? } else { render::definitions(&found) });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A decision that was made.
#[derive(Debug, Serialize)]
struct SagaDecisionOutput {
    id: String,
    action: &'static str,
    outcome: Option<OperatorVerdict>,
    was: SagaBefore,
}

/// Reads the verdict on a step.
fn verdict(outcome: VerdictArg, result: Option<&str>, force: bool) -> Result<SagaAction, CliError> {
    match (outcome, result) {
        (VerdictArg::Happened, Some(result)) => {
            let text = keys::read("--result", result)?;
            let parsed = serde_json::from_slice(&text);
            parsed.map(SagaAction::Happened).map_err(|error| {
                CliError::usage(format!("--result: expected JSON, found another text: {error}"))
            })
        }
        (VerdictArg::Happened, None) => Err(CliError::usage(
            "expected the result of a step that happened, found none: pass it with --result, `null` \
             for a step without a result",
        )),
        (VerdictArg::DidNotHappen, None) => Ok(SagaAction::DidNotHappen { force }),
        (VerdictArg::DidNotHappen, Some(_)) => Err(CliError::usage(
            "expected no --result with --outcome did-not-happen: remove one of them",
        )),
    }
}

/// Decides about the saga as it is now, unless the operator gave a write id: then only about a saga
/// with that write id.
async fn decide(
    at: &StoreSelector,
    target: &SagaSelector,
    sure: &SagaDecisionArgs,
    action: SagaAction,
    json: bool,
) -> Result<(), CliError> {
    let name = target.parse()?;
    let sagas = Sagas::find(at).await?;
    let (id, write_id) = match (name, &sure.write_id) {
        (SagaName::Id(id), Some(write_id)) => (id, write_id.clone()),
        (name, given) => {
            let shown = sagas.show(&name).await?;
            let id = SagaId::parse(&shown.summary.id).ok_or_else(|| {
                CliError::unavailable("expected the id of a saga in the answer, found another text")
            })?;
            // Of a saga that has ended there is none, and the decision is rejected.
            (id, given.clone().or(shown.write_id).unwrap_or_else(|| "0".repeat(32)))
        }
    };
    let (name, outcome) = (action.as_str(), action.outcome());
    let text = render::decided(&action);
    let was = sagas.decide(&id, write_id, action, &sure.reason).await?;
    let output = SagaDecisionOutput { id: id.to_string(), action: name, outcome, was };
    print(&if json { output::json(&output)? } else { text });
    Ok(())
}

/// The sagas of a store: opened here if no other process has it open, else through its gateway or
/// service.
enum Sagas {
    Local(OperatorSagas),
    Remote(Remote),
}

#[derive(Deserialize)]
struct DecisionReply {
    was: SagaBefore,
}

impl Sagas {
    /// Opens the store that flags select, or finds the process that has it open.
    async fn find(at: &StoreSelector) -> Result<Self, CliError> {
        let location = at.location()?;
        let opened = match OpenedStore::find(&location, false).await? {
            OpenedStore::Local(opened) => opened,
            OpenedStore::Remote(remote) => return Ok(Self::Remote(remote)),
        };
        let engine = Idempotency::builder(Arc::clone(&opened.store) as Arc<dyn Store>)
            .namespace(location.namespace.as_str())
            .store_timeout(TIMEOUT)
            .build()
            .map_err(CliError::unavailable)?;
        let audit = Arc::new(Audit::new(location.audit_file, keys::process()));
        Ok(Self::Local(OperatorSagas::new(engine, audit, TIMEOUT)))
    }

    async fn list(&self, query: SagaQuery) -> Result<SagaList, CliError> {
        let remote = match self {
            Self::Local(sagas) => return sagas.list(query).await.map_err(|error| failure(&error)),
            Self::Remote(remote) => remote,
        };
        let mut path = format!("/api/sagas?limit={}", query.limit.unwrap_or(100));
        if let Some(state) = query.state {
            path.push_str(&format!("&state={state}"));
        }
        if let Some(after) = query.after {
            path.push_str(&format!("&after={after}"));
        }
        // Its characters need no escaping: the arguments are checked.
        if let Some(definition) = query.definition {
            path.push_str(&format!("&definition={definition}"));
        }
        Ok(remote.request(Method::GET, &path, None).await?)
    }

    async fn show(&self, name: &SagaName) -> Result<SagaDetails, CliError> {
        let remote = match self {
            Self::Local(sagas) => {
                let id = match name {
                    SagaName::Id(id) => *id,
                    SagaName::Prefix(prefix) => {
                        sagas.find(prefix).await.map_err(|error| failure(&error))?
                    }
                    SagaName::Key { definition, key, scope } => {
                        sagas.id(definition, &scope.headers()?, key)
                    }
                };
                return sagas.show(&id).await.map_err(|error| failure(&error));
            }
            Self::Remote(remote) => remote,
        };
        let (method, path, body) = match name {
            SagaName::Id(id) => (Method::GET, format!("/api/sagas/{id}"), None),
            SagaName::Prefix(prefix) => (Method::GET, format!("/api/sagas/{prefix}"), None),
            SagaName::Key { definition, key, scope } => {
                let body =
                    json!({ "definition": definition, "key": key.as_str(), "scope": scope.json() });
                (Method::POST, "/api/sagas/lookup".to_owned(), Some(body))
            }
        };
        Ok(remote.request(method, &path, body).await?)
    }

    async fn definitions(&self) -> Result<DefinitionList, CliError> {
        match self {
            Self::Local(sagas) => sagas.definitions().await.map_err(|error| failure(&error)),
            Self::Remote(remote) => {
                Ok(remote.request(Method::GET, "/api/saga-definitions", None).await?)
            }
        }
    }

    async fn decide(
        &self,
        id: &SagaId,
        write_id: String,
        action: SagaAction,
        reason: &str,
    ) -> Result<SagaBefore, CliError> {
        let remote = match self {
            Self::Local(sagas) => {
                let write_id = parse_write_id(&write_id).ok_or_else(|| {
                    CliError::usage(
                        "--write-id: expected 32 hexadecimal digits, found another text: copy them from `hapax saga show`",
                    )
                })?;
                let reason = reason.to_owned();
                let request = SagaDecisionRequest { write_id, action, reason };
                let decided = sagas.decide(id, request, decider()).await;
                return decided.map_err(|error| failure(&error).and(force_hint(error.code())));
            }
            Self::Remote(remote) => remote,
        };
        let path = format!("/api/sagas/{id}/{}", action.as_str());
        let mut body = json!({ "write_id": write_id, "reason": reason, "who": keys::user() });
        if let Some(outcome) = action.outcome() {
            body["outcome"] = json!(outcome);
        }
        match action {
            SagaAction::Happened(result) => body["result"] = result,
            // A process of an earlier release rejects a member that it does not know.
            SagaAction::DidNotHappen { force: true } => body["force"] = json!(true),
            _ => {}
        }
        let decided = remote.request(Method::POST, &path, Some(body)).await;
        let DecisionReply { was } =
            decided.map_err(|RemoteError { failure, code }| failure.and(force_hint(&code)))?;
        Ok(was)
    }
}
