//! From what was said to a configuration, and back.

use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::{InFlight, OnUnknown};
use hapax_gateway::{
    ByteSize, Config, Cors, CorsHeaders, ForwardAuth, Origins, PolicyConfig, RouteConfig,
    RouteMode, ScopeConfig, ServerLimits, UrlText,
};
use hapax_http::header::Grammar;
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, StoreOutage};
use hapax_http::statuses::{StatusLists, StatusRange};
use http::HeaderName;

use super::fields::{GatewayFields, PolicyFields};
use super::file::RouteFields;
use super::methods::{AnyMethodArg, MethodArg};
use super::value_args::{
    AdminArg, CompletionOutageArg, DocsUrlArg, DurationArg, GrammarArg, HeaderArg, InFlightArg,
    KeyRuleArg, ListenArg, OnUnknownArg, ScopeMissingArg, StatusArg, StoreOutageArg, UrlArg,
};

/// How long a copy waits unless it is said.
const WAIT_FOR: Duration = Duration::from_secs(5);

impl GatewayFields {
    /// The configuration, without routes.
    pub(super) fn config(self, policy: PolicyConfig) -> Result<Config, String> {
        let transport = self.transport()?;
        let upstream = self.upstream.ok_or("--upstream is required: the service to protect")?;
        let mut config = Config::new(upstream.0);
        set(&mut config.listen, self.listen.map(|addr| addr.0));
        set(&mut config.admin, self.admin.map(|addr| addr.0));
        config.admin_token_file = self.admin_token_file;
        config.audit_file = self.audit_file;
        config.access_log = self.access_log;
        let store = self.store.map(UrlText::read).transpose();
        set(&mut config.store, store.map_err(|error| format!("--store: {error}"))?);
        let cache = self.cache.map(UrlText::read).transpose();
        config.cache = cache.map_err(|error| format!("--cache: {error}"))?;
        config.secret_file = self.secret_file;
        let scope = headers("--auth-scope", self.auth_scope)?.unwrap_or_default();
        let copy = headers("--auth-copy", self.auth_copy)?.unwrap_or_default();
        config.auth = match self.auth_url {
            Some(UrlArg(url)) => {
                let mut auth = ForwardAuth::new(url);
                set(&mut auth.timeout, self.auth_timeout.map(|time| time.0));
                Some(ForwardAuth { scope, copy, ..auth })
            }
            None if !scope.is_empty() || !copy.is_empty() => {
                return Err(
                    "--auth-scope and --auth-copy need --auth-url: there is no answer".into()
                );
            }
            None if self.auth_timeout.is_some() => {
                return Err("--auth-timeout needs --auth-url: nobody is asked".into());
            }
            None => None,
        };
        set(&mut config.max_waiters, self.max_waiters);
        set(&mut config.store_timeout, self.store_timeout.map(|time| time.0));
        set(&mut config.store_wait, self.store_wait.map(|time| time.0));
        set(&mut config.drain_timeout, self.drain_timeout.map(|time| time.0));
        set(&mut config.drain_delay, self.drain_delay.map(|time| time.0));
        let ServerLimits { connections, connections_per_peer, memory, head_timeout, stall } =
            &mut config.limits;
        // More than there can be of them is refused as too much memory.
        let said = self.max_connections.map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        if said == Some(0) {
            return Err("--max-connections is zero: nobody could connect".into());
        }
        set(connections, said);
        let per_peer = self.max_connections_per_peer;
        if per_peer == Some(0) {
            return Err("--max-connections-per-peer is zero: nobody could connect".into());
        }
        *connections_per_peer = per_peer.and_then(|count| usize::try_from(count).ok());
        set(memory, self.max_memory.map(|size| size.0));
        set(head_timeout, self.head_timeout.map(|time| time.0));
        set(stall, self.body_timeout.map(|time| time.0));
        config.transport = transport;
        config.policy = policy;
        Ok(config)
    }

