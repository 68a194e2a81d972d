//! Wall clock of one server, which a test sets.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = include_str!("clock.c");

/// Sets the clock in `file` to `seconds` after the real one.
pub(super) fn set(file: &Path, seconds: i64) {
    // A single write of fixed length over the old text, so that a concurrent reader gets a whole
    // number.
    let mut file = File::options().create(true).truncate(false).write(true).open(file);
    let file = file.as_mut().expect("a file for the clock");
    file.write_all(format!("{seconds:+022}").as_bytes()).expect("a file for the clock");
}

/// Returns the environment for a server that uses the clock in `file`. Builds the library for it in
/// `folder` with the C compiler, which exists wherever Rust links.
pub(super) fn environment(folder: &Path, file: &Path) -> [(OsString, OsString); 2] {
    let source = folder.join("clock.c");
    let library = folder.join("clock.so");
    std::fs::write(&source, SOURCE).expect("a file for the source");
    let compiled = Command::new("cc")
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .output()
        .expect("the C compiler that Rust links with");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    [("LD_PRELOAD".into(), library.into()), ("HAPAX_TEST_CLOCK".into(), file.into())]
}
