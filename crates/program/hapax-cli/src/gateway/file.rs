//! The file.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hapax_gateway::{CacheUrl, StoreUrl};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Error, ValueDeserializer};

use super::fields::{GatewayFields, PolicyFields};
use super::value_args::UrlArg;

/// The largest file, in bytes: with ten thousand routes it is as large.
const LARGEST: u64 = 1 << 20;

/// What a file says.
#[derive(Clone, Debug, Default)]
pub(super) struct File {
    pub(super) gateway: GatewayFields,
    pub(super) policy: PolicyFields,
    pub(super) routes: Vec<RouteFields>,
    /// Whether every user can read it.
    is_open_to_all: bool,
    /// Where each field is said, in which section.
    lines: HashMap<(Section, String), usize>,
}

/// A part of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Section {
    Gateway,
    Policy,
    /// The so-manieth, from 0.
    Route(usize),
}

/// `[[route]]`.
#[derive(Clone, Debug, Default)]
pub(super) struct RouteFields {
    pub(super) path: String,
    pub(super) name: Option<String>,
    pub(super) protect: Option<bool>,
    pub(super) observe: Option<bool>,
    pub(super) policy: PolicyFields,
}

/// What is of a route alone, beside what of the policy differs there.
#[derive(Deserialize)]
struct RouteOwnFields {
    path: String,
    name: Option<String>,
    protect: Option<bool>,
    observe: Option<bool>,
}

const ALONE: [&str; 4] = ["path", "name", "protect", "observe"];

/// In which line what is wrong, if that can be told.
#[derive(Debug)]
pub(super) struct FileError {
    pub(super) line: Option<usize>,
    pub(super) what: String,
}

type Table<'i> = Spanned<DeTable<'i>>;

impl File {
    /// The file at `path`. Blocks for as long as it takes to be read, which of a pipe may be for ever.
    pub(super) fn read(path: &Path) -> Result<Self, FileError> {
        let failed = |what: String| FileError { line: None, what };
        let unread = |error: io::Error| failed(format!("cannot be read: {error}"));
        let opened = std::fs::File::open(path).map_err(unread)?;
        let about = opened.metadata().map_err(unread)?;
        let mut text = String::new();
        opened.take(LARGEST + 1).read_to_string(&mut text).map_err(unread)?;
        if text.len() as u64 > LARGEST {
            return Err(failed("is larger than 1 MiB".into()));
        }
        let mut file = Self::parse(&text)?;
        file.is_open_to_all = about.is_file() && about.permissions().mode() & 0o004 != 0;
        Ok(file)
    }

    /// What to say of a secret in a file that every user can read.
    pub(super) fn warning(&self, name: &str) -> Option<String> {
        let field = self.is_open_to_all.then(|| self.secret()).flatten()?;
        Some(format!(
            "{name} can be read by every user of this machine, and `{field}` in it is secret: \
             chmod o-r, or say it in the environment"
        ))
    }

    /// A field whose value is secret.
    fn secret(&self) -> Option<&'static str> {
        let GatewayFields { store, cache, auth_url, .. } = &self.gateway;
        let store = store.clone().and_then(|store| store.read().ok());
        let cache = cache.clone().and_then(|cache| cache.read().ok());
        let asked =
            |url: &Option<UrlArg>| url.as_ref().is_some_and(|UrlArg(url)| url.query().is_some());
        let mut policies =
            std::iter::once(&self.policy).chain(self.routes.iter().map(|route| &route.policy));
        [
            (
                "store",
                matches!(&store, Some(StoreUrl::Redis(url) | StoreUrl::Postgres(url)) if url.has_password()),
            ),
            ("cache", matches!(&cache, Some(CacheUrl::Redis(url)) if url.has_password())),
            ("auth_url", asked(auth_url)),
            ("reconcile_url", policies.any(|policy| asked(&policy.reconcile_url))),
        ]
        .into_iter()
        .find_map(|(field, is_secret)| is_secret.then_some(field))
    }

    pub(super) fn parse(text: &str) -> Result<Self, FileError> {
        let reading = Reading { text };
        let mut file = Self::default();
        let document = DeTable::parse(text).map_err(|error| reading.error(&error))?;
        for (name, value) in document.into_inner() {
            let at = name.span();
            match name.get_ref().as_ref() {
                "gateway" => {
                    let table = reading.table(&at, value)?;
                    reading.note(&mut file.lines, Section::Gateway, &table);
                    file.gateway = reading.fields(table, "[gateway]")?;
                }
                "policy" => {
                    let table = reading.table(&at, value)?;
                    reading.note(&mut file.lines, Section::Policy, &table);
                    file.policy = reading.fields(table, "[policy]")?;
                }
                "route" => {
                    let DeValue::Array(routes) = value.into_inner() else {
                        return Err(reading.wrong(&at, "routes are written [[route]]"));
                    };
                    for route in routes {
                        let section = Section::Route(file.routes.len());
                        let table = reading.table(&route.span(), route)?;
                        reading.note(&mut file.lines, section, &table);
                        let line = reading.line(&table.span());
                        file.lines.entry((section, "path".into())).or_insert(line);
                        file.routes.push(reading.route(table)?);
                    }
                }
                other => {
                    let what =
                        format!("there is no [{other}], only [gateway], [policy] and [[route]]");
                    return Err(reading.wrong(&at, what));
                }
            }
        }
        Ok(file)
    }

    /// In which line a field is said.
    pub(super) fn line(&self, section: Section, field: &str) -> Option<usize> {
        self.lines.get(&(section, field.to_owned())).copied()
    }
}

struct Reading<'i> {
    text: &'i str,
}

