//! `hapax store quarantine`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use hapax_core::{Namespace, Store};
use hapax_operators::{
    Audit, QuarantineRequest, QuarantineStart, QuarantineView, StoreDecision, StoreRegister,
};
use http::Method;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::exit::CliError;
use crate::keys::{
    OpenedStore, StoreLocation, StoreSelector, TIMEOUT, decider, failure, process, user,
};
use crate::output::{self, print};

/// Time within which every running process confirms a quarantine: three of its writes, or the time after which
/// its entry has lapsed.
const CONFIRM: Duration = Duration::from_secs(30);

/// Time between two looks at the confirmations.
const LOOK: Duration = Duration::from_millis(300);

/// Reject keys that have no record, after the store has lost records, as by the restore of a backup
///
/// Keys without a record get 503, on every route or on one, until the quarantine ends. UUIDs of version 7 and ULIDs
/// that were made after its start execute. Where an unknown outcome is reconciled, a reconcile request is sent for the
/// key. With no --route, consumers in claim mode, sagas and relays pause. The command returns when every running
/// process applies the quarantine, on a server after 10 s at the earliest. Begin it before clients reach the restored
/// store. If they retry for longer than 24 h, repeat it before it ends.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct QuarantineArgs {
    #[command(subcommand)]
    command: Option<QuarantineCommand>,
    #[command(flatten)]
    about: QuarantineSelector,
    /// Accept a namespace that no process has used, as far as the store knows
    #[arg(long)]
    any_namespace: bool,
    /// The time after which it ends, 1 s to 24 h. A quarantine of the same namespace and route is replaced by one that
    /// starts now
    #[arg(long = "for", value_name = "DUR", required = true, value_parser = crate::duration)]
    duration: Option<Duration>,
    /// The reason, stored in the audit file
    #[arg(long, value_name = "TEXT", required = true)]
    reason: Option<String>,
    /// Print JSON; errors too, on standard error, with a code
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum QuarantineCommand {
    /// End a quarantine: keys without a record execute after about 3 s
    End {
        #[command(flatten)]
        about: QuarantineSelector,
        /// The reason, stored in the audit file
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
    /// List the quarantines of the store, and the processes that have not confirmed one
    // It lists those of every namespace.
    #[command(mut_arg("namespace", |arg| arg.hide(true)))]
    List {
        #[command(flatten)]
        at: StoreSelector,
        /// Print JSON; errors too, on standard error, with a code
        #[arg(long)]
        json: bool,
    },
}

/// Help of `--namespace` of a quarantine.
const NAMESPACE: &str = "The namespace of the service; required unless HAPAX_NAMESPACE or --config names it. '' is the \
    service without a namespace";

/// The store, and the operations that a quarantine is limited to.
#[derive(Debug, Args)]
#[command(mut_arg("namespace", |arg| arg.help(NAMESPACE)))]
struct QuarantineSelector {
    #[command(flatten)]
    at: StoreSelector,
    /// Only requests of this route (`name` of [[route]], default its path); consumers, sagas and relays do not pause
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
}

#[derive(Deserialize)]
struct Listed {
    quarantines: Vec<QuarantineView>,
}

#[derive(Deserialize)]
struct Begun {
    id: String,
}

/// Runs `hapax store quarantine`.
pub(super) async fn run(args: QuarantineArgs) -> Result<ExitCode, CliError> {
    let (quarantines, json) = match args.command {
        None => {
            let (Some(duration), Some(reason)) = (args.duration, args.reason) else {
                return Err(CliError::usage("expected --for and --reason"));
            };
            let QuarantineSelector { at, route } = args.about;
            let location = at.location()?;
            let namespace = named(&location)?;
            let start = QuarantineStart {
                namespace,
                route,
                duration: Duration::from_secs(duration.as_secs_f64().ceil() as u64),
                any_namespace: args.any_namespace,
                reason,
                who: user(),
            };
            (vec![begin(location, start).await?], args.json)
        }
        Some(QuarantineCommand::End { about: QuarantineSelector { at, route }, reason, json }) => {
            let location = at.location()?;
            let namespace = named(&location)?;
            end(location, &namespace, route, reason).await?;
            print(&if json { "{}\n".to_owned() } else { "ended\n".to_owned() });
            return Ok(ExitCode::SUCCESS);
        }
        Some(QuarantineCommand::List { at, json }) => {
            let opened = OpenedStore::find(&at.location()?, false).await?;
            let quarantines = list(&opened).await;
            close(opened).await;
            (quarantines?, json)
        }
    };
    if json {
        print(&output::json(&json!({ "quarantines": quarantines }))?);
    } else if quarantines.is_empty() {
        print("no quarantine\n");
    } else {
        quarantines.iter().for_each(|it| print(&text(it)));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the namespace that was named: the default one is not meant by leaving it out.
fn named(location: &StoreLocation) -> Result<Namespace, CliError> {
    match location.is_namespace_named {
        true => Ok(location.namespace.clone()),
        false => Err(CliError::usage(
            "expected the namespace of the service, found none: pass --namespace NAME, or --namespace '' for a service \
             without one",
        )),
    }
}

/// Begins a quarantine, and returns it when every running process has confirmed it.
async fn begin(
    location: StoreLocation,
    start: QuarantineStart,
) -> Result<QuarantineView, CliError> {
    let opened = OpenedStore::find(&location, false).await?;
    let confirmed = match begin_on(&opened, location, start).await {
        Ok(id) => wait_until_confirmed(&opened, &id).await,
        Err(error) => Err(error),
    };
    close(opened).await;
    confirmed
}

/// Begins a quarantine, and returns its id.
async fn begin_on(
    opened: &OpenedStore,
    location: StoreLocation,
    start: QuarantineStart,
) -> Result<String, CliError> {
    match opened {
        OpenedStore::Remote(remote) => {
            let request = QuarantineRequest {
                namespace: start.namespace.as_str().to_owned(),
                route: start.route,
                seconds: start.duration.as_secs(),
                any_namespace: start.any_namespace,
                reason: start.reason,
                who: Some(start.who),
            };
            let request = Some(json!(request));
            let Begun { id } = remote.request(Method::POST, "/api/quarantines", request).await?;
            Ok(id)
        }
        OpenedStore::Local(opened) => {
            let audit = Arc::new(Audit::new(location.audit_file, process()));
            let register = register(Arc::clone(&opened.store) as Arc<dyn Store>);
            let (about, reason) = (StoreDecision::begin(&start), start.reason.clone());
            let begin = async move { Ok(register.begin_quarantine(&start).await?) };
            let begun = audit.decide(about, &reason, decider(), begin).await;
            begun.map_err(|error| failure(&error))
        }
    }
}

async fn wait_until_confirmed(opened: &OpenedStore, id: &str) -> Result<QuarantineView, CliError> {
    let (deadline, mut reported, mut is_reported) = (Instant::now() + CONFIRM, Vec::new(), false);
    loop {
        let this = match list(opened).await {
            Ok(quarantines) => quarantines.into_iter().find(|it| it.id == id),
            // It may be that of one reply.
            Err(_) if Instant::now() < deadline => {
                sleep(LOOK).await;
                continue;
            }
            Err(error) => {
                return Err(error.and(
                    ": the quarantine has begun, and it is not known which processes have confirmed it: run \
                     `hapax store quarantine list`",
                ));
            }
        };
        let Some(this) = this else {
            return Err(CliError::no(
                "expected the quarantine to last until every process had confirmed it, found it ended or replaced, by an operator \
                 or after --for: see `hapax store quarantine list`, and begin it again with a --for of at least 1m",
            ));
        };
        if this.unconfirmed.is_empty() && this.in_force_in_seconds == 0 {
            return Ok(this);
        }
        if deadline <= Instant::now() && !this.unconfirmed.is_empty() {
            return Err(CliError::unavailable(format!(
                "the quarantine has begun; expected a confirmation from each process within {} s, found none from {} (an \
                 earlier release does not confirm): stop them, then check `hapax store quarantine list`",
                CONFIRM.as_secs(),
                this.unconfirmed.join("; ")
            )));
        }
        let mut waiting = this.unconfirmed.clone();
        if waiting.is_empty() {
            waiting.push(format!(
                "processes that are not in the register, for {} s",
                this.in_force_in_seconds
            ));
        }
        // The seconds that are left are reported once.
        if reported != this.unconfirmed || !is_reported {
            eprintln!("hapax: waiting for {}", waiting.join("; "));
            (reported, is_reported) = (this.unconfirmed, true);
        }
        sleep(LOOK).await;
    }
}

async fn end(
    location: StoreLocation,
    namespace: &Namespace,
    route: Option<String>,
    reason: String,
) -> Result<(), CliError> {
    let opened = OpenedStore::find(&location, false).await?;
    let ended = match &opened {
        OpenedStore::Remote(remote) => {
            let namespace = namespace.as_str().to_owned();
            let who = Some(user());
            let request = QuarantineRequest {
                namespace,
                route,
                seconds: 0,
                any_namespace: false,
                reason,
                who,
            };
            let request = Some(json!(request));
            let ended = remote.request(Method::POST, "/api/quarantines/end", request).await;
            ended.map(|_: Listed| ()).map_err(CliError::from)
        }
        OpenedStore::Local(opened) => {
            let audit = Arc::new(Audit::new(location.audit_file, process()));
            let register = register(Arc::clone(&opened.store) as Arc<dyn Store>);
            let (namespace, about) =
                (namespace.clone(), StoreDecision::end(namespace, route.as_deref()));
            let end =
                async move { Ok(register.end_quarantine(&namespace, route.as_deref()).await?) };
            let ended = audit.decide(about, &reason, decider(), end).await;
            ended.map_err(|error| failure(&error))
        }
    };
    close(opened).await;
    ended
}

async fn list(opened: &OpenedStore) -> Result<Vec<QuarantineView>, CliError> {
    match opened {
        OpenedStore::Remote(remote) => {
            let listed = remote.request(Method::GET, "/api/quarantines", None).await;
            let Listed { quarantines } = listed?;
            Ok(quarantines)
        }
        OpenedStore::Local(opened) => {
            let register = register(Arc::clone(&opened.store) as Arc<dyn Store>);
            register.quarantines().await.map_err(CliError::unavailable)
        }
    }
}

fn register(store: Arc<dyn Store>) -> StoreRegister {
    StoreRegister::new(store, TIMEOUT)
}

async fn close(opened: OpenedStore) {
    if let OpenedStore::Local(opened) = opened {
        opened.close().await;
    }
}

fn text(it: &QuarantineView) -> String {
    let route = it.route.as_ref().map(|route| format!(", route {route:?}")).unwrap_or_default();
    let confirmed = match (it.confirmed, it.unconfirmed.len()) {
        (0, 0) => "no running process; one that starts applies it".to_owned(),
        (count, 0) => format!("{count} confirmed, 0 did not"),
        (count, others) => {
            format!("{count} confirmed, {others} did not: {}", it.unconfirmed.join("; "))
        }
    };
    format!(
        "namespace {:?}{route}: from {} until {}\n  processes: {confirmed}\n  {}: {}\n",
        it.namespace, it.since, it.until, it.who, it.reason
    )
}
