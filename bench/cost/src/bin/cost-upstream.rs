//! An upstream that does nothing: answers every request with the same 200 bytes, on one thread.
//!
//!     cost-upstream ADDRESS

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::process::ExitCode;

use hapax_bench_cost::{Any, wire};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

const LISTENER: Token = Token(0);

struct Connection {
    stream: TcpStream,
    input: Vec<u8>,
    filled: usize,
}

fn main() -> ExitCode {
    hapax_bench_cost::exit(run())
}

fn run() -> Result<(), Any> {
    let address = std::env::args().nth(1).ok_or("the address to listen on is missing")?;
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{}",
        wire::ANSWER.len(),
        wire::ANSWER
    );
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(256);
    let mut listener = TcpListener::bind(address.parse()?)?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut connections = HashMap::new();
    let mut next = 1;
    loop {
        poll.poll(&mut events, None)?;
        for event in &events {
            if event.token() != LISTENER {
                let token = event.token();
                let open = connections
                    .get_mut(&token)
                    .is_some_and(|connection| serve(connection, answer.as_bytes()).is_ok());
                if !open {
                    connections.remove(&token);
                }
                continue;
            }
            loop {
                match listener.accept() {
                    Ok((mut stream, _)) => {
                        stream.set_nodelay(true)?;
                        poll.registry().register(&mut stream, Token(next), Interest::READABLE)?;
                        let connection = Connection { stream, input: vec![0; 16384], filled: 0 };
                        connections.insert(Token(next), connection);
                        next += 1;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
}

/// Answers the requests that have arrived. Fails once the peer has closed the connection.
fn serve(connection: &mut Connection, answer: &[u8]) -> Result<(), Any> {
    let Connection { stream, input, filled } = connection;
    loop {
        match stream.read(&mut input[*filled..]) {
            Ok(0) => return Err("the connection was closed, or a request is too large".into()),
            Ok(read) => *filled += read,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        while let Some(message) = wire::message(&input[..*filled])? {
            input.copy_within(message.length..*filled, 0);
            *filled -= message.length;
            stream.write_all(answer)?;
        }
        // A short read has emptied the socket: the next bytes are a new event.
        if *filled == 0 {
            return Ok(());
        }
    }
}
