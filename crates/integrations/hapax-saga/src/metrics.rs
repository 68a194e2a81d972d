//! Metrics, in the text format of Prometheus.
//!
//! Labels are names and versions of definitions, names of steps, and words of a fixed set. Keys, scopes
//! and operation ids are never labels.

use std::fmt::{self, Write as _};

use crate::census::{SagaCensus, SagaCensusStep};
use crate::operator::UnacceptedStart;
use crate::stats::{DefinitionStats, SagaStats, StepStats};

/// A sample: its labels, and its value.
type Sample = (String, u64);

impl SagaStats {
    /// Returns the counters in the text format of Prometheus, for the metrics of the process.
    #[must_use]
    pub fn prometheus(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let each = |of: fn(&DefinitionStats) -> u64| -> Vec<Sample> {
            self.definitions.iter().map(|it| (labels(it.name, it.version), of(it))).collect()
        };
        family(
            out,
            "hapax_saga_running",
            "Sagas that run in this process.",
            each(|it| it.running),
        )?;
        family(out, "hapax_saga_runs_total", "Runs that have begun.", each(|it| it.runs))?;
        let help = "Runs that ended because the saga was parked.";
        family(out, "hapax_saga_parked_total", help, each(|it| it.parked))?;
        let help = "Sagas that became stuck in this process.";
        family(out, "hapax_saga_stuck_total", help, each(|it| it.stuck))?;
        let help = "Runs that ended because their lease was lost, or may have been.";
        family(out, "hapax_saga_lost_total", help, each(|it| it.lost))?;
        let help = "Starts in a transaction that were rejected, since their key had another input.";
        family(out, "hapax_saga_rejected_starts_total", help, each(|it| it.rejected))?;
        let help = "Times that a flow waited for a minute for something that is no step.";
        family(out, "hapax_saga_flow_waits_total", help, each(|it| it.flow_waits))?;
        let ends = self.definitions.iter().flat_map(|it| {
            let labels = labels(it.name, it.version);
            [("done", it.done), ("undone", it.undone)]
                .map(|(end, count)| (format!("{labels},end=\"{end}\""), count))
        });
        family(out, "hapax_saga_ended_total", "Sagas that ended in this process.", ends.collect())?;
        self.write_steps(out)
    }

    fn write_steps(&self, out: &mut String) -> fmt::Result {
        let each = |more: &'static str, of: fn(&StepStats) -> u64| {
            self.definitions.iter().flat_map(move |definition| {
                let labels = labels(definition.name, definition.version);
                let sample = move |step: &StepStats| {
                    (format!("{labels},step=\"{}\"{more}", escaped(step.name)), of(step))
                };
                definition.steps.iter().map(sample)
            })
        };
        let help = "Calls of a step or its undo that are in progress.";
        family(out, "hapax_saga_step_running", help, each("", |it| it.running).collect())?;
        let forward = each(",direction=\"forward\"", |it| it.tries);
        let tries = forward.chain(each(",direction=\"undo\"", |it| it.undo_tries));
        family(out, "hapax_saga_step_tries_total", "Tries of a step.", tries.collect())?;
        let ends = each(",end=\"happened\"", |it| it.happened)
            .chain(each(",end=\"rejected\"", |it| it.rejected))
            .chain(each(",end=\"not-sent\"", |it| it.not_sent))
            .chain(each(",end=\"unknown\"", |it| it.unknown));
        family(out, "hapax_saga_step_ends_total", "Tries that ended.", ends.collect())?;
        let failures = each("", |it| it.undo_failures).collect();
        family(
            out,
            "hapax_saga_step_undo_failures_total",
            "Tries of an undo that failed.",
            failures,
        )?;
        let help = "Times that a saga became stuck in a step.";
        family(out, "hapax_saga_step_stuck_total", help, each("", |it| it.stuck).collect())
    }
}

