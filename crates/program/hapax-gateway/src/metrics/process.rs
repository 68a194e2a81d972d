//! Metrics of the process.

use std::fmt::{self, Write};

use hapax_core::Timestamp;

use super::head;

/// Writes the build, the start of the gateway and, on Linux, the figures of the process.
pub(super) fn write(out: &mut String, started: Timestamp) -> fmt::Result {
    let name = "hapax_build_info";
    head(out, name, "gauge", "The version of the program; always 1.")?;
    writeln!(out, "{name}{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"))?;
    let name = "process_start_time_seconds";
    head(out, name, "gauge", "The start of the gateway, in seconds since 1970.")?;
    writeln!(out, "{name} {}", started.as_micros() as f64 / 1e6)?;
    if let Some(seconds) = cpu_seconds() {
        let name = "process_cpu_seconds_total";
        head(out, name, "counter", "Processor time, of user and system.")?;
        writeln!(out, "{name} {seconds}")?;
    }
    let files = std::fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as u64);
    for (name, help, value) in [
        ("process_resident_memory_bytes", "Resident memory.", status("VmRSS:")),
        ("process_virtual_memory_bytes", "Virtual memory.", status("VmSize:")),
        ("process_open_fds", "Open file descriptors.", files),
        ("process_max_fds", "The most that it may open.", most_files()),
    ] {
        if let Some(value) = value {
            head(out, name, "gauge", help)?;
            writeln!(out, "{name} {value}")?;
        }
    }
    Ok(())
}

/// Returns a size of `/proc/self/status`, in bytes.
fn status(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024)
}

fn most_files() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the processor time, which Linux gives in hundredths of a second (`USER_HZ`).
fn cpu_seconds() -> Option<f64> {
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in parentheses, may contain spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    let (user, system) = (fields.next()?.ok()?, fields.next()?.ok()?);
    Some((user + system) as f64 / TICKS)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_the_process_are_written() {
        let mut text = String::new();
        write(&mut text, Timestamp::from_micros(1_500_000)).unwrap();
        assert!(text.contains("process_start_time_seconds 1.5\n"), "{text}");
        for name in [
            "hapax_build_info{version=",
            "process_cpu_seconds_total ",
            "process_resident_memory_bytes ",
            "process_virtual_memory_bytes ",
            "process_open_fds ",
            "process_max_fds ",
        ] {
            assert!(text.lines().any(|line| line.starts_with(name)), "{name}: {text}");
        }
    }
}