    /// What would have to be said for this configuration; but for logs, which are not in it.
    pub(super) fn of(config: &Config) -> Self {
        let auth = config.auth.as_ref();
        Self {
            listen: Some(ListenArg(config.listen)),
            upstream: Some(UrlArg(config.upstream.clone())),
            admin: Some(AdminArg(config.admin)),
            admin_token_file: config.admin_token_file.clone(),
            audit_file: config.audit_file.clone(),
            access_log: config.access_log.clone(),
            store: Some(config.store.clone().into()),
            cache: config.cache.clone().map(Into::into),
            secret_file: config.secret_file.clone(),
            auth_url: auth.map(|auth| UrlArg(auth.url.clone())),
            auth_timeout: auth.map(|auth| DurationArg(auth.timeout)),
            auth_scope: auth.map(|auth| or_none(&auth.scope)),
            auth_copy: auth.map(|auth| or_none(&auth.copy)),
            max_memory: Some(ByteSize(config.limits.memory)),
            max_connections: u32::try_from(config.limits.connections).ok(),
            max_connections_per_peer: u32::try_from(config.limits.per_peer()).ok(),
            max_waiters: Some(config.max_waiters),
            head_timeout: Some(DurationArg(config.limits.head_timeout)),
            body_timeout: Some(DurationArg(config.limits.stall)),
            store_timeout: Some(DurationArg(config.store_timeout)),
            store_wait: Some(DurationArg(config.store_wait)),
            drain_timeout: Some(DurationArg(config.drain_timeout)),
            drain_delay: Some(DurationArg(config.drain_delay)),
            log_format: None,
            log_level: None,
            ..Self::of_transport(&config.transport)
        }
    }
}

impl PolicyFields {
    /// The policy.
    pub(super) fn policy(self) -> Result<PolicyConfig, String> {
        let cors = self.cors()?;
        let fingerprint = self.fingerprint()?;
        let mut policy = PolicyConfig { cors, fingerprint, ..PolicyConfig::default() };
        let rule = |key| match key {
            KeyRuleArg::Optional => KeyRule::Optional,
            KeyRuleArg::Required => KeyRule::Required,
        };
        set(&mut policy.key, self.key.map(rule));
        let form = |form| match form {
            GrammarArg::Lenient => Grammar::Lenient,
            GrammarArg::Strict => Grammar::Strict,
        };
        set(&mut policy.grammar, self.grammar.map(form));
        set(&mut policy.key_header, self.key_header.map(|name| name.0));
        let methods = |verbs: Vec<MethodArg>| verbs.into_iter().map(|verb| verb.0).collect();
        set(&mut policy.methods, self.methods.map(methods));
        policy.scope = names(self.scope).map(callers).transpose()?;
        policy.scope_missing = self.scope_missing.map(|missing| match missing {
            ScopeMissingArg::Reject => MissingScope::Reject,
            ScopeMissingArg::Shared => MissingScope::Shared,
        });
        set(&mut policy.lease, self.lease.map(|time| time.0));
        set(&mut policy.retention, self.retention.map(|time| time.0));
        let patience = self.wait_for.map_or(WAIT_FOR, |time| time.0);
        policy.in_flight = match self.in_flight {
            None | Some(InFlightArg::Reject) => InFlight::Reject,
            Some(InFlightArg::Wait) => InFlight::Wait(patience),
        };
        let unknown = |unknown| match unknown {
            OnUnknownArg::Reexecute => OnUnknown::Reexecute,
            OnUnknownArg::Block => OnUnknown::Block,
            OnUnknownArg::Reconcile => OnUnknown::Reconcile,
        };
        set(&mut policy.on_unknown, self.on_unknown.map(unknown));
        policy.reconcile_url = self.reconcile_url.map(|url| url.0);
        set(&mut policy.profile, self.profile);
        policy.statuses = StatusLists {
            final_statuses: ranges("--final-statuses", self.final_statuses)?,
            retryable_statuses: ranges("--retryable-statuses", self.retryable_statuses)?,
            unknown_statuses: ranges("--unknown-statuses", self.unknown_statuses)?,
        };
        let outage = |outage| match outage {
            StoreOutageArg::Closed => StoreOutage::Closed,
            StoreOutageArg::Open => StoreOutage::Open,
        };
        set(&mut policy.store_outage, self.store_outage.map(outage));
        let answer = |answer| match answer {
            CompletionOutageArg::Deliver => CompletionOutage::Deliver,
            CompletionOutageArg::Withhold => CompletionOutage::Withhold,
        };
        set(&mut policy.completion_outage, self.completion_outage.map(answer));
        set(&mut policy.stream, self.stream);
        set(&mut policy.expires, self.expires);
        set(&mut policy.max_request_body, self.max_request_body.map(|size| size.0));
        set(&mut policy.max_response_body, self.max_response_body.map(|size| size.0));
        set(&mut policy.upstream_timeout, self.upstream_timeout.map(|time| time.0));
        policy.max_in_flight_per_scope = self.max_in_flight_per_scope.and_then(NonZeroU32::new);
        policy.docs_url = self.docs_url.and_then(|docs| docs.0);
        set(&mut policy.replay_set_cookie, self.replay_set_cookie);
        Ok(policy)
    }