impl SagaCensus {
    /// Returns the counts in the text format of Prometheus. They are those of the store: scrape them at one
    /// process.
    #[must_use]
    pub fn prometheus(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let queues = || {
            self.queues.iter().filter_map(|queue| {
                let (name, version, _) = UnacceptedStart::parse_queue(&queue.queue)?;
                Some((labels(name, version), queue))
            })
        };
        let unfinished = queues().map(|(labels, queue)| (labels, queue.entries));
        family(out, "hapax_sagas_unfinished", "Unfinished sagas.", unfinished.collect())?;
        let help = "Time for which the first unfinished saga has been due; 0 if none is.";
        let due = queues().map(|(labels, queue)| (labels, queue.overdue.as_secs()));
        family(out, "hapax_sagas_due_seconds", help, due.collect())?;
        let each = |of: fn(&SagaCensusStep) -> u64| -> Vec<Sample> {
            self.steps.iter().map(|step| (step_labels(step), of(step))).collect()
        };
        let states = self.steps.iter().flat_map(|step| {
            [("running", step.running), ("parked", step.parked), ("stuck", step.stuck)]
                .map(|(state, count)| (format!("{},state=\"{state}\"", step_labels(step)), count))
        });
        let help = "Unfinished sagas by state and step; the step is empty between steps.";
        family(out, "hapax_sagas", help, states.collect())?;
        let help = "Tries of the step in unfinished sagas.";
        family(out, "hapax_sagas_tries", help, each(|step| step.tries))?;
        let help = "Time since the first of these sagas began.";
        family(out, "hapax_sagas_oldest_seconds", help, each(|step| step.oldest.as_secs()))?;
        for (name, help, value) in [
            (
                "hapax_sagas_rejected_starts",
                "Starts in a transaction that never run, since their key had another input.",
                self.rejected_starts,
            ),
            ("hapax_sagas_unreadable", "Sagas that cannot be read.", self.unreadable),
            (
                "hapax_sagas_complete",
                "Whether all sagas were counted; 0 if the count ended at its limit.",
                u64::from(self.is_complete),
            ),
        ] {
            family(out, name, help, vec![(String::new(), value)])?;
        }
        Ok(())
    }
}

fn step_labels(step: &SagaCensusStep) -> String {
    let labels = labels(&step.definition, step.version);
    format!("{labels},step=\"{}\"", escaped(step.step.as_deref().unwrap_or_default()))
}

fn labels(definition: &str, version: u32) -> String {
    format!("definition=\"{}\",version=\"{version}\"", escaped(definition))
}

/// Returns the value of a label: a log that another program wrote may contain any name.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn family(out: &mut String, name: &str, help: &str, samples: Vec<Sample>) -> fmt::Result {
    let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
    writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}")?;
    for (labels, value) in samples {
        match labels.is_empty() {
            true => writeln!(out, "{name} {value}")?,
            false => writeln!(out, "{name}{{{labels}}} {value}")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hapax_core::schedule::{QueueName, QueueStatus};

    use super::*;

    #[test]
    fn counters_of_a_process_are_rendered_by_definition_and_step() {
        let step = StepStats {
            name: "charge",
            running: 1,
            tries: 2,
            happened: 3,
            rejected: 4,
            not_sent: 5,
            unknown: 6,
            undo_tries: 7,
            undo_failures: 8,
            stuck: 9,
        };
        let definition = DefinitionStats {
            name: "place-order",
            version: 2,
            running: 1,
            runs: 2,
            parked: 3,
            stuck: 4,
            lost: 5,
            rejected: 6,
            flow_waits: 7,
            done: 8,
            undone: 9,
            steps: vec![step],
        };
        let stats = SagaStats { definitions: vec![definition] };
        assert_eq!(stats.prometheus(), include_str!("metrics/process.txt"));
    }

    #[test]
    fn sagas_of_a_store_are_rendered_by_step_and_state() {
        let step = |definition: &str, step: Option<&str>| SagaCensusStep {
            definition: definition.to_owned(),
            version: 2,
            step: step.map(str::to_owned),
            running: 1,
            parked: 2,
            stuck: 3,
            tries: 4,
            oldest: Duration::from_millis(5_900),
        };
        let queue = QueueStatus {
            queue: QueueName::new("saga:place-order:2").unwrap(),
            entries: 6,
            overdue: Duration::from_secs(601),
        };
        let census = SagaCensus {
            queues: vec![queue],
            steps: vec![step("place-order", Some("signal/go")), step("a\"b\\c\nd", None)],
            rejected_starts: 1,
            unreadable: 2,
            is_complete: true,
        };
        assert_eq!(census.prometheus(), include_str!("metrics/store.txt"));
    }
}
