//! Files of lines of JSON that are appended to: the audit file and the access log.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

/// Opens a file for appending lines of JSON, and creates it, readable by its owner only.
///
/// # Errors
/// Any error of opening. A symbolic link is rejected, since a user that can write the folder could have the process
/// write into any file of its user; so is a file whose content is not JSON, such as a database that was named by mistake.
pub fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
    }
    let mut file = match options.open(path) {
        Err(_) if path.is_symlink() => return linked(path),
        opened => opened?,
    };
    // The content of a pipe cannot be read twice. A zero may be left by a power failure.
    if file.metadata()?.is_file() {
        let mut first = Vec::new();
        file.by_ref().take(1).read_to_end(&mut first)?;
        if !matches!(first[..], [] | [b'{' | b'\n' | 0]) {
            let text = "expected a file of JSON lines, found other content: move it away, or name another file";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
    }
    Ok(file)
}

/// Opens what a symbolic link points to, unless it is a file: `/dev/stdout` is a link to a pipe or a terminal.
fn linked(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().append(true).open(path)?;
    if file.metadata()?.is_file() {
        let text = "expected a file, found a symbolic link: name the file that it points to, or - for standard output";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_link_and_a_file_of_other_content_are_rejected_and_stay_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let [log, other, link] = ["log", "other", "link"].map(|name| folder.path().join(name));
        open_log(&log).unwrap().write_all(b"{}\n").unwrap();
        open_log(&log).unwrap().write_all(b"{}\n").unwrap();
        assert_eq!(std::fs::read(&log).unwrap(), b"{}\n{}\n");
        std::fs::write(&other, "redb").unwrap();
        assert_eq!(open_log(&other).unwrap_err().kind(), io::ErrorKind::InvalidData);
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&log, &link).unwrap();
            let error = open_log(&link).unwrap_err();
            assert!(error.to_string().contains("found a symbolic link"), "{error}");
            // A collector of logs may read a pipe, also behind a link, as /dev/stdout is one.
            std::fs::remove_file(&link).unwrap();
            std::os::unix::fs::symlink("/dev/null", &link).unwrap();
            for pipe in [Path::new("/dev/null"), &link] {
                open_log(pipe).unwrap().write_all(b"{}\n").unwrap();
            }
        }
    }
}