    fn cors(&self) -> Result<Option<Cors>, String> {
        let origins = match self.cors_origins.as_deref() {
            Some([any]) if any == "*" => Some(Origins::Any),
            Some([none]) if none == "none" => return Ok(None),
            Some(origins) => Some(Origins::List(origins.to_vec())),
            None => None,
        };
        let Some(origins) = origins else { return Ok(None) };
        let mut cors = Cors::new(origins);
        let methods = |verbs: Vec<AnyMethodArg>| verbs.into_iter().map(|verb| verb.0).collect();
        set(&mut cors.methods, self.cors_methods.clone().map(methods));
        let names = headers("--cors-headers", self.cors_headers.clone())?;
        let names = names.map(|names| match &names[..] {
            [any] if any == "*" => CorsHeaders::Any,
            _ => CorsHeaders::List(names),
        });
        set(&mut cors.headers, names);
        set(&mut cors.expose, headers("--cors-expose", self.cors_expose.clone())?);
        set(&mut cors.credentials, self.cors_credentials);
        cors.max_age = self.cors_max_age.map(|time| time.0);
        Ok(Some(cors))
    }

    /// What would have to be said for this policy.
    pub(super) fn of(policy: &PolicyConfig) -> Self {
        let wait_for = match policy.in_flight {
            InFlight::Reject => None,
            InFlight::Wait(patience) => Some(DurationArg(patience)),
        };
        let cors = policy.cors.as_ref();
        let (fingerprint_body, fingerprint_only, fingerprint_except, fingerprint_headers) =
            super::fingerprint::said(&policy.fingerprint);
        let header = |names: &[HeaderName]| names.iter().cloned().map(HeaderArg).collect();
        Self {
            key: Some(match policy.key {
                KeyRule::Optional => KeyRuleArg::Optional,
                KeyRule::Required => KeyRuleArg::Required,
            }),
            key_header: Some(HeaderArg(policy.key_header.clone())),
            grammar: Some(match policy.grammar {
                Grammar::Lenient => GrammarArg::Lenient,
                Grammar::Strict => GrammarArg::Strict,
            }),
            methods: Some(policy.methods.iter().cloned().map(MethodArg).collect()),
            scope: policy.scope.as_ref().map(|callers| match callers {
                ScopeConfig::Headers(names) => header(names),
                ScopeConfig::Everyone => header(&[NONE]),
            }),
            scope_missing: policy.scope_missing.map(|missing| match missing {
                MissingScope::Reject => ScopeMissingArg::Reject,
                MissingScope::Shared => ScopeMissingArg::Shared,
            }),
            fingerprint_body,
            fingerprint_only,
            fingerprint_except,
            fingerprint_headers,
            lease: Some(DurationArg(policy.lease)),
            retention: Some(DurationArg(policy.retention)),
            in_flight: Some(wait_for.map_or(InFlightArg::Reject, |_| InFlightArg::Wait)),
            wait_for,
            on_unknown: Some(match policy.on_unknown {
                OnUnknown::Reexecute => OnUnknownArg::Reexecute,
                OnUnknown::Block => OnUnknownArg::Block,
                OnUnknown::Reconcile => OnUnknownArg::Reconcile,
            }),
            reconcile_url: policy.reconcile_url.clone().map(UrlArg),
            profile: Some(policy.profile),
            final_statuses: Some(statuses(&policy.statuses.final_statuses)),
            retryable_statuses: Some(statuses(&policy.statuses.retryable_statuses)),
            unknown_statuses: Some(statuses(&policy.statuses.unknown_statuses)),
            store_outage: Some(match policy.store_outage {
                StoreOutage::Closed => StoreOutageArg::Closed,
                StoreOutage::Open => StoreOutageArg::Open,
            }),
            completion_outage: Some(match policy.completion_outage {
                CompletionOutage::Deliver => CompletionOutageArg::Deliver,
                CompletionOutage::Withhold => CompletionOutageArg::Withhold,
            }),
            stream: Some(policy.stream),
            expires: Some(policy.expires),
            max_request_body: Some(ByteSize(policy.max_request_body)),
            max_response_body: Some(ByteSize(policy.max_response_body)),
            upstream_timeout: Some(DurationArg(policy.upstream_timeout)),
            max_in_flight_per_scope: Some(policy.max_in_flight_per_scope.map_or(0, Into::into)),
            docs_url: Some(DocsUrlArg(policy.docs_url.clone())),
            replay_set_cookie: Some(policy.replay_set_cookie),
            cors_origins: Some(match cors.map(|cors| &cors.origins) {
                None => vec!["none".into()],
                Some(Origins::Any) => vec!["*".into()],
                Some(Origins::List(origins)) => origins.clone(),
            }),
            cors_methods: cors.map(|cors| cors.methods.iter().cloned().map(AnyMethodArg).collect()),
            cors_headers: cors.map(|cors| match &cors.headers {
                CorsHeaders::Any => header(&[HeaderName::from_static("*")]),
                CorsHeaders::List(names) => or_none(names),
            }),
            cors_expose: cors.map(|cors| or_none(&cors.expose)),
            cors_credentials: cors.map(|cors| cors.credentials),
            cors_max_age: cors.and_then(|cors| cors.max_age).map(DurationArg),
        }
    }
}

