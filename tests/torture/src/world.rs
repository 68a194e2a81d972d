//! Worlds: gateways on one store, their upstreams, their clients, and the tasks that kill the
//! gateways.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::client;
use crate::dice::Dice;
use crate::gateway::{self, Plan};
use crate::ledger::{Ledger, TortureCounts};
use crate::process::Process;
use crate::upstream::Upstream;
use crate::{OnUnknownPolicy, TortureError, TortureOptions, lock};

/// State that the clients of one world share.
pub(crate) struct World {
    policy: OnUnknownPolicy,
    ports: Vec<u16>,
    copies: u64,
    ledger: Arc<Mutex<Ledger>>,
    /// Number of incarnations that were started.
    incarnations: AtomicU64,
    over: AtomicBool,
}

impl World {
    pub(crate) fn policy(&self) -> OnUnknownPolicy {
        self.policy
    }

    /// Returns the port of a random gateway.
    pub(crate) fn port(&self, dice: &mut Dice) -> u16 {
        self.ports[dice.below(self.ports.len() as u64) as usize]
    }

    /// Returns the number of identical requests that one in four operations sends at once.
    pub(crate) fn copies(&self) -> u64 {
        self.copies
    }

    pub(crate) fn ledger(&self) -> &Mutex<Ledger> {
        &self.ledger
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// Runs a world to its end: all kills, then a last incarnation that must replay every response.
pub(crate) async fn run(
    options: &TortureOptions,
    policy: OnUnknownPolicy,
    kills: u64,
    folder: &Path,
    mut dice: Dice,
) -> Result<(TortureCounts, Vec<String>), TortureError> {
    let folder: PathBuf = folder.join(policy.to_string());
    std::fs::create_dir(&folder)?;
    let ledger = Arc::new(Mutex::new(Ledger::new(policy)));
    let ports = gateway::free_ports(options.gateways, &mut dice)?;
    let store = options.store.clone().unwrap_or_else(|| gateway::store_in(&folder));
    let plans = ports.iter().map(|&port| Plan {
        program: options.gateway.clone(),
        store: store.clone(),
        policy,
        port,
        shared: options.gateways > 1,
        log: folder.join(format!("stderr-{port}")),
    });
    let plans: Vec<_> = plans.collect();
    let (incarnations, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let world =
        Arc::new(World { policy, ports, copies: options.duplicates, ledger, incarnations, over });

    let mut clients = JoinSet::new();
    for number in 0..options.clients {
        clients.spawn(client::run(world.clone(), number, dice.split()));
    }
    let seed = dice.roll();
    let mut seats = JoinSet::new();
    for (seat, plan) in plans.into_iter().enumerate() {
        // The first gateway gets the remainder.
        let share = kills / options.gateways;
        let kills = if seat == 0 { kills - share * (options.gateways - 1) } else { share };
        seats.spawn(sit(world.clone(), plan, kills, seed, dice.split()));
    }
    let mut last = Vec::new();
    while let Some(seat) = seats.join_next().await {
        last.push(seat.map_err(|error| TortureError(error.to_string()))??);
    }
    world.over.store(true, Ordering::Relaxed);
    while clients.join_next().await.is_some() {}
    ask_for_everything(&world, &mut dice).await;
    for (gateway, upstream) in last {
        gateway.terminate().await?;
        drop(upstream);
    }
    Ok(lock(&world.ledger).verdict())
}

/// Runs the incarnations of one gateway in sequence; returns the last one, which is not killed.
async fn sit(
    world: Arc<World>,
    plan: Plan,
    kills: u64,
    seed: u64,
    mut dice: Dice,
) -> Result<(Process, Upstream), TortureError> {
    let born = async || {
        let incarnation = world.incarnations.fetch_add(1, Ordering::Relaxed);
        let upstream = Upstream::start(world.ledger.clone(), incarnation, seed).await?;
        let gateway = Process::spawn(&plan.recipe(upstream.port))?;
        Ok::<_, TortureError>((incarnation, upstream, gateway))
    };
    for _ in 0..kills {
        let (incarnation, _upstream, gateway) = born().await?;
        live_and_die(&world, gateway, plan.port, incarnation, &mut dice).await?;
    }
    let (_, upstream, mut gateway) = born().await?;
    gateway.ready().await?;
    Ok((gateway, upstream))
}

/// Runs one incarnation of a gateway. One in five is killed during its start or soon after. A gateway
/// listens before it opens its store, so that kills interrupt recovery too.
async fn live_and_die(
    world: &World,
    mut gateway: Process,
    port: u16,
    incarnation: u64,
    dice: &mut Dice,
) -> Result<(), TortureError> {
    let ready = if dice.once_in(5) {
        tokio::select! {
            listens = gateway.listens_on(port) => { listens?; true }
            () = sleep(dice.up_to(Duration::from_millis(10))) => false,
        }
    } else {
        gateway.listens_on(port).await?;
        // The gateway calls the hook only some time after its start. If gateways share a store, an
        // execution continues only after a lease lapses, so that a shorter time shows nothing.
        let waits = world.policy == OnUnknownPolicy::Reconcile || world.ports.len() > 1;
        let most = Duration::from_millis(if waits { 800 } else { 300 });
        sleep(dice.up_to(most)).await;
        true
    };
    lock(&world.ledger).killed(incarnation, ready);
    Ok(gateway.kill().await?)
}

/// Repeats every key that has a response and every key that is unknown.
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
