//! Values as people write them, in flags, in the environment and in a file.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use hapax_gateway::{UnitError, parse_duration};
use hapax_http::problem::{DocsUrl, DocsUrlError};
use hapax_http::statuses::{StatusError, StatusRange};
use http::HeaderName;
use serde::{Deserialize, Serialize};

/// A duration, like `30s`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DurationArg(pub(super) Duration);

impl FromStr for DurationArg {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        parse_duration(text).map(Self)
    }
}

impl Display for DurationArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        for (scale, unit) in [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
            // A day is called 24h, by convention.
            if millis != 0 && millis.is_multiple_of(scale) && (unit != "d" || millis > scale) {
                return write!(f, "{}{unit}", millis / scale);
            }
        }
        write!(f, "{millis}ms")
    }
}

/// An address to listen on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ListenArg(pub(super) SocketAddr);

impl FromStr for ListenArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        crate::addr(text).map(Self)
    }
}

impl Display for ListenArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An address, or `off`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AdminArg(pub(super) Option<SocketAddr>);

impl FromStr for AdminArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        text.parse()
            .map(|addr| Self(Some(addr)))
            .map_err(|_| "expected an IP address and a port, like 127.0.0.1:9090, or `off`")
    }
}

impl Display for AdminArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(addr) => addr.fmt(f),
            None => f.write_str("off"),
        }
    }
}

/// What is shown in place of a secret.
const HIDDEN: &str = "(hidden)";

/// Why it is not taken for one: as a token it could be guessed.
const SHOWN: &str =
    "`(hidden)` is what --check shows in place of a secret: say the secret itself there";

/// A URL whose query may be secret, and is shown as that.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct UrlArg(pub(super) http::Uri);

impl FromStr for UrlArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.split_once('?').is_some_and(|(_, query)| query == HIDDEN) {
            return Err(SHOWN.to_owned());
        }
        text.parse().map(Self).map_err(|error: http::uri::InvalidUri| error.to_string())
    }
}

impl Display for UrlArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        match text.split_once('?') {
            Some((url, _)) => write!(f, "{url}?{HIDDEN}"),
            None => f.write_str(&text),
        }
    }
}

impl fmt::Debug for UrlArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// A documentation URL, or `none`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DocsUrlArg(pub(super) Option<DocsUrl>);

impl FromStr for DocsUrlArg {
    type Err = DocsUrlError;

    fn from_str(text: &str) -> Result<Self, DocsUrlError> {
        if text == "none" {
            return Ok(Self(None));
        }
        DocsUrl::new(text).map(|url| Self(Some(url)))
    }
}

impl Display for DocsUrlArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_ref().map_or("none", DocsUrl::as_str))
    }
}

/// The name of a header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HeaderArg(pub(super) HeaderName);

impl FromStr for HeaderArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.trim().parse().map(Self).map_err(|_| "not the name of a header")
    }
}

impl Display for HeaderArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A status or a range of them; `None` is `none`, for an empty list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StatusArg(pub(super) Option<StatusRange>);

impl FromStr for StatusArg {
    type Err = StatusError;

    fn from_str(text: &str) -> Result<Self, StatusError> {
        match text.trim() {
            "none" => Ok(Self(None)),
            text => text.parse().map(|range| Self(Some(range))),
        }
    }
}

impl Display for StatusArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(range) => range.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// Whether a key is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum KeyRuleArg {
    Optional,
    Required,
}

/// What a key is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum GrammarArg {
    Lenient,
    Strict,
}

/// What becomes of a request without its scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ScopeMissingArg {
    Reject,
    Shared,
}

/// What becomes of copies in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum InFlightArg {
    Reject,
    Wait,
}

/// What becomes of retries of what is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum OnUnknownArg {
    Reexecute,
    Block,
    Reconcile,
}

/// What becomes of requests without a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum StoreOutageArg {
    Closed,
    Open,
}

/// What becomes of answers that cannot be recorded yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CompletionOutageArg {
    Deliver,
    Withhold,
}

/// Values that are written as text.
pub(super) mod text {
    use super::{Display, FromStr};
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
    }

    pub(crate) fn serialize<S: Serializer, T: Display>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => serializer.collect_str(value),
            None => serializer.serialize_none(),
        }
    }
}

/// One of several, as people write them after commas.
pub(super) fn trimmed(text: &str) -> Result<String, std::convert::Infallible> {
    Ok(text.trim().to_owned())
}

/// Several of them: as an array, or as one text with commas.
pub(super) mod list {
    use super::{Display, FromStr};
    use serde::{Deserialize, Deserializer, Serializer, de};

    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected an array of strings, or one with commas")]
    enum Written {
        Array(Vec<String>),
        Text(String),
    }

    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
    where
        D: Deserializer<'de>,
        T: FromStr<Err: Display>,
    {
        let parse = |text: &str| {
            text.trim().parse().map_err(|error| de::Error::custom(format!("`{text}`: {error}")))
        };
        let values: Result<_, _> = match Written::deserialize(deserializer)? {
            Written::Array(values) => values.iter().map(|text| parse(text)).collect(),
            Written::Text(text) => text.split(',').map(parse).collect(),
        };
        values.map(Some)
    }

    pub(crate) fn serialize<S: Serializer, T: Display>(
        values: &Option<Vec<T>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match values {
            Some(values) => serializer.collect_seq(values.iter().map(ToString::to_string)),
            None => serializer.serialize_none(),
        }
    }
}

/// Statuses: as an array of numbers and strings, as one of these, or as one string with commas.
pub(super) mod statuses {
    use super::{StatusArg, list};
    use serde::{Deserialize, Deserializer, Serializer, de};

    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected statuses, like [503, \"5xx\"]")]
    enum Written {
        Array(Vec<Item>),
        One(Item),
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Item {
        Code(u16),
        Text(String),
    }

    pub(crate) fn deserialize<'de, D>(deserializer: D) -> Result<Option<Vec<StatusArg>>, D::Error>
    where
        D: Deserializer<'de>,
    {
        let items = match Written::deserialize(deserializer)? {
            Written::Array(items) => items,
            Written::One(item) => vec![item],
        };
        let texts = items.into_iter().map(|item| match item {
            Item::Code(code) => code.to_string(),
            Item::Text(text) => text,
        });
        let mut statuses = Vec::new();
        for text in texts {
            for part in text.split(',') {
                let status = part.parse();
                let named = |error| de::Error::custom(format!("`{part}`: {error}"));
                statuses.push(status.map_err(named)?);
            }
        }
        Ok(Some(statuses))
    }

    pub(crate) fn serialize<S: Serializer>(
        values: &Option<Vec<StatusArg>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        list::serialize(values, serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_as_they_are_written() {
        for text in ["0ms", "250ms", "30s", "5m", "24h", "36h", "7d"] {
            assert_eq!(text.parse::<DurationArg>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_shown_of_a_secret_is_none() {
        let shown = "http://a/check?token=secret".parse::<UrlArg>().unwrap().to_string();
        assert_eq!(shown.parse::<UrlArg>().unwrap_err(), SHOWN);
        assert!("http://a/check?hidden".parse::<UrlArg>().is_ok());
    }

    #[test]
    fn what_is_secret_is_not_shown() {
        let url: UrlArg = "http://a/check?token=secret".parse().unwrap();
        assert_eq!((url.to_string(), format!("{url:?}")), {
            let shown = "http://a/check?(hidden)".to_owned();
            (shown.clone(), shown)
        });
    }
}
