//! `hapax keys`, on a file and through the gateway that has it open.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use crate::world::{
    Gateway, Upstream, hapax, log_line, ok, post, receive, refused, run, send, store,
};

/// Records of one key that is done, and of one whose outcome is unknown.
fn filled(upstream: &Upstream, folder: &std::path::Path, more: &[&str]) -> Gateway {
    let gateway = Gateway::start(upstream.address, folder, more);
    for (key, status) in [("done", "201 Created"), ("unknown", "500 Oh")] {
        let asked = send(gateway.address, key, "x");
        upstream.next().answer(status, "hello");
        receive(&asked).unwrap();
    }
    gateway
}

/// A list and a record, but for the moment when they were looked at.
fn look(at: &[&str]) -> (Value, Value) {
    let listed = ok(&[&["keys", "list", "--json"], at].concat());
    let shown = ok(&[&["keys", "show", "done", "--scope", "Bearer a", "--json"], at].concat());
    let mut listed: Value = serde_json::from_str(&listed).unwrap();
    let mut shown: Value = serde_json::from_str(&shown).unwrap();
    for key in listed["keys"].as_array_mut().unwrap().iter_mut().chain([&mut shown]) {
        assert!(key["now"].take().is_string());
    }
    (listed, shown)
}

#[test]
fn records_look_the_same_through_the_gateway_and_in_the_file() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(&upstream, folder.path(), &[]);
    let store = store(folder.path());
    let through = look(&["--store", &store]);
    let (admin, token) = (gateway.admin.to_string(), gateway.token.to_str().unwrap());
    assert_eq!(look(&["--admin", &admin, "--admin-token-file", token]), through);
    gateway.kill();
    let direct = look(&["--store", &store]);
    assert_eq!(direct, through);
    let (listed, shown) = direct;
    assert_eq!(listed["keys"].as_array().unwrap().len(), 2);
    assert_eq!((&shown["state"], &shown["response"]["body"]), (&"done".into(), &"hello".into()));
    let id = shown["id"].as_str().unwrap();
    let by_id = ok(&["keys", "show", "--id", id, "--store", &store]);
    assert!(by_id.contains(id) && by_id.contains("response     201, 5 bytes"), "{by_id}");
}

#[test]
fn a_finished_record_is_released_only_with_forget_through_the_gateway_and_in_the_file() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::logged(upstream.address, folder.path(), &[]);
    let asked = send(gateway.address, "done", "x");
    upstream.next().answer("201 Created", "hello");
    receive(&asked).unwrap();
    let at = ["--store", &store(folder.path()), "--scope", "Bearer a"];
    let at = [&at[..], &["--reason", "it was refunded"]].concat();
    let release = [&["keys", "release", "done"], &at[..]].concat();
    let resolve = [&["keys", "resolve", "done", "--outcome", "did-not-happen"], &at[..]].concat();
    let forgetting = [&release[..], &["--forget"]].concat();
    let needs_telling = || {
        for refused_one in [&release, &resolve] {
            let (code, line) = refused(refused_one);
            assert_eq!(code, 1);
            for word in ["was completed at 20", "status 201", "--forget", "executes again"] {
                assert!(line.contains(word), "{line}");
            }
        }
        // Another execution than the one that was named: that is another matter.
        let (code, line) = refused(&[&forgetting[..], &["--fence", "1"]].concat());
        assert!(
            code == 1 && line.contains("expected the record with the fence of the decision"),
            "{line}"
        );
        // And so is an answer that it has already.
        let other = ["--outcome", "happened", "--status", "404", "--forget"];
        let (code, line) = refused(&[&["keys", "resolve", "done"], &at[..], &other].concat());
        assert!(code == 1 && line.contains("a stored response cannot be replaced"), "{line}");
        let said = ok(&forgetting);
        assert!(said.contains("although it was completed at 20"), "{said}");
        for refused_one in [&release, &resolve] {
            let (code, line) = refused(refused_one);
            assert!(code == 1 && line.contains("was released at 20"), "{line}");
        }
    };

    needs_telling();
    let audit = log_line(folder.path(), "an operator decided about a record");
    assert_eq!((&audit["was"], &audit["was_answered"]), (&"Done".into(), &201.into()), "{audit}");
    assert_eq!(audit["forget"], true);
    let asked = send(gateway.address, "done", "something else");
    upstream.next().answer("201 Created", "again");
    assert_eq!(receive(&asked).unwrap().body, "again");
    gateway.kill();
    needs_telling();
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let asked = send(gateway.address, "done", "and again");
    upstream.next().answer("201 Created", "third");
    assert_eq!(receive(&asked).unwrap().body, "third");
}

