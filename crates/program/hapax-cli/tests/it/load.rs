//! More at once than there is room for, and what the process takes for it.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use crate::world::{Gateway, Upstream, receive};

/// Without a cap, the bodies of each would be held at once.
const CLIENTS: usize = if cfg!(debug_assertions) { 60 } else { 1_000 };

/// As little as is enough for so many.
const MEMORY_MIB: usize = 32 + CLIENTS * 3 / 16 + 34;

/// A debug build of the program is larger than what users run.
const DEBUG_MIB: usize = if cfg!(debug_assertions) { 16 } else { 0 };

const MEBIBYTE: usize = 1 << 20;

/// The most memory that the process has had at one time.
fn peak_mib(gateway: &Gateway) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1024
}

fn start(address: SocketAddr, key: &str, more: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "POST / HTTP/1.1\r\nhost: a\r\nauthorization: Bearer a\r\nidempotency-key: {key}\r\n{more}\r\n\r\n")
        .unwrap();
    stream
}

/// All of them at once, with so much in head and body, each until it has its answer, which is this
/// long.
#[allow(clippy::disallowed_methods, reason = "the pause of a client, outside of tokio")]
fn storm(address: SocketAddr, name: &str, (head, body): (usize, usize), answer: usize) {
    let body = &vec![b'x'; body];
    let more = &format!("x-large: {}\r\ncontent-length: {}", "z".repeat(head), body.len());
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                let key = format!("{name}-{client}");
                loop {
                    let mut stream = start(address, &key, more);
                    // One that is refused may not be read to its end.
                    let sent = stream.write_all(body);
                    match receive(&stream) {
                        Some(got) if got.status == 201 => {
                            assert_eq!(got.body.len(), answer);
                            return;
                        }
                        Some(got) => {
                            let code = got.code();
                            let later = ["overloaded", "outcome-pending", "store-unavailable"];
                            assert!(later.contains(&&*code), "{code}");
                        }
                        None => assert!(sent.is_err(), "{key} was not answered"),
                    }
                    // Clients that retry without a pause would leave a slow machine no time to answer.
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
        }
    });
}

/// A gibibyte without a length; how much of it was taken.
fn endless(address: SocketAddr) -> usize {
    let mut stream = start(address, "endless", "transfer-encoding: chunked");
    let chunk = [b"10000\r\n", &*vec![b'x'; 0x10000], b"\r\n"].concat();
    let taken = (0..16 * 1024).take_while(|_| stream.write_all(&chunk).is_ok()).count();
    let _ = stream.shutdown(Shutdown::Write);
    assert_eq!(receive(&stream).map(|answer| answer.status), Some(413));
    taken * 0x10000
}

#[test]
fn memory_stays_within_its_cap() {
    memory_stays_within_its_cap_with(&[]);
}

#[test]
fn memory_stays_within_its_cap_with_a_cache() {
    memory_stays_within_its_cap_with(&["--cache", "memory:"]);
}

mod redis {
    use hapax_testkit::servers::RedisServer;

    #[tokio::test(flavor = "multi_thread")]
    async fn memory_stays_within_its_cap() {
        let server = RedisServer::start().await;
        let url = server.url();
        let test = move || super::memory_stays_within_its_cap_with(&["--store", &url]);
        tokio::task::spawn_blocking(test).await.unwrap();
    }
}

fn memory_stays_within_its_cap_with(more: &[&str]) {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let (memory, connections) = (format!("{MEMORY_MIB}MiB"), CLIENTS.to_string());
    let limits = ["--max-memory", &memory, "--max-connections", &connections];
    // Not the time of the store is tested: a busy machine may be slow.
    let limits = [&limits[..], &["--store-timeout", "30s"], more].concat();
    let gateway = Gateway::start(upstream.address, folder.path(), &limits);
    let (address, large) = (gateway.address, "y".repeat(MEBIBYTE - 1024));
    let (large, gateway) = (&large, &gateway);
    let within = |what: &str| {
        let peak = peak_mib(gateway);
        println!("{what}: {peak} MiB of {MEMORY_MIB}");
        assert!(peak < MEMORY_MIB + DEBUG_MIB, "{what}: {peak} MiB of {MEMORY_MIB}");
    };
    // A client that goes on sending after its answer is let go on for a while.
    let taken = endless(address) / MEBIBYTE;
    assert!(taken < 128, "{taken} MiB were taken of a body without end");
    within("a body without end");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let large_head = format!("201 Created\r\nx-large: {}", "z".repeat(30 * 1024));
            for _ in 0..CLIENTS {
                upstream.next().answer(&large_head, "");
            }
            for _ in 0..CLIENTS {
                upstream.next().answer("201 Created", large);
            }
            assert!(upstream.is_idle());
        });
        storm(address, "small", (28 * 1024, MEBIBYTE), 0);
        within("large heads and bodies");
        storm(address, "large", (0, 2), large.len());
        within("large answers");
        // Nobody is there any more to answer these.
        storm(address, "large", (0, 2), large.len());
        within("large replays");
    });
}
