//! `hapax keys`.

mod args;
mod backup;
mod decisions;
mod find;
mod gateway;
mod reconcile;
mod render;
mod user;

use std::io::Read;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Idempotency, Key, OperationId, Store, StoreError};
use hapax_file::{FileStore, LockOwner, OpenError};
use hapax_gateway::{OpenStore, StoreOpenError, StoreOpener, StoreUrl};
use hapax_operators::{
    AccessHashes, Audit, Decider, Decision, DecisionChannel, FindQuery, FoundRecords, ListQuery,
    NO_CALLERS, NO_HASHES, OperatorError, OperatorRecords, OperatorVerdict, QuarantineError,
    RecordBefore, RecordList, RecordView, StateView, StoreDecision, UndecidedGroups,
};
use indicatif::ProgressBar;

use crate::exit::CliError;
use crate::output::{self, print};
use crate::secrets;
pub(crate) use args::KeysArgs;
use args::{KeysCommand, RecordSelector};
pub(crate) use args::{NAMESPACE_OF_KEY, StoreSelector};
pub(crate) use args::{ScopeText, StoreLocation, VerdictArg};
pub(crate) use backup::{BackupArgs, RestoreArgs, backup, restore};
pub(crate) use gateway::{Remote, RemoteError};
pub(crate) use render::force_hint;
use render::{DecisionOutput, Purged};
pub(crate) use user::{process, user};

/// The time that the store may take to answer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// The largest body of a response in a decision, in bytes.
const MAX_BODY: u64 = 1 << 20;

