//! The cost of a request at the gateway, counted without a clock: allocations and tasks. `cost.txt`
//! has the numbers, which may only fall.
//!
//! The gateway runs on the thread of the test, whose allocations are counted; the upstream and the
//! client have threads of their own.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

use hapax_gateway::{Config, Gateway, RouteConfig, RouteMode, StoreUrl};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Number of requests, of which the median counts: collections grow now and then.
const REQUESTS: usize = 101;

/// Reads a message whose body has the length that its head declares; returns `None` at the end of
/// the stream.
fn read_message(stream: &mut TcpStream) -> Option<String> {
    let (mut message, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&message);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                return Some(text.into_owned());
            }
        }
        match stream.read(&mut buffer).unwrap() {
            0 => return None,
            count => message.extend_from_slice(&buffer[..count]),
        }
    }
}

/// Starts a service that answers each request alike.
fn upstream() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            thread::spawn(move || {
                while read_message(&mut stream).is_some() {
                    let answer = "HTTP/1.1 201 Created\r\ncontent-type: application/json\r\n\
                                  content-length: 11\r\n\r\n{\"paid\":10}";
                    stream.write_all(answer.as_bytes()).unwrap();
                }
            });
        }
    });
    address
}

/// A client that sends a request when it is told to.
struct Client {
    requests: std::sync::mpsc::Sender<String>,
    answers: mpsc::Receiver<String>,
}

impl Client {
    fn connect(gateway: SocketAddr) -> Self {
        let (requests, next) = std::sync::mpsc::channel::<String>();
        let (answered, answers) = mpsc::channel(1);
        thread::spawn(move || {
            let mut stream = TcpStream::connect(gateway).unwrap();
            stream.set_nodelay(true).unwrap();
            for request in next {
                stream.write_all(request.as_bytes()).unwrap();
                let answer = read_message(&mut stream).unwrap();
                answered.blocking_send(answer).unwrap();
            }
        });
        Self { requests, answers }
    }
}

fn request(path: &str, key: usize) -> String {
    let body = format!(r#"{{"amount":100,"note":"{}"}}"#, "n".repeat(175));
    format!(
        "POST {path} HTTP/1.1\r\nhost: shop.example\r\ncontent-type: application/json\r\n\
         authorization: Bearer me\r\nidempotency-key: 8e03978e-40d5-43e8-bc93-{key:012}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A name, and the request of a number.
type Case = (&'static str, fn(usize) -> String);

/// Returns the number of tasks that were spawned before: tokio numbers them.
async fn tasks() -> u64 {
    tokio::spawn(async {}).id().to_string().parse().unwrap()
}

/// Returns allocations and tasks of the median request.
fn cost(runtime: &Runtime, client: &mut Client, request: impl Fn(usize) -> String) -> [u64; 2] {
    let mut costs: [Vec<u64>; 2] = Default::default();
    for number in 0..REQUESTS {
        let (request, mut answer) = (request(number), None);
        let before = runtime.block_on(tasks());
        let counted = allocation_counter::measure(|| {
            client.requests.send(request).unwrap();
            answer = runtime.block_on(client.answers.recv());
        });
        assert!(answer.unwrap().starts_with("HTTP/1.1 201 "));
        let tasks = runtime.block_on(tasks()) - before - 1;
        costs.iter_mut().zip([counted.count_total, tasks]).for_each(|(all, one)| all.push(one));
    }
    costs.map(|mut costs| {
        costs.sort_unstable();
        costs[REQUESTS / 2]
    })
}

#[test]
fn a_request_costs_no_more_than_before() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut config = Config::new(format!("http://{}", upstream()).parse().unwrap());
    config.listen = "127.0.0.1:0".parse().unwrap();
    config.admin = None;
    config.store = StoreUrl::Memory;
    config.routes.push(RouteConfig {
        handling: RouteMode::Pass,
        ..RouteConfig::new("/open", config.policy.clone())
    });
    let gateway = runtime.block_on(Gateway::start(config)).unwrap();
    let mut client = Client::connect(gateway.local_addr());
    let mut found = BTreeMap::new();
    let cases: [Case; 3] = [
        ("execution", |number| request("/payments", number)),
        ("replay", |_| request("/payments", 0)),
        ("unprotected", |_| request("/open", 0)),
    ];
    for (case, request) in cases {
        let counts = cost(&runtime, &mut client, request);
        for (what, count) in ["allocations", "tasks"].into_iter().zip(counts) {
            found.insert(format!("{case}: {what}"), count);
        }
    }
    runtime.block_on(gateway.shutdown());
    let found: String = found.iter().map(|(what, count)| format!("{what} {count}\n")).collect();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cost.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(file, &found).unwrap();
    }
    let expected = std::fs::read_to_string(file).unwrap();
    assert_eq!(
        found, expected,
        "the costs in tests/cost.txt may only fall; write lower ones with UPDATE_GOLDEN=1"
    );
}
