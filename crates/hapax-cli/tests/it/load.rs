//! More bodies at once than there is room for, and what the process takes for them.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use crate::world::{Gateway, Upstream, receive};

/// What may be held for bodies, and what the process may take in all: the rest is for the program,
/// the store's pages, and some 64 KiB for each connection.
const CAP: &str = "32MiB";
const WHOLE_KIB: u64 = if cfg!(debug_assertions) { 112 * 1024 } else { 144 * 1024 };

/// Without the cap, each would be held at once.
const CLIENTS: usize = if cfg!(debug_assertions) { 120 } else { 1_000 };

/// The most memory that the process has had at one time.
fn peak_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn start(address: SocketAddr, key: &str, framing: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: {key}\r\n{framing}\r\n\r\n")
        .unwrap();
    stream
}

#[test]
fn memory_stays_within_its_cap() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &["--max-body-memory", CAP]);
    let address = gateway.address;
    let body = vec![b'x'; 1 << 20];
    let body = &body;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..CLIENTS {
                upstream.next().answer("201 Created", "");
            }
        });
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                scope.spawn(move || {
                    let framing = format!("content-length: {}", body.len());
                    let mut stream = start(address, &client.to_string(), &framing);
                    stream.write_all(body).unwrap();
                    receive(&stream).unwrap().status
                })
            })
            .collect();
        // One that never ends, as far as it is let.
        let mut endless = start(address, "endless", "transfer-encoding: chunked");
        let chunk = [b"10000\r\n", &body[..0x10000], b"\r\n"].concat();
        let taken = (0..16 * 1024).take_while(|_| endless.write_all(&chunk).is_ok()).count();
        assert!(taken < 16 * 1024, "a gibibyte was taken");
        assert_eq!(receive(&endless).map(|answer| answer.status), Some(413));
        for client in clients {
            assert_eq!(client.join().unwrap(), 201);
        }
    });
    let peak = peak_kib(gateway.id());
    println!("the process took {peak} KiB");
    assert!(peak < WHOLE_KIB, "the process took {peak} KiB");
}