/// Runs `hapax keys`.
pub(crate) async fn run(args: KeysArgs) -> Result<ExitCode, CliError> {
    // A misspelt variable for the store would select another store.
    crate::gateway::environment::warn_of_unknown();
    match args.command {
        KeysCommand::List { at, state, caller, caller_hash, after, limit, csv, json } => {
            let after = after.as_deref().map(args::RecordName::id).transpose()?;
            let records = Records::find(&at).await?;
            let after = match after {
                Some(named) => Some(records.whole_id(named).await?),
                None => None,
            };
            let caller = match caller {
                Some(value) => Some(records.caller_hash(value).await?),
                // Lists show a hash with this sign.
                None => caller_hash.map(|hash| hash.trim_start_matches('#').to_owned()),
            };
            let list =
                ListQuery { state: state.map(Into::into), after, limit: Some(limit), caller };
            let listed = records.list(list).await?;
            if csv {
                return decisions::print_template(&listed);
            }
            print(&if json { output::json(&listed)? } else { render::list(&listed) });
        }
        KeysCommand::Find { at, key, since, path, route, limit, csv, json } => {
            let query = FindQuery {
                key: key_or_input(key)?.as_str().to_owned(),
                since_seconds: since.map(|since| since.as_secs_f64().ceil() as u64),
                path,
                route,
                from: None,
            };
            let format = find::Format::of(csv, json);
            let records = Records::find(&at).await?;
            return find::run(&records, query, limit as usize, format).await;
        }
        KeysCommand::Hash { at, key, scope, json } => {
            let key = key.map(key_or_input).transpose()?;
            let scope = ScopeText::parse(&scope)?;
            let hashes = Records::find(&at).await?.hash(key.as_ref(), &scope).await?;
            print(&if json { output::json(&hashes)? } else { render::hashes(&hashes) });
        }
        KeysCommand::Count { at, json } => {
            let counted = Records::find(&at).await?.count().await?;
            print(&if json { output::json(&counted)? } else { render::count(&counted) });
        }
        KeysCommand::Show { at, target, json } => {
            let view = Records::find(&at).await?.show(target.parse()?).await?;
            print(&if json { output::json(&view)? } else { render::show(&view) });
        }
        KeysCommand::Release { at, target, sure, json } => {
            let records = Records::find(&at).await?;
            let decision = Decision {
                fence: sure.fence.unwrap_or_default(),
                force: sure.force,
                forget: sure.forget,
                any_kind: sure.any_kind,
                reason: sure.reason.clone(),
                who: Some(user::user()),
                outcome: OperatorVerdict::DidNotHappen,
                status: None,
                headers: Vec::new(),
                body: None,
                body_base64: None,
            };
            let decided = records.decide(&target, sure.fence.is_some(), decision).await?;
            print(&if json { output::json(&decided)? } else { decided.released(sure.forget) });
        }
        KeysCommand::Resolve {
            at, sure, from_file: Some(file), dry_run, headers, json, ..
        } => {
            let common = decisions::Common { reason: sure.reason, headers };
            let file = decisions::DecisionFile::read(&file, &common)?;
            let records = Records::find(&at).await?;
            return decisions::run(&records, &file, dry_run, json).await;
        }
        KeysCommand::Resolve { at, target, sure, outcome, status, headers, body, json, .. } => {
            let body = body.map(|body| read("--body", &body)).transpose()?;
            let (body, body_base64) = render::body(body);
            let decision = Decision {
                fence: sure.fence.unwrap_or_default(),
                force: sure.force,
                forget: sure.forget,
                any_kind: sure.any_kind,
                reason: sure.reason.clone(),
                who: Some(user::user()),
                // Without a file it is required.
                outcome: match outcome {
                    Some(VerdictArg::Happened) => OperatorVerdict::Happened,
                    Some(VerdictArg::DidNotHappen) | None => OperatorVerdict::DidNotHappen,
                },
                status,
                headers,
                body,
                body_base64,
            };
            let records = Records::find(&at).await?;
            let decided = records.decide(&target, sure.fence.is_some(), decision).await?;
            print(&if json { output::json(&decided)? } else { decided.resolved() });
        }
        KeysCommand::Reconcile { at, target, all, json } => {
            let target = if all { None } else { Some(target.parse()?) };
            return reconcile::run(&Records::find(&at).await?, target, json).await;
        }
        KeysCommand::Purge { at, json } => {
            let purged = Records::find(&at).await?.purge().await?;
            print(&if json { output::json(&purged)? } else { purged.text() });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The records of a store: opened here if no other process has it open, else through its gateway.
#[derive(Debug)]
enum Records {
    Local(OperatorRecords),
    Remote(Remote),
}

/// A store that is open in this process, or the gateway that has it open.
pub(crate) enum OpenedStore {
    Local(OpenStore),
    Remote(Remote),
}

/// Accepts the store as it is. Returns whether it had been emptied or replaced.
pub(crate) async fn confirm(at: &StoreSelector, reason: &str) -> Result<bool, CliError> {
    let location = at.location()?;
    match OpenedStore::find(&location, true).await? {
        OpenedStore::Local(opened) => {
            let replaced = opened.is_replaced();
            let audit = Arc::new(Audit::new(location.audit_file, user::process()));
            let store = opened.clone();
            let confirm = async move {
                let confirmed = store.confirm().await;
                confirmed.map_err(|error| OperatorError::Store(StoreError::unavailable(error)))
            };
            let about = StoreDecision::Confirmed;
            let confirmed = audit.decide(about, reason, decider(), confirm).await;
            opened.close().await;
            confirmed.map(|()| replaced).map_err(|error| failure(&error))
        }
        OpenedStore::Remote(remote) => remote.confirm(reason, &user::user()).await,
    }
}

/// Returns whether the gateway at `admin` found its store emptied or replaced, and no operator
/// confirmed that. The token is in `token_file`, or else where a gateway on `store` stores it.
pub(crate) async fn is_replaced(
    admin: SocketAddr,
    store: &StoreUrl,
    token_file: Option<PathBuf>,
) -> Result<bool, CliError> {
    Remote::new(admin, args::token(store, token_file.as_deref())?).is_replaced().await
}

/// Returns the author of a decision on a store that is open in this process.
pub(crate) fn decider() -> Decider {
    Decider { who: user::user(), by: DecisionChannel::Cli, from: user::host() }
}

impl OpenedStore {
    /// Opens the store, or finds the gateway that has it open. Creates neither a file nor tables. If it
    /// `confirms`, an emptied Redis gets an identity.
    pub(crate) async fn find(location: &StoreLocation, confirms: bool) -> Result<Self, CliError> {
        if let Some(admin) = location.admin {
            return Ok(Self::Remote(Remote::new(admin, location.token()?)));
        }
        let StoreLocation { store, secret_file, .. } = location.clone();
        match &store {
            StoreUrl::Memory => {
                return Err(CliError::usage(
                    "a `memory:` store is in its gateway: pass the gateway's address with --admin",
                ));
            }
            // Commands that read a store do not create one.
            StoreUrl::File(path) if !path.exists() => {
                // A file that was removed while a gateway has it open exists until that gateway
                // ends.
                if let Ok(Some(LockOwner { admin: Some(admin), .. })) = FileStore::lock_owner(path)
                {
                    return Ok(Self::Remote(Remote::new(admin, location.token()?)));
                }
                let none = match confirms {
                    true => {
                        ": start the gateway, which creates a store, then run this command again"
                    }
                    false => {
                        ": correct the path or URL in --store, or pass the address of its process by --admin"
                    }
                };
                let none = format!("there is no store at {}{none}", path.display());
                return Err(CliError::unavailable(none));
            }
            _ => {}
        }
        // A confirmation is a write of its own in PostgreSQL, and needs tables there.
        let make = confirms && matches!(&store, StoreUrl::Server(url) if url.is_redis());
        let opening =
            StoreOpener { secret_file, timeout: TIMEOUT, make, ..StoreOpener::new(store) };
        secrets::warn_of_store(&opening);
        match opening.open().await {
            Ok(opened) => Ok(Self::Local(opened)),
            Err(StoreOpenError::File {
                source: OpenError::InUse { admin: Some(admin), .. },
                ..
            }) => Ok(Self::Remote(Remote::new(admin, location.token()?))),
            Err(StoreOpenError::File {
                path,
                source: OpenError::InUse { pid, admin: None, .. },
            }) => {
                let owner = pid.map_or("another process".into(), |pid| format!("process {pid}"));
                Err(CliError::unavailable(format!(
                    "{} is in use by {owner}, whose lock names no admin address: pass it with --admin; a service \
                     without one has to mount the operators' API (hapax-operators); or retry after it has \
                     ended",
                    path.display()
                )))
            }
            Err(error @ (StoreOpenError::Secret { .. } | StoreOpenError::Url { .. })) => {
                let may_end = secrets::is_not_there(&error, location.secret_file.as_deref());
                let failure = CliError::usage(error);
                Err(if may_end { failure.may_end() } else { failure })
            }
            Err(error) => Err(CliError::unavailable(error)),
        }
    }
}

impl Records {
    /// Opens the store that flags select, or finds the gateway that has it open.
    async fn find(at: &StoreSelector) -> Result<Self, CliError> {
        let location = at.location()?;
        let opened = match OpenedStore::find(&location, false).await? {
            OpenedStore::Local(opened) => opened,
            OpenedStore::Remote(remote) => return Ok(Self::Remote(remote)),
        };
        let store = Arc::clone(&opened.store) as Arc<dyn Store>;
        let engine = Idempotency::builder(store)
            .namespace(location.namespace.as_str())
            .store_timeout(TIMEOUT)
            .build()
            .map_err(CliError::unavailable)?;
        let audit = Audit::new(location.audit_file, user::process());
        Ok(Self::Local(OperatorRecords::new(engine, opened.store, audit, TIMEOUT)))
    }

    /// Returns the hash by which records name the caller that sends a value.
    async fn caller_hash(&self, value: String) -> Result<String, CliError> {
        match self {
            Self::Local(keys) => {
                keys.caller_hash(&value).ok_or_else(|| CliError::usage(NO_CALLERS))
            }
            Self::Remote(remote) => remote.caller_hash(value).await,
        }
    }

    /// Returns the first records of a list. A call reads a part of the store, in which few records or none may match,
    /// so that it is repeated until the list has its limit or the store ends: each begins after the id at which the
    /// last one ended. It only reads: it can be interrupted at any time.
    async fn list(&self, mut list: ListQuery) -> Result<RecordList, CliError> {
        let mut listed = self.page(list.clone()).await?;
        let mut missing = list.limit.unwrap_or_default();
        let mut got = listed.keys.len() + listed.damaged.len();
        // It is drawn on a terminal only.
        let bar = ProgressBar::new_spinner();
        while let Some(next) = listed.next.take() {
            missing = missing.saturating_sub(u32::try_from(got).unwrap_or(u32::MAX));
            if missing == 0 {
                listed.next = Some(next);
                break;
            }
            // Ids are hashes: their first digits tell how much of the store was read.
            let read = next.get(..2).and_then(|digits| u32::from_str_radix(digits, 16).ok());
            let percent = read.unwrap_or_default() * 100 / 256;
            bar.set_message(format!("{percent} % searched, {} found", listed.keys.len()));
            bar.tick();
            list.after = Some(id(&next)?);
            list.limit = Some(missing);
            let page = self.page(list.clone()).await.inspect_err(|_| bar.finish_and_clear())?;
            got = page.keys.len() + page.damaged.len();
            listed.keys.extend(page.keys);
            listed.damaged.extend(page.damaged);
            listed.next = page.next;
        }
        bar.finish_and_clear();
        Ok(listed)
    }

    /// Returns a part of a list.
    async fn page(&self, list: ListQuery) -> Result<RecordList, CliError> {
        match self {
            Self::Local(keys) if list.state == Some(StateView::Unknown) && list.after.is_none() => {
                keys.unknown(&list).await.map_err(|error| failure(&error))
            }
            Self::Local(keys) => keys.list(list).await.map_err(|error| failure(&error)),
            Self::Remote(remote) => remote.list(list).await,
        }
    }

    async fn count(&self) -> Result<UndecidedGroups, CliError> {
        match self {
            Self::Local(keys) => keys.count().await.map_err(|error| failure(&error)),
            Self::Remote(remote) => remote.count().await,
        }
    }

    /// Takes a step of a search.
    async fn search(&self, query: &FindQuery) -> Result<FoundRecords, CliError> {
        match self {
            Self::Local(keys) => keys.find(query).await.map_err(|error| failure(&error)),
            Self::Remote(remote) => remote.find(query).await,
        }
    }

    /// Returns the hashes by which the access log names a key and a caller.
    async fn hash(&self, key: Option<&Key>, scope: &ScopeText) -> Result<AccessHashes, CliError> {
        match self {
            Self::Local(keys) if !keys.seals() => Err(CliError::usage(NO_HASHES)),
            Self::Local(keys) => Ok(AccessHashes {
                key_hash: key.and_then(|key| keys.key_hash(key)),
                caller_hash: keys.scope_hash(&scope.headers()?),
            }),
            Self::Remote(remote) => remote.hash(key, scope).await,
        }
    }

    /// Returns the id of a record that is named by it, or by its first digits.
    async fn whole_id(&self, named: args::RecordName) -> Result<OperationId, CliError> {
        if let args::RecordName::Id(text) = &named
            && let Some(id) = OperationId::from_hex(text)
        {
            return Ok(id);
        }
        id(&self.show(named).await?.id)
    }

    async fn show(&self, named: args::RecordName) -> Result<RecordView, CliError> {
        match (self, named) {
            (Self::Local(keys), args::RecordName::Id(id)) => match keys.whole_id(&id).await {
                Ok(id) => keys.show(&id).await,
                Err(error) => Err(error),
            },
            (Self::Local(keys), args::RecordName::Key(key, scope)) => {
                keys.show(&keys.id(&scope.headers()?, &key)).await
            }
            (Self::Remote(remote), named) => return remote.show(named).await,
        }
        .map_err(|error| failure(&error))
    }

    /// Decides about the record as it is now, unless the operator gave a fence: then only about a
    /// record with that fence.
    async fn decide(
        &self,
        target: &RecordSelector,
        fence_is_given: bool,
        mut decision: Decision,
    ) -> Result<DecisionOutput, CliError> {
        let named = target.parse()?;
        if named.is_prefix() && !fence_is_given && (decision.force || decision.forget) {
            return Err(CliError::usage(
                "expected --fence, or a whole --id, with --force or --forget, found first digits of an id alone: look at \
                 the record with `hapax keys show`",
            ));
        }
        let seen = self.show(named).await?;
        if !fence_is_given {
            decision.fence = seen.fence;
        }
        let outcome = decision.outcome;
        let was = self.resolve(&id(&seen.id)?, decision).await.map_err(|error| {
            let hint = render::override_hint(error.name(), outcome);
            error.and(hint)
        })?;
        Ok(DecisionOutput { id: seen.id, outcome, was })
    }

    /// Decides about the record with the fence of the decision.
    async fn resolve(
        &self,
        id: &OperationId,
        decision: Decision,
    ) -> Result<RecordBefore, CliError> {
        match self {
            Self::Local(keys) => {
                keys.resolve(id, decision, decider()).await.map_err(|error| failure(&error))
            }
            Self::Remote(remote) => remote.resolve(&id.to_string(), &decision).await,
        }
    }

    /// Removes expired records, unless the store is open in a gateway, which does that itself.
    async fn purge(&self) -> Result<Purged, CliError> {
        let Self::Local(keys) = self else {
            return Ok(Purged { removed: 0, by_gateway: true });
        };
        let progress = ProgressBar::new_spinner();
        let round = NonZeroU32::MIN.saturating_add(999);
        let mut removed = 0_u64;
        loop {
            let (count, more) = keys.purge(round).await.map_err(|error| failure(&error))?;
            removed += u64::from(count);
            progress.set_message(format!("{removed} expired records removed"));
            progress.tick();
            if !more {
                progress.finish_and_clear();
                return Ok(Purged { removed, by_gateway: false });
            }
        }
    }
}

/// Returns the error of an operation on records or sagas, with its exit code and its code for programs.
pub(crate) fn failure(error: &OperatorError) -> CliError {
    let failure = match error {
        OperatorError::NotFound
        | OperatorError::NoId
        | OperatorError::SeveralIds { .. }
        | OperatorError::Quarantine(QuarantineError::NotFound { .. })
        | OperatorError::OtherKind { .. }
        | OperatorError::InFlight
        | OperatorError::MayExecute { .. }
        | OperatorError::Released { .. }
        | OperatorError::Done { .. }
        | OperatorError::Changed { .. }
        | OperatorError::Saga
        | OperatorError::NoSaga
        | OperatorError::SeveralSagas
        | OperatorError::SagaEnded
        | OperatorError::SagaChanged
        | OperatorError::SagaMismatch(_)
        | OperatorError::SagaTooLarge
        | OperatorError::Contended => CliError::no(error),
        OperatorError::Invalid(_)
        | OperatorError::NoSecret
        | OperatorError::NotHttp { .. }
        | OperatorError::Quarantine(_) => CliError::usage(error),
        _ => CliError::unavailable(error),
    };
    failure.named(error.code())
}

pub(crate) fn id(text: &str) -> Result<OperationId, CliError> {
    OperationId::from_hex(text).ok_or_else(|| {
        CliError::usage(format!(
            "expected an id of 64 hexadecimal digits, found {text:?}: copy it from `list`"
        ))
    })
}

/// Reads a key, or `@-` for standard input, where a line feed may follow it.
fn key_or_input(text: String) -> Result<Key, CliError> {
    let text = match &*text {
        "@-" => String::from_utf8_lossy(&read("KEY", &text)?).into_owned(),
        _ => text,
    };
    Key::new(text.trim_end_matches(['\r', '\n'])).map_err(CliError::usage)
}

/// Reads the value of `flag`: text, or `@PATH` for the content of a file, or `@-` for standard input.
pub(crate) fn read(flag: &str, text: &str) -> Result<Vec<u8>, CliError> {
    let Some(path) = text.strip_prefix('@') else { return Ok(text.as_bytes().to_vec()) };
    let failed = |error: std::io::Error| CliError::usage(format!("{flag} {text}: {error}"));
    let source: Box<dyn Read> = match path {
        "-" => Box::new(std::io::stdin()),
        path => Box::new(std::fs::File::open(path).map_err(failed)?),
    };
    let mut bytes = Vec::new();
    source.take(MAX_BODY + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BODY {
        return Err(CliError::usage(format!(
            "{flag}: expected at most 1 MiB, found more: send a smaller body"
        )));
    }
    Ok(bytes)
}
