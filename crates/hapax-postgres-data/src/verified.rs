//! Whether a layout is the table's.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{DataError, Failure};
use crate::executor::Executor;

/// Statements that the server is to plan, once, before the first call.
///
/// `ON CONFLICT DO NOTHING` without a target would insert a second row where the unique constraint
/// is missing; planned with a target, it is refused.
#[derive(Debug)]
pub(crate) struct Verified {
    statements: Vec<Planned>,
    done: AtomicBool,
}

/// A statement, and the constraint whose absence would have it refused.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) text: String,
    pub(crate) parameters: &'static [&'static str],
    pub(crate) table: String,
    pub(crate) columns: String,
}

impl Verified {
    pub(crate) const fn new(statements: Vec<Planned>) -> Self {
        Self { statements, done: AtomicBool::new(false) }
    }

    /// Asks, unless it was answered before.
    pub(crate) async fn once(&self, executor: &mut impl Executor) -> Result<(), DataError> {
        if self.done.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.now(executor).await
    }

    /// Asks. Nothing is executed, but in a transaction a refusal is the end of it.
    pub(crate) async fn now(&self, executor: &mut impl Executor) -> Result<(), DataError> {
        for Planned { text, parameters, table, columns } in &self.statements {
            let text = format!("EXPLAIN {text}");
            let planned = executor.query(&text, parameters).await;
            planned.map_err(|failure: Failure| {
                if failure.lacks_constraint() {
                    let (table, columns) = (table.clone(), columns.clone());
                    DataError::NoUniqueConstraint { table, columns }
                } else {
                    failure.into_error()
                }
            })?;
        }
        self.done.store(true, Ordering::Relaxed);
        Ok(())
    }
}
