//! Options of a command: `--name value`, `--name=value`.

use std::str::FromStr;

use crate::sh::{Failure, Outcome};

/// Words that follow the command's name. Options are taken out; a word that is left over is an
/// error.
pub(crate) struct Args(Vec<String>);

impl Args {
    pub(crate) fn new(words: impl Iterator<Item = String>) -> Self {
        let split = words.flat_map(|word| match word.split_once('=') {
            Some((name, value)) if name.starts_with("--") => vec![name.into(), value.into()],
            _ => vec![word],
        });
        Self(split.collect())
    }

    pub(crate) fn wants_help(&self) -> bool {
        self.0.iter().any(|word| matches!(word.as_str(), "--help" | "-h"))
    }

    /// Returns the value of `--name`; the last one if the option is given more than once.
    pub(crate) fn value<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, Failure> {
        let mut last = None;
        while let Some(at) = self.0.iter().position(|word| word == name) {
            let Some(value) = self.0.get(at + 1) else {
                return Err(Failure::usage(format!("{name} needs a value: {name} VALUE")));
            };
            let parsed = value.parse();
            last = Some(
                parsed.map_err(|_| Failure::usage(format!("{name} does not take `{value}`")))?,
            );
            self.0.drain(at..=at + 1);
        }
        Ok(last)
    }

    /// Rejects a word that is left over; call it after every known option was taken.
    pub(crate) fn finish(&self) -> Outcome {
        match self.0.first() {
            None => Ok(()),
            Some(word) => Err(Failure::usage(format!("`{word}` is not an option of this command"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Args {
        Args::new(text.split_whitespace().map(String::from))
    }

    #[test]
    fn takes_both_spellings_and_the_last_one() {
        let mut args = args("--seeds 5 --seeds=7");
        assert_eq!(args.value::<u64>("--seeds").unwrap(), Some(7));
        assert!(args.finish().is_ok());
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        assert!(args("--sedes 5").finish().is_err());
        assert!(args("--seeds five").value::<u64>("--seeds").is_err());
        assert!(args("--seeds").value::<u64>("--seeds").is_err());
    }
}
