//! Warnings of settings and files with risks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use hapax_core::Idempotency;
use hapax_core::diagnose::Severity;
use hapax_operators::{is_key_open_to_others, is_open_to_others};

use crate::config::{Config, PolicyConfig, Transport};
use crate::store::{CacheUrl, OpenStore, StoreFinding, StoreUrl};

/// Warns of risks at the start; `open_files` are those of [`ResolvedConfig::open_files`](crate::config::ResolvedConfig).
pub(super) fn warn(config: &Config, opened: &OpenStore, open_files: &BTreeSet<PathBuf>) {
    let secrets = opened.store.capabilities();
    if secrets.naming().is_none() {
        let read = if secrets.seals() { "" } else { ", and read responses" };
        tracing::warn!(
            "no secret names records: anyone who reads the store can guess keys and callers{read}"
        );
    }
    if let StoreUrl::Server(url) = &config.store
        && url.is_unencrypted()
    {
        tracing::warn!("the store is not reached over TLS: use rediss://, or sslmode=require");
    }
    let secret = config.secret_file.clone().or_else(|| config.store.secret_file());
    let open = secret.into_iter().chain(config.token_file()).filter(|path| is_open_to_others(path));
    warn_of_secrets(open.chain(open_files.iter().cloned()));
    let Transport { tls, upstream_tls, .. } = &config.transport;
    let keys = tls.iter().map(|it| &it.key).chain(upstream_tls.client.iter().map(|(_, key)| key));
    let of_cache = config.cache.as_ref().and_then(CacheUrl::key_file);
    for path in keys.cloned().chain(config.store.key_file()).chain(of_cache) {
        if is_key_open_to_others(&path) {
            tracing::warn!(path = %path.display(), "other users can read this private key: chmod 600 it, or 640 if root owns it");
        }
    }
    super::reload::warn(config);
}

/// Warns of credentials for reconcile requests that are never sent. [`Config::check`] rejects them where the settings tell
/// that the store has no secret.
pub(super) fn warn_without_secret(config: &Config, engine: &Idempotency) {
    let is_set = |policy: &PolicyConfig| policy.reconcile_authorization.is_some();
    if !engine.store().capabilities().seals() && config.policies().any(is_set) {
        tracing::warn!(
            "reconcile_authorization has no effect: the store has no secret that seals, so that no record describes its operation, and a \
             retry or an operator decides"
        );
    }
}

/// Warns of files with secrets that other users can read.
pub(super) fn warn_of_secrets(paths: impl IntoIterator<Item = PathBuf>) {
    for path in paths {
        tracing::warn!(path = %path.display(), "other users can read this secret: chmod 600 it");
    }
}

/// Returns the finding about a file of `reconcile_authorization` that other users can read or write.
pub(super) fn finding(path: &Path) -> StoreFinding {
    let found = format!("users other than its owner can read or write {}", path.display());
    let fix = "chmod 600 it: with these credentials anyone can send requests to the service";
    StoreFinding::new(Severity::Risk, "reconcile_authorization", found, fix)
}
