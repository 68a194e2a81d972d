//! The hosts of a URL, one of which is the primary.
//!
//! Each host is tried separately: a server that accepts a connection and then does not answer, or
//! that acts as primary after another one was promoted, must not use up the time in which the next
//! one would answer.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio_postgres::Config;
use tokio_postgres::config::{Host, TargetSessionAttrs};

/// The hosts, and the one that was the primary last.
#[derive(Debug)]
pub(crate) struct Hosts {
    configs: Vec<Config>,
    current: AtomicUsize,
}

/// An attempt with one host. Unless it [works](Self::works), later attempts begin with the next
/// host, also if this one is dropped before its end.
#[derive(Debug)]
pub(crate) struct Attempt<'a> {
    hosts: &'a Hosts,
    at: usize,
    works: bool,
}

impl Hosts {
    /// Returns the hosts of `config`, in its order.
    pub(crate) fn of(config: &Config) -> Self {
        let (names, addresses) = (config.get_hosts().len(), config.get_hostaddrs().len());
        let hosts = names.max(addresses);
        let ports = config.get_ports().len();
        let matches =
            (names == 0 || addresses == 0 || names == addresses) && (ports <= 1 || ports == hosts);
        // Lists that do not match are left to the client, which rejects them with its own message.
        let configs = if hosts > 1 && matches {
            (0..hosts).map(|at| alone(config, at)).collect()
        } else {
            vec![config.clone()]
        };
        Self { configs, current: AtomicUsize::new(0) }
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.configs.len()).unwrap_or(u32::MAX)
    }

    /// Returns an attempt for each host, beginning with the one that was the primary last.
    pub(crate) fn attempts(&self) -> impl Iterator<Item = Attempt<'_>> {
        let (first, count) = (self.current.load(Ordering::Relaxed), self.configs.len());
        (0..count).map(move |more| Attempt {
            hosts: self,
            at: (first + more) % count,
            works: false,
        })
    }

    /// Returns the host that was the primary last.
    pub(crate) fn current(&self) -> &Config {
        &self.configs[self.current.load(Ordering::Relaxed) % self.configs.len()]
    }
}

impl Attempt<'_> {
    pub(crate) fn config(&self) -> &Config {
        &self.hosts.configs[self.at]
    }

    /// Reports that the host is the primary.
    pub(crate) fn works(mut self) {
        self.works = true;
        self.hosts.current.store(self.at, Ordering::Relaxed);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.works {
            let Hosts { configs, current } = self.hosts;
            let next = (self.at + 1) % configs.len();
            // Another task may have found the primary meanwhile: its host stays.
            let moved =
                current.compare_exchange(self.at, next, Ordering::Relaxed, Ordering::Relaxed);
            moved.ok();
        }
    }
}

/// Returns `config` with only the host at `at`.
fn alone(config: &Config, at: usize) -> Config {
    let mut one = Config::new();
    if let Some(user) = config.get_user() {
        one.user(user);
    }
    if let Some(password) = config.get_password() {
        one.password(password);
    }
    if let Some(database) = config.get_dbname() {
        one.dbname(database);
    }
    if let Some(options) = config.get_options() {
        one.options(options);
    }
    if let Some(name) = config.get_application_name() {
        one.application_name(name);
    }
    match config.get_hosts().get(at) {
        Some(Host::Tcp(name)) => drop(one.host(name)),
        #[cfg(unix)]
        Some(Host::Unix(path)) => drop(one.host_path(path)),
        None => {}
    }
    if let Some(address) = config.get_hostaddrs().get(at) {
        one.hostaddr(*address);
    }
    let ports = config.get_ports();
    if let Some(port) = ports.get(at).or_else(|| ports.first()) {
        one.port(*port);
    }
    if let Some(limit) = config.get_connect_timeout() {
        one.connect_timeout(*limit);
    }
    if let Some(limit) = config.get_tcp_user_timeout() {
        one.tcp_user_timeout(*limit);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        one.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        one.keepalives_retries(retries);
    }
    // `read-write` is checked on every connection of a store: see `crate::server_info`.
    if config.get_target_session_attrs() == TargetSessionAttrs::ReadOnly {
        one.target_session_attrs(TargetSessionAttrs::ReadOnly);
    }
    one.keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .channel_binding(config.get_channel_binding());
    one
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(url: &str) -> Hosts {
        Hosts::of(&url.parse().unwrap())
    }

    fn tried(hosts: &Hosts) -> Vec<String> {
        let name = |attempt: Attempt<'_>| match attempt.config().get_hosts() {
            [Host::Tcp(name)] => format!("{name}:{:?}", attempt.config().get_ports()),
            other => format!("{other:?}"),
        };
        hosts.attempts().map(name).collect()
    }

    #[test]
    fn each_host_is_tried_with_its_port_and_all_other_parameters() {
        let url = "postgres://u:p@a:1,b:2/d?target_session_attrs=read-write&sslmode=require\
                   &application_name=n&keepalives_idle=7&connect_timeout=3";
        let hosts = hosts(url);
        for (attempt, wanted) in hosts.attempts().zip([("a", 1), ("b", 2)]) {
            let url = format!(
                "postgres://u:p@{}:{}/d?sslmode=require&application_name=n&keepalives_idle=7\
                 &connect_timeout=3",
                wanted.0, wanted.1
            );
            assert_eq!(*attempt.config(), url.parse::<Config>().unwrap());
        }
        assert_eq!(tried(&super::tests::hosts("host=a,b port=5")), ["a:[5]", "b:[5]"]);
    }

    #[test]
    fn attempts_begin_with_the_host_that_worked_last() {
        let hosts = hosts("postgres://a,b,c/d");
        assert_eq!(hosts.current().get_hosts(), [Host::Tcp("a".into())]);
        hosts.attempts().nth(1).unwrap().works();
        assert_eq!(hosts.current().get_hosts(), [Host::Tcp("b".into())]);
        // Dropped before its end.
        drop(hosts.attempts().next());
        assert_eq!(hosts.current().get_hosts(), [Host::Tcp("c".into())]);
    }

    #[test]
    fn hosts_that_do_not_match_their_ports_are_left_to_the_client() {
        assert_eq!(hosts("host=a,b,c port=1,2").configs.len(), 1);
        assert_eq!(hosts("postgres://a/d?target_session_attrs=read-write").configs.len(), 1);
    }
}