#[test]
fn a_body_may_come_from_a_file_or_standard_input() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(&upstream, folder.path(), &[]);
    let file = folder.path().join("body");
    std::fs::write(&file, b"{\"id\":7}").unwrap();
    let body = format!("@{}", file.display());
    let store = store(folder.path());
    let resolve =
        ["keys", "resolve", "unknown", "--scope", "authorization: Bearer a", "--reason", "r"];
    let how = ["--store", &store, "--outcome", "happened", "--status", "202"];
    let with = ["--header", "Content-Type: application/json", "--body", &body];
    ok(&[&resolve[..], &how, &with].concat());
    let answer = post(gateway.address, "unknown", "x");
    assert_eq!((answer.status, answer.body.as_str()), (202, "{\"id\":7}"));
    assert_eq!(answer.header("content-type"), "application/json");
}

#[test]
fn a_response_that_cannot_be_replayed_is_exit_code_64() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(&upstream, folder.path(), &[]);
    let store = store(folder.path());
    let at = ["keys", "resolve", "unknown", "--scope", "Bearer a", "--store", &store];
    let resolve = [&at[..], &["--outcome", "happened", "--reason", "r"]].concat();
    let bad: [&[&str]; 3] = [
        &["--header", "Content-Length: 5"],
        &["--header", "idempotency-replayed: true"],
        &["--status", "204", "--body", "x"],
    ];
    for more in bad {
        let (code, line) = refused(&[&resolve[..], more].concat());
        assert_eq!(code, 64, "through the gateway: {line}");
    }
    gateway.kill();
    for more in bad {
        let (code, line) = refused(&[&resolve[..], more].concat());
        assert_eq!(code, 64, "on the file: {line}");
    }
}

#[test]
fn decisions_are_printed_as_json() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(&upstream, folder.path(), &[]);
    let at = ["--store", &store(folder.path()), "--scope", "Bearer a", "--json"];
    let read = |words: &[&str]| -> Value {
        serde_json::from_str(&ok(&[&["keys"], words, &at[..]].concat())).unwrap()
    };
    let id = read(&["show", "unknown"])["id"].clone();
    let resolved = read(&["resolve", "unknown", "--outcome", "happened", "--reason", "r"]);
    assert_eq!(
        (&resolved["id"], &resolved["outcome"], &resolved["was"]["state"]),
        (&id, &"happened".into(), &"unknown".into())
    );
    gateway.kill();
    let released = read(&["release", "done", "--forget", "--reason", "r"]);
    assert_eq!(
        (&released["outcome"], &released["was"]["state"], &released["was"]["status"]),
        (&"did-not-happen".into(), &"done".into(), &201.into())
    );
    let (code, error) =
        refused_as_json(&[&["keys", "release", "done", "--reason", "r"], &at[..]].concat());
    assert_eq!((code, &error["code"]), (1, &"released".into()));
    assert!(error["message"].as_str().unwrap().contains("was released"), "{error}");
}

/// The exit code, and the object on standard error.
fn refused_as_json(arguments: &[&str]) -> (i32, Value) {
    let output = run(arguments);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty() && said.lines().count() == 1, "{said}");
    let error: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
    assert_eq!(error.as_object().unwrap().len(), 2, "{error}");
    (output.status.code().unwrap(), error)
}

