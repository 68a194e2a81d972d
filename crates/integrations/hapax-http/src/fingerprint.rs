//! Fingerprints of requests.
//!
//! 1. Method and path count as received, byte by byte. Within routers of axum the target is the one that
//!    reached the outermost of them: its scheme is another one (`http/2`), because earlier releases
//!    compared the stripped target. Records of theirs (`http/1`) are compared by that, so until it ends such a
//!    record of `/orders` also answers a request to `/refunds/orders` with the same key, as they did.
//! 2. The query counts as a list of pairs, sorted by name as received; values of one name keep
//!    their order.
//! 3. The chosen headers count with all their values. Headers that override the method of a POST
//!    ([`METHOD_OVERRIDES`]) always count if they are present.
//! 4. The body counts in its [`BodyForm`]. In canonical form, JSON (`application/json`, `+json`) is
//!    compared by [`hapax_core::canonicalize`], and `multipart/form-data` without its boundary,
//!    which clients generate for every attempt. `application/x-www-form-urlencoded` is compared by its
//!    decoded pairs in their order, in schemes of its own (`http/3`, and `http/4` within routers), because
//!    earlier releases compared its bytes. A body without a canonical form, any other body, and one
//!    with two content types, is compared by its bytes.
//!
//! A canonical body and a raw body of the same bytes never have the same fingerprint.
//!
//! A record has the scheme of its fingerprint, and a retry is compared by that one. An unknown
//! scheme was written by a newer version: it is then unknown whether the retry is the same request,
//! so it is neither replayed nor executed, whatever the route's policy for outages, but rejected
//! like during an outage (503 `store-unavailable`), until a version that knows the scheme gets the
//! retry or the record ends.

mod multipart;
mod urlencoded;

use std::borrow::Cow;
use std::fmt;

use hapax_core::{
    CanonicalJsonError, Fingerprint, FingerprintBuilder, FingerprintScheme, JsonPointers,
    SchemeTooLong,
};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Headers by which clients have a POST treated as another method. If one is present, it is part of
/// the request, chosen or not.
pub const METHOD_OVERRIDES: [HeaderName; 3] = [
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-method-override"),
];

/// Forms in which a body counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BodyForm {
    /// JSON by its values, form data by its pairs or parts in order, anything else by its bytes.
    #[default]
    Canonical,
    /// Any body by its bytes.
    Raw,
    /// The body does not count.
    Ignored,
}

/// Parts of a JSON body that count, in canonical form.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum JsonParts {
    /// The whole body.
    #[default]
    All,
    /// The content at these pointers; the absence of content counts too.
    Only(JsonPointers),
    /// All but the values at these pointers, such as time stamps and trace ids.
    Except(JsonPointers),
}

/// The parts of a request that count. The scheme's name, stored with each record, states all of
/// them, so that a retry is compared as the first request was, whatever the present configuration.
///
/// ```
/// use hapax_core::JsonPointers;
/// use hapax_http::fingerprint::{BodyForm, HttpFingerprintScheme, JsonParts};
/// let noise = JsonParts::Except(JsonPointers::new(["/sent at"])?);
/// let scheme = HttpFingerprintScheme::new(BodyForm::Canonical, ["x-tenant".parse()?])?.json(noise)?;
/// let name = "http/1;body=canonical;except=/sent%20at;headers=x-tenant";
/// assert_eq!(scheme.name().as_str(), name);
/// assert_eq!(HttpFingerprintScheme::named(scheme.name()), Some(scheme));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HttpFingerprintScheme {
    body: BodyForm,
    json: JsonParts,
    headers: Vec<HeaderName>,
    /// True if pairs of form data are decoded.
    is_decoded: bool,
    /// Names of the schemes in which the same parts count, one for each of [`VERSIONS`].
    names: [FingerprintScheme; 4],
}

/// The first parts of the names of schemes. The second and the fourth have the target that reached the outermost router.
/// In the last two, which have canonical bodies, pairs of form data are decoded.
const VERSIONS: [&str; 4] = ["http/1", "http/2", "http/3", "http/4"];

