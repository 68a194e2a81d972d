//! One gateway on one file, its upstream, its clients, and whoever kills it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::client;
use crate::dice::Dice;
use crate::gateway::{self, Gateway, Plan};
use crate::ledger::{Counts, Ledger};
use crate::upstream::Upstream;
use crate::{Fault, Options, Policy, lock};

/// What clients know of their world.
pub(crate) struct World {
    policy: Policy,
    port: u16,
    ledger: Arc<Mutex<Ledger>>,
    over: AtomicBool,
}

impl World {
    pub(crate) fn policy(&self) -> Policy {
        self.policy
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn ledger(&self) -> &Mutex<Ledger> {
        &self.ledger
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// Runs a world to its end: kills, then a last life in which every answer is asked for again.
pub(crate) async fn run(
    options: &Options,
    policy: Policy,
    kills: u64,
    folder: &Path,
    mut dice: Dice,
) -> Result<(Counts, Vec<String>), Fault> {
    let folder: PathBuf = folder.join(policy.to_string());
    std::fs::create_dir(&folder)?;
    let ledger = Arc::new(Mutex::new(Ledger::new(policy)));
    let port = gateway::free_port(&mut dice)?;
    let store = options.store.clone().unwrap_or_else(|| gateway::store_in(&folder));
    let log = folder.join("stderr");
    let plan = Plan { program: options.gateway.clone(), store, policy, port, log };
    let world = Arc::new(World { policy, port, ledger, over: AtomicBool::new(false) });

    let mut clients = JoinSet::new();
    for number in 0..options.clients {
        clients.spawn(client::run(world.clone(), number, dice.split()));
    }
    let seed = dice.roll();
    for life in 0..kills {
        let upstream = Upstream::start(world.ledger.clone(), life, seed).await?;
        let gateway = plan.start(upstream.port)?;
        live_and_die(&world, gateway, life, &mut dice).await?;
    }

    let upstream = Upstream::start(world.ledger.clone(), kills, seed).await?;
    let mut gateway = plan.start(upstream.port)?;
    gateway.ready().await?;
    world.over.store(true, Ordering::Relaxed);
    while clients.join_next().await.is_some() {}
    ask_for_everything(&world, &mut dice).await;
    gateway.terminate().await?;

    drop(upstream);
    Ok(lock(&world.ledger).verdict())
}

/// One life of the gateway. One in five ends while it starts, or soon after: recovery is then
/// interrupted by the next crash.
async fn live_and_die(
    world: &World,
    mut gateway: Gateway,
    life: u64,
    dice: &mut Dice,
) -> Result<(), Fault> {
    let ready = if dice.once_in(5) {
        tokio::select! {
            ready = gateway.ready() => { ready?; true }
            () = sleep(dice.up_to(10)) => false,
        }
    } else {
        gateway.ready().await?;
        // The hook is asked only some time after the start.
        let most = if world.policy == Policy::Reconcile { 800 } else { 300 };
        sleep(dice.up_to(most)).await;
        true
    };
    lock(&world.ledger).killed(life, ready);
    gateway.kill().await
}

/// Asks for every answered key once more, and for every unknown one.
async fn ask_for_everything(world: &Arc<World>, dice: &mut Dice) {
    let (mut keys, unknown) = lock(&world.ledger).settled();
    keys.extend(unknown);
    keys.sort_unstable();
    let share = keys.len().div_ceil(16).max(1);
    let mut askers = JoinSet::new();
    for keys in keys.chunks(share) {
        let (world, keys, mut dice) = (world.clone(), keys.to_vec(), dice.split());
        askers.spawn(async move {
            for key in keys {
                client::operate(&world, &key, &mut dice).await;
            }
        });
    }
    while askers.join_next().await.is_some() {}
}
