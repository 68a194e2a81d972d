//! Readings of a request's path.
//!
//! The gateway chooses the route of a request, the upstream chooses what it executes, and the two
//! may read one path differently. Then a client could have a request executed under another policy
//! than the one for its path. So a path has *readings*:
//!
//! 1. The *plain* one: percent-decoded once (RFC 3986 2.1), without dot segments (5.2.4), empty
//!    segments and a slash at its end. An encoded slash is part of its segment.
//! 2. The others, of servers that decode twice, take `%2F` or a backslash for a slash, cut off
//!    `;parameters`, take an encoded `?` or `#` for the end of the path, merge slashes before they
//!    resolve dot segments and not after, keep dot segments, drop dots and spaces at a segment's
//!    end, or take the part after the last dot for the wanted format of a response
//!    (`/payments.json`). All combinations count for which the path has the characters.
//!
//! Nearly all paths have only the plain reading. A path has *no* reliable reading if it decodes to
//! control characters or to invalid UTF-8, is not a percent-encoding (`%zz`), is encoded more than
//! [`DEPTH`] times, or is longer than [`MAX_MULTIPLE_READINGS`] and has several readings. A percent sign that
//! encodes nothing once the path was decoded (`100%25`) stays unchanged, and the rest is decoded
//! further, as by servers that decode twice.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// Largest number of times that a path may be encoded.
const DEPTH: usize = 3;

/// Longest path, in bytes, that is read in several ways, because each reading takes time.
const MAX_MULTIPLE_READINGS: usize = 2048;

/// Represents a slash that does not separate segments. Paths with this character have no readings,
/// and patterns cannot contain it.
const SLASH: char = '\u{1}';

/// Returns all readings of `path`, the plain one first; `None` if there are no reliable ones.
///
/// Each begins with a slash, is in lower case where it is ASCII, and has no empty segments and no
/// slash at its end, unless it is `/`. `named` returns whether a route names the last segment of a
/// reading including its dot; then the part after the dot is not a format.
pub(super) fn readings(path: &str, named: impl Fn(&str) -> bool) -> Option<Vec<String>> {
    if path.bytes().all(is_plain) {
        return Some(vec![read(path, Deviations(0))]);
    }
    let once = decode(path)?;
    let levels = levels(once)?;
    let odd = Deviations::of(&levels);
    let occasions: Vec<Deviations> =
        Deviations::ALL.into_iter().filter(|it| odd.contains(*it)).collect();
    if (!occasions.is_empty() || levels.len() > 1) && path.len() > MAX_MULTIPLE_READINGS {
        return None;
    }
    // Every subset; the empty one is the plain reading.
    let mut found: Vec<String> = Vec::new();
    for subset in 0..1_u32 << occasions.len() {
        let mut taken = Deviations(0);
        for (index, occasion) in occasions.iter().enumerate() {
            if subset & (1 << index) != 0 {
                taken.0 |= occasion.0;
            }
        }
        for text in &levels {
            let whole = Deviations(taken.0 & !Deviations::FORMAT.0);
            if taken.contains(Deviations::FORMAT) && named(&read(text, whole)) {
                continue;
            }
            let reading = read(text, taken);
            if !found.contains(&reading) {
                found.push(reading);
            }
        }
    }
    Some(found)
}

/// Returns whether a path of only such bytes has only the plain reading.
const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_' | b'~' | b':')
}

/// Set of the deviations from the plain reading.
#[derive(Clone, Copy)]
struct Deviations(u16);

impl Deviations {
    /// `%2F` separates.
    const SLASH: Self = Self(2);
    /// A backslash separates.
    const BACKSLASH: Self = Self(4);
    /// Parameters of a segment begin at a semicolon.
    const PARAMETERS: Self = Self(8);
    /// `%3F` and `%23` end the path.
    const END: Self = Self(16);
    /// Slashes are merged before dot segments are resolved.
    const MERGE: Self = Self(32);
    /// Dot segments are ordinary segments.
    const DOTS: Self = Self(64);
    /// Dots and spaces at the end of a segment are dropped.
    const TAIL: Self = Self(128);
    /// The part after the last dot of the last segment is not part of its name.
    const FORMAT: Self = Self(256);
    const ALL: [Self; 8] = [
        Self::SLASH,
        Self::BACKSLASH,
        Self::PARAMETERS,
        Self::END,
        Self::MERGE,
        Self::DOTS,
        Self::TAIL,
        Self::FORMAT,
    ];

