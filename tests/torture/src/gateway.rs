//! Gateway processes of a world.

use std::path::{Path, PathBuf};

use crate::dice::Dice;
use crate::process::Recipe;
use crate::{OnUnknownPolicy, TortureError};

/// Lease of gateways that share a store: longer than the pauses of a busy machine, and short enough
/// for many to lapse in one run.
const LEASE: &str = "2s";

/// Settings of a gateway process; the same for each incarnation except for the upstream's port.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) program: PathBuf,
    pub(crate) store: String,
    pub(crate) policy: OnUnknownPolicy,
    pub(crate) port: u16,
    /// True if several gateways use the store: a lease then outlives its gateway's process.
    pub(crate) shared: bool,
    /// File for standard error.
    pub(crate) log: PathBuf,
}

impl Plan {
    pub(crate) fn recipe(&self, upstream: u16) -> Recipe {
        let listen = format!("127.0.0.1:{}", self.port);
        let url = format!("http://127.0.0.1:{upstream}");
        let (policy, hook) = (self.policy.to_string(), format!("{url}/outcome"));
        let mut arguments = vec!["gateway", "--listen", &listen, "--admin", "off"];
        arguments.extend(["--namespace", "torture"]);
        arguments.extend(["--upstream", &url, "--store", &self.store, "--on-unknown", &policy]);
        if self.shared {
            arguments.extend(["--lease", LEASE]);
        }
        match self.policy {
            OnUnknownPolicy::Reexecute => {
                arguments.extend(["--in-flight", "wait", "--wait-for", "2s"]);
            }
            OnUnknownPolicy::Block => {}
            OnUnknownPolicy::Reconcile => {
                // The gateway calls the hook one upstream timeout after the lease lapses.
                arguments.extend(["--reconcile-url", &hook, "--upstream-timeout", "150ms"]);
            }
        }
        Recipe {
            name: "the gateway",
            program: self.program.clone(),
            arguments: arguments.into_iter().map(str::to_owned).collect(),
            log: self.log.clone(),
        }
    }
}

/// Returns free ports below those that the system gives to clients. So no other process is given
/// the port of a gateway that is down, and no client connects to itself.
pub(crate) fn free_ports(count: u64, dice: &mut Dice) -> Result<Vec<u16>, TortureError> {
    let mut ports = Vec::new();
    for _ in 0..100 {
        let port = 20_000 + (dice.below(10_000) as u16);
        let free = std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
        if free && !ports.contains(&port) {
            ports.push(port);
        }
        if ports.len() as u64 == count {
            return Ok(ports);
        }
    }
    Err(TortureError("no free ports between 20000 and 30000".into()))
}

/// Returns `file:` and the path of a new file in `folder`.
pub(crate) fn store_in(folder: &Path) -> String {
    format!("file:{}", folder.join("hapax.db").display())
}
