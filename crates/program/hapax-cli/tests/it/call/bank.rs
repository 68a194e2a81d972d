//! A server of threads that honors keys.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Faults of the server for its next request.
#[derive(Clone, Copy)]
pub(super) enum Act {
    Hang,
    Slow(Duration),
    Status(u16),
    /// Executes, and answers with a body of this number of bytes.
    Large(usize),
    /// Executes, and answers with 202 and a `Location`.
    Accept,
    /// Executes, and answers once the bank is released.
    Held,
    /// Executes nothing, and says so with this status.
    Declined(u16),
    /// Executes, and answers with these bytes.
    Bytes(&'static [u8]),
}

#[derive(Default)]
pub(super) struct State {
    acts: Vec<Act>,
    requests: Vec<String>,
    effects: BTreeSet<String>,
    pub(super) executions: u32,
    is_released: bool,
}

#[derive(Clone)]
pub(super) struct Bank {
    pub(super) address: SocketAddr,
    pub(super) state: Arc<Mutex<State>>,
    released: Arc<Condvar>,
}

impl Bank {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let bank = Self { address, state: Arc::default(), released: Arc::default() };
        let serving = bank.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let bank = serving.clone();
                std::thread::spawn(move || bank.exchange(stream));
            }
        });
        bank
    }

    pub(super) fn act(&self, act: Act) {
        self.state.lock().unwrap().acts.push(act);
    }

    pub(super) fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}/payments", self.address)
    }

    /// Waits until this number of requests has arrived.
    pub(super) fn wait_for(&self, requests: usize) {
        while self.requests().len() < requests {
            std::thread::yield_now();
        }
    }

    pub(super) fn release(&self) {
        self.state.lock().unwrap().is_released = true;
        self.released.notify_all();
    }

    fn exchange(&self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut head, mut length, mut key) = (String::new(), 0, String::new());
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            head.push_str(&line);
            match line.trim_end().split_once(": ") {
                Some(("content-length", value)) => length = value.parse().unwrap(),
                Some(("idempotency-key", value)) => key = value.to_owned(),
                _ => {}
            }
            if line.is_empty() {
                // The client was killed before it sent the whole head.
                return None;
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let act = {
            let mut state = self.state.lock().unwrap();
            state.requests.push(format!("{head}{}", String::from_utf8(body).unwrap()));
            let act = (!state.acts.is_empty()).then(|| state.acts.remove(0));
            let executes = !matches!(act, Some(Act::Status(_) | Act::Declined(_)));
            if executes && (key.is_empty() || state.effects.insert(key)) {
                state.executions += 1;
            }
            act
        };
        let (status, text) = match act {
            None => (201, b"paid".to_vec()),
            Some(Act::Status(status) | Act::Declined(status)) => (status, b"no".to_vec()),
            Some(Act::Large(length)) => (201, vec![b'x'; length]),
            Some(Act::Accept) => (202, b"accepted".to_vec()),
            Some(Act::Bytes(bytes)) => (201, bytes.to_vec()),
            Some(Act::Slow(pause)) => {
                std::thread::park_timeout(pause);
                (201, b"paid".to_vec())
            }
            Some(Act::Held) => {
                let state = self.state.lock().unwrap();
                drop(self.released.wait_while(state, |state| !state.is_released));
                (201, b"paid".to_vec())
            }
            Some(Act::Hang) => loop {
                std::thread::park();
            },
        };
        let lines = match act {
            Some(Act::Accept) => "location: /status\r\nretry-after: 0\r\n",
            Some(Act::Declined(_)) => "idempotency-outcome: retryable\r\n",
            _ => "idempotency-operation-id: 4bf9\r\n",
        };
        let head = format!(
            "HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n{lines}connection: close\r\n\r\n",
            text.len()
        );
        (&stream).write_all(&[head.as_bytes(), &text].concat()).ok()
    }
}