    const fn contains(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the deviations that can apply to a path, decoded once and more. Too many are
    /// harmless: their readings are equal.
    fn of(levels: &[String]) -> Self {
        let mut odd = 0;
        let mut add = |occasion: Self, there: bool| odd |= if there { occasion.0 } else { 0 };
        let any = |chars: &[char]| levels.iter().any(|text| text.contains(chars));
        add(Self::SLASH, any(&[SLASH]));
        add(Self::BACKSLASH, any(&['\\']));
        add(Self::PARAMETERS, any(&[';']));
        add(Self::END, any(&['?', '#']));
        // Other deviations may cut a segment so that it becomes a dot segment.
        let segments = levels.iter().flat_map(|text| text.split(['/', SLASH, '\\']));
        let cuts: [&[char]; 3] = [&[';'], &['?', '#'], &[';', '?', '#']];
        let segments = segments.flat_map(|segment| {
            std::iter::once(segment).chain(cuts.map(|ends| before(segment, ends)))
        });
        let segments: Vec<&str> = segments.collect();
        let dots = segments.iter().any(|segment| matches!(segment.trim_end(), "." | ".."));
        add(Self::DOTS, dots);
        add(Self::MERGE, dots);
        add(Self::TAIL, segments.iter().any(|segment| segment.ends_with(['.', ' '])));
        // Deviations may change which segment is the last one.
        let last = |text: &str| text.trim_end_matches('/').rsplit('/').next().map(str::to_owned);
        let last = levels.iter().filter_map(|text| last(text)).any(|it| it.contains('.'));
        let is_odd = odd != 0;
        if last || (is_odd && any(&['.'])) {
            odd |= Self::FORMAT.0;
        }
        Self(odd)
    }
}

/// Decodes once. An encoded slash becomes a [`SLASH`].
fn decode(path: &str) -> Option<String> {
    let mut rest = path.as_bytes();
    while let Some(at) = rest.iter().position(|byte| *byte == b'%') {
        let digits = rest.get(at + 1..at + 3)?;
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        rest = &rest[at + 3..];
    }
    let mut decoded = String::with_capacity(path.len());
    for (index, piece) in path.split('/').enumerate() {
        if index > 0 {
            decoded.push('/');
        }
        let piece: Cow<'_, str> = percent_decode_str(piece).decode_utf8().ok()?;
        if piece.chars().any(char::is_control) {
            return None;
        }
        decoded.extend(piece.chars().map(|char| if char == '/' { SLASH } else { char }));
    }
    Some(decoded)
}

/// Returns the path decoded once, twice and so on, until nothing is encoded; `None` if it is
/// encoded more than [`DEPTH`] times, or if [`decode`] fails.
fn levels(once: String) -> Option<Vec<String>> {
    let mut levels = vec![once];
    loop {
        let text = levels.last()?;
        let next = decode(&escape_lone_percents(&text.replace(SLASH, "%2F")))?;
        if next == *text {
            return Some(levels);
        }
        if levels.len() == DEPTH {
            return None;
        }
        levels.push(next);
    }
}

/// Encodes the percent signs that encode nothing, so that decoding leaves them unchanged.
fn escape_lone_percents(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for (index, char) in text.char_indices() {
        escaped.push(char);
        let digits = text.as_bytes().get(index + 1..index + 3);
        if char == '%' && !digits.is_some_and(|it| it.iter().all(u8::is_ascii_hexdigit)) {
            escaped.push_str("25");
        }
    }
    escaped
}

fn read(text: &str, odd: Deviations) -> String {
    let text = if odd.contains(Deviations::END) { before(text, &['?', '#']) } else { text };
    let separates = |char: char| {
        char == '/'
            || (char == SLASH && odd.contains(Deviations::SLASH))
            || (char == '\\' && odd.contains(Deviations::BACKSLASH))
    };
    let mut kept: Vec<&str> = Vec::new();
    for segment in text.split(separates).skip(1) {
        let segment =
            if odd.contains(Deviations::PARAMETERS) { before(segment, &[';']) } else { segment };
        let segment = if odd.contains(Deviations::TAIL) { without_tail(segment) } else { segment };
        match segment {
            "" if odd.contains(Deviations::MERGE) => {}
            "." if !odd.contains(Deviations::DOTS) => {}
            ".." if !odd.contains(Deviations::DOTS) => {
                kept.pop();
            }
            segment => kept.push(segment),
        }
    }
    kept.retain(|segment| !segment.is_empty());
    if let Some(last) = kept.last_mut().filter(|_| odd.contains(Deviations::FORMAT)) {
        let name = last.rsplit_once('.').map(|(name, _)| name);
        *last = name.filter(|name| !name.is_empty()).unwrap_or(last);
    }
    let mut reading = String::with_capacity(text.len());
    for segment in kept {
        reading.push('/');
        reading.push_str(segment);
    }
    if reading.is_empty() {
        reading.push('/');
    }
    reading.make_ascii_lowercase();
    reading
}

/// Removes dots and spaces at the end; the dots of a segment of only these stay.
fn without_tail(segment: &str) -> &str {
    match segment.trim_end_matches(['.', ' ']) {
        "" => segment.trim_end_matches(' '),
        name => name,
    }
}

fn before<'a>(text: &'a str, ends: &[char]) -> &'a str {
    text.split(ends).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn readings(path: &str) -> Option<Vec<String>> {
        super::readings(path, |_| false)
    }

    fn plain(path: &str) -> Option<String> {
        Some(readings(path)?.remove(0))
    }

    #[test]
    fn paths_are_normalised_to_the_plain_reading() {
        for (path, reading) in [
            ("/payments", "/payments"),
            ("/", "/"),
            ("//", "/"),
            ("/%70ayments", "/payments"),
            ("/PayMents", "/payments"),
            ("/%50ayments", "/payments"),
            ("/a/../payments", "/payments"),
            ("/a/%2e%2E/payments", "/payments"),
            ("/./payments/.", "/payments"),
            ("//payments", "/payments"),
            ("/payments/", "/payments"),
            ("/payments//", "/payments"),
            ("/../../payments", "/payments"),
            ("/caf%C3%A9", "/café"),
            ("/a//../b", "/a/b"),
            ("/a%2Fb", "/a\u{1}b"),
            ("/100%25", "/100%"),
        ] {
            assert_eq!(plain(path).as_deref(), Some(reading), "{path}");
        }
    }

    #[test]
    fn invalid_paths_have_no_reading() {
        for path in [
            "/%",
            "/%7",
            "/%zz",
            "/%u0070",
            "/a%00b",
            "/a%0d%0a",
            "/%ff",
            "/%c0%af",
            "/caf%E9",
            "/%252525252e",
            // Decoded twice.
            "/%25ff/../%2570ayments",
            "/%2570ayments%2500",
        ] {
            assert_eq!(readings(path), None, "{path}");
        }
        assert_eq!(readings(&format!("/{};", "x".repeat(MAX_MULTIPLE_READINGS))), None);
        assert!(readings(&format!("/{}", "x".repeat(MAX_MULTIPLE_READINGS))).is_some());
    }

    #[test]
    fn readings_include_the_interpretations_of_common_servers() {
        for (path, reading) in [
            ("/a%2f..%2fpayments", "/payments"),
            ("/a/..%2fpayments", "/payments"),
            ("/a\\..\\payments", "/payments"),
            ("/a%5c..%5Cpayments", "/payments"),
            ("/a/..;x/payments", "/payments"),
            ("/payments;v=1", "/payments"),
            ("/payments%3Bv=1", "/payments"),
            ("/payments%3fx", "/payments"),
            ("/payments%23x", "/payments"),
            ("/%2570ayments", "/payments"),
            // A percent sign that encodes nothing does not end the decoding of the rest.
            ("/%25/../%2570ayments", "/payments"),
            ("/x%25zz/%252e%252e/%2570ayments", "/payments"),
            ("/100%25/..%252f%2570ayments", "/payments"),
            // It is this path when decoded twice, and another one when decoded three times.
            ("/%2570ayments/%25252e/..", "/payments"),
            ("/%252e%252e/%25252e/payments", "/payments"),
            ("/a//../payments", "/payments"),
            ("/a/../payments", "/a/../payments"),
            ("/a%252f..%252Fpayments", "/payments"),
            ("/payments.json", "/payments"),
            ("/payments.", "/payments"),
            ("/payments%20", "/payments"),
            ("/payments.%20.", "/payments"),
            ("/payments.json;v=1", "/payments"),
            ("/payments.json/x/..", "/payments"),
            ("/v1./payments", "/v1/payments"),
            ("/x/..%20/payments", "/payments"),
            ("/a.b.json", "/a.b"),
            ("/a%3f.;b", "/a?"),
            ("/a;.%3fb", "/a;"),
            ("/.well-known", "/.well-known"),
        ] {
            let found = readings(path).unwrap();
            assert!(found.iter().any(|it| it == reading), "{path}: {found:?}");
        }
    }

    #[test]
    fn a_name_with_a_dot_has_no_format_and_other_readings_have() {
        let found = |path| super::readings(path, |it| it == "/hooks/bank.json").unwrap();
        assert_eq!(found("/hooks/bank.json"), ["/hooks/bank.json"]);
        for path in [
            "/hooks/bank.json/..%2f..%2fpayments.json%2fb/..",
            "/payments.json%3f/../hooks/bank.json",
        ] {
            let found = found(path);
            assert!(found.iter().any(|it| it == "/payments"), "{path}: {found:?}");
        }
    }

    proptest! {
        /// Any text is read without a panic, in few ways, and into normalised readings.
        #[test]
        fn readings_are_normal(path in "/[a-zA-Z0-9./%;\\\\?#éÿ25ef_-]{0,40}") {
            for reading in readings(&path).into_iter().flatten() {
                prop_assert!(reading.starts_with('/') && !reading.contains("//"));
                prop_assert!(reading == "/" || !reading.ends_with('/'));
                prop_assert!(!reading.chars().any(|char| char.is_ascii_uppercase()));
            }
            prop_assert!(readings(&path).is_none_or(|found| found.len() <= 768));
        }

        /// Deviations that cannot apply to a path change nothing.
        #[test]
        fn every_applicable_deviation_is_among_the_readings(path in "/[a.%;?#\\\\/025cef]{0,24}", bits in 0_u16..512) {
            if let (Some(found), Some(once)) = (readings(&path), decode(&path)) {
                for text in levels(once).unwrap() {
                    let reading = read(&text, Deviations(bits));
                    prop_assert!(found.contains(&reading), "{} of {}: {:?}", reading, path, found);
                }
            }
        }

        /// If any characters are encoded, once or twice, and dot segments or slashes are added, the
        /// original path is among the readings, and is the plain one if nothing was encoded twice.
        #[test]
        fn the_intended_path_is_among_the_readings(
            segments in proptest::collection::vec("[a-z]{1,6}", 1..4),
            bytes in proptest::collection::vec(0_u8..8, 60),
            doubly in any::<bool>(),
        ) {
            let mut bytes = bytes.into_iter().cycle();
            let mut path = String::new();
            for segment in &segments {
                path.push('/');
                match bytes.next() {
                    Some(0) => path.push_str("x/../"),
                    Some(1) => path.push_str("./"),
                    Some(2) => path.push_str("y/%2e%2E/"),
                    _ => {}
                }
                for char in segment.chars() {
                    match bytes.next() {
                        Some(0) => path.push_str(&format!("%{:02x}", u32::from(char))),
                        Some(1) if doubly => path.push_str(&format!("%25{:02X}", u32::from(char))),
                        Some(2) => path.push(char.to_ascii_uppercase()),
                        _ => path.push(char),
                    }
                }
            }
            let meant = format!("/{}", segments.join("/"));
            let found = readings(&path).unwrap();
            prop_assert!(found.contains(&meant), "{} of {}: {:?}", meant, path, found);
            prop_assert!(doubly || found[0] == meant);
        }
    }
}
