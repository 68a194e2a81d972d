//! The check at the end of a run: effects, answers and faults.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use crate::effects::{Effect, EffectLines, complete_lines};
use crate::fault::CallFault;
use crate::report::CallsReport;
use crate::run::CLIENTS;
use crate::{CallsOptions, CallsStore, ServerKind, name};

/// Violations of one kind that are listed.
const LISTED: usize = 5;

/// Ends of the sends of one client in one run.
#[derive(Clone, Default, Debug)]
pub(crate) struct Answers {
    /// Status and body of each answer.
    pub(crate) answered: BTreeMap<String, BTreeSet<String>>,
    /// The last reason of each operation that ended without an answer.
    pub(crate) open: BTreeMap<String, String>,
    /// Operations that the last client left in the journal; `None` if it did not get to its end.
    pub(crate) pending: Option<u64>,
    pub(crate) lines: u64,
}

impl Answers {
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            // The client was killed before it opened its file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let mut answers = Self::default();
        for line in complete_lines(&text) {
            answers.lines += 1;
            let words: Vec<_> = line.splitn(3, ' ').collect();
            match words[..] {
                ["answered", name, answer] => {
                    let of = answers.answered.entry(name.to_owned()).or_default();
                    of.insert(answer.to_owned());
                }
                ["open", name, reason] => {
                    answers.open.insert(name.to_owned(), reason.to_owned());
                }
                ["pending", count] => answers.pending = count.parse().ok(),
                _ => return Err(io::Error::other(format!("an unknown line: {line}"))),
            }
        }
        Ok(answers)
    }
}

/// Adds counts and violations to the report. `runs` has the answers of each client in each run.
pub(crate) fn check(
    options: &CallsOptions,
    lines: &EffectLines,
    runs: &[Vec<Answers>; 2],
    report: &mut CallsReport,
) {
    let mut effects = BTreeMap::<&str, Vec<&Effect>>::new();
    for effect in &lines.effects {
        effects.entry(&effect.name).or_default().push(effect);
    }
    let names: Vec<_> = (0..options.operations).map(name).collect();
    let mut found = Vec::new();
    let list = |report: &mut CallsReport, found: &mut Vec<String>| {
        report.violations.extend(found.drain(..).take(LISTED));
    };
    for name in &names {
        match effects.get(name.as_str()).map_or(0, Vec::len) {
            1 => {}
            0 => found.push(format!("{name} has no effect")),
            count => found.push(format!("{name} has {count} effects")),
        }
    }
    list(report, &mut found);

    let mut left = Vec::new();
    for (client, answers) in runs[1].iter().enumerate() {
        let mine = |number: &u64| number % share(options) == client as u64 % share(options);
        for number in (0..options.operations).filter(mine) {
            let name = name(number);
            if !answers.answered.contains_key(&name) {
                let reason = answers.open.get(&name).map_or("it was not sent", String::as_str);
                found.push(format!("{name} is not known to client {client}: {reason}"));
            }
        }
        if answers.pending != Some(0) {
            left.push(format!("client {client} left {:?} operations pending", answers.pending));
        }
    }
    list(report, &mut found);
    list(report, &mut left);

    let mut answers = BTreeMap::<&str, BTreeSet<&str>>::new();
    for (name, of) in runs.iter().flatten().flat_map(|client| &client.answered) {
        answers.entry(name).or_default().extend(of.iter().map(String::as_str));
    }
    for (name, of) in &answers {
        if of.len() > 1 {
            found.push(format!("{name} has {} answers: {of:?}", of.len()));
        }
        let effect = effects.get(name).and_then(|of| of.first());
        let expected = effect.map(|effect| format!("{} {}", effect.status, effect.body()));
        if expected.is_none_or(|expected| !of.contains(expected.as_str())) {
            found.push(format!("{name} has an answer that is not of its effect: {of:?}"));
        }
    }
    list(report, &mut found);

    report.effects = lines.effects.len() as u64;
    report.sends = runs.iter().flatten().map(|client| client.lines).sum();
    let first: BTreeSet<_> = runs[0].iter().flat_map(|client| client.answered.keys()).collect();
    report.known_at_first = first.len() as u64;
    let asked = |verdict| lines.asked.get(verdict).copied().unwrap_or_default();
    report.asked = (asked("happened"), asked("did-not-happen"));
    for (_, fault) in &lines.faults {
        *report.faults.entry(fault.clone()).or_default() += 1;
    }
    for fault in CallFault::all(options.kind) {
        if !report.faults.contains_key(&fault.to_string()) {
            report.violations.push(format!("no {fault} happened"));
        }
    }
    let mut want = vec![
        ("kill of a client", report.client_kills),
        ("kill of the service", report.service_kills),
        ("operation for the second run", options.operations.saturating_sub(report.known_at_first)),
    ];
    if options.kind == ServerKind::Hapax {
        want.push(("kill of the gateway", report.gateway_kills));
        want.push(("effect that was reconciled", report.asked.0));
        want.push(("execution without an effect that was reconciled", report.asked.1));
    }
    for (what, count) in want {
        if count == 0 {
            report.violations.push(format!("the run had no {what}"));
        }
    }
}

/// Returns the number of clients among which the operations are divided.
pub(crate) fn share(options: &CallsOptions) -> u64 {
    match options.journal {
        CallsStore::File => CLIENTS,
        CallsStore::Postgres => 1,
    }
}
