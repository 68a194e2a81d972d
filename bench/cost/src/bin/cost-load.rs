//! Load generator: keep-alive connections of HTTP/1.1, each with one request at a time, on one
//! thread. Writes the result to standard output as JSON. A response other than 200 ends the run.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use hapax_bench_cost::Any;
use hapax_bench_cost::process::{Cores, Times};
use hapax_bench_cost::sample::{Sample, micros};
use hapax_bench_cost::wire::{self, Request};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

/// Time without any response after which the run fails.
const STALLED: Duration = Duration::from_secs(10);

/// Loads a server and measures it
#[derive(Parser)]
struct Args {
    /// Address of the server
    address: SocketAddr,
    /// Process whose processor time is measured
    #[arg(long)]
    pid: u32,
    #[command(flatten)]
    cores: Cores,
    #[arg(long, default_value = wire::PATH)]
    path: String,
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Length of the measured window
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Time before it
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
    /// Repeat this many keys on each connection, instead of sending a new one with each request; a
    /// response in the window that is no replay ends the run
    #[arg(long, value_name = "KEYS")]
    replay: Option<u64>,
    /// File of cookies, one in a line, which requests use in turn
    #[arg(long, value_name = "PATH")]
    sessions: Option<PathBuf>,
}

struct Connection {
    stream: TcpStream,
    request: Request,
    input: Vec<u8>,
    filled: usize,
    sent_at: Instant,
    sent: u64,
    answered: u64,
}

fn main() -> ExitCode {
    hapax_bench_cost::exit(run())
}

fn run() -> Result<(), Any> {
    let args = Args::parse();
    let sample = Load::new(&args)?.run()?;
    println!("{}", serde_json::to_string(&sample)?);
    Ok(())
}

struct Load<'a> {
    args: &'a Args,
    run: u64,
    sessions: Vec<String>,
    connections: Vec<Connection>,
    poll: Poll,
}

impl<'a> Load<'a> {
    fn new(args: &'a Args) -> Result<Self, Any> {
        let sessions = match &args.sessions {
            Some(path) => std::fs::read_to_string(path)?.lines().map(String::from).collect(),
            None => Vec::new(),
        };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
        let run = (u64::from(std::process::id()) << 32) ^ u64::try_from(now.as_nanos())?;
        let poll = Poll::new()?;
        let first = sessions.first().map_or("", String::as_str);
        let connections = (0..args.connections)
            .map(|number| {
                let stream = std::net::TcpStream::connect(args.address)?;
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                let mut stream = TcpStream::from_std(stream);
                poll.registry().register(&mut stream, Token(number), Interest::READABLE)?;
                Ok(Connection {
                    stream,
                    request: Request::new(&args.path, first),
                    input: vec![0; 8192],
                    filled: 0,
                    sent_at: Instant::now(),
                    sent: 0,
                    answered: 0,
                })
            })
            .collect::<Result<_, Any>>()?;
        Ok(Self { args, run, sessions, connections, poll })
    }

    fn run(mut self) -> Result<Sample, Any> {
        let began = Instant::now();
        for number in 0..self.connections.len() {
            self.send(number, began)?;
        }
        let warmup = Duration::from_secs_f64(self.args.warmup);
        while began.elapsed() < warmup || !self.has_sent_all_keys() {
            self.turn(|_| Ok(()), &mut |_| ())?;
        }
        let replays = self.args.replay.is_some();
        let check = |head: &[u8]| match replays && !wire::is_replay(head) {
            true => Err(unexpected("a replay", head)),
            false => Ok(()),
        };
        let mut latencies = Vec::with_capacity(1 << 20);
        let window = Duration::from_secs_f64(self.args.seconds);
        let (started, before) = (Instant::now(), Times::now(self.args.pid, self.args.cores)?);
        while started.elapsed() < window {
            self.turn(check, &mut |latency| latencies.push(micros(latency)))?;
        }
        let elapsed = started.elapsed();
        let after = Times::now(self.args.pid, self.args.cores)?;
        Ok(Sample::of(&mut latencies, elapsed, &after.since(&before)))
    }

    /// Returns whether each key that is to be repeated was answered once.
    fn has_sent_all_keys(&self) -> bool {
        let keys = self.args.replay.unwrap_or_default();
        self.connections.iter().all(|connection| connection.answered >= keys)
    }

    /// Receives the responses that have arrived, and sends a request for each.
    fn turn(
        &mut self,
        check: impl Fn(&[u8]) -> Result<(), Any>,
        answered: &mut impl FnMut(Duration),
    ) -> Result<(), Any> {
        let mut events = Events::with_capacity(256);
        self.poll.poll(&mut events, Some(STALLED))?;
        if events.is_empty() {
            return Err(format!("no response for {} s", STALLED.as_secs()).into());
        }
        for event in &events {
            let number = event.token().0;
            let connection = &mut self.connections[number];
            if connection.receive(&check)? {
                let now = Instant::now();
                answered(now - connection.sent_at);
                self.send(number, now)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, number: usize, now: Instant) -> Result<(), Any> {
        let connections = self.connections.len() as u64;
        let connection = &mut self.connections[number];
        let turn = connection.sent % self.args.replay.unwrap_or(u64::MAX);
        let request = turn * connections + number as u64;
        connection.request.set_key(self.run, request);
        if !self.sessions.is_empty() {
            let session = &self.sessions[request as usize % self.sessions.len()];
            connection.request.set_session(session);
        }
        connection.sent += 1;
        connection.sent_at = now;
        // The socket is empty: the request before was answered.
        connection.stream.write_all(connection.request.bytes())?;
        Ok(())
    }
}

impl Connection {
    /// Reads what has arrived, and returns whether it completes the response.
    fn receive(&mut self, check: impl Fn(&[u8]) -> Result<(), Any>) -> Result<bool, Any> {
        loop {
            match self.stream.read(&mut self.input[self.filled..]) {
                Ok(0) => return Err("the server closed a connection".into()),
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            let input = &self.input[..self.filled];
            if let Some(message) = wire::message(input)? {
                if !wire::is_ok(input) || message.length != self.filled {
                    return Err(unexpected("status 200 and nothing after it", input));
                }
                check(&input[..message.head])?;
                self.filled = 0;
                self.answered += 1;
                return Ok(true);
            }
        }
    }
}

fn unexpected(expected: &str, response: &[u8]) -> Any {
    let response = String::from_utf8_lossy(response);
    format!("expected {expected}, got:\n{response}").into()
}
