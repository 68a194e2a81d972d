//! The user and the machine that make a decision.

/// Returns the user's name and number; under `sudo`, the name of the user who called it.
pub(crate) fn user() -> String {
    let named = ["SUDO_USER", "USER", "LOGNAME"]
        .into_iter()
        .find_map(|name| std::env::var(name).ok().filter(|name| !name.is_empty()));
    let number = rustix::process::getuid().as_raw();
    match named {
        Some(name) => format!("{name} (uid {number})"),
        None => format!("uid {number}"),
    }
}

/// Returns the name of the machine.
pub(super) fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the name of this process, where a gateway would give its own.
pub(crate) fn process() -> String {
    format!("hapax, process {}", std::process::id())
}
