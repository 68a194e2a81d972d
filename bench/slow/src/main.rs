//! What idle connections, slow clients and a slow upstream do to a gateway's memory, and to the latency
//! of everybody else.
//!
//!     cargo build --release
//!     cargo run --release --manifest-path bench/slow/Cargo.toml -- target/release/hapax
//!
//! Probes go at a steady pace from the first to the last second: a new key, then its replay. Burden is
//! added step by step and stays. Printed are, for each step, the connections of clients, the memory that
//! the gateway has resident (Linux), and the probes' latencies. Arguments: the program, idle
//! connections (10000), the slow ones of each kind (200), seconds of each step (8).

mod burden;
mod http;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use burden::Burden;
use http::Connection;
use rustix::process::{Resource, getrlimit, setrlimit};

/// Between two probes of one prober.
const PACE: Duration = Duration::from_millis(10);
const PROBERS: u64 = 2;

type Any = Box<dyn std::error::Error>;

struct Gateway(Child);

impl Gateway {
    /// What it has in memory, in MiB.
    fn resident(&self) -> Result<f64, Any> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)).ok_or("no VmRSS")?;
        Ok(kib.parse::<f64>()? / 1024.0)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> Result<(), Any> {
    let mut arguments = std::env::args().skip(1);
    let program = arguments.next().ok_or("the path of the program `hapax` is needed")?;
    let mut number = |or: usize| arguments.next().map_or(Ok(or), |text| text.parse());
    let (idle, slow, seconds) = (number(10_000)?, number(200)?, number(8)?);

    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;
    let upstream = TcpListener::bind("127.0.0.1:0")?;
    let behind = upstream.local_addr()?;
    thread::spawn(move || http::serve(&upstream));
    let folder = std::env::temp_dir().join(format!("hapax-slow-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let connections = idle * 2 + slow * 4 + 100;
    let (gateway, address) = start(&program, behind, &folder, connections)?;

    let ended = Arc::new(AtomicBool::new(false));
    let latencies = Arc::new(Mutex::new(Vec::new()));
    let probers: Vec<_> = (0..PROBERS)
        .map(|prober| {
            let (ended, latencies) = (Arc::clone(&ended), Arc::clone(&latencies));
            thread::spawn(move || probe(address, prober, &ended, &latencies))
        })
        .collect();

    println!("step                              connections  resident    p50     p99     max");
    let mut burden = Burden::new(address);
    let steps: [(&str, fn(&mut Burden, usize), usize); 6] = [
        ("nothing", |_, _| {}, 0),
        ("idle connections of HTTP/1.1", Burden::idle_http1, idle),
        ("idle connections of HTTP/2", Burden::idle_http2, idle / 10),
        ("clients that send a byte at times", Burden::trickle, slow),
        ("clients that read no answer", Burden::deaf, slow),
        ("requests that take long behind", Burden::long, slow),
    ];
    for (name, add, count) in steps {
        add(&mut burden, count);
        thread::sleep(Duration::from_secs(1));
        take(&latencies);
        thread::sleep(Duration::from_secs(seconds as u64));
        let mut took = take(&latencies);
        took.sort_unstable();
        let at =
            |part: f64| took[((took.len() - 1) as f64 * part) as usize].as_secs_f64() * 1_000.0;
        println!(
            "{name:33} {:11}  {:4.0} MiB {:6.2}  {:6.2}  {:6.2} ms",
            burden.connections(),
            gateway.resident()?,
            at(0.5),
            at(0.99),
            at(1.0),
        );
    }
    ended.store(true, Ordering::SeqCst);
    for prober in probers {
        prober.join().map_err(|_| "a probing client failed")?;
    }
    drop(gateway);
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

fn start(
    program: &str,
    upstream: SocketAddr,
    folder: &Path,
    connections: usize,
) -> Result<(Gateway, SocketAddr), Any> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    // As much as so many connections may take, and half a gibibyte.
    let memory = connections * 192 * 1024 + (512 << 20);
    let gateway = Command::new(program)
        .args(["gateway", "--admin", "off", "--listen", &address.to_string()])
        .args(["--upstream", &format!("http://{upstream}"), "--log-level", "warn"])
        .args(["--max-connections", &connections.to_string()])
        .args(["--max-memory", &format!("{}MiB", memory >> 20)])
        // Nobody is to be given up while it is measured.
        .args(["--head-timeout", "10m", "--body-timeout", "10m"])
        .args(["--store", &format!("file:{}", folder.join("hapax.db").display())])
        .stdout(Stdio::null())
        .spawn()?;
    let gateway = Gateway(gateway);
    for _ in 0..200 {
        if TcpStream::connect(address).is_ok() {
            return Ok((gateway, address));
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err("the gateway did not start".into())
}

fn take(latencies: &Mutex<Vec<Duration>>) -> Vec<Duration> {
    std::mem::take(&mut *latencies.lock().expect("no prober panics with it"))
}

/// An open loop: a probe that is late does not make the next one later.
fn probe(address: SocketAddr, prober: u64, ended: &AtomicBool, latencies: &Mutex<Vec<Duration>>) {
    let mut connection = Connection::open(address);
    let mut due = Instant::now();
    for count in 0_u64.. {
        if ended.load(Ordering::SeqCst) {
            return;
        }
        // Every other one is the replay of the one before.
        let key = format!("probe-{prober}-{}", count / 2);
        due += PACE;
        thread::sleep(due.saturating_duration_since(Instant::now()));
        assert_eq!(connection.post("/payments", &key), 201);
        latencies.lock().expect("no prober panics with it").push(due.elapsed());
    }
}
