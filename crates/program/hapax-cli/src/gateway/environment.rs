//! Variables that no setting reads.

use clap::{Command, CommandFactory};

/// The largest edit distance at which a setting is suggested for an unknown name.
const NEAR: usize = 3;

/// Warns of unknown variables on standard error, for commands without a log.
pub(crate) fn warn_of_unknown() {
    for warning in unknown(variables()) {
        eprintln!("hapax: warning: {warning}");
    }
}

/// A variable that is no text has no name of ours, or its value is rejected.
pub(super) fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Returns a warning for each variable `HAPAX_*` without a meaning, with its value. They are not
/// rejected: Kubernetes sets some.
pub(super) fn unknown(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let known = known(crate::Cli::command());
    let mut warnings: Vec<String> = variables
        .filter(|(name, value)| {
            name.starts_with("HAPAX_") && !known.contains(name) && !is_of_kubernetes(name, value)
        })
        .map(|(name, _)| {
            let near = known.iter().map(|it| (strsim::damerau_levenshtein(it, &name), it)).min();
            // Two other letters of three are not a spelling mistake.
            let most = NEAR.min((name.len() - "HAPAX_".len()) / 2);
            let near = near.filter(|(distance, _)| *distance <= most).map(|(_, near)| near);
            let is_prefix = |it: &&String| name.starts_with(&format!("{it}_"));
            match near.or_else(|| known.iter().find(is_prefix)) {
                Some(near) => format!("{name} is no setting and is ignored: {near} is one"),
                None => format!("{name} is no setting and is ignored"),
            }
        })
        .collect();
    warnings.sort();
    warnings
}

/// Returns the variables of all commands: a variable of one may be set while another runs.
fn known(command: Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str().map(str::to_owned));
    let own: Vec<_> = own.collect();
    command.get_subcommands().cloned().flat_map(known).chain(own).collect()
}

/// Returns whether Kubernetes sets the variable, in every container of a namespace that has a
/// service named hapax, or hapax-…: `HAPAX_SERVICE_HOST`, `HAPAX_SERVICE_PORT_HTTP`,
/// `HAPAX_PORT=tcp://…`, `HAPAX_PORT_80_TCP_ADDR`.
fn is_of_kubernetes(name: &str, value: &str) -> bool {
    let of_port = |rest: &str| {
        let (number, rest) = rest.split_once('_').unwrap_or_default();
        !number.is_empty()
            && number.bytes().all(|byte| byte.is_ascii_digit())
            && ["TCP", "UDP", "SCTP"].iter().any(|protocol| rest.starts_with(protocol))
    };
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || (name.ends_with("_PORT") && value.contains("://"))
        || name.match_indices("_PORT_").any(|(at, port)| of_port(&name[at + port.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_variable_is_reported() {
        let of =
            |name: &str, value: &str| unknown(std::iter::once((name.to_owned(), value.to_owned())));
        let near = "HAPAX_ON_UNKOWN is no setting and is ignored: HAPAX_ON_UNKNOWN is one";
        assert_eq!(of("HAPAX_ON_UNKOWN", "block"), [near]);
        assert_eq!(
            of("HAPAX_NOTHING_LIKE_IT", "x"),
            ["HAPAX_NOTHING_LIKE_IT is no setting and is ignored"]
        );
        assert_eq!(
            of("HAPAX_LOG_LEVEL", "debug"),
            ["HAPAX_LOG_LEVEL is no setting and is ignored: HAPAX_LOG is one"]
        );
        assert_eq!(of("HAPAX_FOO", "1"), ["HAPAX_FOO is no setting and is ignored"]);
        assert_eq!(of("HAPAX_PORT", "8080").len(), 1);
        for (name, value) in [
            ("HAPAX_ON_UNKNOWN", "block"),
            ("HAPAX_LOG", "info"),
            ("HAPAX_CONFIG", "a"),
            ("HAPAXES", "a"),
            ("PATH", "a"),
            ("HAPAX_SERVICE_HOST", "10.0.0.1"),
            ("HAPAX_SERVICE_PORT", "80"),
            ("HAPAX_SERVICE_PORT_HTTP", "80"),
            ("HAPAX_PORT", "tcp://10.0.0.1:80"),
            ("HAPAX_PORT_80_TCP", "tcp://10.0.0.1:80"),
            ("HAPAX_PORT_80_TCP_ADDR", "10.0.0.1"),
            ("HAPAX_ADMIN_PORT_9090_TCP_PROTO", "tcp"),
            ("HAPAX_ADMIN_SERVICE_HOST", "10.0.0.1"),
        ] {
            assert_eq!(of(name, value), [""; 0], "{name}");
        }
    }
}
