//! Figures of the process itself.

use std::fmt::{self, Write};

use super::head;

/// Writes the build, and what Linux says of the process; elsewhere the build alone.
pub(super) fn write(out: &mut String) -> fmt::Result {
    let name = "hapax_build_info";
    head(out, name, "gauge", "The version of the program; always 1.")?;
    writeln!(out, "{name}{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"))?;
    if let Some(bytes) = resident() {
        let name = "process_resident_memory_bytes";
        head(out, name, "gauge", "Resident memory.")?;
        writeln!(out, "{name} {bytes}")?;
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        let name = "process_open_fds";
        head(out, name, "gauge", "Open file descriptors.")?;
        writeln!(out, "{name} {}", files.count())?;
    }
    Ok(())
}

fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}
