//! Real processes: the program, and an upstream of threads.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

/// Longer than anything here takes; a test that needs it fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// The program with these arguments and nothing from outside.
pub(crate) fn hapax(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    command.args(arguments).env_clear().stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub(crate) fn run(arguments: &[&str]) -> Output {
    hapax(arguments).output().unwrap()
}

/// Runs it; what it printed, if it succeeded.
pub(crate) fn ok(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs it; its exit code, and the one line that it says.
pub(crate) fn refused(arguments: &[&str]) -> (i32, String) {
    let output = run(arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    let line = said.strip_suffix('\n').unwrap_or(&said).to_owned();
    assert!(line.starts_with("hapax: ") && !line.contains('\n'), "not one line: {said:?}");
    assert_eq!(output.stdout, b"");
    (output.status.code().unwrap(), line)
}

/// The folder in which `cargo xtask setup` installs the packages of `registry`.
pub(crate) fn installed(registry: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name(registry);
    assert!(
        folder.exists(),
        "packages from {registry} are missing: `cargo xtask setup` installs them, `cargo xtask test \
         --skip {registry}` does without"
    );
    folder
}

/// A gateway process; killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// The file of its admin token, in its folder.
    pub(crate) token: PathBuf,
    child: Child,
    _out: BufReader<ChildStdout>,
}

impl Gateway {
    /// In front of `upstream`, on free ports, with its records in `folder`.
    pub(crate) fn start(upstream: SocketAddr, folder: &Path, more: &[&str]) -> Self {
        Self::start_with(upstream, folder, more, Stdio::inherit())
    }

    /// The same; its log is in `folder`, a JSON object a line.
    pub(crate) fn logged(upstream: SocketAddr, folder: &Path, more: &[&str]) -> Self {
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let json = [&["--log-format", "json"], more].concat();
        Self::start_with(upstream, folder, &json, log.into())
    }

    fn start_with(upstream: SocketAddr, folder: &Path, more: &[&str], err: Stdio) -> Self {
        Starting::spawn(upstream, folder, more, err).ready()
    }

    /// What operators get at `path`.
    pub(crate) fn admin(&self, path: &str) -> Answer {
        let token = std::fs::read_to_string(&self.token).unwrap_or_default();
        get_with(self.admin, path, &format!("authorization: Bearer {}\r\n", token.trim()))
    }

    /// A count or gauge without labels.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.admin("/metrics").body;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// SIGKILL: it gets no chance to finish anything.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Its exit code, once it has ended; until then it is sent this signal again and again.
    pub(crate) fn wait_telling(mut self, signal: Signal) -> i32 {
        while self.child.try_wait().unwrap().is_none() {
            self.signal(signal);
            std::thread::yield_now();
        }
        self.wait()
    }

    /// Its exit code, once it has ended.
    pub(crate) fn wait(mut self) -> i32 {
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| panic!("it ended with {status}"))
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A gateway process that may not be ready yet; killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Starting {
    running: Option<(Child, BufReader<ChildStdout>)>,
    token: PathBuf,
}

impl Starting {
    /// Starts one as [`Gateway::logged`] does, and does not wait until it is ready.
    pub(crate) fn logged(upstream: SocketAddr, folder: &Path, more: &[&str]) -> Self {
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let json = [&["--log-format", "json"], more].concat();
        Self::spawn(upstream, folder, &json, log.into())
    }

    fn spawn(upstream: SocketAddr, folder: &Path, more: &[&str], err: Stdio) -> Self {
        let (url, store) = (format!("http://{upstream}"), store(folder));
        let mut arguments = vec!["gateway"];
        // A file names it.
        if !more.contains(&"--config") {
            arguments.extend(["--upstream", &url]);
        }
        if !more.contains(&"--store") {
            arguments.extend(["--store", &store]);
        }
        if !more.contains(&"--listen") {
            arguments.extend(["--listen", "127.0.0.1:0"]);
        }
        let on_server =
            more.iter().any(|it| it.starts_with("postgres://") || it.starts_with("redis://"));
        if on_server && !more.contains(&"--namespace") {
            arguments.extend(["--namespace", ""]);
        }
        arguments.extend(["--admin", "127.0.0.1:0"]);
        // Beside its file, where it makes one by itself.
        let token = folder.join("hapax.db.admin-token");
        let token_file = token.display().to_string();
        let audit_file = folder.join("hapax.db.audit.jsonl").display().to_string();
        let named = ["--config", "--admin-token-file"].iter().any(|flag| more.contains(flag));
        if more.contains(&"--store") && !named {
            arguments.extend(["--admin-token-file", &token_file]);
            arguments.extend(["--audit-file", &audit_file]);
        }
        arguments.extend(more);
        let mut child = hapax(&arguments).stdout(Stdio::piped()).stderr(err).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { running: Some((child, out)), token }
    }

    /// Waits until it is ready.
    pub(crate) fn ready(mut self) -> Gateway {
        let (child, mut out) = self.running.take().unwrap();
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let mut addresses = line.trim().split([' ', ',']).filter_map(|word| {
            word.strip_prefix("http://").or(word.strip_prefix("https://"))?.parse().ok()
        });
        let mut next = || addresses.next().unwrap_or_else(|| panic!("it said {line:?}"));
        let token = self.token.clone();
        Gateway { address: next(), admin: next(), token, child, _out: out }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let (child, _) = self.running.as_ref().unwrap();
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    /// Its exit code, once it has ended.
    pub(crate) fn wait(mut self) -> i32 {
        let (mut child, _) = self.running.take().unwrap();
        let status = child.wait().unwrap();
        status.code().unwrap_or_else(|| panic!("it ended with {status}"))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some((child, _)) = &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a `GET` of this path gets.
pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    get_with(address, path, "")
}

pub(crate) fn get_with(address: SocketAddr, path: &str, fields: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n").unwrap();
    receive(&stream).unwrap()
}

/// The URL of the store in `folder`.
pub(crate) fn store(folder: &Path) -> String {
    format!("file:{}", folder.join("hapax.db").display())
}

/// What the gateway that was started with its log in `folder` has logged under this message.
pub(crate) fn log_line(folder: &Path, message: &str) -> serde_json::Value {
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    let mut lines = log.lines().map(|line| serde_json::from_str(line).unwrap());
    lines
        .find(|line: &serde_json::Value| line["message"] == message)
        .unwrap_or_else(|| panic!("no {message:?} in\n{log}"))
}

/// All that it has logged under this message so far.
pub(crate) fn log_lines(folder: &Path, message: &str) -> Vec<serde_json::Value> {
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    // The last one may be half written.
    let lines = log.lines().filter_map(|line| serde_json::from_str(line).ok());
    lines.filter(|line: &serde_json::Value| line["message"] == message).collect()
}

/// Returns once this was logged so often.
pub(crate) fn wait_for_log(folder: &Path, message: &str, count: usize) {
    while log_lines(folder, message).len() < count {
        std::thread::yield_now();
    }
}

/// A request that waits for its answer.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    stream: TcpStream,
}

impl Waiting {
    /// Answers; nobody may be there any more.
    pub(crate) fn answer(mut self, status: &str, body: &str) {
        let length = body.len();
        let _ = write!(
            self.stream,
            "HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
    }

    /// Sends it on, byte for byte; its answer can be read from the stream.
    pub(crate) fn forward(&self, to: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(to).unwrap();
        stream.write_all(&[self.head.as_bytes(), &self.body].concat()).unwrap();
        stream
    }

    /// Passes an answer on.
    pub(crate) fn relay(mut self, answer: &Answer) {
        let head = answer.head.strip_suffix("\r\n").unwrap();
        write!(self.stream, "{head}connection: close\r\n\r\n{}", answer.body).unwrap();
    }

    pub(crate) fn header(&self, name: &str) -> String {
        header(&self.head, name)
    }
}

pub(crate) fn header(head: &str, name: &str) -> String {
    let lines = head.lines().filter_map(|line| line.split_once(": "));
    let mut found = lines.filter(|(it, _)| it.eq_ignore_ascii_case(name));
    found.next().map(|(_, value)| value.to_owned()).unwrap_or_default()
}

/// An upstream whose requests the test answers.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    requests: Receiver<Waiting>,
}

impl Upstream {
    pub(crate) fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub(crate) fn on(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let (out, requests) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, out): (TcpStream, Sender<Waiting>) = (stream.unwrap(), out.clone());
                std::thread::spawn(move || {
                    if let Some((head, body)) = read_message(&stream) {
                        let waiting = Waiting { head, body, stream };
                        if waiting.header("idempotency-fence") == "0" {
                            // The probe of a reconcile URL.
                            let status = "404 Not Found\r\nidempotency-outcome: did-not-happen";
                            return waiting.answer(status, "");
                        }
                        // The test may have seen enough.
                        let _ = out.send(waiting);
                    }
                });
            }
        });
        Self { address, requests }
    }

    /// The next request.
    pub(crate) fn next(&self) -> Waiting {
        self.requests.recv_timeout(TIMEOUT).expect("no request came")
    }

    /// The next request, if it comes within this time.
    pub(crate) fn next_within(&self, time: Duration) -> Option<Waiting> {
        self.requests.recv_timeout(time).ok()
    }

    /// Whether there is none.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.try_recv().is_err()
    }
}

