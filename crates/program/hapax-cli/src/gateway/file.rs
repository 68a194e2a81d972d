//! The configuration file of a gateway.

use std::collections::HashMap;
use std::fmt::Display;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use hapax_gateway::{GivenSettings, ROUTE_SETTINGS, SettingInfo, SettingWords};
use toml::Spanned;
use toml::de::{DeTable, DeValue, Error};

use super::settings::{gateway, policy, words};

/// The largest file in bytes, enough for ten thousand routes.
const LARGEST: u64 = 1 << 20;

/// The content of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct File {
    pub(super) given: GivenSettings,
    /// True if every user can read the file.
    is_open_to_all: bool,
    /// The line of each field of each section, from 1.
    lines: HashMap<(Section, String), usize>,
}

/// A section of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Section {
    Gateway,
    Policy,
    /// The route with this index, from 0.
    Route(usize),
}

/// Returns the line of an error, if it is known.
#[derive(Debug)]
pub(super) struct FileError {
    pub(super) line: Option<usize>,
    pub(super) what: String,
}

type Table<'i> = Spanned<DeTable<'i>>;

impl File {
    /// Reads the file at `path`. Blocks until all of it is read; a pipe may block for ever.
    pub(super) fn read(path: &Path) -> Result<Self, FileError> {
        let failed = |what: String| FileError { line: None, what };
        let unreadable = |error: io::Error| failed(format!("cannot be read: {error}"));
        let opened = std::fs::File::open(path).map_err(unreadable)?;
        let about = opened.metadata().map_err(unreadable)?;
        let mut text = String::new();
        opened.take(LARGEST + 1).read_to_string(&mut text).map_err(unreadable)?;
        if text.len() as u64 > LARGEST {
            return Err(failed("is larger than 1 MiB".into()));
        }
        let mut file = Self::parse(&text)?;
        file.is_open_to_all = about.is_file() && about.permissions().mode() & 0o004 != 0;
        Ok(file)
    }

    /// Returns the warning of a secret in a file that every user can read.
    pub(super) fn warning(&self, name: &str) -> Option<String> {
        let field = self.is_open_to_all.then(|| self.secret()).flatten()?;
        Some(format!(
            "{name} can be read by every user of this machine, and `{field}` in it is secret: \
             chmod o-r, or set it in the environment"
        ))
    }

    /// Returns the first field whose value is secret.
    fn secret(&self) -> Option<&'static str> {
        let GivenSettings { gateway: of_gateway, policy: of_policy, routes } = &self.given;
        let given = std::iter::once(of_gateway).chain([of_policy]).chain(routes);
        let is_secret = |info: &SettingInfo, given: &SettingWords| {
            given.get(info.name).is_some_and(|words| words.iter().any(|word| info.has_secret(word)))
        };
        gateway()
            .chain(policy())
            .find(|info| given.clone().any(|given| is_secret(info, given)))
            .map(|info| info.name)
    }

    /// Parses the text of a file. Errors have a line and no values, which may be secret.
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
                    file.given.gateway = reading.fields(&table, "[gateway]", gateway)?;
                }
                "policy" => {
                    let table = reading.table(&at, value)?;
                    reading.note(&mut file.lines, Section::Policy, &table);
                    file.given.policy = reading.fields(&table, "[policy]", policy)?;
                }
                "route" => {
                    let DeValue::Array(routes) = value.into_inner() else {
                        return Err(reading.wrong(&at, "routes are written [[route]]"));
                    };
                    for route in routes {
                        let section = Section::Route(file.given.routes.len());
                        let table = reading.table(&route.span(), route)?;
                        reading.note(&mut file.lines, section, &table);
                        let line = reading.line(&table.span());
                        file.lines.entry((section, "path".into())).or_insert(line);
                        let of_route = || ROUTE_SETTINGS.iter().map(|setting| &setting.info);
                        let known = || of_route().chain(policy());
                        let route = reading.fields(&table, "[[route]]", known)?;
                        if !route.contains_key("path") {
                            let what = "missing field `path` in [[route]]";
                            return Err(reading.wrong(&table.span(), what));
                        }
                        file.given.routes.push(route);
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

    /// Returns the line of a field, from 1.
    pub(super) fn line(&self, section: Section, field: &str) -> Option<usize> {
        self.lines.get(&(section, field.to_owned())).copied()
    }
}

/// The text that is parsed, for the line numbers of errors.
struct Reading<'i> {
    text: &'i str,
}

impl<'i> Reading<'i> {
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

    fn fields<I: Iterator<Item = &'static SettingInfo>>(
        &self,
        table: &Table<'i>,
        section: &str,
        known: impl Fn() -> I,
    ) -> Result<SettingWords, FileError> {
        let fields = table.get_ref().iter().map(|(name, value)| {
            let field = name.get_ref();
            let info = known().find(|info| info.name == field).ok_or_else(|| {
                self.wrong(&name.span(), format!("unknown field `{field}` in {section}"))
            })?;
            let words = words(info, value.get_ref())
                .map_err(|what| self.wrong(&value.span(), format!("{what} in {section}")))?;
            Ok((info.name, words))
        });
        fields.collect()
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

    /// Returns the line of a position, from 1.
    fn line(&self, at: &Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..at.start).unwrap_or_default();
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_line_and_the_reason() {
        for (text, line, expected) in [
            ("[gateway]\nlisten = 8080", 2, "expected a string in [gateway]"),
            ("[gateway]\n\n\nlsten = \"a\"", 4, "unknown field `lsten` in [gateway]"),
            ("[gateway]\nlease = \"1s\"", 2, "unknown field `lease` in [gateway]"),
            ("[policy]\nlease = \"30\"", 2, "expected a whole number and ms, s, m, h or d"),
            ("[policy]\nmethods = [\"POST\", \"a b\"]", 2, "`a b`: expected methods in upper case"),
            ("[policy]\nmethods = 7", 2, "expected an array of strings"),
            ("[policy]\non_unknown = \"x\"", 2, "`x`: expected one of reexecute, block, reconcile"),
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
            assert!(wrong.what.contains(expected), "{text}: {wrong:?}");
        }
    }

    #[test]
    fn errors_do_not_repeat_values_that_may_be_secret() {
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
    fn fields_have_their_lines() {
        let file =
            "[gateway]\nupstream = \"http://a\"\n\n[[route]]\nkey = \"required\"\npath = \"/\"";
        let file = File::parse(file).unwrap();
        assert_eq!(file.line(Section::Gateway, "upstream"), Some(2));
        assert_eq!(file.line(Section::Route(0), "key"), Some(5));
        assert_eq!(file.line(Section::Policy, "key"), None);
        assert_eq!(file.given.routes[0]["path"], ["/"]);
    }
}