#[test]
fn errors_are_printed_as_json() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let _asked = send(gateway.address, "k", "x");
    let _waiting = upstream.next();
    let at = ["--store", &store(folder.path()), "--scope", "Bearer a", "--json"];
    for (words, exit, code) in [
        (&["release", "k", "--reason", "r"][..], 1, "in-flight"),
        (&["release", "k"], 64, "usage"),
        (
            &["resolve", "k", "--outcome", "happened", "--status", "99", "--reason", "r"],
            64,
            "bad-request",
        ),
        (&["show", "nobody's"], 1, "not-found"),
        (&["show", ""], 64, "usage"),
        (&["show", "k", "--limit"], 64, "usage"),
        (&["show", "k", "--admin", "127.0.0.1:1"], 69, "unavailable"),
    ] {
        let (found, error) = refused_as_json(&[&["keys"], words, &at[..]].concat());
        assert_eq!((found, &error["code"]), (exit, &code.into()), "{error}");
    }
    let (code, error) = refused_as_json(&["doctor", "--store", "mysql:", "--json"]);
    assert_eq!((code, &error["code"]), (64, &"usage".into()));
}

#[test]
fn the_gateways_file_names_the_store() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let file = folder.path().join("hapax.toml");
    let name = file.to_str().unwrap();
    let store = store(folder.path());
    let secret = folder.path().join("a.secret");
    std::fs::write(&secret, "7".repeat(64)).unwrap();
    let text = format!(
        "[gateway]\nupstream = \"http://{}\"\nstore = \"{store}\"\nsecret_file = \"{}\"\n\
         admin_token_file = \"{}\"\n",
        upstream.address,
        secret.display(),
        folder.path().join("a.token").display()
    );
    std::fs::write(&file, text).unwrap();
    let gateway = filled(&upstream, folder.path(), &["--config", name, "--store", &store]);
    let show = ["keys", "show", "done", "--scope", "Bearer a"];
    // Through the gateway by its token, which the file names, then by the secret on the file.
    let from_outside = |words: &[&str]| {
        let mut command = hapax(words);
        command.current_dir("/").env("HAPAX_CONFIG", name).output().unwrap()
    };
    assert!(from_outside(&show).status.success());
    gateway.kill();
    let found = from_outside(&show);
    assert!(String::from_utf8(found.stdout).unwrap().contains("response     201"));
    let found = from_outside(&["doctor", "--json"]);
    let said = String::from_utf8(found.stdout).unwrap();
    assert!(said.starts_with('[') && found.stderr.is_empty(), "{said}");
    // Who says another store means it.
    let other = format!("file:{}", folder.path().join("other.db").display());
    let output = from_outside(&["keys", "list", "--store", &other]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("there is no store at") && said.contains("other.db"), "{said}");
    let output = hapax(&["keys", "list", "--config", name]).env("HAPAX_STORE", &other).output();
    assert!(String::from_utf8(output.unwrap().stderr).unwrap().contains("other.db"));

    // And may have no file that can be read: in an emergency, that is.
    let words = ["keys", "list", "--store", &store, "--secret-file", secret.to_str().unwrap()];
    let output = hapax(&words).env("HAPAX_CONFIG", "/nowhere").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.starts_with("hapax: warning: /nowhere"), "{said}");
    assert!(!output.stdout.is_empty());

    // A store in memory is asked for where its gateway is.
    let admin = "[gateway]\nstore = \"memory:\"\nadmin = \"127.0.0.1:1\"\n";
    std::fs::write(&file, admin).unwrap();
    let (code, line) = refused(&["keys", "list", "--config", name]);
    assert!(code == 69 && line.contains("the gateway at 127.0.0.1:1"), "{line}");
    std::fs::write(&file, "[gateway]\n\nstore = \"mysql://u:s3cr3t@h\"\n").unwrap();
    for command in [&["keys", "list"][..], &["doctor"]] {
        let (code, line) = refused(&[command, &["--config", name]].concat());
        assert!(code == 64 && line.contains("hapax.toml:3: --store: "), "{line}");
        assert!(!line.contains("s3cr3t"), "{line}");
    }
}

