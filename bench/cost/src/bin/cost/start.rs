//! Processes that the benchmark starts, each on a free port of the loopback interface.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hapax_bench_cost::Any;
use hapax_bench_cost::wire::OPEN_PATH;
use hapax_testkit::servers::free_port;

/// Time within which a process must listen.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A process that listens; dropping it kills it.
pub(crate) struct Process {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Process {
    /// Starts `command`, whose output goes to `log`, and waits until it listens on `address`.
    ///
    /// # Errors
    /// It ends, or does not listen in time.
    pub(crate) fn start(
        mut command: Command,
        address: SocketAddr,
        log: &Path,
    ) -> Result<Self, Any> {
        let output = File::create(log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let mut process = Self { child: command.spawn()?, address };
        let deadline = Instant::now() + TIMEOUT;
        while TcpStream::connect(address).is_err() {
            let ended = process.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let text = std::fs::read_to_string(log).unwrap_or_default();
                return Err(format!("{command:?} does not start:\n{text}").into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(process)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns an address on which nothing listens now.
pub(crate) fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

/// Writes the configuration of a gateway: protected everywhere but on one path.
pub(crate) fn configure_gateway(
    path: &Path,
    address: SocketAddr,
    upstream: SocketAddr,
    store: &str,
) -> Result<(), Any> {
    // The memory has room for the records of a run in memory, which is far more than the default.
    let text = format!(
        "[gateway]\nlisten = \"{address}\"\nupstream = \"http://{upstream}\"\nadmin = \"off\"\n\
         store = \"{store}\"\nmax_memory = \"8GiB\"\nlog_level = \"error\"\n\
         [[route]]\npath = \"{OPEN_PATH}\"\nprotect = false\n"
    );
    Ok(std::fs::write(path, text)?)
}

/// Writes the configuration of nginx: one process, connections to the upstream kept open.
pub(crate) fn configure_nginx(
    folder: &Path,
    address: SocketAddr,
    upstream: SocketAddr,
) -> Result<(), Any> {
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("  {name}_temp_path {}/{name};\n", folder.display()))
        .concat();
    let text = format!(
        "daemon off;\nmaster_process off;\nworker_processes 1;\npid {0}/nginx.pid;\n\
         error_log stderr error;\nevents {{ worker_connections 4096; }}\nhttp {{\n{temporary}\
         \x20 access_log off;\n  keepalive_requests 1000000000;\n\
         \x20 upstream behind {{ server {upstream}; keepalive 256; keepalive_requests 1000000000; }}\n\
         \x20 server {{\n    listen {address};\n    location / {{\n\
         \x20     proxy_pass http://behind;\n      proxy_http_version 1.1;\n\
         \x20     proxy_set_header Connection \"\";\n    }}\n  }}\n}}\n",
        folder.display()
    );
    Ok(std::fs::write(folder.join("nginx.conf"), text)?)
}
