//! Rules for dependencies: packages that a default build must not have. xtask/directions.toml has the
//! direction of dependencies between our crates.

use std::collections::BTreeSet;
use std::path::Path;

use crate::sh::{Failure, Outcome, Run};
use crate::sources::{self, Source};

/// Runtimes, HTTP and databases.
const HEAVY: [&str; 19] = [
    "async-std",
    "axum",
    "fjall",
    "http",
    "http-body",
    "http-body-util",
    "hyper",
    "hyper-util",
    "redb",
    "redis",
    "reqwest",
    "rusqlite",
    "smol",
    "sqlx",
    "tokio",
    "tokio-postgres",
    "tokio-util",
    "tower",
    "tower-service",
];

const HTTP: [&str; 7] =
    ["axum", "http", "http-body", "http-body-util", "hyper", "hyper-util", "reqwest"];

/// Crates whose default features must stay free of others.
const FREE_OF: [(&str, &[&str]); 9] = [
    ("hapax-core", &HEAVY),
    ("hapax-file", &HTTP),
    ("hapax-messages", &HTTP),
    ("hapax-postgres", &HTTP),
    ("hapax-postgres-data", &HTTP),
    ("hapax-postgres-messages", &HTTP),
    ("hapax-redis", &HTTP),
    ("hapax-saga", &HTTP),
    ("hapax-tiered", &HTTP),
];

/// Packages with which build scripts compile C or find C libraries.
const C_BUILDERS: [&str; 6] = ["autotools", "bindgen", "cc", "cmake", "pkg-config", "vcpkg"];

/// The package that may use them: TLS needs it, it contains its C code, and needs no library.
const MAY_BUILD_C: &str = "ring";

/// Crates that depend on a C compiler's package but do not use it with this feature.
const NO_C_WITH: [(&str, &str); 1] = [("blake3", "pure")];

/// Words that read a clock or randomness, each with the one file that may use it.
const DOORS: [(&str, &str); 5] = [
    ("SystemTime", "crates/core/hapax-core/src/clock.rs"),
    ("getrandom::", "crates/core/hapax-core/src/entropy.rs"),
    ("rand::", ""),
    ("fastrand::", ""),
    ("Uuid::new_v", ""),
];

/// Runs all checks and lists every violation.
pub(crate) fn run() -> Outcome {
    let mut found = Vec::new();
    for (krate, banned) in FREE_OF {
        found.extend(unwanted(krate, &tree(krate, "normal")?, banned));
    }
    found.extend(c_code("hapax-cli", &tree("hapax-cli", "normal,build")?, &[MAY_BUILD_C]));
    for (krate, _) in FREE_OF.iter().chain(&[("hapax-http", &[][..])]) {
        found.extend(c_code(krate, &tree(krate, "normal,build")?, &[]));
    }
    found.extend(sources::all()?.iter().flat_map(side_doors));
    if found.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("dependencies:\n  {}", found.join("\n  "))))
}

/// A package in a dependency tree.
struct Node {
    depth: usize,
    name: String,
    features: Vec<String>,
}

/// Returns the packages that the default features of `krate` bring on this platform, parents before
/// children.
fn tree(krate: &str, edges: &str) -> Result<Vec<Node>, Failure> {
    let args = ["tree", "--package", krate, "--edges", edges, "--prefix", "depth"];
    Ok(parse_tree(&Run::cargo().args(args).args(["--format", " {p}|{f}"]).read()?))
}

fn parse_tree(text: &str) -> Vec<Node> {
    let node = |line: &str| {
        let (depth, rest) = line.split_once(' ')?;
        let (package, features) = rest.split_once('|')?;
        let features = features.trim_end_matches(" (*)").split(',').map(String::from).collect();
        let name = package.split(' ').next()?.to_owned();
        Some(Node { depth: depth.parse().ok()?, name, features })
    };
    text.lines().filter_map(node).collect()
}

fn unwanted(krate: &str, tree: &[Node], banned: &[&str]) -> Vec<String> {
    let names: BTreeSet<&str> = tree.iter().map(|node| node.name.as_str()).collect();
    let hits = names.into_iter().filter(|name| banned.contains(name));
    hits.map(|name| format!("the default features of {krate} bring {name}")).collect()
}