const fn version(is_original: bool, is_decoded: bool) -> usize {
    is_original as usize + 2 * is_decoded as usize
}

impl HttpFingerprintScheme {
    /// Returns a scheme in which these headers count, and the body in this form.
    ///
    /// # Errors
    /// [`SchemeTooLong`] if the names of the headers do not fit.
    pub fn new(
        body: BodyForm,
        headers: impl IntoIterator<Item = HeaderName>,
    ) -> Result<Self, SchemeTooLong> {
        let mut headers: Vec<_> = headers.into_iter().collect();
        headers.sort_unstable_by(|one, other| one.as_str().cmp(other.as_str()));
        headers.dedup();
        let names = names(body, &JsonParts::All, &headers)?;
        Ok(Self { body, json: JsonParts::All, headers, is_decoded: false, names })
    }

    /// Returns the scheme in which only these parts of a JSON body count. It has no effect if
    /// bodies are not compared in canonical form.
    ///
    /// # Errors
    /// [`SchemeTooLong`] if the pointers do not fit.
    pub fn json(self, json: JsonParts) -> Result<Self, SchemeTooLong> {
        let json = if self.body == BodyForm::Canonical { json } else { JsonParts::All };
        let names = names(self.body, &json, &self.headers)?;
        Ok(Self { json, names, ..self })
    }

    /// Returns the scheme of this name; `None` if this version does not support it. For a name of
    /// `http/2` or `http/4` it is the scheme of `http/1` or `http/3` with the same parts: only the targets
    /// differ that they are given.
    #[must_use]
    pub fn named(name: &FingerprintScheme) -> Option<Self> {
        let (version, rest) = name.as_str().split_once(";body=")?;
        let mut fields = VERSIONS.contains(&version).then(|| rest.split(';'))?;
        let body = fields.next()?;
        let forms = [BodyForm::Canonical, BodyForm::Raw, BodyForm::Ignored];
        let body = forms.into_iter().find(|form| form.word() == body)?;
        let (mut json, mut headers) = (JsonParts::All, Vec::new());
        for field in fields {
            let (word, list) = field.split_once('=').unzip();
            match (word.unwrap_or(field), list) {
                ("only", list) => json = JsonParts::Only(pointers(list)?),
                ("except", list) => json = JsonParts::Except(pointers(list)?),
                ("headers", Some(list)) => {
                    headers = list.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
                }
                _ => return None,
            }
        }
        let scheme = Self::new(body, headers).ok()?.json(json).ok()?;
        // A name has one form: another spelling is not of this version.
        Some(Self { is_decoded: scheme.decodes(name)?, ..scheme })
    }

    /// Returns whether pairs of form data are decoded under a name of these parts; `None` for another name.
    fn decodes(&self, name: &FingerprintScheme) -> Option<bool> {
        let version = self.names.iter().position(|it| it == name)?;
        (version < 2 || self.body == BodyForm::Canonical).then_some(version >= 2)
    }

    /// Returns the name that the record of a request has. `is_original` states that the target is the one that reached
    /// the outermost router.
    pub(crate) fn name_of(&self, headers: &HeaderMap, is_original: bool) -> &FingerprintScheme {
        let is_form = || urlencoded::is_form(multipart::content_type(headers));
        let is_decoded = self.body == BodyForm::Canonical && is_form();
        &self.names[version(is_original, is_decoded)]
    }

    /// Returns the name: in records of form data that is `http/3` in place of `http/1`.
    #[must_use]
    pub const fn name(&self) -> &FingerprintScheme {
        &self.names[version(false, self.is_decoded)]
    }

    /// Returns the form in which the body counts.
    #[must_use]
    pub const fn body_form(&self) -> BodyForm {
        self.body
    }

    /// Returns the parts of a JSON body that count.
    #[must_use]
    pub const fn json_parts(&self) -> &JsonParts {
        &self.json
    }

