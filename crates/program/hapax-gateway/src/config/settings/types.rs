//! Types of settings: how a value is read from the words of a user, and written as such.

use std::fmt::Display;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use hapax_core::{InFlight, JsonPointers, Namespace, OnUnknown};
use hapax_http::classify::Profile;
use hapax_http::fingerprint::BodyForm;
use hapax_http::header::Grammar;
use hapax_http::problem::DocsUrl;
use hapax_http::server::{CompletionOutage, KeyRule, MissingScope, ScopePart, StoreOutage};
use hapax_http::statuses::StatusRange;
use hapax_proxy::{ByteSize, IpNetwork, UpstreamProtocol, parse_duration};
use http::{HeaderName, Method, Uri};

use super::super::{CorsHeaders, JwtKeys, LogFormat, Origins, ReconcileAuthorization, ScopeConfig};
use crate::store::{CacheUrl, StoreUrl};

/// How a value is written.
#[derive(Clone, Copy, Debug)]
pub enum ValueKind {
    /// A string.
    Text,
    /// A whole number.
    Number,
    /// `true` or `false`.
    Flag,
    /// One of these words.
    Choice(fn() -> Vec<&'static str>),
    /// Several strings, or one with commas.
    List,
    /// A [`ValueKind::List`] that may have numbers as well.
    NumberList,
}

/// A type of settings: how a value is read, written and described.
pub(super) trait SettingType {
    /// The type of its field in the configuration.
    type Value: PartialEq;
    const KIND: ValueKind;
    /// The placeholder of a value in a help text; empty where all values are listed.
    const PLACEHOLDER: &'static str;
    /// Returns whether a value contains a secret; `None` if no value can.
    const HAS_SECRET: Option<fn(&str) -> bool> = None;

    fn read(words: &[String]) -> Result<Self::Value, String>;

    /// Writes a value as [`SettingType::read`] reads it, without secrets; `None` for the absence of
    /// a value.
    fn write(value: &Self::Value) -> Option<Vec<String>>;

    /// Checks one word by itself, as soon as it is read.
    fn check(word: &str) -> Result<(), String> {
        Self::read(&[word.to_owned()]).map(drop)
    }
}

impl<S: SettingType> SettingType for Option<S> {
    type Value = Option<S::Value>;
    const KIND: ValueKind = S::KIND;
    const PLACEHOLDER: &'static str = S::PLACEHOLDER;
    const HAS_SECRET: Option<fn(&str) -> bool> = S::HAS_SECRET;

    fn read(words: &[String]) -> Result<Self::Value, String> {
        S::read(words).map(Some)
    }

    fn write(value: &Self::Value) -> Option<Vec<String>> {
        value.as_ref().and_then(S::write)
    }

    fn check(word: &str) -> Result<(), String> {
        S::check(word)
    }
}

/// A whole number.
pub(super) struct Count<T>(PhantomData<T>);

impl<T: FromStr + Display + PartialEq> SettingType for Count<T> {
    type Value = T;
    const KIND: ValueKind = ValueKind::Number;
    const PLACEHOLDER: &'static str = "N";

    fn read(words: &[String]) -> Result<T, String> {
        single(words, |word| word.parse().map_err(|_| "expected a whole number, like 100"))
    }

    fn write(value: &T) -> Option<Vec<String>> {
        Some(vec![value.to_string()])
    }
}

/// A type with a word for each value.
pub(super) trait Words: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];
}

/// One of several words.
pub(super) struct Choice<T>(PhantomData<T>);

impl<T: Words> SettingType for Choice<T> {
    type Value = T;
    const KIND: ValueKind = ValueKind::Choice(|| T::WORDS.iter().map(|(word, _)| *word).collect());
    const PLACEHOLDER: &'static str = "";

    fn read(words: &[String]) -> Result<T, String> {
        single(words, |word| {
            let found = T::WORDS.iter().find(|(known, _)| *known == word);
            found.map(|(_, value)| *value).ok_or_else(|| {
                let known: Vec<_> = T::WORDS.iter().map(|(word, _)| *word).collect();
                format!("expected one of {}", known.join(", "))
            })
        })
    }

