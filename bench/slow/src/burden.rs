//! Connections that take up room.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::http::Connection;

/// What is held open, until it is dropped.
pub struct Burden {
    address: SocketAddr,
    idle: Vec<Connection>,
    streams: Vec<TcpStream>,
    /// Those that send a byte now and then.
    slow: Arc<Mutex<Vec<TcpStream>>>,
    slow_count: usize,
}

impl Burden {
    pub fn new(address: SocketAddr) -> Self {
        let slow = Arc::new(Mutex::new(Vec::<TcpStream>::new()));
        let sending = Arc::clone(&slow);
        thread::spawn(move || {
            loop {
                for stream in sending.lock().expect("nobody panics with it").iter_mut() {
                    let _ = stream.write_all(b"x");
                }
                thread::sleep(Duration::from_millis(250));
            }
        });
        Self { address, idle: Vec::new(), streams: Vec::new(), slow, slow_count: 0 }
    }

    /// Those that are held open, without the probers'.
    pub fn connections(&self) -> usize {
        self.idle.len() + self.streams.len() + self.slow_count
    }

    /// Connections that were used once and are kept.
    pub fn idle_http1(&mut self, count: usize) {
        for number in 0..count {
            let mut connection = Connection::open(self.address);
            assert_eq!(connection.post("/payments", &format!("idle-{number}")), 201);
            self.idle.push(connection);
        }
    }

    /// Connections that agreed on their settings and say no more.
    pub fn idle_http2(&mut self, count: usize) {
        for _ in 0..count {
            let mut stream = self.connect();
            let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
            stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").expect("the gateway reads");
            stream.write_all(&settings).expect("the gateway reads");
            stream.read_exact(&mut [0; 9]).expect("the gateway has settings too");
            self.streams.push(stream);
        }
    }

    /// Clients that never come to the end of a body.
    pub fn trickle(&mut self, count: usize) {
        for number in 0..count {
            let mut stream = self.connect();
            let head = head("/payments", &format!("slow-{number}"), 12 * 1024);
            stream.write_all(head.as_bytes()).expect("the gateway reads");
            self.slow.lock().expect("nobody panics with it").push(stream);
            self.slow_count += 1;
        }
    }

    /// Clients that ask for a mebibyte and do not read it.
    pub fn deaf(&mut self, count: usize) {
        for number in 0..count {
            let mut stream = self.connect();
            let head = head("/large", &format!("deaf-{number}"), 0);
            stream.write_all(head.as_bytes()).expect("the gateway reads");
            self.streams.push(stream);
        }
    }

    /// Requests that the upstream does not answer while it is measured.
    pub fn long(&mut self, count: usize) {
        for number in 0..count {
            let mut stream = self.connect();
            let head = head("/long", &format!("long-{number}"), 0);
            stream.write_all(head.as_bytes()).expect("the gateway reads");
            self.streams.push(stream);
        }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).expect("the gateway listens")
    }
}

fn head(path: &str, key: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: bench\r\nidempotency-key: {key}\r\n\
         authorization: Bearer bench\r\n\
         content-length: {length}\r\n\r\n"
    )
}
