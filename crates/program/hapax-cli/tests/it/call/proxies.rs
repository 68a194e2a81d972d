//! Calls through the proxies of the environment.

use std::io::{BufRead, BufReader, Write, copy};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::Script;
use crate::world::hapax;

/// A proxy that opens tunnels to clients with a password.
struct Proxy {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Self { address: listener.local_addr().unwrap(), heads: Arc::default() };
        let heads = Arc::clone(&proxy.heads);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let heads = Arc::clone(&heads);
                std::thread::spawn(move || tunnel(&stream, &heads));
            }
        });
        proxy
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

fn tunnel(mut stream: &TcpStream, heads: &Mutex<Vec<String>>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        reader.read_line(&mut head).ok().filter(|read| *read > 0)?;
    }
    heads.lock().unwrap().push(head.clone());
    if !head.contains("Proxy-Authorization: Basic dXNlcjpodXNo\r\n") {
        return stream.write_all(b"HTTP/1.1 407 Log In\r\ncontent-length: 0\r\n\r\n").ok();
    }
    let target = head.strip_prefix("CONNECT ")?.split(' ').next()?;
    let server = TcpStream::connect(target).ok()?;
    stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").ok()?;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let _ = copy(&mut { stream }, &mut &server);
            let _ = server.shutdown(std::net::Shutdown::Write);
        });
        let _ = copy(&mut &server, &mut { stream });
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
    Some(())
}

#[test]
fn the_proxy_of_the_environment_is_used_with_the_flag_only() {
    let (script, proxy) = (Script::new(), Proxy::start());
    let (url, journal) = (script.bank.url(), script.journal());
    let variable = format!("http://user:hush@{}", proxy.address);
    let call = |name: &str, flags: &[&str], variables: &[(&str, &str)]| {
        let words = ["call", "--name", name, "--server", "hapax", "POST", &url];
        let more = ["--journal", journal.to_str().unwrap(), "--within", "500ms"];
        let mut call = hapax(&[&words[..], &more, flags].concat());
        let output = call.envs(variables.iter().copied()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!error.contains("hush"), "{error}");
        (output.status.code().unwrap(), error)
    };
    let set = ("HTTP_PROXY", &*variable);
    assert_eq!(call("direct", &[], &[set]).0, 0);
    let flag = ["--proxy-from-env"];
    assert_eq!(call("excepted", &flag, &[set, ("NO_PROXY", "127.0.0.1")]).0, 0);
    assert_eq!((proxy.heads().len(), script.bank.requests().len()), (0, 2));

    assert_eq!(call("proxied", &flag, &[set]).0, 0);
    let heads = proxy.heads();
    let connect = format!("CONNECT {} HTTP/1.1\r\n", script.bank.address);
    assert!(heads.len() == 1 && heads[0].starts_with(&connect), "{heads:?}");
    assert_eq!(script.bank.requests().len(), 3);

    // A proxy that opens no tunnel is a server that was not reached.
    let wrong = format!("http://user:hush2@{}", proxy.address);
    let (code, error) = call("rejected", &flag, &[("http_proxy", &wrong)]);
    assert_eq!(code, 75, "{error}");
    assert!(error.contains("found 407: correct the user and the password of the proxy"), "{error}");
    let list = script.list();
    assert_eq!(list["pending"][0]["may_have_happened"], false, "{list}");

    assert_eq!(call("none", &flag, &[]).0, 64);
    let (code, error) = call("socks", &flag, &[("HTTPS_PROXY", "socks5://user:hush@a:1080")]);
    assert!(code == 64 && error.contains("HTTPS_PROXY: expected http://"), "{error}");
    assert_eq!(script.bank.requests().len(), 3);
}
