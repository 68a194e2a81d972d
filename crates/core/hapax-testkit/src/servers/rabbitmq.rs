//! RabbitMQ.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::{EVERY, TIMEOUT, free_port, loopback, program, signal, tail};

/// The server's own script. Debian's one in `/usr/sbin` changes the user, and so the environment.
const SCRIPT: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";

/// Time for a node to start, which takes it several seconds of a processor: on a machine that is busy, much longer. One that
/// cannot start ends before.
const STARTS_WITHIN: Duration = Duration::from_secs(300);

/// Evaluates Erlang in the node.
const CONSOLE: &str = include_str!("rabbitmq.erl");

/// The number of messages in the queue `Q`. The node reads the figures of a quorum queue every five seconds.
const MESSAGES: &str = "case amqqueue:get_type(Q) of \
    rabbit_quorum_queue -> {ok,N,_}=ra:consistent_query(amqqueue:get_pid(Q),\
    fun rabbit_fifo:query_messages_total/1), N; \
    _ -> proplists:get_value(messages,rabbit_amqqueue:info(Q,[messages])) end";

/// Settings of a [`RabbitMqServer`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RabbitMqServerOptions {
    /// Largest message that the server takes, in bytes.
    pub max_message_size: usize,
    /// Certificate and key of [`RabbitMqServer::tls_url`], in PEM.
    pub certificate: Option<(String, String)>,
    /// Roots of the certificates of clients, in PEM. With TLS a client must have one then, and may log in by it
    /// (`EXTERNAL`) as the user of its common name.
    pub client_roots: Option<String>,
}

impl Default for RabbitMqServerOptions {
    fn default() -> Self {
        Self { max_message_size: 128 << 20, certificate: None, client_roots: None }
    }
}

/// A private RabbitMQ node with its own name server (epmd); dropping it kills both and removes their
/// folder.
#[derive(Debug)]
pub struct RabbitMqServer {
    child: Option<Child>,
    epmd: Option<Child>,
    ports: Ports,
    options: RabbitMqServerOptions,
    // After the node is killed, which would write to it.
    folder: tempfile::TempDir,
}

#[derive(Clone, Copy, Debug)]
struct Ports {
    amqp: u16,
    tls: u16,
    epmd: u16,
    distribution: u16,
    console: u16,
}

impl Ports {
    fn free() -> Self {
        Self {
            amqp: free_port(),
            tls: free_port(),
            epmd: free_port(),
            distribution: free_port(),
            console: free_port(),
        }
    }
}

impl RabbitMqServer {
    /// Starts a server with the user `guest`.
    pub async fn start() -> Self {
        Self::with(RabbitMqServerOptions::default()).await
    }

    /// Starts a server with settings.
    pub async fn with(options: RabbitMqServerOptions) -> Self {
        let (folder, ports) = (super::folder(), Ports::free());
        let mut server = Self { folder, ports, options, epmd: None, child: None };
        let write = |name: &str, text: &str| {
            std::fs::write(server.folder.path().join(name), text).expect("a file");
        };
        // Without plugins it starts sooner.
        match &server.options.client_roots {
            None => write("plugins", "[]."),
            Some(roots) => {
                write("plugins", "[rabbitmq_auth_mechanism_ssl].");
                write("client-roots", roots);
            }
        }
        write("console.erl", CONSOLE);
        if let Some((certificate, key)) = &server.options.certificate {
            write("certificate", certificate);
            write("key", key);
        }
        // Another process may have taken a port in between.
        for _ in 0..5 {
            if server.try_start().await {
                return server;
            }
            server.epmd = None;
            server.ports = Ports::free();
        }
        panic!("the server does not start:\n{}", tail(&server.log()));
    }

    /// Returns `amqp://guest:guest@127.0.0.1:PORT`, of the virtual host `/`.
    #[must_use]
    pub fn url(&self) -> String {
        Self::url_at(self.address())
    }

    /// Returns `amqps://guest:guest@127.0.0.1:PORT`, of the virtual host `/`, for a server with a
    /// certificate.
    #[must_use]
    pub fn tls_url(&self) -> String {
        format!("amqps://guest:guest@{}", loopback(self.ports.tls))
    }

