//! Flags, variables and values of a file for the gateway's settings. A setting `max_memory` is
//! `--max-memory`, `HAPAX_MAX_MEMORY` and `max_memory`.

use clap::builder::{BoolishValueParser, PossibleValuesParser, TypedValueParser as _};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use hapax_gateway::{
    GATEWAY_SETTINGS, GivenSettings, POLICY_SETTINGS, SettingInfo, ValueKind, is_setting,
};
use toml::Value;
use toml::de::DeValue;

const POLICY_HEADING: &str = "Policy (routes in the file may have their own)";

/// Settings that flags and the environment give.
#[derive(Clone, Debug, Default)]
pub(super) struct FlagSettings(pub(super) GivenSettings);

impl Args for FlagSettings {
    fn augment_args(command: Command) -> Command {
        let policy = policy().map(|info| arg(info).help_heading(POLICY_HEADING));
        command.args(gateway().map(arg)).args(policy)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for FlagSettings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let words = |info: &SettingInfo| {
            let words = matches.get_many::<String>(info.name)?;
            Some((info.name, words.cloned().collect()))
        };
        let (gateway, policy) = (gateway().filter_map(words), policy().filter_map(words));
        let (gateway, policy) = (gateway.collect(), policy.collect());
        Ok(Self(GivenSettings { gateway, policy, routes: Vec::new() }))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the settings of `[gateway]`.
pub(super) fn gateway() -> impl Iterator<Item = &'static SettingInfo> {
    GATEWAY_SETTINGS.iter().map(|setting| &setting.info)
}

/// Returns the settings of `[policy]`.
pub(super) fn policy() -> impl Iterator<Item = &'static SettingInfo> {
    POLICY_SETTINGS.iter().map(|setting| &setting.info)
}

fn arg(info: &'static SettingInfo) -> Arg {
    let default = info.default(&name).map(|text| format!(" [default: {text}]"));
    let help = info.help(&name) + &default.unwrap_or_default();
    let arg = Arg::new(info.name).long(long(info.name)).env(variable(info.name)).help(help);
    let arg = arg.hide_env_values(info.may_be_secret());
    let checked = |word: &str| info.check(word).map(|()| word.to_owned());
    let listed = |word: &str| info.check(word.trim()).map(|()| word.trim().to_owned());
    match info.kind {
        ValueKind::Choice(words) => {
            let arg = arg.value_name(info.name.to_ascii_uppercase());
            arg.value_parser(PossibleValuesParser::new(words()))
        }
        ValueKind::Flag => {
            let parser = BoolishValueParser::new().map(|flag| flag.to_string());
            let arg = arg.num_args(0..=1).default_missing_value("true");
            arg.value_name(info.placeholder).value_parser(parser)
        }
        ValueKind::List | ValueKind::NumberList => {
            let arg = arg.value_name(info.placeholder).value_delimiter(',');
            arg.action(ArgAction::Append).value_parser(listed)
        }
        ValueKind::Text | ValueKind::Number => {
            arg.value_name(info.placeholder).value_parser(checked)
        }
    }
}

/// Returns the name of a setting in errors and help: its flag, or its field if it has no flag.
pub(super) fn name(field: &str) -> String {
    if is_setting(field) { format!("--{}", long(field)) } else { format!("`{field}`") }
}

fn long(field: &str) -> String {
    field.replace('_', "-")
}

/// Returns the variable of a setting.
pub(super) fn variable(field: &str) -> String {
    match field {
        // The name is older than the configuration file.
        "log_level" => "HAPAX_LOG".to_owned(),
        field => format!("HAPAX_{}", field.to_ascii_uppercase()),
    }
}

/// Reads the value of a setting in a file. Errors do not repeat values that may be secret.
pub(super) fn words(info: &SettingInfo, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let expected = match info.kind {
        ValueKind::Text | ValueKind::Choice(_) => "a string",
        ValueKind::Number => "an integer",
        ValueKind::Flag => "a boolean",
        ValueKind::List => "an array of strings, or one with commas",
        ValueKind::NumberList => "statuses, like [503, \"5xx\"]",
    };
    let read = match (info.kind, value) {
        (ValueKind::List, DeValue::Array(items)) => {
            items.iter().map(|item| Some(item.get_ref().as_str()?.trim().to_owned())).collect()
        }
        (ValueKind::NumberList, DeValue::Array(items)) => {
            let items: Option<Vec<_>> = items.iter().map(|item| text(item.get_ref())).collect();
            items.map(|items| split(&items.join(",")))
        }
        (ValueKind::List, DeValue::String(text)) => Some(split(text)),
        (ValueKind::NumberList, value) => text(value).map(|text| split(&text)),
        (ValueKind::Text | ValueKind::Choice(_), DeValue::String(_))
        | (ValueKind::Number, DeValue::Integer(_)) => text(value).map(|text| vec![text]),
        (ValueKind::Flag, DeValue::Boolean(flag)) => Some(vec![flag.to_string()]),
        _ => None,
    };
    let unexpected = || format!("invalid type: {}, expected {expected}", value.type_str());
    let words: Vec<_> = read.ok_or_else(unexpected)?;
    for word in &words {
        info.check(word).map_err(|error| match info.kind {
            ValueKind::Text | ValueKind::Number | ValueKind::Flag => error,
            _ => format!("`{word}`: {error}"),
        })?;
    }
    Ok(words)
}

/// Returns a string, or the digits of an integer.
fn text(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            let number = i64::from_str_radix(number.as_str(), number.radix());
            number.ok().map(|number| number.to_string())
        }
        _ => None,
    }
}

fn split(text: &str) -> Vec<String> {
    text.split(',').map(|word| word.trim().to_owned()).collect()
}

/// Returns the value of a setting, as a file has it.
pub(super) fn value(info: &SettingInfo, words: &[String]) -> Value {
    let word = words.first().cloned().unwrap_or_default();
    match info.kind {
        ValueKind::List | ValueKind::NumberList => words.to_vec().into(),
        ValueKind::Number => word.parse::<i64>().map_or(Value::String(word), Value::Integer),
        ValueKind::Flag => (word == "true").into(),
        ValueKind::Text | ValueKind::Choice(_) => word.into(),
    }
}
