//! Endpoints of webhooks, which flags name: those of `hapax relay`, and the services of `hapax consume`.

use std::path::Path;

use hapax_webhooks::{WebhookSink, WebhookSinkBuilder, WebhookSinkError};

use crate::exit::CliError;
use crate::secrets;

/// The flag of the signing secrets.
pub(crate) const SECRET_FILE: &str = "--signing-secret-file";

/// The files of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndpointFiles<'a> {
    /// Signing secrets, one a line.
    pub(crate) secrets: Option<&'a Path>,
    /// Root certificates to trust.
    pub(crate) roots: Option<&'a Path>,
}

/// Builds the sink of an endpoint. `timeout` is the flag of the time for a response.
pub(crate) async fn sink(
    mut builder: WebhookSinkBuilder,
    files: EndpointFiles<'_>,
    timeout: &str,
) -> Result<WebhookSink, CliError> {
    if let Some(file) = files.secrets {
        let path = file.display();
        secrets::warn_if_open(file);
        let text = tokio::fs::read_to_string(file).await;
        let text =
            text.map_err(|error| {
                CliError::unavailable(format!(
                    "{SECRET_FILE}: expected a file that can be read, found an error for {path}: {error}"
                ))
            })?;
        if text.trim().is_empty() {
            return Err(CliError::usage(format!(
                "{SECRET_FILE}: {path}: expected a secret, found an empty file"
            )));
        }
        let secrets = text.lines().filter(|line| !line.trim().is_empty());
        builder = secrets.fold(builder, WebhookSinkBuilder::secret);
    } else {
        tracing::warn!(
            "messages are not signed: without {SECRET_FILE} the receiver cannot tell them from requests of \
             others"
        );
    }
    if let Some(file) = files.roots {
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
            WebhookSinkError::Timeout => timeout,
            _ => "--to",
        };
        let failure = CliError::usage(format!("{flag}: {error}"));
        // Another program may be replacing the file of the roots.
        if matches!(error, WebhookSinkError::Roots(_)) { failure.may_end() } else { failure }
    })
}
