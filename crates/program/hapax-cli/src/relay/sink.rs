//! The broker or endpoint of `hapax relay`.

use std::num::NonZeroUsize;
use std::sync::Arc;

use hapax_messages::{MessageSink, RelayLimits};
use hapax_webhooks::WebhookSink;

use super::RelayArgs;
use crate::exit::CliError;
use crate::webhooks::{self, EndpointFiles, SECRET_FILE};

/// Connections to an endpoint of webhooks, unless a flag sets their number.
const CONNECTIONS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(31);

/// Returns the sink of the flags, and the default of messages in flight.
pub(super) async fn open(
    args: &RelayArgs,
) -> Result<(Arc<dyn MessageSink>, NonZeroUsize), CliError> {
    let scheme = args.to.0.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    match scheme.as_deref() {
        Some("http" | "https") => {
            let builder = WebhookSink::builder(&args.to.0).timeout(args.publish_timeout);
            let files = EndpointFiles {
                secrets: args.signing_secret_file.as_deref(),
                roots: args.to_ca.as_deref(),
            };
            let sink = webhooks::sink(builder, files, "--publish-timeout").await?;
            Ok((Arc::new(sink), CONNECTIONS))
        }
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
