//! Help texts of the program. `UPDATE_GOLDEN=1` writes the golden files again.

use std::path::Path;

use crate::world::ok;

#[test]
fn help_matches_the_golden_file() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/golden");
    for (name, arguments) in [
        ("hapax", &["--help"][..]),
        ("gateway", &["gateway", "--help"]),
        ("keys", &["keys", "--help"]),
        ("keys-count", &["keys", "count", "--help"]),
        ("keys-find", &["keys", "find", "--help"]),
        ("keys-hash", &["keys", "hash", "--help"]),
        ("keys-list", &["keys", "list", "--help"]),
        ("keys-show", &["keys", "show", "--help"]),
        ("keys-release", &["keys", "release", "--help"]),
        ("keys-resolve", &["keys", "resolve", "--help"]),
        ("keys-reconcile", &["keys", "reconcile", "--help"]),
        ("saga", &["saga", "--help"]),
        ("saga-list", &["saga", "list", "--help"]),
        ("saga-show", &["saga", "show", "--help"]),
        ("saga-retry", &["saga", "retry", "--help"]),
        ("saga-resolve", &["saga", "resolve", "--help"]),
        ("saga-definitions", &["saga", "definitions", "--help"]),
        ("call", &["call", "--help"]),
        ("call-list", &["call", "list", "--help"]),
        ("call-resume", &["call", "resume", "--help"]),
        ("call-acknowledge", &["call", "acknowledge", "--help"]),
        ("call-forget", &["call", "forget", "--help"]),
        ("doctor", &["doctor", "--help"]),
        ("store-confirm", &["store", "confirm", "--help"]),
        ("store-quarantine", &["store", "quarantine", "--help"]),
        ("store-quarantine-end", &["store", "quarantine", "end", "--help"]),
        ("store-quarantine-list", &["store", "quarantine", "list", "--help"]),
        ("sql", &["sql", "--help"]),
        ("messages", &["messages", "--help"]),
        ("messages-list", &["messages", "list", "--help"]),
        ("messages-show", &["messages", "show", "--help"]),
        ("messages-drop", &["messages", "drop", "--help"]),
        ("messages-redrive", &["messages", "redrive", "--help"]),
        ("relay", &["relay", "--help"]),
        ("consume", &["consume", "--help"]),
        ("backup", &["backup", "--help"]),
        ("restore", &["restore", "--help"]),
        ("demo", &["demo", "--help"]),
    ] {
        let said = ok(arguments);
        let file = folder.join(name).with_extension("txt");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&file, &said).unwrap();
        }
        let golden = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(said, golden, "{name}: UPDATE_GOLDEN=1 writes it again");
    }
}
