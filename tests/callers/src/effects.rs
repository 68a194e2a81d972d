//! The effects of a service, in a file that is synchronized before an effect is answered.
//!
//! | line | |
//! | --- | --- |
//! | `effect NAME KEY STATUS` | an effect; KEY is the operation id, or in Stripe's manner the key |
//! | `rejected KEY FENCE` | a fence, and all smaller ones, of which the service has said that nothing happened |
//! | `fault NAME FAULT` | a fault that has happened |
//! | `asked VERDICT` | an answer to a reconcile request |

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::fault::CallFault;
use crate::{ServeArgs, ServerKind};

/// An effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Effect {
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) status: u16,
    /// Its number among all effects, from 1.
    pub(crate) number: usize,
}

impl Effect {
    /// Returns the body of its answer, which no other effect has.
    pub(crate) fn body(&self) -> String {
        format!("{} had effect {}", self.name, self.number)
    }
}

/// Returns the lines of a file that a process may be writing: a reader may see a part of the last one.
pub(crate) fn complete_lines(text: &str) -> std::str::Lines<'_> {
    text.rfind('\n').map_or("", |end| &text[..end]).lines()
}

/// Lines of a file of effects.
#[derive(Clone, Default, Debug)]
pub(crate) struct EffectLines {
    pub(crate) effects: Vec<Effect>,
    /// The largest rejected fence of each key.
    pub(crate) rejected: HashMap<String, u64>,
    /// Names and faults.
    pub(crate) faults: HashSet<(String, String)>,
    /// Answers to reconcile requests.
    pub(crate) asked: HashMap<String, u64>,
}

impl EffectLines {
    /// Reads a file, which may not exist yet.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            read => read?,
        };
        let mut lines = Self::default();
        for line in complete_lines(&text) {
            lines.add(line).ok_or_else(|| io::Error::other(format!("an unknown line: {line}")))?;
        }
        Ok(lines)
    }

    fn add(&mut self, line: &str) -> Option<()> {
        let words: Vec<_> = line.split(' ').collect();
        match words[..] {
            ["effect", name, key, status] => {
                let (name, key, status) = (name.to_owned(), key.to_owned(), status.parse().ok()?);
                self.effects.push(Effect { name, key, status, number: self.effects.len() + 1 });
            }
            ["rejected", key, fence] => {
                let rejected = self.rejected.entry(key.to_owned()).or_default();
                *rejected = fence.parse::<u64>().ok()?.max(*rejected);
            }
            ["fault", name, fault] => {
                self.faults.insert((name.to_owned(), fault.to_owned()));
            }
            ["asked", verdict] => *self.asked.entry(verdict.to_owned()).or_default() += 1,
            _ => return None,
        }
        Some(())
    }
}

/// An open file of effects. Its methods block: each one writes.
#[derive(Debug)]
pub(crate) struct EffectFile {
    kind: ServerKind,
    seed: u64,
    opened: Mutex<(File, EffectLines)>,
}

impl EffectFile {
    pub(crate) fn open(args: &ServeArgs) -> io::Result<Self> {
        let lines = EffectLines::read(&args.effects)?;
        let file = OpenOptions::new().create(true).append(true).open(&args.effects)?;
        let opened = Mutex::new((file, lines));
        Ok(Self { kind: args.kind, seed: args.seed, opened })
    }

    fn opened(&self) -> MutexGuard<'_, (File, EffectLines)> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the fault of an operation, if it has not happened before.
    pub(crate) fn fault(&self, name: &str) -> io::Result<Option<CallFault>> {
        let Some(fault) = CallFault::of(self.kind, self.seed, name) else { return Ok(None) };
        let mut opened = self.opened();
        if opened.1.faults.contains(&(name.to_owned(), fault.to_string())) {
            return Ok(None);
        }
        write(&mut opened, &format!("fault {name} {fault}"), false)?;
        Ok(Some(fault))
    }

    /// Returns the number of effects.
    pub(crate) fn count(&self) -> usize {
        self.opened().1.effects.len()
    }

    /// Returns the last effect of a key.
    pub(crate) fn find(&self, key: &str) -> Option<Effect> {
        self.opened().1.effects.iter().rev().find(|effect| effect.key == key).cloned()
    }

    /// Adds an effect; `None` if the fence is rejected.
    pub(crate) fn add(
        &self,
        name: &str,
        key: &str,
        fence: u64,
        status: u16,
    ) -> io::Result<Option<Effect>> {
        let mut opened = self.opened();
        if opened.1.rejected.get(key).is_some_and(|rejected| fence <= *rejected) {
            return Ok(None);
        }
        write(&mut opened, &format!("effect {name} {key} {status}"), true)?;
        Ok(opened.1.effects.last().cloned())
    }

    /// Returns the effect of a key; without one, rejects the fence from now on.
    pub(crate) fn reconcile(&self, key: &str, fence: u64) -> io::Result<Option<Effect>> {
        let mut opened = self.opened();
        let found = opened.1.effects.iter().find(|effect| effect.key == key).cloned();
        if found.is_none() {
            write(&mut opened, &format!("rejected {key} {fence}"), true)?;
        }
        let verdict = if found.is_some() { "happened" } else { "did-not-happen" };
        write(&mut opened, &format!("asked {verdict}"), false)?;
        Ok(found)
    }
}

fn write(opened: &mut (File, EffectLines), line: &str, durable: bool) -> io::Result<()> {
    opened.0.write_all(format!("{line}\n").as_bytes())?;
    if durable {
        opened.0.sync_data()?;
    }
    opened.1.add(line).ok_or_else(|| io::Error::other("a name or a key has a space"))
}
