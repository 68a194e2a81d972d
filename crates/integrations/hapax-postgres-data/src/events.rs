//! Appends of events at an expected version, each at most once.

mod decide;
mod statements;

use std::ops::Range;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use self::decide::{Found, decide};
use self::statements::Statements;
use crate::error::{DataError, ItemError, LostRaces};
use crate::executor::{Executor, Rows, TextQueries as _};
use crate::items::{Shape, array, number, row, text};
use crate::layout::{BatchLimits, Column, LayoutError, TableName, check_columns};
use crate::verified::Verified;

/// Result of an append. Positions are within the stream, from 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AppendResult {
    /// This call appended the events at these positions.
    Appended {
        /// From the first to before the end.
        positions: Range<u64>,
    },
    /// All of the events exist at these positions, consecutive and in this order: this append was
    /// executed before, whatever version it expected.
    AlreadyAppended {
        /// From the first to before the end.
        positions: Range<u64>,
    },
    /// None of the events exists, and other events are at the expected position.
    Conflict {
        /// The version of the stream: the position of its last event.
        current: u64,
    },
    /// None of the events exists, and the expected version is greater than the version of the
    /// stream.
    Gap {
        /// The version of the stream; 0 for one without events.
        current: u64,
    },
    /// Some of the events exist and others do not, or they exist in another order or with others in
    /// between. Nothing was appended.
    PartialOverlap {
        /// The position of each event, in the order of the call; `None` if it does not exist.
        positions: Vec<Option<u64>>,
        /// The version of the stream.
        current: u64,
    },
    /// An event with the same id and another value of a field exists in this stream. Nothing was
    /// appended.
    SameIdDifferentBody {
        /// Which of the call's events, from 0; the first.
        index: usize,
        /// The position of the existing event.
        position: u64,
        /// The first field that differs, in the order of the layout.
        field: String,
    },
    /// An event with the same id exists in another stream, and ids are
    /// [unique in the table](IdScope::UniqueInTable). Nothing was appended.
    SameIdInOtherStream {
        /// Which of the call's events, from 0; the first.
        index: usize,
        /// The other stream.
        stream: String,
        /// The position of the event in that stream.
        position: u64,
    },
}

/// The scope in which an event's id is unique.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IdScope {
    /// In the table: a unique constraint on the id. The same id in another stream is
    /// [`AppendResult::SameIdInOtherStream`].
    #[default]
    UniqueInTable,
    /// In its stream: a unique constraint on stream and id. The same id in another stream is
    /// another event.
    UniqueInStream,
}

/// A stored event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredEvent<E> {
    /// Its position in the stream.
    pub position: u64,
    /// Its id and fields.
    pub event: E,
}

/// An event log: a table of streams. Each stream is a sequence of events from 1 on without a gap; a
/// writer states the version that it expects.
///
/// The table needs a unique constraint on stream and sequence, in this order for the index to be of
/// use, and one for [`IdScope`]. An event is any
/// serde value with a field for the id and each field of the layout; stream and sequence are
/// given by the call. The id is the writer's: made once, and sent again with every retry. Stream
/// and sequence together, `{stream}-{sequence}`, name an event as well.
///
/// # Statements
/// 1. One statement inserts the events, if the stream's last position is the expected one and none
///    of the ids is there. Its first event decides: a writer at the same position waits until the
///    other's transaction has ended, without a lock that others could wait for. The rest follows
///    only if the first was inserted.
/// 2. If nothing was inserted, a second statement finds the reason, in one view of the table.
/// 3. If it finds none, as when the missing version was committed in between: again from 1, in at
///    most [`BatchLimits::rounds`] rounds.
///
/// # Guarantees
/// - Of any number of writers that expect one version, exactly one gets [`AppendResult::Appended`],
///   and all of its events are there or none.
/// - The same append again, as after a lost reply, is [`AppendResult::AlreadyAppended`] at the same
///   positions, also if it expects the version that it has created, and also if others came after.
/// - Fields are compared by the server, by the equality of their types (see [`Column`]): a body in
///   `jsonb` as JSON, one in `bytea` or `text` byte by byte. Nothing is hashed.
/// - On a plain connection a race never shows as an error of the database. In a transaction all of
///   this holds for streams under READ COMMITTED. The exceptions there are [`DataError::Again`]:
///   for two transactions that append to two streams in opposite order, and, under REPEATABLE READ
///   and SERIALIZABLE, for one whose position was taken by a row that it does not see (an append at
///   the version that the others have created is a `Gap` there: see [the crate](crate#isolation));
///   and [`DataError::UniqueViolation`] for two that give one id to events of two streams at the
///   same moment.
///
/// # What is defined
/// - No events: the version is compared, nothing is written, and `Appended` is at no position.
/// - The same id twice in a call: [`ItemError::DuplicateId`], by what the id's type holds equal.
///   Nothing was appended; in a transaction, that goes on.
/// - No unique constraint of the table is deferrable. `BEFORE INSERT` triggers change no column of
///   the layout: with another field, the same append again would be
///   [`SameIdDifferentBody`](AppendResult::SameIdDifferentBody).
/// - Streams only grow. If you remove events, keep the last one of each stream; otherwise its
///   versions begin at 1 again.
#[derive(Debug)]
pub struct EventLog {
    shape: Shape,
    stream: String,
    statements: Statements,
    verified: Verified,
}