/// Returns the packages whose build script compiles C.
fn c_code(krate: &str, tree: &[Node], may: &[&str]) -> Vec<String> {
    let mut path: Vec<&Node> = Vec::new();
    let mut found = BTreeSet::new();
    for node in tree {
        path.truncate(node.depth);
        let parent = path.last();
        let innocent = parent.is_some_and(|parent| {
            may.contains(&parent.name.as_str())
                || NO_C_WITH.iter().any(|(name, feature)| {
                    parent.name == *name && parent.features.iter().any(|has| has == feature)
                })
        });
        if C_BUILDERS.contains(&node.name.as_str()) && !innocent {
            let parent = parent.map_or("?", |parent| parent.name.as_str());
            found.insert(format!(
                "the default build of {krate} compiles C: {parent} uses {}",
                node.name
            ));
        }
        path.push(node);
    }
    found.into_iter().collect()
}

/// Returns the lines of published crates that read a clock or randomness directly.
fn side_doors(source: &Source) -> Vec<String> {
    let in_library = source.path.starts_with("crates")
        && source.path.components().nth(3).is_some_and(|part| part.as_os_str() == "src");
    let is_test = source.path.ends_with("tests.rs")
        || source.path.parent().is_some_and(|folder| folder.ends_with("tests"));
    if !in_library || is_test {
        return Vec::new();
    }
    let code = source.text.lines().enumerate().filter(|(_, line)| !line.trim().starts_with("//"));
    code.flat_map(|(number, line)| {
        DOORS
            .iter()
            .filter(|(word, door)| has_word(line, word) && source.path != Path::new(door))
            .map(move |(word, _)| {
                format!(
                    "{}:{}: `{word}`: use a Clock or an Entropy",
                    source.path.display(),
                    number + 1
                )
            })
    })
    .collect()
}

/// Returns whether `line` has `word`, but not as the end of a longer word.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        !line[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_in_the_core_is_found() {
        let tree = parse_tree("0 hapax-core v0.1.0 (/a b)|default\n1 tokio v1.0.0|rt,sync (*)\n");
        assert_eq!(unwanted("hapax-core", &tree, &HEAVY).len(), 1);
        assert!(unwanted("hapax-core", &tree[..1], &HEAVY).is_empty());
    }

    #[test]
    fn a_crate_that_compiles_c_is_found() {
        let pure = "0 hapax-cli v0.1.0|\n1 blake3 v1.8.0|pure\n2 cc v1.0.0|\n";
        assert!(c_code("x", &parse_tree(pure), &[]).is_empty());
        assert_eq!(c_code("x", &parse_tree(&pure.replace("pure", "std")), &[]).len(), 1);
        let ring =
            "0 hapax-cli v0.1.0|\n1 blake3 v1.8.0|pure\n1 zstd-sys v0.17.0|\n2 cc v1.0.0| (*)\n";
        assert_eq!(
            c_code("x", &parse_tree(ring), &[MAY_BUILD_C]),
            ["the default build of x compiles C: zstd-sys uses cc"]
        );
    }

    #[test]
    fn a_side_door_is_found() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let line = "let now = SystemTime::now();";
        assert_eq!(side_doors(&source("crates/core/hapax-core/src/clock.rs", line)).len(), 0);
        assert_eq!(side_doors(&source("crates/core/hapax-core/src/lease.rs", line)).len(), 1);
        assert_eq!(side_doors(&source("crates/core/hapax-core/tests/it.rs", line)).len(), 0);
        assert_eq!(side_doors(&source("crates/core/hapax-core/src/lease/tests.rs", line)).len(), 0);
        assert_eq!(side_doors(&source("crates/core/hapax-core/src/tests/a.rs", line)).len(), 0);
        assert_eq!(
            side_doors(&source("crates/core/hapax-core/src/a.rs", "// SystemTime")).len(),
            0
        );
        assert_eq!(
            side_doors(&source("crates/core/hapax-core/src/a.rs", "use brand::X;")).len(),
            0
        );
    }
}
