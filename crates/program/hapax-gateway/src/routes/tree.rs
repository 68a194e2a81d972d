//! Tree of path patterns, by segment.
//!
//! At each segment a literal text takes precedence over `{any}`, and that over the rest, `{*rest}`.
//! So the most specific of the matching patterns applies, compared from the left, and
//! `/payments/{id}/receipt` may be an exception to `/payments/{*rest}`; matchit, which axum uses,
//! rejects this combination.

use std::collections::BTreeMap;

/// Patterns and their values.
#[derive(Clone, Debug)]
pub(super) struct Tree<T> {
    /// Value of a pattern that ends here.
    here: Option<T>,
    /// Value of a pattern for any remaining segments, including none.
    rest: Option<T>,
    named: BTreeMap<String, Tree<T>>,
    any: Option<Box<Tree<T>>>,
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Self { here: None, rest: None, named: BTreeMap::new(), any: None }
    }
}

/// Reasons for which a pattern cannot be added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PatternError<T> {
    /// The pattern is invalid.
    Unreadable(&'static str),
    /// This value's pattern matches the same paths.
    Taken(T),
}

impl<T: Copy> Tree<T> {
    /// Adds a pattern, in lower case like the paths that are looked up.
    pub(super) fn insert(&mut self, pattern: &str, value: T) -> Result<(), PatternError<T>> {
        let mut node = self;
        let mut segments = segments(pattern).peekable();
        while let Some(segment) = segments.next() {
            let rest = match parameter(segment).map_err(PatternError::Unreadable)? {
                Some(name) => name.starts_with('*'),
                None => {
                    node = node.named.entry(segment.to_owned()).or_default();
                    continue;
                }
            };
            if !rest {
                node = node.any.get_or_insert_default();
            } else if segments.peek().is_none() {
                return take(&mut node.rest, value);
            } else {
                return Err(PatternError::Unreadable("has a `{*…}` that is not its last segment"));
            }
        }
        take(&mut node.here, value)
    }

    /// Returns the value of the most specific pattern.
    pub(super) fn find(&self, path: &str) -> Option<T> {
        self.look(segments(path))
    }

    /// Visits each node at most once for any path, since a node's depth is the number of segments
    /// before it.
    fn look<'a>(&self, mut path: impl Iterator<Item = &'a str> + Clone) -> Option<T> {
        let Some(first) = path.next() else { return self.here.or(self.rest) };
        let named = self.named.get(first).and_then(|node| node.look(path.clone()));
        named.or_else(|| self.any.as_ref()?.look(path)).or(self.rest)
    }
}

fn take<T: Copy>(slot: &mut Option<T>, value: T) -> Result<(), PatternError<T>> {
    match *slot {
        Some(other) => Err(PatternError::Taken(other)),
        None => {
            *slot = Some(value);
            Ok(())
        }
    }
}

/// Returns the segments of a path; `/` has none.
fn segments(path: &str) -> impl Iterator<Item = &str> + Clone {
    path.split('/').filter(|segment| !segment.is_empty())
}

/// Returns a parameter's name, with `*` for the rest; `None` for a literal segment.
fn parameter(segment: &str) -> Result<Option<&str>, &'static str> {
    if !segment.contains(['{', '}']) {
        return Ok(None);
    }
    let name = segment.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
    let word = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    name.filter(|name| {
        let bare = name.strip_prefix('*').unwrap_or(name);
        !bare.is_empty() && word(bare)
    })
    .map(Some)
    .ok_or("has braces that are no parameter: a whole segment, like `{id}` or `{*rest}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(patterns: &[&str]) -> Tree<usize> {
        let mut tree = Tree::default();
        for (index, pattern) in patterns.iter().enumerate() {
            tree.insert(pattern, index).unwrap();
        }
        tree
    }

    #[test]
    fn the_most_specific_counts_from_the_left() {
        let tree = tree(&[
            "/{*rest}",
            "/a/{*rest}",
            "/a/{id}",
            "/a/{id}/receipt",
            "/a/b",
            "/{tenant}/a/{*rest}",
            "/{tenant}/b/c",
        ]);
        for (path, index) in [
            ("/", 0),
            ("/x", 0),
            ("/x/y/z", 0),
            ("/a", 1),
            ("/a/x/y", 1),
            ("/a/x", 2),
            ("/a/x/receipt", 3),
            ("/a/b", 4),
            ("/a/b/receipt", 3),
            ("/a/b/c", 1),
            ("/x/a", 5),
            ("/x/a/y", 5),
            ("/x/b/c", 6),
            ("/x/b", 0),
        ] {
            assert_eq!(tree.find(path), Some(index), "{path}");
        }
        assert_eq!(self::tree(&["/a/b"]).find("/a"), None);
        assert_eq!(self::tree(&["/a/{x}"]).find("/a"), None);
        assert_eq!(self::tree(&["/"]).find("/a"), None);
    }

    #[test]
    fn invalid_patterns_are_errors() {
        let mut tree = tree(&["/a/{x}", "/a/{*rest}", "/a"]);
        for (pattern, taken) in [("/a/{y}", 0), ("/a/{*all}", 1), ("/a", 2)] {
            assert_eq!(tree.insert(pattern, 9), Err(PatternError::Taken(taken)), "{pattern}");
        }
        for pattern in
            ["/{", "/}", "/{}", "/{*}", "/a{x}", "/{x}.json", "/{a}{b}", "/{*x}/b", "/{a b}"]
        {
            assert!(
                matches!(tree.insert(pattern, 9), Err(PatternError::Unreadable(_))),
                "{pattern}"
            );
        }
    }

    #[test]
    fn a_lookup_visits_each_node_at_most_once() {
        // A search that visits nodes repeatedly would not end.
        let depth = 40;
        let patterns: Vec<String> = (0..depth)
            .map(|at| {
                let segment = |index| if index == at { "/a" } else { "/{x}" };
                (0..depth).map(segment).collect::<String>() + "/end"
            })
            .collect();
        let tree = tree(&patterns.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(tree.find(&"/a".repeat(depth)), None);
    }
}
