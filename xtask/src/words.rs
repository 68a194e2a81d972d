//! The vocabulary in names and comments: VOCABULARY.md as far as a program can check it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::sh::{Failure, Outcome};
use crate::sources::{self, Source};

/// Names of public types that two crates declare, with the reason.
const SHARED_NAMES: [(&str, &str); 0] = [];

/// Words with which no doc comment begins: it begins with a noun or a verb.
const BAD_STARTS: [&str; 11] = [
    "What", "Who", "Whom", "Whose", "Of", "It", "That", "Likewise", "Whoever", "Whatever",
    "Somebody",
];

/// Words that VOCABULARY.md rejects, each with the one to use.
const REJECTED: [(&str, &str); 25] = [
    ("nobody", "no caller, no process, nothing"),
    ("somebody", "a caller, another process"),
    ("anybody", "any caller"),
    ("everybody", "every caller"),
    ("whoever", "the caller that, the process that"),
    ("likewise", "the sentence again"),
    ("whom", "which"),
    ("doubt", "unknown, ambiguous"),
    ("unsure", "unknown"),
    ("grant", "lease id"),
    ("refuse", "reject"),
    ("refuses", "rejects"),
    ("refused", "rejected"),
    ("refusal", "rejection"),
    ("refusals", "rejections"),
    ("refusing", "rejecting"),
    ("hears", "receives, is notified"),
    ("heard", "received, notified"),
    ("told", "answered, notified, configured"),
    ("tells", "returns, notifies, distinguishes"),
    ("patience", "timeout"),
    ("dice", "randomness"),
    ("seam", "store trait"),
    ("conversation", "exchange"),
    ("conversations", "exchanges"),
];

/// Rejects names and comments that do not follow VOCABULARY.md.
pub(crate) fn run() -> Outcome {
    let sources: Vec<Source> =
        sources::all()?.into_iter().filter(|source| is_product(&source.path)).collect();
    let mut found = shared_names(&sources);
    found.extend(sources.iter().flat_map(bad_comments));
    if found.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("words, see VOCABULARY.md:\n  {}", found.join("\n  "))))
}

/// Returns whether a file is source of a crate that users may read: no test, bench or fuzz target.
fn is_product(path: &Path) -> bool {
    ["crates", "tests"].iter().any(|root| path.starts_with(root))
        && path.components().any(|part| part.as_os_str() == "src")
}

/// Returns the name of the crate that a file belongs to.
fn krate(path: &Path) -> String {
    let before_src = path.iter().take_while(|part| *part != "src").last();
    before_src.unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns names of public types that more than one crate declares, and exceptions without use.
fn shared_names(sources: &[Source]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for source in sources {
        let krate = krate(&source.path);
        for name in source.text.lines().filter_map(public_type) {
            let declared = crates.entry(name).or_default();
            if !declared.contains(&krate) {
                declared.push(krate.clone());
            }
        }
    }
    let shared = |name: &str| crates.get(name).is_some_and(|declared| declared.len() > 1);
    let allowed = |name: &str| SHARED_NAMES.iter().any(|(allowed, _)| *allowed == name);
    let unused = SHARED_NAMES.iter().filter(|(name, _)| !shared(name));
    let mut found: Vec<_> = unused
        .map(|(name, _)| format!("xtask/src/words.rs: {name} is in one crate only"))
        .collect();
    for (name, declared) in &crates {
        if declared.len() > 1 && !allowed(name) {
            found.push(format!("the type {name} is public in {}", declared.join(" and ")));
        }
    }
    found
}

/// Returns the name of the public type that a line declares.
fn public_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "type ", "union "];
    let rest = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    (end > 0).then(|| &rest[..end])
}

/// Returns comments that begin wrongly or have rejected words.
fn bad_comments(source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let (mut in_doc, mut in_code) = (false, false);
    for (number, line) in source.text.lines().enumerate() {
        let at = || format!("{}:{}", source.path.display(), number + 1);
        let line = line.trim_start();
        let Some(comment) = line.strip_prefix("//") else {
            (in_doc, in_code) = (false, false);
            continue;
        };
        let doc = comment.strip_prefix(['/', '!']);
        let text = doc.unwrap_or(comment).trim();
        if doc.is_some() && text.starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            let first = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            if doc.is_some() && !in_doc && BAD_STARTS.contains(&first) {
                found.push(format!("{}: a doc comment begins with {first:?}", at()));
            }
            found.extend(
                rejected(text)
                    .map(|(word, instead)| format!("{}: {word:?} is rejected: {instead}", at())),
            );
        }
        in_doc = doc.is_some();
    }
    found
}

/// Returns the rejected words of a text, names in backquotes left out.
fn rejected(text: &str) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    let prose: String = text.split('`').step_by(2).collect::<Vec<_>>().join(" ").to_lowercase();
    REJECTED.iter().filter(move |(word, _)| {
        prose.split(|c: char| !c.is_alphanumeric()).any(|part| part == *word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_type_name_in_two_crates_is_found() {
        let one =
            source("crates/core/a/src/lib.rs", "pub struct Record<T> {\npub(crate) enum Row {");
        let two = source("crates/core/b/src/lib.rs", "    pub type Record = u8;\npub enum Row {}");
        assert_eq!(shared_names(&[one, two]), ["the type Record is public in a and b"]);
    }

    #[test]
    fn a_doc_comment_with_a_wrong_first_word_is_found() {
        let text = "/// What it is.\n/// It goes on.\nstruct A;\n// What is code.\n//! Of this.\n";
        let found = bad_comments(&source("crates/core/a/src/lib.rs", text));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("rs:1:") && found[1].contains("rs:5:"), "{found:?}");
    }

    #[test]
    fn a_rejected_word_is_found_in_prose_only() {
        let text = "/// Whoever waits.\n/// `whoever()` and\n/// ```\n/// whoever\n/// ```\nlet whoever = 1;\n";
        let found = bad_comments(&source("crates/core/a/src/lib.rs", text));
        assert_eq!(found.len(), 2, "the first word and the word itself: {found:?}");
    }
}