#[test]
fn a_record_in_flight_is_decided_only_with_force() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = Gateway::start(upstream.address, folder.path(), &[]);
    let asked = send(gateway.address, "k", "x");
    let waiting = upstream.next();
    let at = ["--store", &store(folder.path()), "--scope", "Bearer a"];
    let release = [&["keys", "release", "k", "--reason", "r"], &at[..]].concat();
    let (code, line) = refused(&release);
    assert!(code == 1 && line.ends_with("(--force)"), "{code} {line}");
    let (code, _) = refused(&[&release[..], &["--force", "--fence", "1"]].concat());
    assert_eq!(code, 1);
    ok(&[&release[..], &["--force"]].concat());
    waiting.answer("201 Created", "late");
    assert_eq!(receive(&asked).unwrap().code(), "superseded");
}

#[test]
fn a_missing_store_or_gateway_is_an_error_of_one_line() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let store = store(folder.path());
    let (code, line) = refused(&["keys", "list", "--store", &store]);
    assert!(code == 69 && line.contains("there is no store"), "{code} {line}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was made");
    assert_eq!(refused(&["keys", "list", "--store", "memory:"]).0, 64);
    assert_eq!(refused(&["keys", "show", "--store", &store]).0, 64);
    let nobody = ["--admin", "127.0.0.1:1"];
    assert_eq!(refused(&[&["keys", "show", "--id", "abc"], &nobody[..]].concat()).0, 64);
    assert_eq!(refused(&[&["keys", "show", "abc"], &nobody[..]].concat()).0, 69);

    let token = folder.path().join("elsewhere");
    let token = token.to_str().unwrap();
    let gateway = filled(&upstream, folder.path(), &["--admin-token-file", token]);
    let list = ["keys", "list", "--store", &store];
    let (code, line) = refused(&list);
    assert!(code == 64 && line.contains("found none: pass its file with --admin-token-file"));
    ok(&[&list[..], &["--admin-token-file", token]].concat());
    let output = hapax(&list).env("HAPAX_ADMIN_TOKEN_FILE", token).output().unwrap();
    assert!(output.status.success());
    let wrong = folder.path().join("wrong");
    std::fs::write(&wrong, "0123456789abcdef").unwrap();
    let file = ["--admin-token-file", wrong.to_str().unwrap()];
    std::fs::set_permissions(&wrong, Permissions::from_mode(0o644)).unwrap();
    let warned = run(&[&list[..], &file].concat()).stderr;
    let warned = String::from_utf8(warned).unwrap();
    assert!(warned.starts_with("hapax: warning: ") && warned.contains("chmod 600"), "{warned}");
    std::fs::set_permissions(&wrong, Permissions::from_mode(0o600)).unwrap();
    let (code, line) = refused(&[&list[..], &file].concat());
    assert!(code == 64 && line.contains("found a different one"), "{code} {line}");
    gateway.kill();
    let (code, line) = refused(&["keys", "show", "nobody's", "--store", &store]);
    assert!(code == 1 && line.contains("expected a record of this key"), "{code} {line}");
}

#[test]
fn a_stored_body_does_not_control_the_terminal_and_is_complete_as_json() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let _gateway = filled(&upstream, folder.path(), &[]);
    let store = store(folder.path());
    let at = ["unknown", "--scope", "Bearer a", "--store", &store];
    let body = "paid\u{1b}[2J\r\nstate        done\u{202e}\u{9b}1A";
    let happened = ["--outcome", "happened", "--body", body, "--reason", "seen"];
    ok(&[&["keys", "resolve"], &at[..], &happened].concat());
    let shown = ok(&[&["keys", "show"], &at[..]].concat());
    let controls = ['\u{1b}', '\r', '\u{202e}', '\u{9b}'];
    assert!(shown.contains("paid\u{fffd}[2J") && !shown.contains(controls), "{shown:?}");
    let shown = ok(&[&["keys", "show", "--json"], &at[..]].concat());
    assert!(!shown.contains(controls), "{shown:?}");
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["response"]["body"], body);
}

