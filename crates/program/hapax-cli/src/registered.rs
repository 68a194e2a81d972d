//! The entry of a command in the register of its store, and the quarantines that apply to it.

use std::sync::Arc;

use hapax_core::Idempotency;
use hapax_operators::{ConsumerNaming, StoreRegister, StoreUser, supervised};
use tokio::task::JoinSet;

use crate::admin::{Metric, Observed};
use crate::exit::CliError;

/// An observed process that pauses in a quarantine.
#[derive(Clone, Debug)]
pub(crate) struct Pausing<O> {
    pub(crate) observed: O,
    pub(crate) engine: Idempotency,
}

/// Enters this process as `what` for the time of `work`. If `every_namespace`, the quarantines of all namespaces apply to it.
/// Another process of its `consumers` must name and order their messages as it does.
///
/// The entry is removed after an error of `work` too, such as that of a later step of a start: otherwise it would count as that
/// of a running process for ten seconds, and reject a start whose arguments were corrected meanwhile. Without a removal, as
/// after a drop of this future, it lapses.
pub(crate) async fn while_registered<T>(
    engine: &Idempotency,
    what: &str,
    every_namespace: bool,
    consumers: Vec<ConsumerNaming>,
    work: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = format!("{what} on {host}, process {}", std::process::id());
    let user = StoreUser::new(engine.namespace(), name).map_err(CliError::unavailable)?;
    let user = StoreUser { every_namespace, consumers, ..user };
    let register = StoreRegister::new(Arc::clone(engine.store()), engine.store_timeout());
    let user = register.enter_when_available(user, engine).await.map_err(CliError::usage)?;
    let kept = user.clone();
    let mut keeping = JoinSet::new();
    keeping.spawn(async move {
        supervised("the entry in the register of the store", || kept.refresh()).await;
    });
    let done = work.await;
    // Its last write must not follow the removal.
    keeping.shutdown().await;
    user.remove().await;
    done
}

impl<O: Observed> Observed for Pausing<O> {
    fn metrics(&self) -> Vec<Metric> {
        let is_paused = f64::from(u8::from(self.engine.quarantines().pauses()));
        let help = "1 while a quarantine of the store pauses this process, or its register was not written for 10 s; else 0.";
        let mut metrics = self.observed.metrics();
        metrics.push(Metric::gauge("quarantined", help, is_paused));
        metrics
    }

    fn unready(&self) -> Option<String> {
        let quarantines = self.engine.quarantines();
        if !quarantines.pauses() {
            return self.observed.unready();
        }
        let until = quarantines.in_force().iter().map(|it| it.until).max();
        Some(match until {
            Some(until) => format!(
                "paused by a quarantine of the store until {until}: see `hapax store quarantine list`"
            ),
            None => "the register of the store was not written, for a reason in the log: check the store (`hapax doctor`); \
                     until then this process pauses"
                .to_owned(),
        })
    }
}
