//! Kills the bank repeatedly, between any two of its steps and at any moment, and loses the replies
//! to its COMMITs, while clients retry until they get a response. In the end the ledger must agree
//! with the responses.
//!
//! `HAPAX_KILLS=3000` sets the number of kills, `HAPAX_SEED` the seed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_bank::{TABLES, Transfer};
use hapax_testkit::SeededEntropy;
use hapax_testkit::faults::{FaultProxy, FaultProxyRates, ProxyCounts};
use hapax_testkit::servers::PostgresServer;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::client::{Door, ask};
use super::ledger::{ACCOUNTS, BALANCE, Ledger};
use super::process::Plan;

const CLIENTS: u64 = 16;

/// Limit of attempts for a transfer. Against a bank that is down they take a minute, and it is down
/// only for moments. Attempts are counted, not timed, so that a paused machine does no harm.
const ATTEMPTS: u32 = 4_000;

/// Time within which the bank must end at a step of its own.
const DEATH: Duration = Duration::from_secs(60);

struct Seen {
    kills: u64,
    deaths: BTreeMap<String, u64>,
    ledger: Ledger,
    faults: ProxyCounts,
}

/// Kills the bank until `kills` were counted, or until a violation.
async fn torture(kills: u64, seed: u64, bug: Option<&'static str>) -> Seen {
    let server = PostgresServer::start().await;
    server.sql("postgres", TABLES).await;
    let accounts =
        format!("INSERT INTO accounts SELECT id, {BALANCE} FROM generate_series(1, {ACCOUNTS}) id");
    server.sql("postgres", &accounts).await;
    let dice = Arc::new(SeededEntropy::new(seed));
    let proxy = FaultProxy::before(server.address(), seed).await.unwrap();
    proxy.only(b"COMMIT\0");
    let harm =
        FaultProxyRates { silence: 1, ..FaultProxyRates::all(8, Duration::from_millis(200)) };
    proxy.set(harm);
    let folder = tempfile::tempdir().unwrap();
    let mut plan = Plan::new(&server, folder.path().join("bank.log"));
    plan.pool = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.address().port());
    plan.bug = bug;

    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (ledger, over, dice) = (Arc::clone(&ledger), Arc::clone(&over), Arc::clone(&dice));
        let port = plan.port;
        clients.spawn(async move {
            let mut count = 0;
            while !over.load(Ordering::Relaxed) {
                count += 1;
                operate(port, &ledger, &dice, format!("{client}-{count}")).await;
            }
        });
    }
    let mut killed = 0;
    while killed + plan.deaths().values().sum::<u64>() < kills
        && ledger.lock().unwrap().violations.is_empty()
    {
        // One process in three is killed by the test, the others kill themselves at a step.
        let ours = dice.below(3) == 0;
        plan.die = if ours { 0 } else { 400 };
        let mut bank = plan.start(dice.below(u64::MAX));
        if bank.ready().await {
            let life = if ours { dice.below(250) } else { 1_000 };
            killed += u64::from(bank.kill_after(Duration::from_millis(life)).await);
        } else {
            bank.kill_after(DEATH).await;
        }
    }
    proxy.set(FaultProxyRates::default());
    // The remaining transfers finish without faults.
    plan.die = 0;
    over.store(true, Ordering::Relaxed);
    let mut bank = plan.start(0);
    assert!(bank.ready().await);
    clients.join_all().await;
    let mut ledger = std::mem::take(&mut *ledger.lock().unwrap());
    ledger.judge(&server).await;
    bank.kill_after(Duration::ZERO).await;
    Seen { kills: killed, deaths: plan.deaths(), ledger, faults: proxy.counts() }
}

/// Requests one transfer until it has a final response; sometimes with duplicates, and sometimes
/// once more.
async fn operate(port: u16, ledger: &Arc<Mutex<Ledger>>, dice: &Arc<SeededEntropy>, key: String) {
    let sender = dice.below(ACCOUNTS as u64) as i64 + 1;
    let receiver = (sender + dice.below(ACCOUNTS as u64 - 1) as i64) % ACCOUNTS + 1;
    let amount = dice.below(400) as i64 + 1;
    let door = if dice.below(2) == 0 { Door::Handler } else { Door::Function };
    let asked = Transfer { reference: key, sender, receiver, amount };
    ledger.lock().unwrap().asked(&asked);
    let copies = if dice.below(4) == 0 { 3 } else { 1 };
    let mut asking = JoinSet::new();
    for _ in 0..copies {
        let (ledger, dice, asked) = (Arc::clone(ledger), Arc::clone(dice), asked.clone());
        asking.spawn(async move { insist(port, &ledger, &dice, door, &asked).await });
    }
    asking.join_all().await;
    if dice.below(4) == 0 {
        insist(port, ledger, dice, door, &asked).await;
    }
}

async fn insist(
    port: u16,
    ledger: &Mutex<Ledger>,
    dice: &SeededEntropy,
    door: Door,
    asked: &Transfer,
) {
    for attempt in 1.. {
        let reply = ask(port, door, asked).await;
        if ledger.lock().unwrap().heard(asked, reply, attempt >= ATTEMPTS) {
            return;
        }
        sleep(Duration::from_millis(1 + dice.below(30))).await;
    }
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_ledger_says_what_clients_were_told() {
    let (kills, first) = (setting("HAPAX_KILLS", 40), setting("HAPAX_SEED", 1));
    // A slow machine gets fewer transfers between two kills: the seed after it tries again.
    for seed in first..first + 10 {
        if ledger_holds(kills, seed).await {
            return;
        }
    }
    panic!("ten seeds did not reach every fault");
}

/// Returns whether the run reached a kill, a transfer, a declined one and a lost reply to COMMIT.
async fn ledger_holds(kills: u64, seed: u64) -> bool {
    let Seen { kills: ours, deaths, ledger, faults } = torture(kills, seed, None).await;
    let (done, declined) = ledger.tally();
    println!(
        "seed {seed}: {ours} kills at any moment, and at steps {deaths:?}; {done} transfers, \
         {declined} declined, {} replies, {} of them to retry; {faults:?}",
        ledger.replies, ledger.not_yet
    );
    assert!(ledger.violations.is_empty(), "{:#?}", ledger.violations);
    if kills >= 1_000 {
        assert!(faults.late_requests > 0 && faults.lost_requests > 0 && faults.silences > 0);
        for step in [
            "before a claim",
            "after a claim",
            "before a write",
            "after a write",
            "with a connection",
            "before BEGIN",
            "after BEGIN",
            "after the work",
            "before COMMIT",
            "after COMMIT",
            "before ROLLBACK",
            "after ROLLBACK",
        ] {
            assert!(deaths.contains_key(step), "it never died {step}");
        }
    }
    ours > 0 && done > 0 && declined > 0 && faults.lost_replies + faults.torn_replies > 0
}

/// Finds a record that is not written in the transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_planted_bug_is_found() {
    'bugs: for bug in ["outside", "early"] {
        for seed in 0..10 {
            let Seen { ledger, kills, deaths, .. } = torture(30, seed, Some(bug)).await;
            let deaths: u64 = deaths.values().sum();
            println!("{bug}: {:?} after {} kills", ledger.violations.first(), kills + deaths);
            if !ledger.violations.is_empty() {
                continue 'bugs;
            }
        }
        panic!("{bug} was not found");
    }
}