    fn write(value: &T) -> Option<Vec<String>> {
        let found = T::WORDS.iter().find(|(_, known)| known == value);
        found.map(|(word, _)| vec![(*word).to_owned()])
    }
}

macro_rules! words {
    ($($type:ty { $($word:literal: $value:ident),* })*) => {
        $(impl Words for $type {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, Self::$value)),*];
        })*
    };
}

words! {
    KeyRule { "optional": Optional, "required": Required }
    Grammar { "lenient": Lenient, "strict": Strict }
    MissingScope { "reject": Reject, "shared": Shared }
    BodyForm { "canonical": Canonical, "raw": Raw, "none": Ignored }
    OnUnknown { "reexecute": Reexecute, "block": Block, "reconcile": Reconcile }
    StoreOutage { "closed": Closed, "open": Open }
    CompletionOutage { "deliver": Deliver, "withhold": Withhold }
    UpstreamProtocol { "auto": Auto, "http1": Http1, "http2": Http2 }
    LogFormat { "text": Text, "json": Json }
}

/// Declares types by their names, the types of their fields, and how they are read and written.
/// `unchecked`: a word is read only with all others, so that the error can name the setting.
macro_rules! setting_types {
    ($(
        $(#[$doc:meta])*
        $name:ident: $value:ty = $kind:ident $(($words:expr))? $placeholder:literal
        $(, secret($secret:expr))? $(, unchecked $unchecked:tt)?
        { $read:expr, $write:expr }
    )*) => {
        $(
            $(#[$doc])*
            pub(super) struct $name;

            impl SettingType for $name {
                type Value = $value;
                const KIND: ValueKind = ValueKind::$kind $(($words))?;
                const PLACEHOLDER: &'static str = $placeholder;
                $(const HAS_SECRET: Option<fn(&str) -> bool> = Some($secret);)?

                fn read(words: &[String]) -> Result<$value, String> {
                    let read: fn(&[String]) -> Result<$value, String> = $read;
                    read(words)
                }

                fn write(value: &$value) -> Option<Vec<String>> {
                    let write: fn(&$value) -> Vec<String> = $write;
                    Some(write(value))
                }

                $(fn check(_: &str) -> Result<(), String> {
                    Ok($unchecked)
                })?
            }
        )*
    };
}

setting_types! {
    Level: String = Text "LEVEL" { |words| single(words, str::parse::<String>), |level| one(level) }
    Name: String = Text "TEXT" { |words| single(words, str::parse::<String>), |name| one(name) }
    /// A namespace, which may be empty.
    ServiceName: Namespace = Text "NAME" {
        |words| single(words, str::parse::<Namespace>), |name| one(name)
    }
    /// A text without white space.
    Word: String = Text "TEXT" {
        |words| single(words, |word| match word {
            text if text.is_empty() || text.contains(char::is_whitespace) => {
                Err("expected a text without white space, like https://login.example")
            }
            text => Ok(text.to_owned()),
        }),
        |word| one(word)
    }
    /// A JWK Set: a path, or a URL whose query may be secret.
    Keys: JwtKeys = Text "PATH", secret(|word| word.contains("://") && word.contains('?')) {
        |words| single(words, |word| match word {
            "" => Err("expected a path or a URL, found nothing".to_owned()),
            url if url.contains("://") => uri(url).map(JwtKeys::Url),
            path => Ok(JwtKeys::File(path.into())),
        }),
        |keys| match keys {
            JwtKeys::File(path) => one(path.display()),
            JwtKeys::Url(uri) => shown_uri(uri),
        }
    }
    Path: PathBuf = Text "PATH" {
        |words| single(words, |word| match word {
            "" => Err("expected a path, found nothing"),
            path => Ok(path.into()),
        }),
        |path| one(path.display())
    }
    /// A file of credentials, or `none`.
    Authorization: ReconcileAuthorization = Text "PATH" {
        |words| single(words, |word| match word {
            "" => Err("expected a path or `none`, found nothing"),
            NONE => Ok(ReconcileAuthorization::Nothing),
            path => Ok(ReconcileAuthorization::File(path.into())),
        }),
        |authorization| match authorization {
            ReconcileAuthorization::File(path) => one(path.display()),
            ReconcileAuthorization::Nothing => one(NONE),
        }
    }
    Time: Duration = Text "DUR" { |words| single(words, parse_duration), |time| one(duration(*time)) }
    Size: usize = Text "SIZE" {
        |words| single(words, str::parse::<ByteSize>).map(|size| size.0),
        |bytes| one(ByteSize(*bytes))
    }
    Flag: bool = Flag "BOOL" { |words| single(words, str::parse::<bool>), |flag| one(flag) }
    Connections: usize = Number "N" {
        |words| single(words, |word| {
            let count = word.parse().ok().filter(|count| (1..=1_000_000).contains(count));
            count.ok_or("expected a whole number from 1 to 1000000")
        }),
        |count| one(count)
    }
    Address: SocketAddr = Text "ADDR" {
        |words| single(words, |word| {
            word.parse().map_err(|_| "expected an IP address and a port, like 127.0.0.1:8080")
        }),
        |address| one(address)
    }
    /// An address, or `off`.
    AddressOrOff: Option<SocketAddr> = Text "ADDR" {
        |words| single(words, |word| match word {
            "off" => Ok(None),
            word => word.parse().map(Some).map_err(|_| {
                "expected an IP address and a port, like 127.0.0.1:9090, or `off`"
            }),
        }),
        |address| one(address.map_or("off".to_owned(), |address| address.to_string()))
    }
    /// The URL of a service, which has no query.
    ServiceUrl: Uri = Text "URL" { |words| single(words, uri), shown_uri }
    /// A URL whose query may be secret.
    Url: Uri = Text "URL", secret(|word| word.contains('?')) { |words| single(words, uri), shown_uri }
    /// A documentation URL, or `none`.
    DocsUrlOrNone: Option<DocsUrl> = Text "URL" {
        |words| single(words, |word| match word {
            NONE => Ok(None),
            url => DocsUrl::new(url).map(Some),
        }),
        |url| one(url.as_ref().map_or(NONE, DocsUrl::as_str))
    }
    Store: StoreUrl = Text "URL", secret(|word| match word.parse() {
        Ok(StoreUrl::Server(url)) => url.has_password(),
        _ => false,
    }), unchecked () { |words| single(words, str::parse::<StoreUrl>), |url| one(url) }
    Cache: CacheUrl = Text "URL", secret(|word| match word.parse() {
        Ok(CacheUrl::Redis(url)) => url.has_password(),
        _ => false,
    }), unchecked () { |words| single(words, str::parse::<CacheUrl>), |url| one(url) }
    ProfileName: Profile = Text "NAME" { |words| single(words, str::parse::<Profile>), |name| one(name) }
    /// The handling of duplicates in flight; `wait` for the default time.
    InFlightRule: InFlight = Choice(|| vec!["reject", "wait"]) "" {
        |words| single(words, |word| match word {
            "reject" => Ok(InFlight::Reject),
            "wait" => Ok(InFlight::Wait(Duration::from_secs(5))),
            _ => Err("expected one of reject, wait"),
        }),
        |rule| one(if *rule == InFlight::Reject { "reject" } else { "wait" })
    }
    Header: HeaderName = Text "HEADER" { |words| single(words, header), |name| one(name) }
    /// Names of headers; `none` alone for no header.
    Headers: Vec<HeaderName> = List "HEADER,…" { |words| list_or_none(words, header), texts_or_none }
    /// Names of headers that a page may send, or `*`.
    PageHeaders: CorsHeaders = List "HEADER,…" {
        |words| match words {
            [any] if any == ANY => Ok(CorsHeaders::Any),
            words => list_or_none(words, header).map(CorsHeaders::List),
        },
        |headers| match headers {
            CorsHeaders::Any => one(ANY),
            CorsHeaders::List(names) => texts_or_none(names),
        }
    }
    /// Parts of a request that name the caller; `none` alone for one scope for everyone.
    Callers: ScopeConfig = List "HEADER,…" {
        |words| match words {
            [none] if none == NONE => Ok(ScopeConfig::Everyone),
            words => list_or_none(words, part_of_scope).map(ScopeConfig::Parts),
        },
        |scope| match scope {
            ScopeConfig::Everyone => one(NONE),
            ScopeConfig::Parts(parts) => texts(parts),
        }
    }
    Methods: Vec<Method> = List "METHOD,…" {
        |words| list(words, |word| method(word).ok_or_else(|| expected_methods(""))),
        |methods| texts(methods)
    }
    /// Methods, or `*` for any.
    PageMethods: Vec<Method> = List "METHOD,…" {
        |words| list(words, |word| {
            let any = (word == ANY).then(|| Method::from_bytes(ANY.as_bytes()).ok()).flatten();
            any.or_else(|| method(word)).ok_or_else(|| expected_methods(", or `*` alone"))
        }),
        |methods| texts(methods)
    }
    Statuses: Vec<StatusRange> = NumberList "STATUS,…" {
        |words| list_or_none(words, str::parse::<StatusRange>), texts_or_none
    }
    /// JSON pointers; `none` alone for no pointer.
    Pointers: Option<JsonPointers> = List "POINTER,…", unchecked () {
        |words| match words {
            [none] if none == NONE => Ok(None),
            words => JsonPointers::new(words).map(Some).map_err(|error| error.to_string()),
        },
        |pointers| match pointers {
            None => one(NONE),
            Some(pointers) => pointers.iter().map(str::to_owned).collect(),
        }
    }
    /// Networks and `loopback`; `none` alone for no network.
    Networks: Vec<IpNetwork> = List "NET,…" {
        |words| list_or_none(words, |word| match word {
            LOOPBACK => Ok(IpNetwork::loopback()),
            word => word.parse().map(|network| vec![network]),
        }).map(|networks| networks.concat()),
        |networks| match *networks == IpNetwork::loopback() {
            true => one(LOOPBACK),
            false => texts_or_none(networks),
        }
    }
    /// Origins, or `*` for any; `none` alone leaves CORS to the service.
    OriginsOrNone: Option<Origins> = List "ORIGIN,…" {
        |words| Ok(match words {
            [any] if any == ANY => Some(Origins::Any),
            [none] if none == NONE => None,
            words => Some(Origins::List(words.to_vec())),
        }),
        |origins| match origins {
            None => one(NONE),
            Some(Origins::Any) => one(ANY),
            Some(Origins::List(origins)) => origins.clone(),
        }
    }
}

/// Stands alone in a list, for no value.
const NONE: &str = "none";

/// Stands alone in a list, for every value.
const ANY: &str = "*";

const LOOPBACK: &str = "loopback";

/// The text that replaces a secret.
const HIDDEN: &str = "(hidden)";

fn single<T, E: Display>(words: &[String], read: fn(&str) -> Result<T, E>) -> Result<T, String> {
    match words {
        [word] => read(word).map_err(|error| error.to_string()),
        _ => Err("expected one value".to_owned()),
    }
}

fn list<T, E: Display>(words: &[String], read: fn(&str) -> Result<T, E>) -> Result<Vec<T>, String> {
    words.iter().map(|word| read(word).map_err(|error| error.to_string())).collect()
}

fn list_or_none<T, E: Display>(
    words: &[String],
    read: fn(&str) -> Result<T, E>,
) -> Result<Vec<T>, String> {
    match words {
        [none] if none == NONE => Ok(Vec::new()),
        words if words.iter().any(|word| word == NONE) => Err("`none` stands alone".to_owned()),
        words => list(words, read),
    }
}

fn one(value: impl Display) -> Vec<String> {
    vec![value.to_string()]
}

fn texts<T: Display>(values: &[T]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
}

#[allow(clippy::ptr_arg, reason = "it is a function of the field's type")]
fn texts_or_none<T: Display>(values: &Vec<T>) -> Vec<String> {
    if values.is_empty() { one(NONE) } else { texts(values) }
}

fn part_of_scope(word: &str) -> Result<ScopePart, &'static str> {
    let expected = "expected the name of a header, like x-user, of a cookie, like cookie:session, or of a claim, like \
                    jwt:sub";
    word.trim().parse().map_err(|_| expected)
}

fn header(word: &str) -> Result<HeaderName, &'static str> {
    word.trim().parse().map_err(|_| "expected the name of a header, like x-user")
}

