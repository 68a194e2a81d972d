//! Sagas as text.

use std::fmt::{Result, Write};

use hapax_operators::{
    DefinitionList, DefinitionView, SagaAction, SagaDecisionView, SagaDetails, SagaList,
    SagaStepView, SagaSummary, StuckView, TriesView,
};

use crate::output::line;

pub(super) fn list(listed: &SagaList) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_list(&mut text, listed);
    text
}

fn write_list(out: &mut String, listed: &SagaList) -> Result {
    if listed.sagas.is_empty() && listed.damaged.is_empty() {
        out.push_str("no unfinished sagas\n");
    } else {
        writeln!(out, "{:<8} {:<24}  {:<24}  ID", "STATE", "STARTED", "DUE")?;
    }
    for saga in &listed.sagas {
        let SagaSummary { id, state, started, due, .. } = saga;
        let [started, due] = [started, due].map(|time| time.as_deref().unwrap_or("-"));
        writeln!(out, "{:<8} {started:<24}  {due:<24}  {id}", state.as_str())?;
        writeln!(out, "         {}", situation(saga))?;
    }
    for (id, reason) in &listed.damaged {
        writeln!(out, "{:<8} {}: {id}", "damaged", line(reason))?;
    }
    if let Some(next) = &listed.next {
        writeln!(out, "there are more: --after {next}")?;
    }
    Ok(())
}

/// Returns the definition of a saga and its situation in one line.
fn situation(saga: &SagaSummary) -> String {
    let mut words = vec![definition(saga)];
    words.extend(saga.key.as_deref().map(|key| format!("key {}", line(key))));
    if saga.compensating {
        words.push("being undone".to_owned());
    }
    if let Some(stuck) = &saga.stuck {
        words.push(stuck_line(stuck));
    }
    if let Some(signal) = &saga.signal {
        words.push(format!("waits for the signal {}", line(signal)));
    }
    if saga.overdue {
        words.push("no process has run it since it was due".to_owned());
    }
    words.join("  ")
}

fn definition(saga: &SagaSummary) -> String {
    match (&saga.definition, saga.version) {
        (Some(name), Some(version)) => format!("{name} version {version}"),
        _ => "-".to_owned(),
    }
}

fn stuck_line(stuck: &StuckView) -> String {
    let StuckView { reason, step, nth, direction, detail, since, may_execute_until } = stuck;
    let undo = if direction == "undo" { "the undo of " } else { "" };
    let step = step.as_ref().map(|step| format!(" in {undo}{}", numbered(step, *nth)));
    let may = may_execute_until.as_ref().map(|until| format!("; may still execute until {until}"));
    let (step, may) = (step.unwrap_or_default(), may.unwrap_or_default());
    format!("{reason}{step} since {since}: {}{may}", line(detail))
}

/// Returns the name of a step, with its number if there is an earlier one of that name.
fn numbered(name: &str, nth: Option<u32>) -> String {
    match nth {
        None | Some(0) => line(name),
        Some(nth) => format!("{}.{nth}", line(name)),
    }
}

pub(super) fn show(saga: &SagaDetails) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_show(&mut text, saga);
    text
}

