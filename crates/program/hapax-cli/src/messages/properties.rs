//! The file of the properties of Kafka clients.

#[cfg(feature = "kafka")]
use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
#[cfg(feature = "kafka")]
use hapax_kafka::KafkaStartError;

use crate::exit::CliError;

/// The flag of the file.
pub(crate) const PROPERTIES: &str = "--kafka-properties";

/// Option that names the file.
#[derive(Debug, Args)]
pub(crate) struct PropertyArgs {
    /// Kafka: the file of properties of librdkafka, one NAME=VALUE a line, such as
    /// security.protocol=sasl_ssl. A line that begins with # is a comment. TLS needs a program that was built
    /// with the feature kafka-tls
    #[arg(long = "kafka-properties", value_name = "PATH", env = "HAPAX_KAFKA_PROPERTIES")]
    pub(crate) file: Option<PathBuf>,
}

impl PropertyArgs {
    /// Rejects the flag if the URL of `flag` is that of another server.
    pub(crate) fn rejected_without_kafka(&self, flag: &str) -> Result<(), CliError> {
        match self.file {
            None => Ok(()),
            Some(_) => Err(CliError::usage(format!(
                "{PROPERTIES}: expected Kafka brokers in {flag} (kafka://HOST), found another server: \
                 remove {PROPERTIES}"
            ))),
        }
    }

    /// Reads the file, and adds the properties that the command sets, each with the flag of its value.
    #[cfg(feature = "kafka")]
    pub(crate) fn with(
        &self,
        own: impl IntoIterator<Item = (&'static str, String, &'static str)>,
    ) -> Result<BTreeMap<String, String>, CliError> {
        let mut properties = match &self.file {
            None => BTreeMap::new(),
            Some(file) => {
                let path = file.display();
                let text = std::fs::read_to_string(file).map_err(|error| {
                    CliError::usage(format!(
                        "{PROPERTIES}: expected a file that can be read, found an error for {path}: {error}"
                    ))
                })?;
                let parsed = parse(&text);
                let parsed = parsed
                    .map_err(|error| CliError::usage(format!("{PROPERTIES}: {path}: {error}")))?;
                if parsed.keys().any(|name| name.contains("password") || name.contains("secret")) {
                    crate::secrets::warn_if_open(file);
                }
                parsed
            }
        };
        for (name, value, flag) in own {
            // Of two names of one property, the client takes that which is set last.
            let other = match name {
                SERVERS => "metadata.broker.list",
                "message.timeout.ms" => "delivery.timeout.ms",
                _ => name,
            };
            if let Some(found) = [name, other].into_iter().find(|it| properties.contains_key(*it)) {
                return Err(CliError::usage(format!(
                    "{PROPERTIES}: expected no {found}, which {flag} sets, found it: remove it, and set {flag}"
                )));
            }
            properties.insert(name.to_owned(), value);
        }
        Ok(properties)
    }
}

/// Returns the error of a client that was not started. `flag` names the brokers.
#[cfg(feature = "kafka")]
pub(crate) fn not_started(flag: &str) -> impl FnOnce(KafkaStartError) -> CliError {
    move |error| match error {
        KafkaStartError::Property { .. }
        | KafkaStartError::UnknownProperty { .. }
        | KafkaStartError::TwoNames { .. }
        | KafkaStartError::Properties { .. } => CliError::usage(format!("{PROPERTIES}: {error}")),
        error => CliError::unavailable(format!("{flag}: {error}")),
    }
}

/// The property of the addresses of brokers.
#[cfg(feature = "kafka")]
pub(crate) const SERVERS: &str = "bootstrap.servers";

/// Parses the text of a file. An error has no values, which may be secret.
#[cfg(feature = "kafka")]
fn parse(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut properties = BTreeMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = line.split_once('=').unwrap_or_default();
        let name = name.trim_end();
        if name.is_empty() {
            return Err(format!("line {number}: expected NAME=VALUE, found another text"));
        }
        if properties.insert(name.to_owned(), value.trim_start().to_owned()).is_some() {
            return Err(format!(
                "line {number}: expected each property once, found {name} again: remove one of both"
            ));
        }
    }
    Ok(properties)
}

#[cfg(all(test, feature = "kafka"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_property_a_line_and_none_that_a_flag_sets() {
        let text = "# of orders\r\n\r\nsecurity.protocol=sasl_ssl\r\n sasl.password = a=b #c \n";
        let parsed: Vec<_> = parse(text).unwrap().into_iter().collect();
        let expected = [("sasl.password", "a=b #c"), ("security.protocol", "sasl_ssl")];
        assert_eq!(parsed, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
        for (wrong, expected) in [
            ("acks=all\nhidden\n", "line 2: expected NAME=VALUE"),
            ("=hidden", "line 1: expected NAME=VALUE"),
            ("acks=1\n\nacks=hidden", "line 3: expected each property once, found acks again"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.starts_with(expected) && !error.contains("hidden"), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("properties");
        let args = PropertyArgs { file: Some(file.clone()) };
        let own = || [(SERVERS, "one".to_owned(), "--to")];
        assert!(args.with(own()).unwrap_err().to_string().contains("a file that can be read"));
        for name in [SERVERS, "metadata.broker.list"] {
            std::fs::write(&file, format!("{name}=two")).unwrap();
            let error = args.with(own()).unwrap_err().to_string();
            assert!(error.contains(&format!("expected no {name}, which --to sets")), "{error}");
        }
        std::fs::write(&file, "client.id=a").unwrap();
        let found: Vec<_> = args.with(own()).unwrap().into_iter().collect();
        let expected = [(SERVERS, "one"), ("client.id", "a")];
        assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
}
