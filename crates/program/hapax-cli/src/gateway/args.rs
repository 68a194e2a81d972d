//! The flags of `hapax gateway`.

use std::path::PathBuf;

use clap::Args;

use super::settings::FlagSettings;

/// Idempotency in front of any HTTP service
///
/// A request with an Idempotency-Key header executes once, however often it is sent: duplicates get
/// the first response. Everything else passes through. Records are stored in a file, ./hapax.db
/// unless --store names another store; there is nothing to set up.
#[derive(Clone, Debug, Args)]
#[command(after_help = AFTER)]
pub(crate) struct GatewayArgs {
    /// File with the same settings, and those of routes; flags and environment take precedence. On
    /// SIGHUP it is read again
    #[arg(long, env = "HAPAX_CONFIG", value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Print the settings in force, without secrets, and end: with 0, with 64 if they are invalid, or
    /// with 69 if a file of certificates, a key or a secret is missing, or certificates cannot be used.
    /// With METHOD and PATH, like `--check POST /payments/7`: print the route and the policy of that
    /// request
    #[arg(long, num_args = 0..=2, value_names = ["METHOD", "PATH"])]
    pub(super) check: Option<Vec<String>>,

    #[command(flatten)]
    pub(super) settings: FlagSettings,
}

const AFTER: &str = "\
Durations are written 250ms, 30s, 5m, 24h, 7d; sizes 64KiB, 1MiB, 2GiB. In a file, a flag of the
first list is a field of [gateway] and one of the second a field of [policy], with underscores:

  [gateway]
  upstream = \"http://127.0.0.1:3000\"
  [policy]
  in_flight = \"wait\"
  [[route]]
  path = \"/reports/{*rest}\"   # and fields of [policy] that differ there
  protect = false             # passes through; observe = true counts what would happen

Exit codes: 0 after a drain; 64 for a configuration that is not valid; 69 if another start may
succeed: the store cannot be opened within --store-wait, a file of a secret is missing, certificates
or keys are missing or cannot be used, an address is in use.

  hapax gateway --upstream http://127.0.0.1:3000
  curl -i http://127.0.0.1:8080/orders -H 'Authorization: Bearer me' \\
    -H 'Idempotency-Key: 8e03978e' -d '{\"item\": 7}'";
