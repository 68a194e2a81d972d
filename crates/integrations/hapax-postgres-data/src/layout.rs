//! Names that a caller chose, as SQL writes them.

use std::collections::BTreeSet;
use std::fmt;

/// A table of the caller's.
///
/// Names are taken as they are, with case and every character, and quoted: `Orders` is not
/// `orders`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TableName {
    schema: Option<String>,
    name: String,
}

impl TableName {
    /// A table that is found along the connection's `search_path`.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { schema: None, name: name.into() }
    }

    /// A table of a schema, whatever the `search_path`.
    #[must_use]
    pub fn in_schema(schema: impl Into<String>, name: impl Into<String>) -> Self {
        Self { schema: Some(schema.into()), name: name.into() }
    }

    pub(crate) fn check(&self) -> Result<(), LayoutError> {
        self.schema.iter().chain([&self.name]).try_for_each(|name| check_name(name))
    }
}

/// As SQL writes it, quoted.
impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            write!(f, "{}.", quoted(schema))?;
        }
        f.write_str(&quoted(&self.name))
    }
}

/// A column, and how its values are read and compared.
///
/// Values are compared by the server, by `IS NOT DISTINCT FROM`, so by what the column's type holds
/// equal: the numeric 1.0 is 1.00, `{"a": 1, "b": 2}` is `{"b": 2, "a": 1.0}` in `jsonb`, two
/// `timestamptz` of one instant are one, and null is null.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Column {
    pub(crate) name: String,
    pub(crate) read: bool,
    compare: bool,
}

impl Column {
    /// The column of this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), read: false, compare: false }
    }

    /// The column is read as text: for numbers with more digits than the 15 of an `f64`, such as
    /// money in `numeric`. Values are always written as text, except `json` and `jsonb`: there a
    /// text is a JSON string, and a row that is read and written again would become one. So this is
    /// rejected for such a column if it is written too
    /// ([`DataError::JsonAsText`](crate::DataError::JsonAsText)); serde_json's `RawValue` reads and
    /// writes them digit by digit.
    #[must_use]
    pub const fn read_as_text(mut self) -> Self {
        self.read = true;
        self
    }

    /// The column is compared as text, after its type has parsed it: then 1.0 is not 1.00. For
    /// types without equality, such as `json` and `xml`, and for types whose equality is too
    /// generous. No effect for a column of a key.
    #[must_use]
    pub const fn compare_as_text(mut self) -> Self {
        self.compare = true;
        self
    }

    /// The column of `of`, an expression for a row.
    pub(crate) fn of(&self, of: &str) -> String {
        format!("{of}.{}", quoted(&self.name))
    }

    /// The columns that are read, by their names.
    pub(crate) fn read_of(&self, of: &str) -> String {
        let column = self.of(of);
        if self.read { format!("{column}::text AS {}", quoted(&self.name)) } else { column }
    }

    /// Whether two rows differ in it.
    pub(crate) fn differs(&self, one: &str, other: &str) -> String {
        let cast = if self.compare { "::text" } else { "" };
        format!("{}{cast} IS DISTINCT FROM {}{cast}", self.of(one), self.of(other))
    }
}

impl<S: Into<String>> From<S> for Column {
    fn from(name: S) -> Self {
        Self::new(name)
    }
}

/// Errors of a layout.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A name is empty, has a zero byte, or has more than 63 bytes (the server would cut it).
    #[error("expected a name of 1 to 63 bytes without a zero byte, found {0:?}")]
    Name(String),
    /// A column is named twice.
    #[error("the column {0:?} is named twice")]
    Twice(String),
    /// No column is named for this purpose.
    #[error("expected a column for the {0}, found none: add one")]
    Missing(&'static str),
    /// A limit of zero.
    #[error("the limit of {0} is zero: expected at least 1")]
    Zero(&'static str),
    /// Fewer than two rounds: with one round the conflicting row would not be read.
    #[error("expected at least 2 rounds, found fewer: change `BatchLimits::rounds`")]
    OneRound,
}

/// Limits of one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchLimits {
    /// Items of a call; 1,000 by default.
    pub items: usize,
    /// Bytes of a call's items as JSON; 8 MiB by default.
    pub bytes: usize,
    /// Limit of rounds of a call: a round is repeated after a race, such as a conflicting row that
    /// was deleted meanwhile, or a deadlock. Default 8, at least 2.
    pub rounds: u32,
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self { items: 1_000, bytes: 8 << 20, rounds: 8 }
    }
}

impl BatchLimits {
    pub(crate) const fn check(&self) -> Result<(), LayoutError> {
        match self {
            Self { items: 0, .. } => Err(LayoutError::Zero("items")),
            Self { bytes: 0, .. } => Err(LayoutError::Zero("bytes")),
            Self { rounds: 0 | 1, .. } => Err(LayoutError::OneRound),
            _ => Ok(()),
        }
    }
}

/// An identifier as SQL writes it. In quotes a backslash is a character like others.
pub(crate) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// Names that the server takes whole, none of them twice.
pub(crate) fn check_columns<'a>(
    columns: impl IntoIterator<Item = &'a Column>,
) -> Result<(), LayoutError> {
    let mut seen = BTreeSet::new();
    for Column { name, .. } in columns {
        check_name(name)?;
        if !seen.insert(name) {
            return Err(LayoutError::Twice(name.clone()));
        }
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), LayoutError> {
    let whole = (1..=63).contains(&name.len()) && !name.contains('\0');
    if whole { Ok(()) } else { Err(LayoutError::Name(name.into())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_in_a_name_is_escaped() {
        let table = TableName::in_schema("a\".\"b", "c\"; DROP TABLE d; --");
        assert_eq!(table.to_string(), "\"a\"\".\"\"b\".\"c\"\"; DROP TABLE d; --\"");
        assert_eq!(Column::new("x\"y").of("t"), "t.\"x\"\"y\"");
    }

    #[test]
    fn invalid_names_are_rejected() {
        for name in ["", "a\0b", &"é".repeat(32)] {
            assert_eq!(TableName::new(name).check(), Err(LayoutError::Name(name.into())));
            assert_eq!(
                TableName::in_schema(name, "a").check(),
                Err(LayoutError::Name(name.into()))
            );
            assert!(check_columns(&[Column::new(name)]).is_err());
        }
        assert_eq!(TableName::in_schema(" ", "\\").check(), Ok(()));
        assert_eq!(check_columns(&["a".into(), "A".into()]), Ok(()));
        let twice = check_columns(&["a".into(), "b".into(), "a".into()]);
        assert_eq!(twice, Err(LayoutError::Twice("a".into())));
    }

    #[test]
    fn limits_of_zero_are_rejected() {
        let limits = BatchLimits::default();
        assert_eq!(limits.check(), Ok(()));
        assert!(BatchLimits { items: 0, ..limits }.check().is_err());
        assert!(BatchLimits { bytes: 0, ..limits }.check().is_err());
        assert_eq!(BatchLimits { rounds: 1, ..limits }.check(), Err(LayoutError::OneRound));
        assert_eq!(BatchLimits { rounds: 2, ..limits }.check(), Ok(()));
    }
}
