//! The file of decisions: CSV with a header line that names its columns.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use csv::{ErrorKind, Position, ReaderBuilder, StringRecord};
use hapax_core::OperationId;
use hapax_operators::{Decision, OperatorVerdict};

use super::super::{MAX_BODY, render, user};
use super::{COLUMNS, FENCE_SIGN};
use crate::exit::CliError;

/// The largest number of lines with a record.
const MAX_LINES: usize = 10_000;

/// The longest line, in bytes of its columns.
const MAX_LINE: usize = 64 << 10;

/// The largest file, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// The largest sum of bodies, in bytes.
const MAX_BODIES: usize = 64 << 20;

/// Reason and headers of all decisions of a file.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) reason: String,
    /// Headers of each response.
    pub(crate) headers: Vec<(String, String)>,
}

/// Decisions that were read from a file.
#[derive(Debug)]
pub(crate) struct DecisionFile {
    pub(super) path: PathBuf,
    pub(super) lines: Vec<DecisionLine>,
    /// The number of lines without an outcome.
    pub(super) open: usize,
}

/// A line with a decision.
#[derive(Debug)]
pub(super) struct DecisionLine {
    /// Its number in the file, from 1.
    pub(super) number: u64,
    pub(super) id: OperationId,
    pub(super) decision: Decision,
}

/// Reads one file.
struct Reading<'a> {
    path: &'a Path,
    common: &'a Common,
    /// The place of each of [`COLUMNS`].
    places: [Option<usize>; COLUMNS.len()],
    bodies: usize,
}

impl DecisionFile {
    /// Reads all decisions, with their bodies.
    ///
    /// # Errors
    /// A line that is no decision, with its number.
    pub(crate) fn read(path: &Path, common: &Common) -> Result<Self, CliError> {
        let bytes = read_at_most(path, MAX_FILE)
            .map_err(|error| CliError::usage(format!("--from-file {}: {error}", path.display())))?;
        // Excel writes a byte order mark.
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
        let head = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        // Spreadsheets of many countries separate by semicolons.
        let delimiter = if head.contains(&b';') && !head.contains(&b',') { b';' } else { b',' };
        let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(bytes);
        let header = reader.headers().map_err(|error| broken(path, bytes, &error))?.clone();
        let mut reading = Reading { path, common, places: places(path, &header)?, bodies: 0 };
        let mut file = Self { path: path.to_owned(), lines: Vec::new(), open: 0 };
        let mut numbers = HashMap::new();
        for row in reader.records() {
            let row = row.map_err(|error| broken(path, bytes, &error))?;
            // A spreadsheet may write lines of empty cells.
            if row.iter().all(|cell| cell.trim().is_empty()) {
                continue;
            }
            let number = row.position().map_or(1, |position| line(bytes, position));
            if file.lines.len() + file.open == MAX_LINES {
                let text =
                    format!("expected at most {MAX_LINES} lines, found more: split the file");
                return Err(at(path, number, text));
            }
            let id = reading.id(number, &row)?;
            if let Some(first) = numbers.insert(id, number) {
                let text = format!(
                    "expected each id once, found that of line {first}: remove one of the lines"
                );
                return Err(at(path, number, text));
            }
            match reading.decision(number, &row)? {
                Some(decision) => file.lines.push(DecisionLine { number, id, decision }),
                None => file.open += 1,
            }
        }
        Ok(file)
    }
}

