//! What is measured, beside what, and the targets.

use hapax_bench_cost::Any;

/// Where records are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backing {
    Memory,
    File,
    Redis,
    Postgres,
}

/// The process that is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Server {
    /// axum without any layer.
    Axum,
    /// Hapax's layer on axum.
    Layer(Backing),
    /// The layer of the crate `idempotent` on axum.
    Idempotent(Backing),
    /// The layer of the crate axum-idempotent on axum.
    AxumIdempotent,
    /// A reverse proxy that is hyper and nothing else.
    Proxy,
    Nginx,
    /// The program `hapax` in front of the upstream.
    Gateway(Backing),
    /// A store without HTTP and without an engine.
    Swaps(Backing),
}

impl Server {
    /// Returns where its records are, if it has any.
    pub(crate) const fn backing(self) -> Option<Backing> {
        match self {
            Self::Layer(backing)
            | Self::Idempotent(backing)
            | Self::Gateway(backing)
            | Self::Swaps(backing) => Some(backing),
            Self::Axum | Self::AxumIdempotent | Self::Proxy | Self::Nginx => None,
        }
    }
}

/// The requests that are sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Traffic {
    /// Each has a new key.
    Fresh,
    /// They repeat keys whose outcome is stored.
    Replays,
    /// Each has a new key, on a path that is not protected.
    Open,
}

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) server: Server,
    pub(crate) traffic: Traffic,
    /// One connection instead of many.
    pub(crate) alone: bool,
}

const fn case(name: &'static str, server: Server) -> Case {
    Case { name, server, traffic: Traffic::Fresh, alone: false }
}

const fn alone(name: &'static str, server: Server) -> Case {
    Case { name, server, traffic: Traffic::Fresh, alone: true }
}

const fn with(name: &'static str, server: Server, traffic: Traffic) -> Case {
    Case { name, server, traffic, alone: false }
}

/// The case by which the noise of a run is judged.
pub(crate) const REFERENCE: &str = "axum";

/// Cases of `bench http`, in the order of a round: those that are compared are near each other.
pub(crate) const HTTP: &[Case] = &[
    case(REFERENCE, Server::Axum),
    case("layer-memory", Server::Layer(Backing::Memory)),
    case("idempotent-memory", Server::Idempotent(Backing::Memory)),
    case("axum-idempotent", Server::AxumIdempotent),
    case("layer-redis", Server::Layer(Backing::Redis)),
    case("idempotent-redis", Server::Idempotent(Backing::Redis)),
    case("gateway-redis", Server::Gateway(Backing::Redis)),
    case("layer-file", Server::Layer(Backing::File)),
    case("swaps-file", Server::Swaps(Backing::File)),
    case("gateway-file", Server::Gateway(Backing::File)),
    alone("layer-file-alone", Server::Layer(Backing::File)),
    alone("swaps-file-alone", Server::Swaps(Backing::File)),
    case("layer-postgres", Server::Layer(Backing::Postgres)),
    case("swaps-postgres", Server::Swaps(Backing::Postgres)),
    case("gateway-postgres", Server::Gateway(Backing::Postgres)),
    case("hyper-proxy", Server::Proxy),
    case("nginx", Server::Nginx),
    case("gateway-memory", Server::Gateway(Backing::Memory)),
    with("gateway-open", Server::Gateway(Backing::Memory), Traffic::Open),
    with("replay-memory", Server::Gateway(Backing::Memory), Traffic::Replays),
    with("replay-postgres", Server::Gateway(Backing::Postgres), Traffic::Replays),
];

/// Cases of `bench stores`.
pub(crate) const STORES: &[Case] = &[
    case("swaps-memory", Server::Swaps(Backing::Memory)),
    case("swaps-file", Server::Swaps(Backing::File)),
    case("swaps-redis", Server::Swaps(Backing::Redis)),
    case("swaps-postgres", Server::Swaps(Backing::Postgres)),
    alone("swaps-memory-alone", Server::Swaps(Backing::Memory)),
    alone("swaps-file-alone", Server::Swaps(Backing::File)),
    alone("swaps-redis-alone", Server::Swaps(Backing::Redis)),
    alone("swaps-postgres-alone", Server::Swaps(Backing::Postgres)),
];