/// Returns a method of IANA's registry. Any other method is probably a typing error, and the
/// intended method would not be protected. Methods are case-sensitive. Methods are case-sensitive.
fn method(word: &str) -> Option<Method> {
    METHODS.split(' ').any(|known| known == word).then(|| word.parse().ok()).flatten()
}

fn expected_methods(more: &str) -> String {
    format!("expected methods in upper case{more}: {}", METHODS.replace(' ', ", "))
}

/// IANA's registry of methods (RFC 9110, 18.2) without `PRI` and `*`, which are reserved.
const METHODS: &str = "ACL BASELINE-CONTROL BIND CHECKIN CHECKOUT CONNECT COPY DELETE GET HEAD LABEL \
    LINK LOCK MERGE MKACTIVITY MKCALENDAR MKCOL MKREDIRECTREF MKWORKSPACE MOVE OPTIONS ORDERPATCH \
    PATCH POST PROPFIND PROPPATCH PUT QUERY REBIND REPORT SEARCH TRACE UNBIND UNCHECKOUT UNLINK \
    UNLOCK UPDATE UPDATEREDIRECTREF VERSION-CONTROL";

fn uri(word: &str) -> Result<Uri, String> {
    if word.split_once('?').is_some_and(|(_, query)| query == HIDDEN) {
        // As a token it could be guessed.
        return Err("`(hidden)` is shown in place of a secret: give the secret itself".to_owned());
    }
    word.parse().map_err(|error: http::uri::InvalidUri| error.to_string())
}