fn write_show(out: &mut String, saga: &SagaDetails) -> Result {
    let SagaDetails { summary, write_id, now, lease_until, end, failure, steps, decisions } = saga;
    let unfinished = write_id.is_some();
    let attempt = unfinished.then(|| summary.attempt.to_string());
    let overdue = summary.overdue.then(|| "yes: no process has run it since it was due".to_owned());
    for (name, value) in [
        ("id", Some(summary.id.clone())),
        ("key", summary.key.as_deref().map(line)),
        ("definition", unfinished.then(|| definition(summary))),
        ("state", Some(summary.state.to_string())),
        ("end", end.clone()),
        ("stuck", summary.stuck.as_ref().map(stuck_line)),
        ("overdue", overdue),
        (if unfinished { "being undone" } else { "undone for" }, failure.as_deref().map(line)),
        ("signal", summary.signal.as_deref().map(line)),
        ("started", summary.started.clone()),
        ("continues", summary.parked_until.clone()),
        ("due", summary.due.clone()),
        ("attempt", attempt),
        ("lease until", lease_until.clone()),
        ("now", now.clone()),
        ("write id", write_id.clone()),
    ] {
        if let Some(value) = value {
            writeln!(out, "{name:<12} {value}")?;
        }
    }
    for step in steps {
        write_step(out, step)?;
    }
    for SagaDecisionView { at, who, action, why } in decisions {
        let [who, why] = [who, why].map(|text| line(text));
        writeln!(out, "{:<12} {action}, decided by {who} at {at}: {why}", "decision")?;
    }
    Ok(())
}

fn write_step(out: &mut String, step: &SagaStepView) -> Result {
    let name = numbered(&step.name, Some(step.nth));
    let outcome = step.outcome.as_str();
    writeln!(out, "{:<12} {name}: {outcome}, {}", "step", tries(&step.forward))?;
    write_key(out, &step.forward)?;
    if let Some(result) = &step.result {
        writeln!(out, "  result     {}", line(&result.to_string()))?;
    } else if let Some(bytes) = step.result_bytes {
        writeln!(out, "  result     {bytes} bytes")?;
    }
    match (&step.undo, &step.undone) {
        (Some(undo), end) => {
            let end = end.as_deref().unwrap_or("not ended");
            writeln!(out, "  undo       {end}, {}", tries(undo))?;
            write_key(out, undo)
        }
        (None, Some(end)) => writeln!(out, "  undo       {end}"),
        (None, None) => Ok(()),
    }
}

/// Writes the key that the called system has seen.
fn write_key(out: &mut String, view: &TriesView) -> Result {
    match &view.key {
        Some(key) if view.tries > 0 => writeln!(out, "  key        {}", line(key)),
        _ => Ok(()),
    }
}

fn tries(view: &TriesView) -> String {
    let TriesView { tries, open, last, retry_at, error, .. } = view;
    let mut text = match tries {
        1 => "1 try".to_owned(),
        tries => format!("{tries} tries"),
    };
    if let Some(last) = last {
        text.push_str(&format!(", the last until {last}"));
    }
    if *open {
        text.push_str(", the last one has not ended");
    }
    if let Some(at) = retry_at {
        text.push_str(&format!(", the next at {at}")); // of a pause: `, until {at}`
    }
    if let Some(error) = error {
        text.push_str(&format!("; last error: {}", line(error)));
    }
    text
}

pub(super) fn definitions(found: &DefinitionList) -> String {
    if found.definitions.is_empty() {
        return "no unfinished sagas\n".to_owned();
    }
    let mut text = format!("{:>10}  DEFINITION\n", "UNFINISHED");
    for DefinitionView { definition, version, unfinished, due_for_s, overdue } in &found.definitions
    {
        let overdue = match overdue {
            true => format!("  overdue for {due_for_s} s: no process runs it"),
            false => String::new(),
        };
        text.push_str(&format!("{unfinished:>10}  {definition} version {version}{overdue}\n"));
    }
    text
}

/// Returns the effect of a decision.
pub(super) fn decided(action: &SagaAction) -> String {
    let effect = match action {
        SagaAction::Retry => {
            "retry: the stuck step, undo or flow has new tries; see `hapax saga show`"
        }
        SagaAction::Happened(_) => "resolved: the step happened, and the saga continues",
        SagaAction::DidNotHappen { .. } => "resolved: the step did not happen, and is tried again",
        SagaAction::Skip => {
            "skipped: the effect of the step stays, and the step before it is undone"
        }
        SagaAction::Abort => {
            "aborted: the steps that happened are undone; without one the saga has ended"
        }
    };
    format!("{effect}\n")
}
