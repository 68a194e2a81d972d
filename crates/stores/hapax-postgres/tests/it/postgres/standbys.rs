//! Synchronous standbys: absent at a commit, and promoted.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::diagnose::Severity;
use hapax_core::transaction::{
    ExecutionEnd, ExecutionResult, TransactResult, TransactionBackend, Tx,
};
use hapax_core::{
    Claim, FinishError, Idempotency, Lease, OnUnknown, Outcome, Policy, Scope, Store, SystemClock,
};
use hapax_postgres::{
    PgTransactions, PgTx, PostgresConnectError, PostgresOptions, PostgresStore, diagnose,
};
use hapax_testkit::servers::{PgBouncer, PostgresServer};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};

use super::support::{SameRequest, at, claim, expect_stored, key, named, own, policy};

/// More than any server or process takes.
const LIMIT: Duration = Duration::from_secs(60);

/// How long a process has, after a fault, to take for recorded what is not replicated.
const WINDOW: Duration = Duration::from_secs(3);

/// Renewed after a third, which is later than the fault; and over when a standby is promoted, or
/// soon after.
const LEASE: Duration = Duration::from_secs(9);

/// Backends that wait for a standby.
const WAITS: &str = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
const WAITING: &str = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_failover_after_a_crash_executes_nothing_twice() {
    let drills = std::env::var("HAPAX_DRILLS").map_or(9, |number| number.parse().unwrap());
    let mut primary = PostgresServer::start().await;
    primary.sql("postgres", "CREATE TABLE work (of bigint)").await;
    for number in 0..drills {
        primary = Drill::of(number).run(primary).await;
    }
}

/// What waits for the standby when the fault comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Claim,
    Completion,
    Transaction,
}

/// Ends the wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// One backend is killed, and the server recovers.
    Crash,
    /// All of the server is killed, and started again.
    Restart,
    /// All connections are ended.
    Terminate,
}

#[derive(Clone, Copy, Debug)]
struct Drill {
    number: u64,
    stage: Stage,
    fault: Fault,
    on_unknown: OnUnknown,
}

/// What a process came to know.
#[derive(Debug)]
enum Told {
    Execute(#[allow(dead_code, reason = "held until the process ends")] Box<Lease>),
    Recorded,
    Nothing,
}

impl Drill {
    fn of(number: u64) -> Self {
        // Nine drills are each stage with each fault.
        let (stage, fault, round) = (number % 3, number / 3 % 3, number / 9);
        // A claim that is lost executes twice under any policy, a lost outcome under this one.
        let on_unknown = match (stage == 0) ^ (round % 2 == 1) {
            true => OnUnknown::Block,
            false => OnUnknown::Reexecute,
        };
        let stage = [Stage::Claim, Stage::Completion, Stage::Transaction][stage as usize];
        let fault = [Fault::Crash, Fault::Restart, Fault::Terminate][fault as usize];
        Self { number, stage, fault, on_unknown }
    }

    fn policy(&self) -> Policy {
        let mut policy = policy(self.on_unknown);
        policy.terms.lease = LEASE;
        policy
    }

    async fn act(self, engine: Idempotency, lease: Option<Lease>, by: PgTransactions) -> Told {
        let outcome = Outcome::new("test/1", "yes");
        let Some(lease) = lease else {
            let (key, policy) = (named(self.number), self.policy());
            return match engine.claim(&Scope::shared(), &key, &SameRequest, &policy).await {
                Ok(Claim::Execute(lease)) => Told::Execute(Box::new(lease)),
                _ => Told::Nothing,
            };
        };
        if self.stage == Stage::Completion {
            return match lease.complete(outcome, None).await {
                Ok(_) => Told::Recorded,
                Err(FinishError::Pending) => Told::Nothing,
                Err(error) => panic!("{self:?}: {error}"),
            };
        }
        let work = move |tx: Tx<PgTx>, _| {
            let outcome = outcome.clone();
            async move {
                tx.batch_execute("INSERT INTO work VALUES (1)").await.ok();
                (ExecutionEnd::Complete { outcome, retention: None }, ())
            }
        };
        match lease.transact(&TransactionBackend::new(Arc::new(by)), work).await {
            TransactResult::Ended(ExecutionResult::Recorded(_), ()) => Told::Recorded,
            _ => Told::Nothing,
        }
    }