    /// Returns the headers that count, sorted by name.
    #[must_use]
    pub fn headers(&self) -> &[HeaderName] {
        &self.headers
    }

    /// Returns the fingerprint of a request.
    #[must_use]
    pub fn fingerprint(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Fingerprint {
        self.hash(self.is_decoded, method, uri, headers, body)
    }

    fn hash(
        &self,
        is_decoded: bool,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Fingerprint {
        let (domain, body) = self.body_fields(is_decoded, headers, body);
        let mut fields = Fingerprint::builder(domain);
        fields.field(method.as_str().as_bytes()).field(uri.path().as_bytes());
        list(&mut fields, &pairs(uri.query()));
        for name in &self.headers {
            let values: Vec<_> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
            list(fields.field(name.as_str().as_bytes()), &values);
        }
        list(&mut fields, &body);
        // Only headers that are present: without any, nothing follows the body.
        for name in METHOD_OVERRIDES.iter().filter(|name| headers.contains_key(*name)) {
            let values: Vec<_> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
            list(fields.field(name.as_str().as_bytes()), &values);
        }
        fields.finish()
    }

    /// Returns the hash domain, and the body as fields.
    fn body_fields<'a>(&self, is_decoded: bool, headers: &HeaderMap, body: &'a [u8]) -> Fields<'a> {
        let raw = || ("http/1 raw", vec![Cow::Borrowed(body)]);
        match self.body {
            BodyForm::Ignored => ("http/1 no body", Vec::new()),
            BodyForm::Raw => raw(),
            BodyForm::Canonical => {
                let kind = multipart::content_type(headers);
                if is_json(kind) {
                    return self.json_fields(body).unwrap_or_else(|_| raw());
                }
                if let Some(parts) = multipart::parts(kind, body) {
                    return ("http/1 form data", parts);
                }
                let pairs = is_decoded.then(|| urlencoded::pairs(kind, body)).flatten();
                pairs.map_or_else(raw, |pairs| ("http/3 pairs", pairs))
            }
        }
    }

    fn json_fields(&self, body: &[u8]) -> Result<Fields<'static>, CanonicalJsonError> {
        Ok(match &self.json {
            JsonParts::All => ("http/1 json", vec![hapax_core::canonicalize(body)?.into()]),
            JsonParts::Except(pointers) => {
                ("http/1 json parts", vec![hapax_core::canonicalize_except(body, pointers)?.into()])
            }
            JsonParts::Only(pointers) => {
                let found = hapax_core::canonicalize_only(body, pointers)?;
                // No value is encoded as empty: absent content differs from any content.
                let fields = found.into_iter().map(|part| part.unwrap_or_default().into());
                ("http/1 json parts", fields.collect())
            }
        })
    }
}

type Fields<'a> = (&'static str, Vec<Cow<'a, [u8]>>);

impl Default for HttpFingerprintScheme {
    /// Canonical bodies, no headers.
    fn default() -> Self {
        let (body, json) = (BodyForm::Canonical, JsonParts::All);
        #[allow(clippy::unreachable, reason = "the names are shorter than any limit")]
        let Ok(names) = names(body, &json, &[]) else { unreachable!() };
        Self { body, json, headers: Vec::new(), is_decoded: false, names }
    }
}

impl BodyForm {
    const fn word(self) -> &'static str {
        match self {
            Self::Canonical => "canonical",
            Self::Raw => "raw",
            Self::Ignored => "none",
        }
    }
}

/// Escapes all characters that have a meaning in a name or are not ASCII. `/` is not escaped.
const ESCAPED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'_').remove(b'-').remove(b'.').remove(b'~');