impl<'i> Reading<'i> {
    fn route(&self, mut table: Table<'i>) -> Result<RouteFields, FileError> {
        let mut alone = DeTable::new();
        for name in ALONE {
            if let Some((name, value)) = table.get_mut().remove_entry(name) {
                alone.insert(name, value);
            }
        }
        let alone: RouteOwnFields = self.fields(Spanned::new(table.span(), alone), "[[route]]")?;
        let policy = self.fields(table, "[[route]]")?;
        let RouteOwnFields { path, name, protect, observe } = alone;
        Ok(RouteFields { path, name, protect, observe, policy })
    }

    fn table(
        &self,
        at: &Range<usize>,
        value: Spanned<DeValue<'i>>,
    ) -> Result<Table<'i>, FileError> {
        let span = value.span();
        match value.into_inner() {
            DeValue::Table(table) => Ok(Spanned::new(span, table)),
            _ => Err(self.wrong(at, "expected a table")),
        }
    }

    fn fields<T: DeserializeOwned>(&self, table: Table<'i>, section: &str) -> Result<T, FileError> {
        let span = table.span();
        let value = Spanned::new(span.clone(), DeValue::Table(table.into_inner()));
        T::deserialize(ValueDeserializer::from(value)).map_err(|error| {
            let what = error.message();
            // All that it could be is in the help.
            let what = what.split(", expected one of").next().unwrap_or_default();
            let what = without_value(what);
            let at = error.span().unwrap_or(span);
            self.wrong(&at, format!("{what} in {section}"))
        })
    }

    fn note(
        &self,
        lines: &mut HashMap<(Section, String), usize>,
        section: Section,
        table: &Table<'i>,
    ) {
        for name in table.get_ref().keys() {
            lines.insert((section, name.get_ref().to_string()), self.line(&name.span()));
        }
    }

    fn error(&self, error: &Error) -> FileError {
        let line = error.span().map(|span| self.line(&span));
        FileError { line, what: error.message().to_owned() }
    }

    fn wrong(&self, at: &Range<usize>, what: impl Display) -> FileError {
        FileError { line: Some(self.line(at)), what: what.to_string() }
    }

    /// From 1.
    fn line(&self, at: &Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..at.start).unwrap_or_default();
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }
}

/// `invalid type: integer `7`, expected a string` without the 7, which may be a secret.
fn without_value(what: &str) -> Cow<'_, str> {
    let found = what.strip_prefix("invalid type: ").zip(what.rsplit_once(", expected "));
    let Some((found, (_, expected))) = found else { return what.into() };
    let kind = found.split([' ', ',']).next().unwrap_or_default();
    format!("invalid type: {kind}, expected {expected}").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_line_and_what_is_wrong() {
        for (text, line, says) in [
            ("[gateway]\nlisten = 8080", 2, "expected a string in [gateway]"),
            ("[gateway]\n\n\nlsten = \"a\"", 4, "unknown field `lsten` in [gateway]"),
            ("[gateway]\nlease = \"1s\"", 2, "unknown field `lease` in [gateway]"),
            ("[policy]\nlease = \"30\"", 2, "expected a whole number and ms, s, m, h or d"),
            ("[policy]\nmethods = [\"POST\", \"a b\"]", 2, "`a b`: expected methods in upper case"),
            ("[policy]\nmethods = 7", 2, "expected an array of strings"),
            ("[policy]\non_unknown = \"x\"", 2, "unknown variant `x`"),
            ("[policy]\nkey = \"required\"\nkey = \"optional\"", 3, "duplicate key"),
            ("[policies]", 1, "there is no [policies]"),
            ("upstream = \"x\"", 1, "there is no [upstream]"),
            ("[route]\npath = \"/\"", 1, "[[route]]"),
            ("[[route]]\npath = \"/a\"\n[[route]]\nname = \"x\"", 3, "missing field `path`"),
            (
                "[[route]]\npath = \"/a\"\nobserved = true",
                3,
                "unknown field `observed` in [[route]]",
            ),
            ("[[route]]\npath = \"/a\"\nobserve = 1", 3, "expected a boolean"),
            ("[gateway\n", 1, ""),
            ("x = ", 1, ""),
        ] {
            let wrong = File::parse(text).unwrap_err();
            assert_eq!(wrong.line, Some(line), "{text}: {wrong:?}");
            assert!(wrong.what.contains(says), "{text}: {wrong:?}");
        }
    }

    #[test]
    fn what_may_be_secret_is_not_told() {
        for text in [
            "[gateway]\ncache = 91827364512",
            "[gateway]\ncache = [\"91827364512\"]",
            "[gateway]\ncache = 91827364512.5",
            "[gateway]\ncache = 91827364512x",
            "[gateway]\ncache = x91827364512",
            "[gateway]\ncache = \"91827364512",
            "[gateway]\nmax_waiters = \"91827364512\"",
            "[gateway]\nauth_url = \"http://h/?token=91827364512 x\"",
            "[gateway]\nauth_url = 91827364512",
            "[policy]\nreconcile_url = \"http://h/?91827364512 x\"",
        ] {
            let wrong = File::parse(text).unwrap_err();
            assert_eq!(wrong.line, Some(2), "{text}: {wrong:?}");
            assert!(!wrong.what.is_empty() && !wrong.what.contains("91827"), "{wrong:?}");
        }
    }

    #[test]
    fn lines_are_remembered() {
        let file =
            "[gateway]\nupstream = \"http://a\"\n\n[[route]]\nkey = \"required\"\npath = \"/\"";
        let file = File::parse(file).unwrap();
        assert_eq!(file.line(Section::Gateway, "upstream"), Some(2));
        assert_eq!(file.line(Section::Route(0), "key"), Some(5));
        assert_eq!(file.line(Section::Policy, "key"), None);
        assert_eq!(file.routes[0].path, "/");
    }
}
