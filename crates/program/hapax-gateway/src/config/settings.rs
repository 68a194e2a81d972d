//! Settings: one table for each section of a configuration file.
//!
//! A row of a table declares everything about a setting. A program that reads settings derives
//! flags, variables, fields of its file and a reference from the rows.

mod read;
mod table;
mod types;

pub use read::{GivenSettings, SettingWords};
pub use table::{GATEWAY_SETTINGS, POLICY_SETTINGS, ROUTE_SETTINGS};
pub use types::ValueKind;

use super::{Config, ConfigError};

/// A setting of a `T`: of a gateway, a policy or a route.
#[derive(Debug)]
pub struct Setting<T: 'static> {
    /// The parts that do not depend on `T`.
    pub info: SettingInfo,
    get: fn(&T) -> Option<Vec<String>>,
    set: fn(&mut T, &[String]) -> Result<(), ConfigError>,
    differs: fn(&T, &T) -> bool,
}

/// The description of a setting, without its place in a configuration.
#[derive(Debug)]
pub struct SettingInfo {
    /// The name of its field in a file.
    pub name: &'static str,
    /// How its value is written.
    pub kind: ValueKind,
    /// The placeholder of its value; empty where the help lists all values.
    pub placeholder: &'static str,
    help: &'static str,
    default: fn() -> Option<String>,
    check: fn(&str) -> Result<(), String>,
    has_secret: Option<fn(&str) -> bool>,
    marks: &'static [Mark],
}

/// Properties of a setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    /// A change needs a restart.
    Fixed,
    /// The setting also applies to requests that pass through unprotected.
    Unprotected,
}

impl SettingInfo {
    /// Returns what the setting does, in a sentence in which other settings have the names that `name`
    /// returns.
    #[must_use]
    pub fn help(&self, name: &dyn Fn(&str) -> String) -> String {
        with_names(self.help.trim_start(), name)
    }

    /// Returns the default, as a user writes it or described in words; `None` without one.
    #[must_use]
    pub fn default(&self, name: &dyn Fn(&str) -> String) -> Option<String> {
        (self.default)().map(|text| with_names(&text, name))
    }

    /// Checks one element of a value.
    ///
    /// # Errors
    /// A text that says what was expected.
    pub fn check(&self, word: &str) -> Result<(), String> {
        (self.check)(word)
    }

    /// Returns whether a value of the setting may have a secret.
    #[must_use]
    pub const fn may_be_secret(&self) -> bool {
        self.has_secret.is_some()
    }

    /// Returns whether this word of a value has a secret.
    #[must_use]
    pub fn has_secret(&self, word: &str) -> bool {
        self.has_secret.is_some_and(|has_secret| has_secret(word))
    }

    /// Returns whether the setting can change while a gateway runs.
    #[must_use]
    pub fn is_reloadable(&self) -> bool {
        !self.marks.contains(&Mark::Fixed)
    }

    fn has_effect_unprotected(&self) -> bool {
        self.marks.contains(&Mark::Unprotected)
    }
}

/// Returns whether `name` is a setting of a gateway or of a policy.
#[must_use]
pub fn is_setting(name: &str) -> bool {
    GATEWAY_SETTINGS.iter().any(|setting| setting.info.name == name)
        || POLICY_SETTINGS.iter().any(|setting| setting.info.name == name)
}

/// Replaces the settings of a text, which are in backticks, by the names that `name` returns.
fn with_names(text: &str, name: &dyn Fn(&str) -> String) -> String {
    let parts = text.split('`').enumerate().map(|(index, part)| match (index % 2, part) {
        (0, part) => part.to_owned(),
        (_, part) if is_setting(part) => name(part),
        (_, part) => format!("`{part}`"),
    });
    parts.collect()
}

/// Returns the settings that differ and cannot change without a restart.
pub(crate) fn changed(before: &Config, after: &Config) -> Vec<&'static str> {
    let fixed = GATEWAY_SETTINGS.iter().filter(|setting| !setting.info.is_reloadable());
    let changed = fixed.filter(|setting| (setting.differs)(before, after));
    changed.map(|setting| setting.info.name).collect()
}

/// Returns what a user would write for the default of a setting.
fn default_of<T: Default>(get: fn(&T) -> Option<Vec<String>>) -> Option<String> {
    get(&T::default()).map(|words| words.join(","))
}

impl<T> Setting<T> {
    /// Returns the words that a user would write for the value in `config`, without secrets; `None`
    /// for the absence of a value.
    #[must_use]
    pub fn get(&self, config: &T) -> Option<Vec<String>> {
        (self.get)(config)
    }
}