/// Returns the names of the schemes of all [`VERSIONS`], which have the same length.
fn names(
    body: BodyForm,
    json: &JsonParts,
    headers: &[HeaderName],
) -> Result<[FingerprintScheme; 4], SchemeTooLong> {
    let mut name = format!(";body={}", body.word());
    let (word, pointers) = match json {
        JsonParts::All => ("", None),
        JsonParts::Only(pointers) => (";only", Some(pointers)),
        JsonParts::Except(pointers) => (";except", Some(pointers)),
    };
    name += word;
    if let Some(pointers) = pointers.filter(|pointers| pointers.iter().len() > 0) {
        let escaped: Vec<_> =
            pointers.iter().map(|text| utf8_percent_encode(text, ESCAPED).to_string()).collect();
        name += &format!("={}", escaped.join(","));
    }
    if !headers.is_empty() {
        let names: Vec<_> = headers.iter().map(HeaderName::as_str).collect();
        name += &format!(";headers={}", names.join(","));
    }
    let of = |version: &str| FingerprintScheme::new(format!("{version}{name}"));
    let [one, two, three, four] = VERSIONS.map(of);
    Ok([one?, two?, three?, four?])
}

/// Returns whether a scheme compares the target that reached the outermost router.
pub(crate) fn is_of_original(scheme: &FingerprintScheme) -> bool {
    let version = scheme.as_str().split(';').next().unwrap_or_default();
    [VERSIONS[1], VERSIONS[3]].contains(&version)
}

/// Returns the pointers of a list. An empty list has no `=`: an empty text after `=` is the pointer
/// to the whole body.
fn pointers(list: Option<&str>) -> Option<JsonPointers> {
    let texts: Result<Vec<_>, _> = list
        .into_iter()
        .flat_map(|list| list.split(','))
        .map(|text| percent_decode_str(text).decode_utf8())
        .collect();
    JsonPointers::new(texts.ok()?).ok()
}

/// A request as it is claimed, with the scheme in force. Its `Debug` form shows only the scheme,
/// the method and the body's length.
#[derive(Clone)]
pub struct HttpRequest<'a> {
    /// The scheme in force.
    pub scheme: &'a HttpFingerprintScheme,
    /// The method.
    pub method: &'a Method,
    /// The target; its path and query count.
    pub uri: &'a Uri,
    /// The headers, from which the scheme chooses.
    pub headers: &'a HeaderMap,
    /// The whole body.
    pub body: &'a [u8],
}

impl fmt::Debug for HttpRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpRequest")
            .field("scheme", &self.scheme.name())
            .field("method", &self.method)
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

impl hapax_core::OperationRequest for HttpRequest<'_> {
    fn scheme(&self) -> FingerprintScheme {
        self.scheme.name_of(self.headers, false).clone()
    }

    fn fingerprint(&self, scheme: &FingerprintScheme) -> Option<Fingerprint> {
        let Self { method, uri, headers, body, .. } = self;
        if let Some(is_decoded) = self.scheme.decodes(scheme) {
            return Some(self.scheme.hash(is_decoded, method, uri, headers, body));
        }
        Some(HttpFingerprintScheme::named(scheme)?.fingerprint(method, uri, headers, body))
    }
}

/// Adds a list with its length, so that no longer or shorter list has the same fields.
fn list(fields: &mut FingerprintBuilder, items: &[impl AsRef<[u8]>]) {
    fields.field(&(items.len() as u64).to_be_bytes());
    for item in items {
        fields.field(item.as_ref());
    }
}

/// Returns whether two targets count as the same one, under every scheme.
pub(crate) fn is_same_target(one: &Uri, other: &Uri) -> bool {
    one.path() == other.path() && pairs(one.query()) == pairs(other.query())
}

fn pairs(query: Option<&str>) -> Vec<&[u8]> {
    let mut pairs: Vec<_> = query.into_iter().flat_map(|query| query.split('&')).collect();
    // The sort is stable: values of one name keep their order.
    pairs.sort_by_key(|pair| pair.split_once('=').map_or(*pair, |(name, _)| name));
    pairs.into_iter().map(str::as_bytes).collect()
}

fn is_json(kind: &str) -> bool {
    let media = kind.split(';').next().unwrap_or_default().trim();
    media.eq_ignore_ascii_case("application/json")
        || media.len() > 5 && media.as_bytes()[media.len() - 5..].eq_ignore_ascii_case(b"+json")
}