impl RouteFields {
    /// The route, where `policy` says what it does not.
    pub(super) fn route(self, policy: &PolicyFields) -> Result<RouteConfig, String> {
        let Self { path, name, protect, observe, policy: own } = self;
        let handling = match (protect, observe) {
            (Some(false), Some(true)) => {
                return Err("`observe = true` contradicts `protect = false`".into());
            }
            (Some(true), Some(true)) => {
                return Err("`observe = true` contradicts `protect = true`: what is observed is \
                     not protected"
                    .into());
            }
            (Some(false), _) => RouteMode::Pass,
            (_, Some(true)) => RouteMode::Observe,
            _ => RouteMode::Protect,
        };
        Ok(RouteConfig { path, name, handling, policy: own.or(policy.clone()).policy()? })
    }
}

/// Stands alone, for one scope or for no header.
const NONE: HeaderName = HeaderName::from_static("none");

fn callers(names: Vec<HeaderName>) -> Result<ScopeConfig, String> {
    match &names[..] {
        [only] if *only == NONE => Ok(ScopeConfig::Everyone),
        names if names.contains(&NONE) => Err("--scope: `none` stands alone".into()),
        _ => Ok(ScopeConfig::Headers(names)),
    }
}

pub(super) fn set<T>(field: &mut T, said: Option<T>) {
    if let Some(said) = said {
        *field = said;
    }
}

pub(super) fn names(said: Option<Vec<HeaderArg>>) -> Option<Vec<HeaderName>> {
    said.map(|names| names.into_iter().map(|name| name.0).collect())
}

/// `none` alone is no header.
fn headers(flag: &str, said: Option<Vec<HeaderArg>>) -> Result<Option<Vec<HeaderName>>, String> {
    names(said)
        .map(|names| match &names[..] {
            [only] if *only == NONE => Ok(Vec::new()),
            all if all.contains(&NONE) => Err(format!("{flag}: `none` stands alone")),
            _ => Ok(names),
        })
        .transpose()
}

/// Reads `none` alone as no status.
fn ranges(flag: &str, said: Option<Vec<StatusArg>>) -> Result<Vec<StatusRange>, String> {
    let said = said.unwrap_or_default();
    let ranges: Vec<_> = said.iter().filter_map(|status| status.0).collect();
    match (said.len(), ranges.len()) {
        (1, 0) => Ok(ranges),
        (said, of_them) if said == of_them => Ok(ranges),
        _ => Err(format!("{flag}: `none` stands alone")),
    }
}

/// As [`ranges`] reads it.
fn statuses(ranges: &[StatusRange]) -> Vec<StatusArg> {
    if ranges.is_empty() {
        return vec![StatusArg(None)];
    }
    ranges.iter().copied().map(|range| StatusArg(Some(range))).collect()
}

/// As [`headers`] reads it.
fn or_none(names: &[HeaderName]) -> Vec<HeaderArg> {
    let none = [NONE];
    let names = if names.is_empty() { &none[..] } else { names };
    names.iter().cloned().map(HeaderArg).collect()
}
