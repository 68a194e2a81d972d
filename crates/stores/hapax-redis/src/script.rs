//! The scripts, and the commands that call them.

use redis::{Cmd, Script};

/// A script and its hash, by which servers find it.
#[derive(Debug)]
pub(crate) struct Lua {
    text: &'static str,
    hash: String,
}

impl Lua {
    /// Returns the script that compares and swaps.
    pub(crate) fn swap() -> Self {
        Self::new(include_str!("swap.lua"))
    }

    /// Returns the script that loads.
    pub(crate) fn load() -> Self {
        Self::new(include_str!("load.lua"))
    }

    /// Returns the script that checks the secret that names keys.
    pub(crate) fn secret() -> Self {
        Self::new(include_str!("secret.lua"))
    }

    /// Returns the script that reads, creates or confirms the identity of the store.
    pub(crate) fn identity() -> Self {
        Self::new(include_str!("identity.lua"))
    }

    pub(crate) fn new(text: &'static str) -> Self {
        Self { text, hash: Script::new(text).get_hash().to_owned() }
    }

    /// Returns a call by hash: the first attempt, and nearly always enough.
    pub(crate) fn by_name(&self, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        command("EVALSHA", &self.hash, keys, arguments)
    }

    /// Returns a call by text, for a server that does not have the script; it has it afterwards.
    pub(crate) fn by_text(&self, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        command("EVAL", self.text, keys, arguments)
    }
}

fn command(name: &str, script: &str, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
    let bytes: usize = arguments.iter().map(|argument| argument.len()).sum();
    let words = 3 + keys.len() + arguments.len();
    let mut command = Cmd::with_capacity(words, script.len() + bytes + 128 * keys.len());
    command.arg(name).arg(script).arg(keys.len());
    for key in keys {
        command.arg(*key);
    }
    for argument in arguments {
        command.arg(*argument);
    }
    command
}