/// What a case is to reach.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Goal {
    /// At least this part of the requests per second of the case beside it.
    Rate { beside: &'static str, least: f64 },
    /// At most this processor time of the server for a request, in microseconds.
    Cpu { most: f64 },
    /// At most so much more latency (median) than the case beside it, in milliseconds.
    Latency { beside: &'static str, most: f64 },
    /// Nothing: the ratio is only printed.
    Beside { beside: &'static str },
}

impl Goal {
    /// Returns the name of the case beside it.
    pub(crate) const fn beside(self) -> Option<&'static str> {
        match self {
            Self::Rate { beside, .. } | Self::Latency { beside, .. } | Self::Beside { beside } => {
                Some(beside)
            }
            Self::Cpu { .. } => None,
        }
    }
}

const fn rate(beside: &'static str, least: f64) -> Goal {
    Goal::Rate { beside, least }
}

const fn beside(beside: &'static str) -> Goal {
    Goal::Beside { beside }
}

/// Connections for which the targets are stated.
pub(crate) const TARGET_CONNECTIONS: usize = 64;

/// The targets, and ratios that are printed next to them.
pub(crate) const GOALS: &[(&str, Goal)] = &[
    ("layer-memory", rate("idempotent-memory", 1.15)),
    ("layer-memory", Goal::Cpu { most: 15.0 }),
    ("layer-memory", beside("axum")),
    ("layer-memory", beside("axum-idempotent")),
    ("layer-redis", rate("idempotent-redis", 1.3)),
    ("layer-redis", Goal::Cpu { most: 28.0 }),
    ("layer-file", rate("swaps-file", 0.8)),
    ("layer-file-alone", Goal::Latency { beside: "swaps-file-alone", most: 0.2 }),
    ("layer-postgres", rate("swaps-postgres", 0.8)),
    ("gateway-memory", rate("hyper-proxy", 0.6)),
    ("gateway-memory", Goal::Cpu { most: 32.0 }),
    ("gateway-memory", beside("nginx")),
    ("gateway-open", rate("hyper-proxy", 0.9)),
    ("gateway-open", beside("nginx")),
    ("gateway-redis", rate("layer-redis", 0.85)),
    ("gateway-file", rate("layer-file", 0.85)),
    ("gateway-postgres", rate("layer-postgres", 0.85)),
    ("replay-memory", rate("gateway-open", 0.9)),
    ("replay-postgres", rate("gateway-open", 0.6)),
];

/// Returns the cases of `all` that `only` names, those beside them and the reference; all of them if
/// `only` is empty.
///
/// # Errors
/// A name is none of a case.
pub(crate) fn choose(all: &'static [Case], only: &[String]) -> Result<Vec<&'static Case>, Any> {
    let is_case = |name: &String| all.iter().any(|case| case.name == name);
    if let Some(unknown) = only.iter().find(|name| !is_case(name)) {
        let names: Vec<_> = all.iter().map(|case| case.name).collect();
        return Err(format!("no case {unknown:?}: expected {}", names.join(", ")).into());
    }
    let is_named = |name: &str| only.iter().any(|only| only == name);
    let is_beside =
        |name: &str| GOALS.iter().any(|(case, goal)| is_named(case) && goal.beside() == Some(name));
    let is_chosen =
        |name: &str| only.is_empty() || name == REFERENCE || is_named(name) || is_beside(name);
    Ok(all.iter().filter(|case| is_chosen(case.name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_name_cases() {
        let is_case = |name: &str| HTTP.iter().any(|case| case.name == name);
        for (case, goal) in GOALS {
            assert!(is_case(case), "{case}");
            assert!(goal.beside().is_none_or(is_case), "{goal:?}");
        }
    }

    #[test]
    fn a_case_brings_those_beside_it() {
        let chosen = choose(HTTP, &["gateway-file".into()]).expect("it is a case");
        let names: Vec<_> = chosen.iter().map(|case| case.name).collect();
        assert_eq!(names, ["axum", "layer-file", "gateway-file"]);
    }
}