fn shown_uri(uri: &Uri) -> Vec<String> {
    let text = uri.to_string();
    match text.split_once('?') {
        Some((url, _)) => one(format_args!("{url}?{HIDDEN}")),
        None => vec![text],
    }
}

fn duration(time: Duration) -> String {
    let millis = time.as_millis();
    for (scale, unit) in [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
        // A day is called 24h, by convention.
        if millis != 0 && millis.is_multiple_of(scale) && (unit != "d" || millis > scale) {
            return format!("{}{unit}", millis / scale);
        }
    }
    format!("{millis}ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<S: SettingType>(word: &str) -> Result<S::Value, String> {
        S::read(&[word.to_owned()])
    }

    #[test]
    fn durations_are_written_as_they_are_read() {
        for text in ["0ms", "250ms", "30s", "5m", "24h", "36h", "7d"] {
            assert_eq!(Time::write(&read::<Time>(text).unwrap()), Some(one(text)));
        }
    }

    #[test]
    fn the_query_of_a_url_is_hidden_and_its_placeholder_is_rejected() {
        let shown = Url::write(&read::<Url>("http://a/check?token=secret").unwrap()).unwrap();
        assert_eq!(shown, ["http://a/check?(hidden)"]);
        assert!(read::<Url>(&shown[0]).unwrap_err().contains("in place of a secret"));
        assert!(read::<Url>("http://a/check?hidden").is_ok());
    }

    #[test]
    fn methods_are_those_of_the_registry() {
        assert_eq!(METHODS.split(' ').count(), 39);
        for known in METHODS.split(' ') {
            assert_eq!(read::<Methods>(known).unwrap(), [known]);
            assert_eq!(read::<PageMethods>(known).unwrap(), [known]);
        }
        assert_eq!(read::<PageMethods>("*").unwrap(), ["*"]);
        for none in ["*", "ANY", "POTS", "post", "", "PRI", "a b"] {
            let error = read::<Methods>(none).unwrap_err();
            assert!(error.contains("PATCH, POST, PROPFIND"), "{none}: {error}");
            assert!(none == "*" || read::<PageMethods>(none).is_err(), "{none}");
        }
    }
}
