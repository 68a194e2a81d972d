//! Paths of routes in the register, by what gateways match with them.

use std::collections::BTreeMap;

/// Returns the value that requests of the path with this meaning have: its own, else that of the most specific pattern
/// that matches all of them, else that of any other path.
pub(super) fn find<'a, T>(by_meaning: &BTreeMap<String, &'a T>, meaning: &str) -> Option<&'a T> {
    let exact = by_meaning.get(meaning);
    let covering = || {
        let ranked =
            by_meaning.iter().filter_map(|(pattern, it)| Some((rank(pattern, meaning)?, it)));
        ranked.min_by(|(one, _), (other, _)| one.cmp(other)).map(|(_, it)| it)
    };
    exact.or_else(covering).or_else(|| by_meaning.get("*")).copied()
}

/// Returns how specific a pattern is, the most specific first, if it matches each request that `path` matches.
fn rank(pattern: &str, path: &str) -> Option<Vec<u8>> {
    if !pattern.starts_with('/') || !path.starts_with('/') {
        return None;
    }
    let (mut path, mut ranks) = (segments(path), Vec::new());
    for segment in segments(pattern) {
        if segment == "{*}" {
            ranks.push(2);
            return Some(ranks);
        }
        match path.next()? {
            "{*}" => return None,
            same if same == segment => ranks.push(u8::from(segment == "{}")),
            _ if segment == "{}" => ranks.push(1),
            _ => return None,
        }
    }
    path.next().is_none().then_some(ranks)
}

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
    let meanings = segments(path).map(|segment| match segment.strip_prefix('{') {
        Some(name) if name.starts_with('*') => "/{*}".to_owned(),
        Some(_) => "/{}".to_owned(),
        None => format!("/{}", segment.to_ascii_lowercase()),
    });
    match meanings.collect::<String>() {
        root if root.is_empty() => "/".to_owned(),
        meaning => meaning,
    }
}

fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|segment| !segment.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_pattern_that_matches_all_requests_of_a_path_has_its_value() {
        let patterns = ["*", "/p/{x}", "/p/{*rest}", "/p/x/y", "/{a}/x"];
        let routes = patterns.map(|it| (it.to_owned(), it)).into_iter().collect();
        let by_meaning = by_meaning(&routes);
        for (path, expected) in [
            ("/p/x", "/p/{x}"),
            ("/p/{y}", "/p/{x}"),
            ("/p/x/y", "/p/x/y"),
            ("/p/{z}/y", "/p/{*rest}"),
            ("/p/{*all}", "/p/{*rest}"),
            ("/q/x", "/{a}/x"),
            ("/{b}/X", "/{a}/x"),
            ("/q/{x}", "*"),
            ("/{*all}", "*"),
            ("/", "*"),
            ("*", "*"),
        ] {
            assert_eq!(find(&by_meaning, &meaning(path)), Some(&expected), "{path}");
        }
    }
}