impl Reading<'_> {
    fn cell<'r>(&self, row: &'r StringRecord, column: &str) -> &'r str {
        let place = COLUMNS.iter().position(|it| *it == column).and_then(|it| self.places[it]);
        place.and_then(|place| row.get(place)).unwrap_or_default()
    }

    fn id(&self, number: u64, row: &StringRecord) -> Result<OperationId, CliError> {
        if row.as_slice().len() > MAX_LINE {
            let text = "expected a line of at most 64 KiB, found a longer one: put its body into a file, and the \
                        name of the file into the column body_file";
            return Err(at(self.path, number, text));
        }
        let id = self.cell(row, "id").trim();
        OperationId::from_hex(id).ok_or_else(|| {
            let text = format!(
                "expected an id of 64 hexadecimal digits in the column id, found {}: copy it from the list",
                quoted(id)
            );
            at(self.path, number, text)
        })
    }

    /// Returns the decision of a line; `None` if it has none.
    fn decision(&mut self, number: u64, row: &StringRecord) -> Result<Option<Decision>, CliError> {
        let wrong = |column: &str, expected: &str, found: &str| {
            let found = quoted(found);
            let text = format!("expected {expected} in the column {column}, found {found}");
            at(self.path, number, text)
        };
        let [fence, outcome, status, body_file] =
            ["fence", "outcome", "status", "body_file"].map(|column| self.cell(row, column).trim());
        let body = self.cell(row, "body");
        let fence =
            fence.strip_prefix(FENCE_SIGN).unwrap_or(fence).parse().map_err(|_| {
                wrong("fence", "the fence of the record, as the list shows it,", fence)
            })?;
        let outcome = match outcome {
            "happened" => OperatorVerdict::Happened,
            "did-not-happen" => OperatorVerdict::DidNotHappen,
            "" if status.is_empty() && body.is_empty() && body_file.is_empty() => return Ok(None),
            other => return Err(wrong("outcome", "happened or did-not-happen", other)),
        };
        let status = match status {
            "" => None,
            text => {
                Some(text.parse().map_err(|_| wrong("status", "200 to 599, or nothing,", text))?)
            }
        };
        let body = match (body, body_file) {
            ("", "") => None,
            (text, "") => Some(text.as_bytes().to_vec()),
            ("", name) => Some(self.body(number, name)?),
            (_, name) => {
                return Err(wrong("body_file", "nothing, as there is a body,", name));
            }
        };
        self.bodies += body.as_ref().map_or(0, Vec::len);
        if self.bodies > MAX_BODIES {
            let text = "expected bodies of at most 64 MiB in all, found more: split the file";
            return Err(at(self.path, number, text));
        }
        let happened = outcome == OperatorVerdict::Happened;
        let (body, body_base64) = render::body(body);
        let decision = Decision {
            fence,
            force: false,
            forget: false,
            any_kind: false,
            reason: self.common.reason.clone(),
            who: Some(user::user()),
            outcome,
            status,
            headers: if happened { self.common.headers.clone() } else { Vec::new() },
            body,
            body_base64,
        };
        decision.check().map_err(|error| at(self.path, number, error))?;
        Ok(Some(decision))
    }

    /// Reads a body from a file, whose name is relative to the folder of the decisions.
    fn body(&self, number: u64, name: &str) -> Result<Vec<u8>, CliError> {
        let path = self.path.parent().unwrap_or(Path::new("")).join(name);
        read_at_most(&path, MAX_BODY).map_err(|error| {
            let text = format!(
                "expected a file of at most 1 MiB in the column body_file, found {}: {error}",
                quoted(name)
            );
            at(self.path, number, text)
        })
    }
}

/// Finds the columns in the header line. A column of another name may be a misspelt one.
fn places(path: &Path, header: &StringRecord) -> Result<[Option<usize>; COLUMNS.len()], CliError> {
    let mut places = [None; COLUMNS.len()];
    for (place, name) in header.iter().enumerate() {
        let column = COLUMNS.iter().position(|it| *it == name.trim());
        let Some(column) = column.filter(|column| places[*column].is_none()) else {
            let text = format!(
                "expected the columns {}, each at most once, found {}: correct its name, or remove it",
                COLUMNS.join(", "),
                quoted(name)
            );
            return Err(at(path, 1, text));
        };
        places[column] = Some(place);
    }
    for needed in ["id", "fence", "outcome"] {
        let column = COLUMNS.iter().position(|it| *it == needed);
        if column.is_none_or(|column| places[column].is_none()) {
            let text = format!(
                "expected a column {needed}, found none: begin with the file of `hapax keys list --csv`"
            );
            return Err(at(path, 1, text));
        }
    }
    Ok(places)
}

fn read_at_most(path: &Path, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let text = format!("expected at most {} MiB, found more", most >> 20);
        return Err(std::io::Error::other(text));
    }
    Ok(bytes)
}

/// Returns the error of a line.
fn at(path: &Path, number: u64, text: impl std::fmt::Display) -> CliError {
    CliError::usage(format!("{}:{number}: {text}; nothing was decided", path.display()))
}

/// Returns the number of the line of a row. The reader's position is before the empty lines that precede the row, and
/// within a CR LF.
fn line(bytes: &[u8], position: &Position) -> u64 {
    let start = usize::try_from(position.byte()).unwrap_or(usize::MAX);
    let rest = bytes.get(start..).unwrap_or_default();
    let ends = rest.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
    position.line() + ends.filter(|byte| **byte == b'\n').count() as u64
}

/// Returns the error of a line that is no CSV.
fn broken(path: &Path, bytes: &[u8], error: &csv::Error) -> CliError {
    let number = error.position().map_or(1, |position| line(bytes, position));
    let text = match error.kind() {
        ErrorKind::UnequalLengths { expected_len, len, .. } => format!(
            "expected {expected_len} columns, as in the first line, found {len}: quote a cell that has a \
             separator, a quote or a line feed"
        ),
        ErrorKind::Utf8 { .. } => {
            "expected UTF-8, found other bytes: save the file as UTF-8".to_owned()
        }
        _ => format!("expected CSV, found {error}"),
    };
    at(path, number, text)
}

/// Returns a short form of a cell.
fn quoted(text: &str) -> String {
    let short: String = text.chars().take(80).collect();
    if short.is_empty() { "nothing".to_owned() } else { format!("{short:?}") }
}
