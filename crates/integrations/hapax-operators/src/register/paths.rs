//! Paths of routes in the register, by what gateways match with them.

use std::collections::BTreeMap;

/// Returns the values of paths by their meanings.
pub(super) fn by_meaning<T>(routes: &BTreeMap<String, T>) -> BTreeMap<String, &T> {
    routes.iter().map(|(path, value)| (meaning(path), value)).collect()
}

/// Returns one text for all spellings of a pattern that match the same requests: without the case of letters, empty
/// segments and the names of parameters. `*`, for any other path, stays as it is.
pub(super) fn meaning(path: &str) -> String {
    if !path.starts_with('/') {
        return path.to_owned();
    }
    let segments = path.split('/').filter(|segment| !segment.is_empty());
    let meanings = segments.map(|segment| match segment.strip_prefix('{') {
        Some(name) if name.starts_with('*') => "/{*}".to_owned(),
        Some(_) => "/{}".to_owned(),
        None => format!("/{}", segment.to_ascii_lowercase()),
    });
    meanings.collect()
}
