//! A raw server that honors keys, and can break off at any byte.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// The behaviour of the server for its next request only.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    /// Closes the connection after this number of bytes of the request.
    CutRequest(usize),
    /// Executes, and closes the connection after this number of bytes of the answer.
    CutAnswer(usize),
    /// Answers with these bytes, and executes nothing.
    Answer(String),
    /// Executes, and answers with these bytes.
    Execute(String),
    /// Executes, and never answers.
    Silent,
}

/// A request that arrived completely.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Arrived {
    pub(crate) line: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Arrived {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

#[derive(Default)]
struct State {
    acts: VecDeque<Act>,
    arrived: Vec<Arrived>,
    /// Effects by key, and by request line without one.
    effects: BTreeMap<String, u32>,
    /// Answers to requests whose line begins so. They have no effect, and take no act.
    fixed: Vec<(String, String)>,
    connections: usize,
    /// Chooses acts once the script is empty, if set.
    dice: Option<u64>,
    /// Number of acts that it chose.
    faults: u32,
}

impl State {
    fn act(&mut self) -> Option<Act> {
        if let Some(act) = self.acts.pop_front() {
            return Some(act);
        }
        let dice = self.dice.as_mut()?;
        // Knuth's generator.
        *dice =
            dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let throw = *dice >> 33;
        let cut = usize::try_from(throw / 100 % 150).unwrap();
        let act = match throw % 100 {
            0..8 => Act::CutRequest(cut),
            8..16 => Act::CutAnswer(cut.min(60)),
            16..20 => Act::Answer(answer(503, &["retry-after: 1"], "")),
            20..22 => Act::Answer(answer(429, &[], "")),
            22..24 => Act::Answer(answer(425, &[], "")),
            24..26 => Act::Answer(answer(409, &["retry-after: 0"], "")),
            26..32 => Act::Execute(answer(500, &["idempotency-replayed: false"], "")),
            _ => return None,
        };
        self.faults += 1;
        Some(act)
    }
}

/// The server.
#[derive(Clone)]
pub(crate) struct Bank {
    pub(crate) address: SocketAddr,
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

impl Bank {
    pub(crate) async fn start() -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    pub(crate) fn serve(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let bank = Self { address, state: Arc::default(), changed: Arc::default() };
        let serving = bank.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                serving.state.lock().unwrap().connections += 1;
                let (bank, mut stream) = (serving.clone(), stream);
                tokio::spawn(async move { while bank.exchange(&mut stream).await.is_some() {} });
            }
        });
        bank
    }

    pub(crate) fn origin(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn act(&self, acts: impl IntoIterator<Item = Act>) {
        self.state.lock().unwrap().acts.extend(acts);
    }

    /// Answers each request whose line begins so, whatever acts are left.
    #[cfg(any(feature = "reqwest-middleware", feature = "tower"))]
    pub(crate) fn answer_all(&self, line: &str, answer: &str) {
        self.state.lock().unwrap().fixed.push((line.to_owned(), answer.to_owned()));
    }

    /// Lets the server fail at random.
    pub(crate) fn storm(&self, seed: u64) {
        self.state.lock().unwrap().dice = Some(seed);
    }

    /// Returns the number of faults that were chosen at random.
    pub(crate) fn faults(&self) -> u32 {
        self.state.lock().unwrap().faults
    }

    pub(crate) fn arrived(&self) -> Vec<Arrived> {
        self.state.lock().unwrap().arrived.clone()
    }

    pub(crate) fn connections(&self) -> usize {
        self.state.lock().unwrap().connections
    }

    /// Returns the number of effects of each key.
    pub(crate) fn effects(&self) -> Vec<u32> {
        self.state.lock().unwrap().effects.values().copied().collect()
    }

    /// Waits until this number of requests has arrived.
    pub(crate) async fn wait_for(&self, count: usize) {
        loop {
            let changed = self.changed.notified();
            if self.arrived().len() >= count {
                return;
            }
            changed.await;
        }
    }
}

impl Bank {
    /// Reads a request and acts. `None`: the connection is to be closed.
    async fn exchange(&self, stream: &mut TcpStream) -> Option<()> {
        let (mut read, mut act) = (Vec::new(), None);
        let (head, length) = loop {
            let byte = stream.read_u8().await.ok()?;
            read.push(byte);
            // The act is of the request whose first byte arrives first.
            let act = act.get_or_insert_with(|| self.state.lock().unwrap().act());
            if matches!(act, Some(Act::CutRequest(at)) if read.len() >= *at) {
                return None;
            }
            if read.ends_with(b"\r\n\r\n") {
                let head = String::from_utf8(read.clone()).unwrap();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                let length = length.map_or(0, |length| length.parse().unwrap());
                break (head, length);
            }
        };
        let mut body = vec![0; length];
        for (at, byte) in body.iter_mut().enumerate() {
            *byte = stream.read_u8().await.ok()?;
            if matches!(act, Some(Some(Act::CutRequest(cut))) if read.len() + at + 1 >= cut) {
                return None;
            }
        }
        let mut lines = head.lines();
        let line = lines.next()?.to_owned();
        let headers = lines.filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let arrived = Arrived { line, headers, body };
        let answer = self.execute(&arrived, act.flatten());
        self.changed.notify_waiters();
        let (bytes, stays) = match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        };
        stream.write_all(&bytes).await.ok()?;
        stays.then_some(())
    }

    /// Executes a request; returns the bytes of its answer, and whether the connection stays open.
    fn execute(&self, arrived: &Arrived, act: Option<Act>) -> Option<(Vec<u8>, bool)> {
        let mut state = self.state.lock().unwrap();
        state.arrived.push(arrived.clone());
        let fixed = state.fixed.iter().find(|(line, _)| arrived.line.starts_with(line));
        if let Some(answer) = fixed.map(|(_, answer)| answer.clone().into_bytes()) {
            act.into_iter().for_each(|act| state.acts.push_front(act));
            return Some((answer, true));
        }
        if let Some(Act::Answer(answer)) = act {
            return Some((answer.into_bytes(), true));
        }
        let key = arrived.header("idempotency-key").map(str::to_owned);
        let known = key.as_ref().is_some_and(|key| state.effects.contains_key(key));
        let of = key.unwrap_or_else(|| arrived.line.clone());
        // Reading has none.
        if !known && !arrived.line.starts_with("GET ") {
            *state.effects.entry(of).or_default() += 1;
        }
        let body = format!("paid {}", arrived.body.len());
        let answer = format!(
            "HTTP/1.1 201 Created\r\ncontent-length: {}\r\nidempotency-replayed: {known}\r\nset-cookie: session=hush\r\n\r\n{body}",
            body.len()
        );
        Some(match act {
            Some(Act::CutAnswer(at)) => (answer.as_bytes()[..at].to_vec(), false),
            Some(Act::Execute(answer)) => (answer.into_bytes(), true),
            Some(Act::Silent) => return None,
            _ => (answer.into_bytes(), true),
        })
    }
}

/// Returns an answer with this status, these header lines and this body.
pub(crate) fn answer(status: u16, headers: &[&str], body: &str) -> String {
    let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    format!("HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n{lines}\r\n{body}", body.len())
}