    /// Fails over from `primary`, with a commit that its standby never got. Returns the new primary.
    async fn run(self, mut primary: PostgresServer) -> PostgresServer {
        let mut standby = PostgresServer::standby_of(&primary, "one").await;
        wait_for(&primary, "one").await;
        holds(&primary, "SELECT sync_state FROM pg_stat_replication", "sync").await;
        let (ports, policy) = ([primary.port(), standby.port()], self.policy());
        let process = Process::start(ports, LIMIT).await.unwrap();
        let lease = match self.stage {
            Stage::Claim => None,
            _ => {
                let (engine, policy) = (process.engine(), policy);
                let owning = async move { own(&engine, self.number, &policy).await };
                Some(process.runtime().spawn(owning).await.unwrap())
            }
        };
        let mut executions = u32::from(lease.is_some());

        // The standby is away, and a commit waits for it.
        standby.kill().await;
        let by = super::transact::at(process.store(), &primary);
        let mut acting = process.runtime().spawn(self.act(process.engine(), lease, by));
        holds(&primary, WAITING, "t").await;
        let waiting = primary.sql("postgres", &format!("{WAITS} LIMIT 1")).await;
        match self.fault {
            Fault::Crash => primary.crash(),
            Fault::Restart => {
                primary.kill().await;
                primary.restart().await;
            }
            Fault::Terminate => drop(primary.sql("postgres", super::faults::TERMINATE).await),
        }
        let gone = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {waiting}");
        holds(&primary, &gone, "0").await;

        // What anybody takes for recorded from here on has to be there afterwards.
        let told = timeout(WINDOW, &mut acting).await.ok().map(Result::unwrap);
        let mut recorded = matches!(told, Some(Told::Recorded));
        executions += u32::from(matches!(told, Some(Told::Execute(_))));
        if let Ok(other) = Process::start(ports, WINDOW).await {
            match other.claim(self.number, &policy).await {
                Some(Claim::Execute(_)) => executions += 1,
                Some(Claim::Replay(_)) => recorded = true,
                _ => {}
            }
        }
        primary.kill().await;
        standby.restart().await;
        standby.promote().await;

        let told = match told {
            Some(told) => told,
            // It finds the new primary by itself.
            None => {
                let late = timeout(LIMIT, acting).await.expect("there is a primary").unwrap();
                let got_through =
                    self.stage == Stage::Transaction || !matches!(late, Told::Nothing);
                assert!(got_through, "{self:?}: {late:?}");
                executions += u32::from(matches!(late, Told::Execute(_)));
                recorded |= matches!(late, Told::Recorded);
                late
            }
        };
        // With what it still had to write.
        drop(process);
        drop(told);
        let next = Process::start(ports, LIMIT).await.unwrap();
        let asked = loop {
            match next.claim(self.number, &policy).await {
                None | Some(Claim::InFlight { .. }) => {}
                Some(asked) => break asked,
            }
        };
        executions += u32::from(matches!(asked, Claim::Execute(_)));
        // A transaction that the new primary does not have did not happen, so that it may run again.
        if self.on_unknown == OnUnknown::Block && self.stage != Stage::Transaction {
            assert!(executions <= 1, "{self:?}: {executions} executions");
        }
        assert!(
            !recorded || matches!(asked, Claim::Replay(_)),
            "{self:?}: recorded, and {asked:?}"
        );
        println!("{self:?}: {executions} executions, recorded: {recorded}");
        drop(next);
        standby
    }
}

/// A process, on a runtime of its own, so that it can be killed: when it is dropped.
struct Process {
    runtime: Option<Runtime>,
    made: Option<(Arc<PostgresStore>, Idempotency)>,
}

impl Process {
    /// On the servers at `ports`, of which one is the primary.
    async fn start(ports: [u16; 2], patience: Duration) -> Result<Self, PostgresConnectError> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut process = Self { runtime: Some(runtime), made: None };
        let making = async move {
            let store = Arc::new(PostgresStore::connect(hosts(ports)).await?);
            let engine = Idempotency::builder(Arc::clone(&store) as Arc<dyn Store>)
                .namespace("")
                .store_timeout(patience)
                .build()
                .unwrap();
            Ok((store, engine))
        };
        process.made = Some(process.runtime().spawn(making).await.unwrap()?);
        Ok(process)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    fn store(&self) -> &Arc<PostgresStore> {
        &self.made.as_ref().unwrap().0
    }

    fn engine(&self) -> Idempotency {
        self.made.as_ref().unwrap().1.clone()
    }

