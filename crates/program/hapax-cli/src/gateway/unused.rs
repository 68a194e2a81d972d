//! What was said and could have no effect: whoever said it believes that it has one.

use super::fields::PolicyFields;
use super::file::RouteFields;
use super::load::{SettingError, said};
use super::value_args::{HeaderArg, InFlightArg};

/// What of a policy has an effect on a route that passes; the rest is about protection.
const PASSING: [&str; 2] = ["upstream_timeout", "docs_url"];

/// A setting that needs another one.
struct Dependency {
    field: &'static str,
    /// Whether it has an effect under a policy, which may be a route's.
    counts: fn(&PolicyFields) -> bool,
    why: &'static str,
}

const NEEDS: [Dependency; 7] = [
    Dependency {
        field: "wait_for",
        counts: |policy| policy.in_flight == Some(InFlightArg::Wait),
        why: "needs --in-flight wait: nobody waits",
    },
    Dependency {
        field: "scope_missing",
        counts: |policy| !matches!(policy.scope.as_deref(), Some([HeaderArg(only)]) if only == "none"),
        why: "contradicts --scope none: nobody can lack it",
    },
    Dependency { field: "cors_methods", counts: has_origins, why: NO_ORIGINS },
    Dependency { field: "cors_headers", counts: has_origins, why: NO_ORIGINS },
    Dependency { field: "cors_expose", counts: has_origins, why: NO_ORIGINS },
    Dependency { field: "cors_credentials", counts: has_origins, why: NO_ORIGINS },
    Dependency { field: "cors_max_age", counts: has_origins, why: NO_ORIGINS },
];

const NO_ORIGINS: &str = "needs --cors-origins: no page may do anything";

fn has_origins(policy: &PolicyFields) -> bool {
    policy.cors_origins.as_deref().is_some_and(|origins| origins != ["none"])
}

/// Refuses what can have no effect on any route.
pub(super) fn check(policy: &PolicyFields, routes: &[RouteFields]) -> Result<(), SettingError> {
    let everywhere = said(policy);
    let routes: Vec<_> = routes
        .iter()
        .map(|route| (route, said(&route.policy), route.policy.clone().or(policy.clone())))
        .collect();
    for (index, (route, own, whole)) in routes.iter().enumerate() {
        let refused = |field: &str, why: &str| {
            let flag = flag(field);
            Err(SettingError::Route(index, format!("route {}: {flag} {why}", route.path)))
        };
        if route.protect == Some(false) {
            let counts = |field: &str| PASSING.contains(&field) || field.starts_with("cors_");
            if let Some(field) = own.keys().find(|field| !counts(field)) {
                return refused(field, "contradicts `protect = false`: its requests just pass");
            }
        }
        for Dependency { field, counts, why } in NEEDS {
            if own.contains_key(field) && !counts(whole) {
                return refused(field, why);
            }
        }
    }
    for Dependency { field, counts, why } in NEEDS {
        let somewhere = || {
            routes.iter().any(|(route, own, whole)| {
                let passes = route.protect == Some(false) && !field.starts_with("cors_");
                !passes && !own.contains_key(field) && counts(whole)
            })
        };
        if everywhere.contains_key(field) && !counts(policy) && !somewhere() {
            return Err(SettingError::Setting(format!("{} {why}", flag(field))));
        }
    }
    Ok(())
}

fn flag(field: &str) -> String {
    format!("--{}", field.replace('_', "-"))
}
