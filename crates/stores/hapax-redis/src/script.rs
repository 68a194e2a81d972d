//! The scripts, and how one is asked for.

use redis::{Cmd, Script};

/// A script and its name on servers that know it.
#[derive(Debug)]
pub(crate) struct Lua {
    text: &'static str,
    hash: String,
}

impl Lua {
    /// Compares and swaps.
    pub(crate) fn swap() -> Self {
        Self::new(include_str!("swap.lua"))
    }

    /// Loads.
    pub(crate) fn load() -> Self {
        Self::new(include_str!("load.lua"))
    }

    /// Agrees on the secret that names keys.
    pub(crate) fn secret() -> Self {
        Self::new(include_str!("secret.lua"))
    }

    /// Tells, leaves or confirms the identity of the store.
    pub(crate) fn identity() -> Self {
        Self::new(include_str!("identity.lua"))
    }

    fn new(text: &'static str) -> Self {
        Self { text, hash: Script::new(text).get_hash().to_owned() }
    }

    /// By its name: what is sent first, and nearly always enough.
    pub(crate) fn by_name(&self, keys: &[&str], arguments: &[&[u8]]) -> Cmd {
        command("EVALSHA", &self.hash, keys, arguments)
    }

    /// By its text, for a server that does not know the name, which then does.
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
