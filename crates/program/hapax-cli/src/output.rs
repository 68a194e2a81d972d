//! Texts for standard output. Text of clients, services and producers must not control the terminal of an
//! operator: it could hide lines, or show a decision that no operator made.

use std::fmt::Write as _;
use std::io::Write as _;

use serde::Serialize;

use crate::exit::CliError;

/// Writes a text, with [`block`], to standard output.
pub(crate) fn print(text: &str) {
    // Standard output may be closed: the exit code reports the result as well.
    let _ = std::io::stdout().write_all(block(text).as_bytes());
}

/// Returns a value as JSON. Characters that control a terminal are escaped, also those that JSON allows.
pub(crate) fn json(value: &impl Serialize) -> Result<String, CliError> {
    Ok(escaped(&serde_json::to_string_pretty(value).map_err(CliError::unavailable)?))
}

/// Returns a value as JSON on one line, as [`json`] does.
pub(crate) fn json_line(value: &impl Serialize) -> Result<String, CliError> {
    Ok(escaped(&serde_json::to_string(value).map_err(CliError::unavailable)?))
}

fn escaped(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len() + 1);
    for char in json.chars() {
        // JSON has line feeds between values only. All others that control are within strings.
        if char != '\n' && controls(char) {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "\\u{:04x}", u32::from(char));
        } else {
            escaped.push(char);
        }
    }
    escaped.push('\n');
    escaped
}

/// Returns a text of one line, in which U+FFFD replaces each character that controls a terminal.
pub(crate) fn line(text: &str) -> String {
    text.replace(controls, "\u{fffd}")
}

/// Returns a text of several lines. As [`line()`], except that line feeds and tabs stay.
pub(crate) fn block(text: &str) -> String {
    text.replace(|char| !matches!(char, '\n' | '\t') && controls(char), "\u{fffd}")
}

/// Returns whether a terminal may act on `char` rather than show it: control characters, separators of lines,
/// and those that change the direction of text.
fn controls(char: char) -> bool {
    char.is_control()
        || matches!(char, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[2J\r\nb\tc\u{9b}\u{7f}\u{202e}d\u{2066}é";

    #[test]
    fn characters_that_control_a_terminal_are_replaced() {
        assert_eq!(
            line(HOSTILE),
            "a\u{fffd}[2J\u{fffd}\u{fffd}b\u{fffd}c\u{fffd}\u{fffd}\u{fffd}d\u{fffd}é"
        );
        assert_eq!(block(HOSTILE), "a\u{fffd}[2J\u{fffd}\nb\tc\u{fffd}\u{fffd}\u{fffd}d\u{fffd}é");
        assert_eq!(line("zwölf, 十二"), "zwölf, 十二");
    }

    #[test]
    fn json_has_the_same_value_without_characters_that_control_a_terminal() {
        let text = json(&[HOSTILE]).unwrap();
        assert!(text.chars().all(|char| char == '\n' || !controls(char)), "{text:?}");
        assert_eq!(serde_json::from_str::<[String; 1]>(&text).unwrap(), [HOSTILE]);
    }
}
