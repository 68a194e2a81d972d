//! The broker or endpoint of `hapax relay`.

use std::num::NonZeroUsize;
use std::sync::Arc;

use hapax_messages::{MessageSink, RelayLimits};
use hapax_webhooks::{WebhookSink, WebhookSinkBuilder, WebhookSinkError};

use super::RelayArgs;
use crate::exit::CliError;

const SECRET_FILE: &str = "--signing-secret-file";

/// Connections to an endpoint of webhooks, unless a flag sets their number.
const CONNECTIONS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(31);

/// Returns the sink of the flags, and the default of messages in flight.
pub(super) async fn open(
    args: &RelayArgs,
) -> Result<(Arc<dyn MessageSink>, NonZeroUsize), CliError> {
    let scheme = args.to.0.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    match scheme.as_deref() {
        Some("http" | "https") => Ok((Arc::new(webhooks(args).await?), CONNECTIONS)),
        Some("nats" | "tls") => {
            for (flag, file) in [(SECRET_FILE, &args.signing_secret_file), ("--to-ca", &args.to_ca)]
            {
                if file.is_some() {
                    return Err(CliError::usage(format!(
                        "{flag}: expected an endpoint in --to (https://HOST/PATH), found a broker: \
                         remove {flag}"
                    )));
                }
            }
            let sink = crate::messages::sink(&args.to).await?;
            Ok((sink, RelayLimits::default().in_flight))
        }
        _ => Err(CliError::usage(
            "--to: expected nats://HOST, tls://HOST, http://HOST/PATH or https://HOST/PATH, found \
             another URL",
        )),
    }
}

async fn webhooks(args: &RelayArgs) -> Result<WebhookSink, CliError> {
    let mut builder = WebhookSink::builder(&args.to.0).timeout(args.publish_timeout);
    if let Some(file) = &args.signing_secret_file {
        let path = file.display();
        let text = tokio::fs::read_to_string(file).await;
        let text =
            text.map_err(|error| CliError::usage(format!("{SECRET_FILE}: {path}: {error}")))?;
        if text.trim().is_empty() {
            return Err(CliError::usage(format!(
                "{SECRET_FILE}: {path}: expected a secret, found an empty file"
            )));
        }
        let secrets = text.lines().filter(|line| !line.trim().is_empty());
        builder = secrets.fold(builder, WebhookSinkBuilder::secret);
    }
    if let Some(file) = &args.to_ca {
        builder = builder.roots(file);
    }
    builder.build().await.map_err(|error| {
        let flag = match error {
            WebhookSinkError::Secret { .. } | WebhookSinkError::TooManySecrets { .. } => {
                SECRET_FILE
            }
            WebhookSinkError::NoRoots
            | WebhookSinkError::Roots(_)
            | WebhookSinkError::RootsWithoutTls => "--to-ca",
            WebhookSinkError::Timeout => "--publish-timeout",
            _ => "--to",
        };
        CliError::usage(format!("{flag}: {error}"))
    })
}
