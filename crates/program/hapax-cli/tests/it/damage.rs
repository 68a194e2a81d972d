//! A damaged file of records: what the doctor says of it, what salvage saves, and what a gateway
//! does on it.

use std::collections::BTreeSet;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::world::{Gateway, Upstream, ok, post, receive, run, send, store};

/// Enough for a tree of some leaves.
const KEYS: usize = 40;

/// Key and answer of a request.
fn of(number: usize) -> (String, String) {
    (format!("key-{number}"), format!("answer {number} {}", "x".repeat(300)))
}

/// The names of the records in a store that no gateway has open, and their keys.
fn listed(store: &str) -> Vec<(String, String)> {
    let listed = ok(&["keys", "list", "--json", "--limit", "1000", "--store", store]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let keys = listed["keys"].as_array().unwrap().iter();
    keys.map(|it| (text(&it["id"]), text(&it["described"]["key"]))).collect()
}

/// Flips a bit in each block that holds a sealed record with this name: the one that is in use, and
/// those that earlier transactions left.
fn damage(path: &Path, id: &str) {
    let digits: Vec<&str> = (0..32).map(|byte| &id[2 * byte..2 * byte + 2]).collect();
    let name: Vec<u8> =
        digits.iter().map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect();
    let mut file = std::fs::read(path).unwrap();
    let mut damaged = 0;
    // Behind the two copies of the header each block is followed by its checksum.
    for block in file[2 * 4096..].chunks_mut(4096 + 16) {
        let holds = |bytes: &[u8]| block.windows(bytes.len()).any(|window| window == bytes);
        if block[0] == 1 && holds(&name) && holds(b"hxs\x01") {
            block[5] ^= 0x40;
            damaged += 1;
        }
    }
    assert!(damaged > 0);
    std::fs::write(path, file).unwrap();
}

fn is_replayed(gateway: &Gateway, number: usize) {
    let (key, answer) = of(number);
    let replay = post(gateway.address, &key, "x");
    assert_eq!((replay.status, &replay.body), (201, &answer));
    assert_eq!(replay.header("idempotency-replayed"), "true");
}

#[test]
fn intact_records_of_a_damaged_file_are_replayed_and_salvaged() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let (old, new) = (folder.path().join("hapax.db"), folder.path().join("new.db"));
    let (of_old, of_new) = (store(folder.path()), format!("file:{}", new.display()));
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    for number in 0..KEYS {
        let (key, answer) = of(number);
        let asked = send(gateway.address, &key, "x");
        upstream.next().answer("201 Created", &answer);
        assert_eq!(receive(&asked).unwrap().body, answer);
    }
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);
    let before = listed(&of_old);
    assert_eq!(before.len(), KEYS);
    let fine = ok(&["doctor", "--store", &of_old]);
    assert!(fine.contains(&format!("fine     records: all {KEYS} can be read")), "{fine}");
    let (id, _) = before.iter().find(|(_, key)| *key == of(7).0).unwrap();
    damage(&old, id);

    let doctor = run(&["doctor", "--store", &of_old]);
    let found = String::from_utf8(doctor.stdout).unwrap();
    assert_eq!(doctor.status.code(), Some(1), "{found}");
    assert!(found.contains("broken   records: ") && found.contains("are damaged"), "{found}");
    assert!(found.contains("hapax doctor --salvage OLD NEW"), "{found}");

    let salvage = ["doctor", "--salvage", old.to_str().unwrap(), new.to_str().unwrap()];
    let salvaged = run(&salvage);
    let said = String::from_utf8(salvaged.stdout).unwrap();
    assert_eq!(salvaged.status.code(), Some(1), "{said}");
    let secret = |name: &str| folder.path().join(name);
    std::fs::copy(secret("hapax.db.secret"), secret("new.db.secret")).unwrap();
    let saved: BTreeSet<String> = listed(&of_new).into_iter().map(|(_, key)| key).collect();
    let lost = KEYS - saved.len();
    assert!((1..KEYS / 2).contains(&lost) && !saved.contains(&of(7).0), "{saved:?}");
    assert!(said.starts_with(&format!("{} of {KEYS} records read from ", saved.len())), "{said}");
    assert!(said.contains(&format!(", {lost} lost, ")), "{said}");
    assert!(said.contains(&format!("cp {}.secret {}.secret", old.display(), new.display())));
    // Nothing is written over what was salvaged.
    assert_eq!(run(&salvage).status.code(), Some(69));

    // On the damaged file a gateway starts, and rejects what may be in the damaged block.
    let gateway = Gateway::logged(upstream.address, folder.path(), &[]);
    for number in 0..KEYS {
        if saved.contains(&of(number).0) {
            is_replayed(&gateway, number);
        } else {
            let rejected = post(gateway.address, &of(number).0, "x");
            let seen = (rejected.status, &*rejected.code());
            assert_eq!(seen, (503, "store-unavailable"), "{}", rejected.body);
        }
    }
    assert!(gateway.metric("hapax_store_damaged_blocks") > 0);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.wait(), 0);

    // On the new one what is lost looks unused, as was said.
    let gateway = Gateway::start(upstream.address, folder.path(), &["--store", &of_new]);
    for number in (0..KEYS).filter(|it| saved.contains(&of(*it).0)) {
        is_replayed(&gateway, number);
    }
    assert!(upstream.is_idle(), "something was executed again");
    let asked = send(gateway.address, &of(7).0, "x");
    upstream.next().answer("201 Created", "again");
    assert_eq!(receive(&asked).unwrap().body, "again");
}
