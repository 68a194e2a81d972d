//! `hapax keys find`.

use std::collections::HashSet;
use std::process::ExitCode;

use hapax_operators::{FindQuery, FoundRecords, RecordView};
use indicatif::ProgressBar;
use serde::Serialize;

use super::{Records, decisions, render};
use crate::exit::CliError;
use crate::output::{self, print};

/// Formats of the found records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    Table,
    Csv,
    /// One document, at the end of the search.
    Json,
}

/// Result of a search. Text and CSV are printed while it goes on.
#[derive(Debug, Default, Serialize)]
struct Search {
    /// The found records; in other formats than JSON they are not kept.
    keys: Vec<RecordView>,
    searched: u64,
    unreadable: u64,
    /// Whether the search ended at its limit.
    more: bool,
    #[serde(skip)]
    ids: HashSet<String>,
}

impl Format {
    pub(super) const fn of(csv: bool, json: bool) -> Self {
        match (csv, json) {
            (true, _) => Self::Csv,
            (false, true) => Self::Json,
            (false, false) => Self::Table,
        }
    }
}

/// Searches step by step, and prints at most `limit` records as they are found. It only reads: it can be
/// interrupted at any time.
pub(super) async fn run(
    records: &Records,
    mut query: FindQuery,
    limit: usize,
    format: Format,
) -> Result<ExitCode, CliError> {
    let (mut search, mut is_repeated) = (Search::default(), false);
    // It is drawn on a terminal only.
    let bar = ProgressBar::new_spinner();
    loop {
        let step = records.search(&query).await.inspect_err(|_| bar.finish_and_clear())?;
        query.from = step.next.clone();
        let found = search.add(step, limit);
        if !found.is_empty() {
            let is_first = search.ids.len() == found.len();
            let text = match format {
                Format::Table => render::rows(&found, is_first),
                Format::Csv => decisions::template(&found, is_first)?,
                Format::Json => String::new(),
            };
            bar.suspend(|| print(&text));
        }
        if format == Format::Json {
            search.keys.extend(found);
        }
        bar.set_message(format!(
            "{} records searched, {} found",
            search.searched,
            search.ids.len()
        ));
        bar.tick();
        if search.more || query.from.is_none() {
            if is_repeated || !search.ids.is_empty() {
                break;
            }
            // A record that was written during the search may have moved to a part that was read already.
            (search, is_repeated) = (Search::default(), true);
        }
    }
    bar.finish_and_clear();
    search.end(format)
}

impl Search {
    /// Adds a step. Returns the records that are to be printed: a step may find some again.
    fn add(&mut self, step: FoundRecords, limit: usize) -> Vec<RecordView> {
        self.searched += step.searched;
        self.unreadable += step.unreadable;
        let mut found = Vec::new();
        for view in step.keys {
            if self.ids.contains(&view.id) {
                continue;
            }
            if self.ids.len() == limit {
                self.more = true;
                break;
            }
            self.ids.insert(view.id.clone());
            found.push(view);
        }
        // The rest of the store need not be read to know that the limit is reached.
        self.more |= self.ids.len() == limit && step.next.is_some();
        found
    }

    fn end(&self, format: Format) -> Result<ExitCode, CliError> {
        let Self { searched, unreadable, more, ids, .. } = self;
        if ids.is_empty() {
            let mut text = format!(
                "expected a record of this key, found none among {searched} records in two searches: the request \
                 never arrived here, its record has expired, or it was written during both: check the key and the \
                 store, and repeat the search for a request in progress"
            );
            if *unreadable > 0 {
                text.push_str(&format!(
                    "; {unreadable} of them cannot be read: see `hapax doctor`, or they were written without a secret"
                ));
            }
            return Err(CliError::no(text).named("not-found"));
        }
        if format == Format::Json {
            print(&output::json(self)?);
            return Ok(ExitCode::SUCCESS);
        }
        if *more {
            eprintln!(
                "hapax: there may be more records: raise --limit, or search by --since, --path or --route"
            );
        }
        if *unreadable > 0 {
            eprintln!(
                "hapax: {unreadable} of {searched} records cannot be read: see `hapax doctor`, or they were written \
                 without a secret"
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}