    /// Returns the URL of a server that is reached at another address.
    #[must_use]
    pub fn url_at(address: SocketAddr) -> String {
        format!("amqp://guest:guest@{address}")
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        loopback(self.ports.amqp)
    }

    /// Evaluates Erlang expressions in the node, and returns the last value as text.
    pub async fn eval(&self, expressions: &str) -> String {
        let answer = timeout(TIMEOUT, self.try_eval(expressions)).await.expect("the node answers");
        answer.expect("the node is there")
    }

    async fn try_eval(&self, expressions: &str) -> std::io::Result<String> {
        assert!(!expressions.contains('\n'), "expected one line");
        let mut stream = TcpStream::connect(loopback(self.ports.console)).await?;
        stream.write_all(format!("{expressions}\n").as_bytes()).await?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).await?;
        Ok(line.trim_end().to_owned())
    }

    /// Creates a durable classic queue.
    pub async fn declare_queue(&self, queue: &str) {
        let name = format!("rabbit_misc:r(<<\"/\">>,queue,<<\"{queue}\">>)");
        let declare =
            format!("element(1,rabbit_amqqueue:declare({name},true,false,[],none,<<\"guest\">>)).");
        let declared = self.eval(&declare).await;
        assert!(["new", "existing"].contains(&&*declared), "{queue}: {declared}");
    }

    /// Returns the number of messages in a queue that are not acknowledged, delivered or not; 0 if
    /// there is no such queue.
    pub async fn messages(&self, queue: &str) -> u64 {
        let name = format!("rabbit_misc:r(<<\"/\">>,queue,<<\"{queue}\">>)");
        let lookup = format!("case rabbit_amqqueue:lookup({name}) of {{ok,Q}} ->");
        let count = self.eval(&format!("{lookup} {MESSAGES}; _ -> 0 end.")).await;
        count.parse().unwrap_or_else(|_| panic!("messages of {queue}: {count}"))
    }

    /// Returns the number of messages in all queues that are not acknowledged, delivered or not; `None` while a queue has
    /// no leader. Delay queues have messages that are in no other one.
    pub async fn messages_of_all_queues(&self) -> Option<u64> {
        let sum = format!("lists:sum([{MESSAGES} || Q <- rabbit_amqqueue:list()]).");
        self.eval(&sum).await.parse().ok()
    }

    /// Freezes it (SIGSTOP): connections stay open without an answer.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Resumes it (SIGCONT).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills it (SIGKILL), and waits until it has ended. Its files stay. A server that runs has its queues and
    /// exchanges on disk: Mnesia writes them with a delay.
    pub async fn kill(&mut self) {
        let sync = self.try_eval("catch mnesia:sync_log().");
        // A server that is paused does not answer.
        let _ = timeout(Duration::from_secs(2), sync).await;
        self.signal(Signal::KILL);
        if let Some(mut child) = self.child.take() {
            child.wait().await.expect("our own child can be awaited");
        }
    }

    /// Starts it again after [`kill`](Self::kill), on the same ports and files.
    pub async fn restart(&mut self) {
        assert!(self.child.is_none(), "it still runs");
        for _ in 0..20 {
            if self.try_start().await {
                return;
            }
            sleep(EVERY * 10).await;
        }
        panic!("the server does not start again:\n{}", tail(&self.log()));
    }

    fn configuration(&self) -> String {
        let size = format!("max_message_size = {}\n", self.options.max_message_size);
        if self.options.certificate.is_none() {
            return size;
        }
        let file = |name: &str| self.folder.path().join(name).display().to_string();
        let clients = match self.options.client_roots {
            None => "ssl_options.verify = verify_none\n".to_owned(),
            Some(_) => format!(
                "ssl_options.cacertfile = {}\nssl_options.verify = verify_peer\n\
                 ssl_options.fail_if_no_peer_cert = true\nssl_cert_login_from = common_name\n\
                 auth_mechanisms.1 = PLAIN\nauth_mechanisms.2 = EXTERNAL\n",
                file("client-roots")
            ),
        };
        format!(
            "{size}listeners.ssl.1 = {}\nssl_options.certfile = {}\nssl_options.keyfile = {}\n{clients}",
            loopback(self.ports.tls),
            file("certificate"),
            file("key")
        )
    }

    async fn try_start(&mut self) -> bool {
        let configuration = self.folder.path().join("rabbitmq.conf");
        std::fs::write(configuration, self.configuration()).expect("a file");
        if self.epmd.is_none() {
            self.epmd = Some(self.start_epmd());
        }
        let log = std::fs::File::create(self.log()).expect("a file");
        let errors = log.try_clone().expect("the file is open");
        let script = if Path::new(SCRIPT).is_file() {
            PathBuf::from(SCRIPT)
        } else {
            program(&["rabbitmq-server"])
        };
        let mut command = Command::new(script);
        self.set_environment(&mut command);
        command.stdin(std::process::Stdio::null()).stdout(log).stderr(errors);
        command.kill_on_drop(true).process_group(0);
        let child = command.spawn().expect("rabbitmq-server can be started");
        self.child = Some(child);
        let deadline = Instant::now() + STARTS_WITHIN;
        while Instant::now() < deadline {
            let child = self.child.as_mut().expect("it was set");
            if child.try_wait().expect("the child is ours to wait for").is_some() {
                self.child = None;
                return false;
            }
            // The console listens after the node has started. Another node on this port would have
            // another name.
            let name = timeout(Duration::from_secs(2), self.try_eval("node().")).await;
            if matches!(name, Ok(Ok(name)) if name == format!("'{}'", self.node())) {
                return true;
            }
            sleep(EVERY).await;
        }
        false
    }

    fn set_environment(&self, command: &mut Command) {
        let file = |name: &str| self.folder.path().join(name);
        let Ports { amqp, epmd, distribution, console, .. } = self.ports;
        // The script splits the arguments at spaces.
        let arguments = format!(
            "-noinput +S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none -start_epmd false \
             -kernel inet_dist_use_interface {{127,0,0,1}} -eval file:script(\"{}\").",
            file("console.erl").display()
        );
        for (name, value) in [
            ("ERL_EPMD_ADDRESS", "127.0.0.1"),
            ("ERL_EPMD_PORT", &epmd.to_string()),
            ("HAPAX_CONSOLE_PORT", &console.to_string()),
            // The node replaces the script, so that signals reach it.
            ("RABBITMQ_ALLOW_INPUT", "1"),
            ("RABBITMQ_DIST_PORT", &distribution.to_string()),
            ("RABBITMQ_LOGS", "-"),
            ("RABBITMQ_NODENAME", &self.node()),
            ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1"),
            ("RABBITMQ_NODE_PORT", &amqp.to_string()),
            ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", &arguments),
        ] {
            command.env(name, value);
        }
        for (name, value) in [
            ("ERL_CRASH_DUMP", file("erl_crash.dump")),
            // Of the cookie.
            ("HOME", self.folder.path().to_owned()),
            ("RABBITMQ_CONFIG_FILE", file("rabbitmq.conf")),
            ("RABBITMQ_CONF_ENV_FILE", PathBuf::from("/dev/null")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", file("plugins")),
            ("RABBITMQ_LOG_BASE", file("log")),
            ("RABBITMQ_MNESIA_BASE", file("data")),
            ("RABBITMQ_PID_FILE", file("pid")),
        ] {
            command.env(name, value);
        }
    }

    /// Name of the Erlang node.
    fn node(&self) -> String {
        format!("hapax-{}@localhost", self.ports.amqp)
    }

    fn start_epmd(&self) -> Child {
        let mut command = Command::new(program(&["epmd"]));
        command.args(["-port", &self.ports.epmd.to_string()]).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::null()).kill_on_drop(true).process_group(0);
        command.spawn().expect("epmd can be started")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    fn signal(&self, which: Signal) {
        if let Some(child) = &self.child {
            signal(child, which);
        }
    }
}

impl Drop for RabbitMqServer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("end of the server's log:\n{}", tail(&self.log()));
        }
    }
}
