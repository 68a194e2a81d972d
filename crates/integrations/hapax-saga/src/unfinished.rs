//! Unfinished sagas with their inputs, which are in the entries of the schedule.

use std::num::NonZeroU32;

use bytes::Bytes;
use hapax_core::schedule::EntryKey;
use hapax_core::{Key, OperationId, OperationRequest, Outcome, Scope, value};
use serde::de::DeserializeOwned;

use crate::definition::Saga;
use crate::log::Failure;
use crate::note::{FinalEnd, FinalOutcome, Note};
use crate::operator::{SagaLookup, SagaOperator, SagaOperatorError, SagaView};
use crate::sagas::Sagas;

/// A page of the unfinished sagas of a definition.
#[derive(Debug)]
pub struct UnfinishedPage<I> {
    /// The sagas, each with its input.
    pub sagas: Vec<(SagaView, I)>,
    /// Sagas of which a part cannot be read. One whose entry cannot be read, and whose record has no log, may
    /// be of another definition.
    pub unreadable: Vec<UnreadableSaga<I>>,
    /// The place where the next page begins; `None` at the end.
    pub next: Option<EntryKey>,
}

/// An unfinished saga that cannot be read: another version or another secret wrote it, or it is damaged.
#[derive(Debug)]
pub struct UnreadableSaga<I> {
    /// Its operation id.
    pub id: OperationId,
    /// The description of its start for operators, JSON with its `key`, if it can be read.
    pub description: Option<Bytes>,
    /// Its input, if it can be read.
    pub input: Option<I>,
    /// The reason, and what to do.
    pub error: SagaOperatorError,
}

impl<I, O: DeserializeOwned, E: DeserializeOwned> Saga<I, O, E> {
    /// Reads the outcome of a record: the output of a saga that was done, or the error of one that was
    /// undone; `None` if it is none of this definition's types, or of a saga that was cancelled.
    #[must_use]
    pub fn output(&self, outcome: &Outcome) -> Option<Result<O, E>> {
        match FinalOutcome::decode(outcome)?.end {
            FinalEnd::Done(value) => value::read(&value.0).ok().map(Ok),
            FinalEnd::Undone(Failure::Error(error)) => value::read(&error.0).ok().map(Err),
            FinalEnd::Undone(Failure::Cancelled { .. }) => None,
        }
    }
}

impl Sagas {
    /// Returns the operation id of a saga that is started in this scope and under this key.
    #[must_use]
    pub fn operation_id<I, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        scope: &Scope,
        key: &Key,
    ) -> OperationId {
        self.id(saga, scope, key)
    }

    /// Returns a page of the unfinished sagas of a definition in order of operation id, after `after`,
    /// each with its input. Those that cannot be read are listed apart.
    ///
    /// # Errors
    /// [`SagaOperatorError`].
    pub async fn unfinished<I: DeserializeOwned, O, E>(
        &self,
        saga: &Saga<I, O, E>,
        after: Option<EntryKey>,
        limit: NonZeroU32,
    ) -> Result<UnfinishedPage<I>, SagaOperatorError> {
        let operator = SagaOperator::new(self.node.engine.clone());
        let page = operator.entries(after, limit).await?;
        let (mut sagas, mut unreadable) = (Vec::new(), Vec::new());
        let (next, mut found) = (page.next(), None);
        for (key, entry) in page.entries {
            let is_other = entry.as_ref().is_ok_and(|it| it.queue != saga.definition.queue);
            if is_other || found == Some(key.operation) {
                continue;
            }
            let (description, input) = match entry {
                Ok(entry) => read_note::<I>(&entry.note),
                Err(error) => (None, Err(error.into())),
            };
            match operator.show(&key.operation).await {
                // Another entry of a saga is that of an earlier one under its key, or of a late start, and
                // may precede its own, which follows. The log names the definition of an entry that cannot
                // be read.
                Ok(SagaLookup::Unfinished(view))
                    if view.log.as_ref().is_some_and(|log| {
                        log.entry != *key.id.as_bytes() || log.definition != saga.definition.name
                    }) =>
                {
                    continue;
                }
                Ok(SagaLookup::Unfinished(view)) => match input {
                    Ok(input) => sagas.push((*view, input)),
                    Err(error) => {
                        let (id, description, input) = (view.id, view.description, None);
                        unreadable.push(UnreadableSaga { id, description, input, error });
                    }
                },
                Ok(_) => continue,
                // One that is damaged must not hide the others.
                Err(error) if error.is_of_one_saga() => {
                    let (id, input) = (key.operation, input.ok());
                    unreadable.push(UnreadableSaga { id, description, input, error });
                }
                Err(error) => return Err(error),
            }
            found = Some(key.operation);
        }
        Ok(UnfinishedPage { sagas, unreadable, next })
    }
}

/// Reads the note of an entry: the description of the start, if the entry has it, and the input.
fn read_note<I: DeserializeOwned>(note: &[u8]) -> (Option<Bytes>, Result<I, SagaOperatorError>) {
    let unreadable = |_| SagaOperatorError::Unreadable;
    match Note::decode(note) {
        Ok(note) => (note.description(), value::read(&note.input.0).map_err(unreadable)),
        Err(error) => (None, Err(unreadable(error))),
    }
}
