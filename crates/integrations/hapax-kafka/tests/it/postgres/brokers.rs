//! A broker that keeps its log and the offsets of groups through a restart, which the mock cluster does not: the
//! program `tansu` 0.6 with SQLite, named by the variable `TANSU`. It stores no metadata of commits.

#[cfg(feature = "tls")]
mod tls;

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hapax_testkit::servers::free_port;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use super::consumer::Mode;
use super::world::World;
use crate::kafka::cluster::{Cluster, LIMIT};

/// A broker.
struct Broker {
    program: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
    /// The port to which it directs clients.
    advertised: u16,
    child: Option<Child>,
}

impl Broker {
    /// Returns a broker that does not run. Without the variable it prints that the test is left out, and returns
    /// `None`.
    fn new(test: &str) -> Option<Self> {
        let Some(program) = std::env::var_os("TANSU") else {
            let line = format!("{test}: skipped: TANSU is not set\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let program = PathBuf::from(program);
        let port = free_port();
        Some(Self { program, folder, port, advertised: port, child: None })
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Starts it, and waits until it accepts connections.
    async fn start(&mut self) {
        let url = |port: u16| format!("tcp://127.0.0.1:{port}");
        let mut command = Command::new(&self.program);
        command
            .args(["broker", "--storage-engine", "sqlite://log.db"])
            .args(["--listener-url", &url(self.port)])
            .args(["--advertised-listener-url", &url(self.advertised)])
            .current_dir(self.folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        self.child = Some(command.spawn().unwrap());
        let listens = async {
            while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await.is_err() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(LIMIT, listens).await.expect("the broker starts");
    }

    /// Kills it (SIGKILL). Its files stay.
    async fn kill(&mut self) {
        self.child.take().expect("it runs").kill().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_id_has_one_effect_while_the_broker_is_killed_in_claim_mode() {
    the_broker_is_killed("claims", Mode::Claims).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_id_has_one_effect_while_the_broker_is_killed_in_batch_mode() {
    the_broker_is_killed("batches", Mode::Batches).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_id_has_one_effect_while_the_broker_is_killed_in_positions_mode() {
    the_broker_is_killed("positions", Mode::PositionsWithIds).await;
}

/// `HAPAX_BROKER_KILLS` kills of the broker under load, and of a member after every third.
async fn the_broker_is_killed(test: &str, mode: Mode) {
    let Some(mut broker) = Broker::new(test) else { return };
    let kills = std::env::var("HAPAX_BROKER_KILLS").map_or(3, |kills| kills.parse().unwrap());
    broker.start().await;
    let cluster = Cluster::connect(&broker.address(), test).await;
    let world = World::on(cluster).await;
    let stop = Arc::new(AtomicBool::new(false));
    let publishing = world.publish_until(&stop);
    let stays = world.process(mode);
    let mut other = world.process(mode);
    for number in 0..kills {
        world.more_effects(100).await;
        broker.kill().await;
        if number % 3 == 2 {
            other.kill().await;
            other = world.process(mode);
        }
        broker.start().await;
    }
    world.more_effects(100).await;
    stop.store(true, Ordering::SeqCst);
    publishing.await.unwrap();
    world.drained(LIMIT).await;
    stays.stop().await;
    other.stop().await;
    // A publication that was not confirmed may be in the log twice: a record without an effect is committed.
    world.check_effects().await;
    if mode != Mode::Batches {
        world.check_order().await;
    }
    assert_eq!(world.count("SELECT count(*) FROM hapax_dead_letters").await, 0);
}
