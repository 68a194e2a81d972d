//! First configurations, as new users write them, under clients that retry, hang up and are killed.
//!
//! In each of them no request has a second effect and no caller gets the answer of another; a
//! configuration that could not keep this is rejected, and the rejection says what to write.

mod callers;
mod mistakes;
mod services;

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use services::Service;

use crate::world::{Answer, Gateway, receive, send_to};

/// A header that identifies a caller: its name and value.
type Caller = (&'static str, &'static str);

/// Sends a payment; `more` are further members of its JSON object.
fn pay(to: SocketAddr, caller: Caller, key: &str, amount: u32, more: &str) -> std::net::TcpStream {
    let fields = [("content-type", "application/json"), caller];
    send_to(to, "/payments", key, &fields, &format!(r#"{{"amount": {amount}{more}}}"#))
}

/// Sends a payment and returns its answer.
fn paid(to: SocketAddr, caller: Caller, key: &str, amount: u32, more: &str) -> Answer {
    receive(&pay(to, caller, key, amount, more)).expect("an answer")
}

/// Retries a payment until its first request is no longer in flight.
fn settled(to: SocketAddr, caller: Caller, key: &str, amount: u32) -> Answer {
    loop {
        let answer = paid(to, caller, key, amount, HOLD);
        if answer.code() != "in-flight" {
            return answer;
        }
        std::thread::yield_now();
    }
}

/// The member that keeps a charge from being answered until [`Service::release`].
const HOLD: &str = r#", "hold": true"#;

/// Two callers use one key; each gets its own answer, and a retry gets it again.
fn two_callers_with_one_key(to: SocketAddr, service: &Service, callers: [Caller; 2]) {
    let pairs = [(callers[0], 101), (callers[1], 102)];
    let first = pairs.map(|(caller, amount)| paid(to, caller, "order-1", amount, ""));
    for (answer, (caller, amount)) in first.iter().zip(pairs) {
        assert_eq!((answer.status, &*answer.header("idempotency-replayed")), (201, "false"));
        let retry = paid(to, caller, "order-1", amount, "");
        assert_eq!((retry.status, &*retry.header("idempotency-replayed")), (201, "true"));
        assert_eq!(retry.body, answer.body);
        let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!((&body["caller"], &body["amount"]), (&caller.1.into(), &amount.into()));
    }
    service.was_charged_once_each(&[101, 102]);
}

/// A client closes its connection during the charge; the retry gets the receipt.
fn a_client_hangs_up(to: SocketAddr, service: &Service, caller: Caller) {
    let client = pay(to, caller, "order-2", 201, HOLD);
    service.wait_for_charge(201);
    drop(client);
    assert_eq!(paid(to, caller, "order-2", 201, HOLD).code(), "in-flight");
    service.release();
    assert_eq!(settled(to, caller, "order-2", 201).status, 201);
    service.hold_again();
    service.was_charged_once_each(&[101, 102, 201]);
}

/// A client process is killed during the charge; the retry gets the receipt.
fn a_client_is_killed(to: SocketAddr, service: &Service, caller: Caller) {
    let header = |(name, value): (&str, &str)| format!("{name}: {value}");
    let mut client = Command::new("curl")
        .args(["-s", "-o", "/dev/null", "-d", &format!(r#"{{"amount": 202{HOLD}}}"#)])
        .args(["-H", &header(caller), "-H", "content-type: application/json"])
        .args(["-H", "idempotency-key: order-3", &format!("http://{to}/payments")])
        .spawn()
        .unwrap();
    service.wait_for_charge(202);
    client.kill().unwrap();
    client.wait().unwrap();
    service.release();
    assert_eq!(settled(to, caller, "order-3", 202).status, 201);
    service.hold_again();
    service.was_charged_once_each(&[101, 102, 201, 202]);
}

/// What is killed in the middle of a charge and started again.
trait Killed {
    fn address(&self) -> SocketAddr;
    fn kill(self) -> impl FnOnce() -> Self;
}

/// The process that keeps the records is killed during the charge: the retry executes nothing.
fn the_keeper_is_killed(keeper: impl Killed, front: Option<SocketAddr>, of: &Service, by: Caller) {
    let to = |it: &dyn Fn() -> SocketAddr| front.unwrap_or_else(it);
    let client = pay(to(&|| keeper.address()), by, "order-4", 203, HOLD);
    of.wait_for_charge(203);
    let start_again = keeper.kill();
    drop(client);
    let keeper = start_again();
    of.release();
    let retry = settled(to(&|| keeper.address()), by, "order-4", 203);
    assert_eq!((retry.status, &*retry.code()), (409, "outcome-unknown"), "{}", retry.body);
    of.hold_again();
    of.was_charged_once_each(&[101, 102, 201, 202, 203]);
}

/// A gateway with its command line.
struct Line<'a> {
    gateway: Gateway,
    upstream: SocketAddr,
    folder: &'a Path,
    more: Vec<String>,
}

impl<'a> Line<'a> {
    fn start(upstream: SocketAddr, folder: &'a Path, more: &[&str]) -> Self {
        let gateway = Gateway::start(upstream, folder, more);
        let more = more.iter().map(|it| (*it).to_owned()).collect();
        Self { gateway, upstream, folder, more }
    }
}

impl Killed for Line<'_> {
    fn address(&self) -> SocketAddr {
        self.gateway.address
    }

    fn kill(self) -> impl FnOnce() -> Self {
        let Self { gateway, upstream, folder, mut more } = self;
        // A proxy in front knows the address.
        if !more.iter().any(|it| it == "--listen") {
            more.extend(["--listen".to_owned(), gateway.address.to_string()]);
        }
        gateway.kill();
        move || {
            let more: Vec<&str> = more.iter().map(String::as_str).collect();
            Self::start(upstream, folder, &more)
        }
    }
}

/// A process that is killed when the test ends.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// Returns once it accepts connections at this address.
    fn serving(mut self, address: SocketAddr) -> Self {
        while std::net::TcpStream::connect(address).is_err() {
            assert!(self.0.try_wait().unwrap().is_none(), "it ended before it served");
            std::thread::yield_now();
        }
        self
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