    async fn claim(&self, of: u64, policy: &Policy) -> Option<Claim> {
        let (engine, policy) = (self.engine(), *policy);
        let claiming =
            async move { engine.claim(&Scope::shared(), &named(of), &SameRequest, &policy).await };
        self.runtime().spawn(claiming).await.unwrap().ok()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn hosts([first, second]: [u16; 2]) -> PostgresOptions {
    let url = format!(
        "postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres\
         ?target_session_attrs=read-write"
    );
    url.parse().unwrap()
}

/// Has commits wait for the standby `name` from now on.
async fn wait_for(server: &PostgresServer, name: &str) {
    set_names(server, &format!("SET synchronous_standby_names = '{name}'"), name).await;
}

/// Has commits wait for none.
async fn wait_for_none(server: &PostgresServer) {
    set_names(server, "RESET synchronous_standby_names", "").await;
}

async fn set_names(server: &PostgresServer, change: &str, wanted: &str) {
    server.sql("postgres", &format!("ALTER SYSTEM {change}")).await;
    server.sql("postgres", "SELECT pg_reload_conf()").await;
    holds(server, "SHOW synchronous_standby_names", wanted).await;
}

/// Waits until `text` returns `wanted`.
async fn holds(server: &PostgresServer, text: &str, wanted: &str) {
    let ownership = async {
        loop {
            match server.try_sql("postgres", text).await {
                Ok(found) if found == wanted => return,
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let held = timeout(LIMIT, ownership).await;
    held.unwrap_or_else(|_| panic!("{text} does not become {wanted:?}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_connection_without_its_standby_is_not_read_from() {
    let server = PostgresServer::start().await;
    let store = PostgresStore::connect(at(&server)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    wait_for(&server, "absent").await;
    server.sql("postgres", super::faults::TERMINATE).await;
    // The end of the connection may be noticed by the first one.
    let _ = store.load(&key(1)).await;
    store.load(&key(1)).await.unwrap_err();
    let refused = PostgresStore::connect(at(&server)).await.unwrap_err();
    assert!(matches!(refused, PostgresConnectError::Unconfirmed), "{refused}");

    let findings = diagnose(&at(&server), &SystemClock).await.unwrap();
    let finding = findings.iter().find(|finding| finding.subject == "standbys").unwrap();
    assert_eq!(finding.severity, Severity::Risk, "{finding}");
    assert!(finding.found.ends_with("absent is absent"), "{finding}");

    wait_for_none(&server).await;
    PostgresStore::connect(at(&server)).await.unwrap();
}

/// Cancels the backends that wait, as an operator does who believes that they hang.
const CANCEL: &str =
    "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_record_whose_commit_was_cancelled_before_a_standby_had_it_is_neither_stored_nor_replayed()
 {
    let server = PostgresServer::start().await;
    server.sql("postgres", "ALTER DATABASE postgres SET client_min_messages = error").await;
    let writer = Arc::new(PostgresStore::connect(at(&server)).await.unwrap());
    let reader = PostgresStore::connect(at(&server)).await.unwrap();
    expect_stored(&*writer, &claim(1)).await;
    expect_stored(&reader, &claim(3)).await;
    // Each connection has confirmed its reads before.
    assert!(reader.load(&key(1)).await.unwrap().stored.is_some());
    wait_for(&server, "absent").await;
    let writing = tokio::spawn({
        let writer = Arc::clone(&writer);
        async move { writer.swap(claim(2)).await }
    });
    holds(&server, WAITING, "t").await;
    server.sql("postgres", CANCEL).await;
    holds(&server, "SELECT count(*) FROM hapax_cells", "3").await;
    writing.await.unwrap().unwrap_err();
    reader.load(&key(2)).await.unwrap_err();
    let mut duplicate = claim(2);
    duplicate.write_id = super::support::write_id(17);
    reader.swap(duplicate).await.unwrap_err();
    wait_for_none(&server).await;
    let there = async { while reader.load(&key(2)).await.is_err() {} };
    timeout(LIMIT, there).await.expect("commits wait for no standby");
    assert!(reader.load(&key(2)).await.unwrap().stored.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_crash_behind_a_pooler_is_not_read_from_without_a_standby() {
    let server = PostgresServer::start().await;
    let pooler = PgBouncer::start(&server, 4).await;
    let options: PostgresOptions = pooler.url("postgres").parse().unwrap();
    let store = Arc::new(PostgresStore::connect(options).await.unwrap());
    // The connection to the pooler that loads survives what follows.
    assert!(store.load(&key(1)).await.unwrap().stored.is_none());
    let before = store.stats().connections;
    wait_for(&server, "absent").await;
    let writing = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.swap(claim(1)).await }
    });
    holds(&server, WAITING, "t").await;
    let waiting = server.sql("postgres", &format!("{WAITS} LIMIT 1")).await;
    server.crash();
    let gone = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {waiting}");
    holds(&server, &gone, "0").await;
    holds(&server, "SELECT count(*) FROM hapax_cells", "1").await;
    writing.await.unwrap().unwrap_err();
    store.load(&key(1)).await.unwrap_err();
    // The pooler made a new connection to the server: the store kept the one to the pooler.
    assert_eq!(store.stats().connections, before);
    wait_for_none(&server).await;
    let there = async { while store.load(&key(1)).await.is_err() {} };
    timeout(LIMIT, there).await.expect("commits wait for no standby");
    assert!(store.load(&key(1)).await.unwrap().stored.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_primary_is_found_beside_hosts_that_do_not_answer() {
    let server = PostgresServer::start().await;
    let silent = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let ports = [silent.local_addr().unwrap().port(), server.port()];
    let store = PostgresStore::connect(hosts(ports).listen(true)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    let findings = diagnose(&hosts(ports), &SystemClock).await.unwrap();
    let role = findings.iter().find(|finding| finding.subject == "role").unwrap();
    assert_eq!(role.found, "primary");
}