#[test]
fn a_url_with_a_password_is_not_accepted_as_an_argument() {
    for (words, instead) in [
        (
            &["gateway", "--upstream", "http://127.0.0.1:1", "--store"][..],
            "set HAPAX_STORE instead",
        ),
        (&["gateway", "--upstream", "http://127.0.0.1:1", "--cache"], "set HAPAX_CACHE instead"),
        (&["keys", "list", "--store"], "set HAPAX_STORE instead"),
        (&["saga", "list", "--store"], "set HAPAX_STORE instead"),
        (&["store", "quarantine", "list", "--store"], "set HAPAX_STORE instead"),
        (&["doctor", "--store"], "set HAPAX_STORE instead"),
        (&["messages", "list", "--database"], "set HAPAX_DATABASE instead"),
        (&["relay", "--to", "nats://127.0.0.1:1", "--from"], "--from: expected a URL without"),
        (&["backup", "--to", "x", "--store"], "set HAPAX_STORE instead"),
    ] {
        for url in ["postgres://u:hidden@127.0.0.1:1/d", "redis://:hidden@127.0.0.1:1"] {
            let (code, line) = refused(&[words, &[url]].concat());
            assert!(code == 64 && line.contains(instead), "{words:?} {code} {line}");
            assert!(!line.contains("hidden"), "{line}");
        }
    }
}

#[test]
fn expired_records_are_purged() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(
        &upstream,
        folder.path(),
        &["--retention", "100ms", "--lease", "100ms", "--on-unknown", "reexecute"],
    );
    let store = store(folder.path());
    let purge = ["keys", "purge", "--store", &store];
    assert!(ok(&purge).starts_with("nothing was removed here: the gateway"), "the gateway does it");
    let in_json = [&purge[..], &["--json"]].concat();
    let json = |said: String| serde_json::from_str::<Value>(&said).unwrap();
    assert_eq!(json(ok(&in_json)), json!({ "removed": 0, "by_gateway": true }));
    gateway.kill();
    let expired = ["keys", "list", "--store", &store, "--state", "expired"];
    while ok(&expired).lines().count() < 3 {
        assert!(run(&expired).status.success());
    }
    // One lease after that they may go.
    let mut removed = 0;
    while removed < 2 {
        let said = ok(&purge);
        removed += said.split(' ').next().unwrap().parse::<u32>().unwrap();
    }
    assert_eq!((removed, ok(&expired).as_str()), (2, "no records\n"));
    assert_eq!(json(ok(&in_json)), json!({ "removed": 0, "by_gateway": false }));
}