/// Collects the columns of an [`EventLog`].
#[derive(Clone, Debug)]
pub struct EventLogBuilder {
    table: TableName,
    stream: Column,
    sequence: Column,
    id: Column,
    ids: IdScope,
    fields: Vec<Column>,
    limits: BatchLimits,
}

impl EventLog {
    /// Begins with the table; its columns are `stream`, `sequence` and `id` unless others are named.
    #[must_use]
    pub fn on_table(table: TableName) -> EventLogBuilder {
        EventLogBuilder {
            table,
            stream: "stream".into(),
            sequence: "sequence".into(),
            id: "id".into(),
            ids: IdScope::default(),
            fields: Vec::new(),
            limits: BatchLimits::default(),
        }
    }

    /// Returns the statements by name: `append`; `look`, which runs if nothing was appended;
    /// `insist`, which replaces `append` if `look` found no reason, so that a violated other
    /// constraint is named; `version`; `read`. Their parameters are the events as a JSON array, the
    /// stream as a JSON object, the version, and the number of events to read.
    #[must_use]
    pub fn sql(&self) -> [(&'static str, &str); 5] {
        let Statements { append, look, insist, version, read } = &self.statements;
        [
            ("append", append),
            ("look", look),
            ("insist", insist),
            ("version", version),
            ("read", read),
        ]
    }

    /// Makes the server plan the statements without executing them. It fails if a table, a column,
    /// a unique constraint or a permission is missing. The first append makes the same check; call
    /// this at the start of a service to find the error earlier.
    ///
    /// # Errors
    /// [`DataError::NoUniqueConstraint`], [`DataError::JsonAsText`], [`DataError::Rejected`],
    /// [`DataError::Lost`].
    pub async fn verify(&self, mut executor: impl Executor) -> Result<(), DataError> {
        self.verified.now(&mut executor).await
    }

    /// Appends `events` to `stream`, whose last event is at `expected`, or which has none if that is
    /// 0: all of them or none.
    ///
    /// # Errors
    /// See [`DataError`].
    pub async fn append<T: Serialize + Sync>(
        &self,
        mut executor: impl Executor,
        stream: &str,
        expected: u64,
        events: &[T],
    ) -> Result<AppendResult, DataError> {
        let texts = self.shape.items(events)?;
        if i64::try_from(expected.saturating_add(events.len() as u64)).is_err() {
            return Err(ItemError::Position.at(0));
        }
        self.verified.once(&mut executor).await?;
        if events.is_empty() {
            let current = self.version(executor, stream).await?;
            return Ok(decide(expected, current, &[])
                .unwrap_or(AppendResult::Appended { positions: expected + 1..expected + 1 }));
        }
        let (given, head) = (array(texts.iter().map(String::as_str)), self.head(stream));
        let version = expected.to_string();
        let end = expected + events.len() as u64;
        let mut races = LostRaces::default();
        let mut append = &self.statements.append;
        for _ in 0..self.shape.limits.rounds {
            match executor.query(append, &[&given, &head, &version]).await {
                Ok(rows) if rows.is_empty() => {}
                Ok(_) => return Ok(AppendResult::Appended { positions: expected + 1..end + 1 }),
                Err(failure) => races.lost(failure)?,
            }
            match executor.query(&self.statements.look, &[&given, &head]).await {
                Ok(rows) => {
                    let (current, found) = self.found(&rows, events.len())?;
                    if let Some(outcome) = decide(expected, current, &found) {
                        return Ok(outcome);
                    }
                    races.violation()?;
                }
                Err(failure) => races.lost(failure)?,
            }
            append = &self.statements.insist;
        }
        Err(races.into_error(self.shape.limits.rounds))
    }

    /// Returns the version of `stream`: the position of its last event, or 0.
    ///
    /// # Errors
    /// [`DataError::Rejected`], [`DataError::Lost`].
    pub async fn version(
        &self,
        mut executor: impl Executor,
        stream: &str,
    ) -> Result<u64, DataError> {
        let head = self.head(stream);
        let rows = executor.query(&self.statements.version, &[&head]).await;
        let rows = rows.map_err(crate::error::StatementError::into_error)?;
        rows.first().and_then(|row| number(row, 0)).ok_or(DataError::OtherRows)
    }

    /// Returns at most `most` events of `stream` after position `after`, in order.
    ///
    /// # Errors
    /// [`DataError::Rejected`], [`DataError::Lost`], [`DataError::Row`].
    pub async fn read<E: DeserializeOwned>(
        &self,
        mut executor: impl Executor,
        stream: &str,
        after: u64,
        most: u32,
    ) -> Result<Vec<StoredEvent<E>>, DataError> {
        // Past the end is past the end.
        let after = after.min(i64::MAX.unsigned_abs()).to_string();
        let page = [&self.head(stream)[..], &after, &most.to_string()];
        let rows = executor.query(&self.statements.read, &page).await;
        let recorded = |there: &Vec<Option<String>>| {
            let position = number(there, 0).ok_or(DataError::OtherRows)?;
            Ok(StoredEvent { position, event: row(text(there, 1))? })
        };
        rows.map_err(crate::error::StatementError::into_error)?.iter().map(recorded).collect()
    }

    fn head(&self, stream: &str) -> String {
        Value::from_iter([(self.stream.clone(), Value::from(stream))]).to_string()
    }

    /// Result of `look`: the version, and the existing part of each event.
    fn found(&self, rows: &Rows, events: usize) -> Result<(u64, Vec<Option<Found>>), DataError> {
        let mut found: Vec<Option<Found>> = (0..events).map(|_| None).collect();
        let mut current = None;
        for row in rows {
            current = number(row, 0);
            let index = number(row, 1).and_then(|number| usize::try_from(number).ok());
            let index = index.and_then(|number| number.checked_sub(1)).filter(|at| *at < events);
            let index = index.ok_or(DataError::OtherRows)?;
            if number(row, 2) != Some(1) {
                return Err(ItemError::DuplicateId.at(index));
            }
            let Some(position) = number(row, 3) else { continue };
            let other_stream = text(row, 4).map(String::from);
            let fields = &self.shape.columns[1..];
            let different = number(row, 5).and_then(|at| fields.get(usize::try_from(at).ok()?));
            let different = different.map(|field| field.name.clone());
            found[index] = Some(Found { position, other_stream, different });
        }
        Ok((current.ok_or(DataError::OtherRows)?, found))
    }
}

impl EventLogBuilder {
    /// Sets the column of the stream's name, of any type that text can be converted to.
    #[must_use]
    pub fn stream(mut self, column: impl Into<Column>) -> Self {
        self.stream = column.into();
        self
    }

