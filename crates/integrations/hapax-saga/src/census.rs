//! A walk that counts the unfinished sagas of a store.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use hapax_core::schedule::QueueStatus;

use crate::log::{Log, LogTime, StepLog};
use crate::operator::{SagaLookup, SagaOperator, SagaOperatorError, UnacceptedStart};
use crate::schedule::on_schedule;

const PAGE: NonZeroU32 = NonZeroU32::new(256).unwrap();

/// The unfinished sagas of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SagaCensus {
    /// The queues: one for each definition and version, with the number of its unfinished sagas, and
    /// the time for which the first has been due. If it is overdue for minutes, no process with the
    /// definition runs, or all are at their limit.
    pub queues: Vec<QueueStatus>,
    /// The counts, by definition, version and step.
    pub steps: Vec<SagaCensusStep>,
    /// Starts in a transaction that never run, since their key belongs to a saga with another input.
    pub rejected_starts: u64,
    /// Sagas whose log or record cannot be read.
    pub unreadable: u64,
    /// False if the walk ended at its limit, of sagas or of entries of other namespaces.
    pub is_complete: bool,
}

/// The unfinished sagas in one step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SagaCensusStep {
    /// The definition.
    pub definition: String,
    /// Its version.
    pub version: u32,
    /// The step that runs or waits; a pause is `sleep/NAME` or `signal/NAME`. `None` between steps.
    pub step: Option<String>,
    /// Sagas that run, or whose process died and that no other has continued yet.
    pub running: u64,
    /// Sagas that are parked.
    pub parked: u64,
    /// Sagas that are stuck.
    pub stuck: u64,
    /// Tries of the step in these sagas.
    pub tries: u64,
    /// Time since the first of these sagas began.
    pub oldest: Duration,
}

impl SagaOperator {
    /// Counts unfinished sagas, at most `limit`, and passes over at most as many entries of other
    /// namespaces. Reads each record, so it is no call for every scrape of metrics.
    ///
    /// # Errors
    /// [`SagaOperatorError::Store`].
    pub async fn census(&self, limit: u64) -> Result<SagaCensus, SagaOperatorError> {
        let mut queues = on_schedule(&self.engine, |schedule| schedule.queues()).await?;
        let is_rejected = |it: &QueueStatus| {
            UnacceptedStart::parse_queue(&it.queue).map(|(_, _, is_rejected)| is_rejected)
        };
        let rejected = queues.iter().filter(|it| is_rejected(it) == Some(true));
        let rejected_starts = rejected.map(|it| it.entries).sum();
        let of_sagas = queues.iter().filter(|it| it.queue.as_str().starts_with("saga:"));
        let total: u64 = of_sagas.map(|it| it.entries).sum();
        queues.retain(|it| is_rejected(it) == Some(false));
        let mut steps = BTreeMap::new();
        let (mut unreadable, mut counted, mut after, mut last) = (0, 0, None, None);
        let (mut found, mut others) = (0, 0);
        let is_complete = 'walk: loop {
            // The last one of this namespace may have many of others after it.
            if found >= total {
                break true;
            }
            if others >= limit {
                break false;
            }
            let page = self.entries(after, PAGE).await?;
            others += page.others.map_or(0, |(_, count)| u64::from(count));
            for (key, entry) in &page.entries {
                let is_saga = entry.as_ref().is_ok_and(|it| it.queue.as_str().starts_with("saga:"));
                found += u64::from(is_saga);
                if !is_saga || last == Some(key.operation) {
                    continue;
                }
                if counted >= limit {
                    break 'walk false;
                }
                (last, counted) = (Some(key.operation), counted + 1);
                match self.show(&key.operation).await {
                    Ok(SagaLookup::Unfinished(saga)) => {
                        if let Some(log) = &saga.log {
                            count(&mut steps, log, saga.now.into());
                        }
                    }
                    Ok(SagaLookup::Ended(_) | SagaLookup::NotFound) => {}
                    Err(error) if error.is_of_one_saga() => unreadable += 1,
                    Err(error) => return Err(error),
                }
            }
            after = page.next();
            if after.is_none() {
                break true;
            }
        };
        let steps = steps.into_values().collect();
        Ok(SagaCensus { queues, steps, rejected_starts, unreadable, is_complete })
    }
}

type Steps = BTreeMap<(String, u32, Option<String>), SagaCensusStep>;

fn count(steps: &mut Steps, log: &Log, now: LogTime) {
    let step = log.current_step();
    let name = step.map(|step| step.name.clone());
    let key = (log.definition.clone(), log.version, name.clone());
    let counts = steps.entry(key).or_insert_with(|| SagaCensusStep {
        definition: log.definition.clone(),
        version: log.version,
        step: name,
        running: 0,
        parked: 0,
        stuck: 0,
        tries: 0,
        oldest: Duration::ZERO,
    });
    match (&log.stuck, &log.parked) {
        (Some(_), _) => counts.stuck += 1,
        (None, Some(_)) => counts.parked += 1,
        (None, None) => counts.running += 1,
    }
    let tries = |step: &StepLog| u64::from(step.tries(log.direction()).begun);
    counts.tries += step.map_or(0, tries);
    counts.oldest = counts.oldest.max(now.since(log.started));
}
