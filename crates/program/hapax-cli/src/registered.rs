//! The entry of a command in the register of its store, and the quarantines that apply to it.

use std::sync::Arc;

use hapax_core::Idempotency;
use hapax_operators::{ConsumerNaming, RegisteredUser, StoreRegister, StoreUser, supervised};
use tokio::task::JoinHandle;

use crate::admin::{Metric, Observed};
use crate::exit::CliError;

/// The entry of this process, which a task keeps.
#[derive(Debug)]
pub(crate) struct Registered {
    user: RegisteredUser,
    keeping: JoinHandle<()>,
}

/// An observed process that pauses in a quarantine.
#[derive(Clone, Debug)]
pub(crate) struct Pausing<O> {
    pub(crate) observed: O,
    pub(crate) engine: Idempotency,
}

impl Registered {
    /// Enters this process as `what`. If `every_namespace`, the quarantines of all namespaces apply to it. Another process of
    /// its `consumers` must name and order their messages as it does.
    pub(crate) async fn enter(
        engine: &Idempotency,
        what: &str,
        every_namespace: bool,
        consumers: Vec<ConsumerNaming>,
    ) -> Result<Self, CliError> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let name = format!("{what} on {host}, process {}", std::process::id());
        let user = StoreUser::new(engine.namespace(), name).map_err(CliError::unavailable)?;
        let user = StoreUser { every_namespace, consumers, ..user };
        let register = StoreRegister::new(Arc::clone(engine.store()), engine.store_timeout());
        let user = register.enter_when_available(user, engine).await.map_err(CliError::usage)?;
        let kept = user.clone();
        let keeping = tokio::spawn(async move {
            supervised("the entry in the register of the store", || kept.refresh()).await;
        });
        Ok(Self { user, keeping })
    }

    /// Removes the entry.
    pub(crate) async fn remove(mut self) {
        // Its last write must not follow the removal.
        self.keeping.abort();
        let _ = (&mut self.keeping).await;
        self.user.remove().await;
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.keeping.abort();
    }
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