#[test]
fn a_decision_requires_a_reason_and_writes_two_audit_lines() {
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(&upstream, folder.path(), &[]);
    let store = store(folder.path());
    let at = ["--store", &store, "--scope", "Bearer a"];
    let audit = || -> Vec<Value> {
        let text = std::fs::read_to_string(folder.path().join("hapax.db.audit.jsonl"));
        text.unwrap_or_default().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let resolve = ["keys", "resolve", "unknown", "--outcome", "happened"];
    for reason in [&[][..], &["--reason", " "]] {
        let (code, line) = refused(&[&resolve[..], &at, reason].concat());
        assert!(code == 64 && line.contains("reason"), "{code} {line}");
    }
    assert!(audit().is_empty());
    let why = "the bank's statement of 3 May has it";
    ok(&[&resolve[..], &at, &["--reason", why]].concat());
    let lines = audit();
    let stages: Vec<_> = lines.iter().map(|line| &line["stage"]).collect();
    assert_eq!(stages, ["intended", "done"]);
    for line in &lines {
        assert_eq!((&line["why"], &line["by"]), (&why.into(), &"api".into()), "{line}");
        assert!(line["who"].as_str().unwrap().contains("uid "), "{line}");
        assert!(line["from"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
        assert_eq!((&line["before"]["state"], &line["status"]), (&"unknown".into(), &200.into()));
        assert_eq!(line["decision"], lines[0]["decision"]);
    }
    let shown = ok(&[&["keys", "show", "unknown"], &at[..]].concat());
    assert!(shown.contains("decision     happened, decided by ") && shown.contains(why), "{shown}");
    gateway.kill();
    // The record has it still, and so has a decision that no gateway takes.
    let shown = ok(&[&["keys", "show", "unknown"], &at[..]].concat());
    assert!(shown.contains(why), "{shown}");
    let release = ["keys", "release", "done", "--reason", "a test charge"];
    let (code, _) = refused(&[&release[..], &at].concat());
    assert_eq!(code, 1);
    ok(&[&release[..], &at, &["--forget"]].concat());
    let lines = audit();
    let seen: Vec<_> = lines[2..].iter().map(|line| (&line["stage"], &line["code"])).collect();
    let null = Value::Null;
    let (intended, done) = (Value::from("intended"), Value::from("done"));
    let rejected = Value::from("rejected");
    assert_eq!(seen, [(&intended, &null), (&rejected, &done), (&intended, &null), (&done, &null)]);
    assert_eq!((&lines[5]["by"], &lines[5]["forget"]), (&"cli".into(), &true.into()));
    let shown = ok(&[&["keys", "show", "done"], &at[..]].concat());
    assert!(
        shown.contains("did not happen, decided by ") && shown.contains("a test charge"),
        "{shown}"
    );
}

#[test]
fn the_doctor_reports_unreadable_records_and_a_token_readable_by_others() {
    use std::os::unix::fs::PermissionsExt;
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let gateway = filled(&upstream, folder.path(), &[]);
    let store = store(folder.path());
    gateway.kill();
    let doctor = ["doctor", "--store", &store];
    let said = ok(&doctor);
    assert!(said.contains("fine     key ring: all of the 2 "), "{said}");
    assert!(said.contains("fine     admin token: "), "{said}");
    let token = folder.path().join("hapax.db.admin-token");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(ok(&doctor).contains("risk     admin token: users other than its owner can read"));
    let secret = folder.path().join("hapax.db.secret");
    let first = std::fs::read_to_string(&secret).unwrap();
    let ring = format!("name {first}seal {}\n", "22".repeat(32));
    std::fs::write(&secret, &ring).unwrap();
    let found = run(&doctor);
    let said = String::from_utf8(found.stdout).unwrap();
    assert_eq!(found.status.code(), Some(1), "{said}");
    assert!(said.contains("broken   key ring: 2 of the 2 "), "{said}");
    std::fs::write(&secret, format!("{ring}open {first}")).unwrap();
    assert!(ok(&doctor).contains("fine     key ring: all of the 2 "));
}

#[test]
fn the_token_of_a_store_in_memory_is_in_the_working_directory_and_found_there() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;
    use std::process::Stdio;
    let (upstream, folder) = (Upstream::start(), tempfile::tempdir().unwrap());
    let url = format!("http://{}", upstream.address);
    let at = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", "memory:"];
    let mut child = hapax(&[&["gateway", "--upstream", &url], &at[..]].concat())
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let mut addresses = line.trim().split([' ', ',']).filter_map(|it| it.strip_prefix("http://"));
    let admin = addresses.nth(1).unwrap();
    let list = || hapax(&["keys", "list", "--admin", admin]);
    let found = list().current_dir(folder.path()).output().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let not_found = list().current_dir(elsewhere.path()).output().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let said = String::from_utf8_lossy(&not_found.stderr);
    assert!(not_found.status.code() == Some(64) && said.contains("found none"), "{said}");
    let token = folder.path().join("hapax.admin-token").metadata().unwrap();
    assert_eq!(token.permissions().mode() & 0o777, 0o600);
}
