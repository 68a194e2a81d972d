//! As much of HTTP/1.1 as the benchmark speaks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// A large body.
const LARGE: usize = 1 << 20;

/// A client's connection, kept open.
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    pub fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the gateway listens");
        stream.set_nodelay(true).expect("it is a TCP socket");
        Self { stream: BufReader::new(stream) }
    }

    /// Sends a request with this key; the status of its answer.
    pub fn post(&mut self, path: &str, key: &str) -> u16 {
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: bench\r\nidempotency-key: {key}\r\n\
             authorization: Bearer bench\r\n\
             content-type: application/json\r\ncontent-length: 14\r\n\r\n{{\"amount\":100}}"
        );
        self.stream.get_mut().write_all(request.as_bytes()).expect("the gateway reads");
        let first = message(&mut self.stream).expect("the gateway answers");
        first.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("it has a status")
    }
}

/// Answers every request with 201, on a thread for each connection: `/large` with a mebibyte, and
/// `/long` after a minute.
pub fn serve(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        thread::spawn(move || {
            let _ = stream.set_nodelay(true);
            let mut stream = BufReader::new(stream);
            let answer = b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\n\
                           content-length: 13\r\n\r\n{\"id\":\"ch_1\"}";
            let large = || {
                let head = format!("HTTP/1.1 201 Created\r\ncontent-length: {LARGE}\r\n\r\n");
                [head.as_bytes(), &[b'x'; LARGE]].concat()
            };
            while let Some(first) = message(&mut stream) {
                let answer = match first.split(' ').nth(1) {
                    Some("/large") => large(),
                    Some("/long") => {
                        thread::sleep(Duration::from_secs(60));
                        answer.to_vec()
                    }
                    _ => answer.to_vec(),
                };
                if stream.get_mut().write_all(&answer).is_err() {
                    return;
                }
            }
        });
    }
}

/// Reads a message whole; its first line. `None` where the connection ended.
fn message(stream: &mut BufReader<TcpStream>) -> Option<String> {
    let mut first = String::new();
    let mut length = 0;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if first.is_empty() {
            line.clone_into(&mut first);
        } else if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().ok()?;
        }
    }
    std::io::copy(&mut stream.take(length), &mut std::io::sink()).ok()?;
    Some(first)
}
