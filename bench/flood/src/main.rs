//! What a flood of distinct keys does to the latency of other keys.
//!
//!     cargo build --release
//!     cargo run --release --manifest-path bench/flood/Cargo.toml -- target/release/hapax
//!
//! Probes go at a steady pace from the first to the last second: a new key, then its replay. In
//! turn it is calm, and a flood of new keys comes over other connections, each as fast as it is
//! answered. Printed are the probes' latencies in both, and their ratio, round by round: the ratio
//! holds when the machine's speed drifts. Arguments: the program, keys in all (100000), connections
//! of the flood (8), rounds (4).

mod http;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use http::{Connection, serve};

/// Between two probes of one prober.
const PACE: Duration = Duration::from_millis(10);
const PROBERS: u64 = 2;
/// How long it is calm in each round.
const CALM: Duration = Duration::from_secs(8);

struct Gateway(Child);

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let program = arguments.next().ok_or("the path of the program `hapax` is needed")?;
    let mut number = |or: u64| arguments.next().map_or(Ok(or), |text| text.parse());
    let (keys, connections, rounds) = (number(100_000)?, number(8)?, number(4)?);

    let upstream = TcpListener::bind("127.0.0.1:0")?;
    let behind = upstream.local_addr()?;
    thread::spawn(move || serve(&upstream));
    let folder = std::env::temp_dir().join(format!("hapax-flood-{}", std::process::id()));
    std::fs::create_dir(&folder)?;
    let (gateway, address) = start(&program, behind, &folder)?;

    let flooding = Arc::new(AtomicBool::new(false));
    let ended = Arc::new(AtomicBool::new(false));
    let latencies = Arc::new(Mutex::new((Vec::new(), Vec::new())));
    let probers: Vec<_> = (0..PROBERS)
        .map(|prober| {
            let (flooding, ended) = (flooding.clone(), ended.clone());
            let latencies = latencies.clone();
            thread::spawn(move || probe(address, prober, &flooding, &ended, &latencies))
        })
        .collect();

    println!("{keys} keys over {connections} connections, {rounds} rounds; milliseconds");
    println!("round  probes      p50 calm  flood  ratio    p99 calm  flood  ratio   flood keys/s");
    let next = Arc::new(AtomicU64::new(0));
    let mut ratios = Vec::new();
    for round in 1..=rounds {
        take(&latencies);
        thread::sleep(CALM);
        flooding.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        let until = keys * round / rounds;
        let floods: Vec<_> = (0..connections)
            .map(|_| {
                let next = next.clone();
                thread::spawn(move || flood(address, &next, until))
            })
            .collect();
        for flood in floods {
            flood.join().map_err(|_| "a flooding client failed")?;
        }
        next.store(until, Ordering::SeqCst);
        let speed = (keys / rounds) as f64 / begun.elapsed().as_secs_f64();
        flooding.store(false, Ordering::SeqCst);
        let (mut calm, mut flooded) = take(&latencies);
        calm.sort_unstable();
        flooded.sort_unstable();
        let at = |sorted: &[Duration], part: f64| {
            sorted[((sorted.len() - 1) as f64 * part) as usize].as_secs_f64() * 1_000.0
        };
        let (calm_50, flood_50) = (at(&calm, 0.5), at(&flooded, 0.5));
        let (calm_99, flood_99) = (at(&calm, 0.99), at(&flooded, 0.99));
        println!(
            "{round:5} {:5}/{:<5}    {calm_50:6.2} {flood_50:6.2}  {:5.2}     {calm_99:6.2} {flood_99:6.2}  {:5.2}   {speed:12.0}",
            calm.len(),
            flooded.len(),
            flood_50 / calm_50,
            flood_99 / calm_99,
        );
        ratios.push(flood_99 / calm_99);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio of p99: {:.2}", ratios[ratios.len() / 2]);
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
) -> Result<(Gateway, SocketAddr), Box<dyn std::error::Error>> {
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let gateway = Command::new(program)
        .args(["gateway", "--admin", "off", "--listen", &address.to_string()])
        .args(["--upstream", &format!("http://{upstream}")])
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

type Latencies = Mutex<(Vec<Duration>, Vec<Duration>)>;

fn take(latencies: &Latencies) -> (Vec<Duration>, Vec<Duration>) {
    std::mem::take(&mut *latencies.lock().expect("no prober panics with it"))
}

/// An open loop: a probe that is late does not make the next one later.
fn probe(
    address: SocketAddr,
    prober: u64,
    flooding: &AtomicBool,
    ended: &AtomicBool,
    latencies: &Latencies,
) {
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
        let during = flooding.load(Ordering::SeqCst);
        assert_eq!(connection.post(&key), 201);
        let took = due.elapsed();
        // One that the flood began or ended in counts for neither.
        if during == flooding.load(Ordering::SeqCst) {
            let mut latencies = latencies.lock().expect("no prober panics with it");
            if during { latencies.1.push(took) } else { latencies.0.push(took) }
        }
    }
}

fn flood(address: SocketAddr, next: &AtomicU64, until: u64) {
    let mut connection = Connection::open(address);
    loop {
        let key = next.fetch_add(1, Ordering::SeqCst);
        if key >= until {
            return;
        }
        assert_eq!(connection.post(&format!("flood-{key}")), 201);
    }
}