/// Head and body of a request or a response with a length.
fn read_message(stream: &TcpStream) -> Option<(String, Vec<u8>)> {
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let mut body = vec![0; header(&head, "content-length").parse().unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> String {
        header(&self.head, name)
    }

    /// The code of a problem.
    pub(crate) fn code(&self) -> String {
        let json: serde_json::Value = serde_json::from_str(&self.body).unwrap_or_default();
        json["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// Sends a `POST` under `key`; its answer can be read from the stream.
pub(crate) fn send(address: SocketAddr, key: &str, body: &str) -> TcpStream {
    send_to(address, "/pay", key, &[("authorization", "Bearer a")], body)
}

/// The same, to this path and with these fields.
pub(crate) fn send_to(
    address: SocketAddr,
    path: &str,
    key: &str,
    fields: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    send_fields(address, path, &[&[("idempotency-key", key)], fields].concat(), body)
}

/// Sends a `POST` with these fields alone.
pub(crate) fn send_fields(
    address: SocketAddr,
    path: &str,
    fields: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: a\r\n");
    for (name, value) in fields {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    stream
}

/// The answer that comes, if one does.
pub(crate) fn receive(stream: &TcpStream) -> Option<Answer> {
    let (head, body) = read_message(stream)?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head, body: String::from_utf8_lossy(&body).into_owned() })
}

pub(crate) fn post(address: SocketAddr, key: &str, body: &str) -> Answer {
    receive(&send(address, key, body)).expect("no answer came")
}
