//! The server's `INFO`, and the conditions under which it is unfit for a store.

use std::collections::HashMap;

/// Oldest version that is accepted. `SET` in earlier ones takes no absolute expiry in milliseconds.
const OLDEST: (u32, u32) = (6, 2);

/// The parsed answer of `INFO`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerInfo(HashMap<String, String>);

/// Reasons for which a server cannot give the store's guarantees.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnfitServer {
    /// The server removes records when memory runs short, and their operations would execute again.
    #[error(
        "the server's maxmemory-policy is `{policy}`: it would remove records unnoticed, and their \
         operations would execute again; set it to `noeviction`"
    )]
    Evicts {
        /// Its `maxmemory-policy`.
        policy: String,
    },
    /// The server is a replica and rejects writes.
    #[error("the server is a replica: connect to its master")]
    Replica,
    /// The server is older than 6.2.
    #[error("the server is version {version}: 6.2 or later is needed")]
    TooOld {
        /// The server's version.
        version: String,
    },
    /// The server is a node of a cluster, which this build does not support.
    #[error("the server is a node of a cluster: build with the feature `cluster`")]
    Cluster,
    /// The server does not report a property that is needed.
    #[error("the answer to INFO lacks `{field}`: it is unknown whether the server is fit")]
    MissingField {
        /// The missing field.
        field: &'static str,
    },
}

impl ServerInfo {
    pub(crate) fn parse(info: &str) -> Self {
        let lines = info.lines().filter_map(|line| line.split_once(':'));
        Self(lines.map(|(name, value)| (name.into(), value.trim().into())).collect())
    }

    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.value("cluster_enabled") == Some("1")
    }

    pub(crate) fn is_replica(&self) -> bool {
        self.value("role").is_some_and(|role| role != "master")
    }

    /// Returns the policy if it is one that evicts.
    pub(crate) fn eviction(&self) -> Option<&str> {
        self.value("maxmemory_policy").filter(|policy| *policy != "noeviction")
    }

    pub(crate) fn is_too_old(&self) -> bool {
        let version = self.value("redis_version").unwrap_or_default();
        let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
        let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        (major, minor) < OLDEST
    }

    /// Checks whether the server is fit for a store.
    pub(crate) fn check(&self, allow_eviction: bool) -> Result<(), UnfitServer> {
        let silent = |field| UnfitServer::MissingField { field };
        let version = self.value("redis_version").ok_or(silent("redis_version"))?;
        if self.is_too_old() {
            return Err(UnfitServer::TooOld { version: version.into() });
        }
        self.value("role").ok_or(silent("role"))?;
        if self.is_replica() {
            return Err(UnfitServer::Replica);
        }
        if allow_eviction {
            return Ok(());
        }
        self.value("maxmemory_policy").ok_or(silent("maxmemory_policy"))?;
        match self.eviction() {
            Some(policy) => Err(UnfitServer::Evicts { policy: policy.into() }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ServerInfo, UnfitServer};

    fn check(info: &str) -> Result<(), UnfitServer> {
        ServerInfo::parse(info).check(false)
    }

    #[test]
    fn old_server_versions_are_detected() {
        let rest = "role:master\r\nmaxmemory_policy:noeviction\r\n";
        for (version, fits) in
            [("6.0.16", false), ("6.2.0", true), ("7.0.15", true), ("10.0.1", true), ("5", false)]
        {
            let checked = check(&format!("redis_version:{version}\r\n{rest}"));
            assert_eq!(checked.is_ok(), fits, "{version}: {checked:?}");
        }
    }

    #[test]
    fn a_missing_field_of_info_is_an_error() {
        let silent = |field| Err(UnfitServer::MissingField { field });
        assert_eq!(check(""), silent("redis_version"));
        assert_eq!(check("redis_version:7.0.0\r\n"), silent("role"));
        assert_eq!(check("redis_version:7.0.0\r\nrole:master\r\n"), silent("maxmemory_policy"));
    }
}