    /// Sets the column of the position in the stream: `bigint`, or `integer` if that is enough.
    #[must_use]
    pub fn sequence(mut self, column: impl Into<Column>) -> Self {
        self.sequence = column.into();
        self
    }

    /// Sets the column of the event's id, and the scope in which ids are unique.
    #[must_use]
    pub fn id(mut self, column: impl Into<Column>, ids: IdScope) -> Self {
        (self.id, self.ids) = (column.into(), ids);
        self
    }

    /// Adds a column that is written, read, and compared if the id exists: the event's kind, its
    /// body. A value that differs between attempts, such as the time, should be a default of the
    /// table's column instead.
    #[must_use]
    pub fn field(mut self, column: impl Into<Column>) -> Self {
        self.fields.push(column.into());
        self
    }

    /// Sets the limits of a call.
    #[must_use]
    pub const fn limits(mut self, limits: BatchLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Builds the event log.
    ///
    /// # Errors
    /// [`LayoutError`], if names cannot be names, or one is there twice.
    pub fn build(self) -> Result<EventLog, LayoutError> {
        self.table.check()?;
        check_columns([&self.stream, &self.sequence, &self.id].into_iter().chain(&self.fields))?;
        self.limits.check()?;
        let (statements, checks) = Statements::new(&self);
        let Self { stream, id, fields, limits, .. } = self;
        let columns = [id].into_iter().chain(fields).collect();
        Ok(EventLog {
            shape: Shape { columns, key: 1, limits },
            stream: stream.name,
            statements,
            verified: Verified::new(checks),
        })
    }
}
