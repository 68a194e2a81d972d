//! Texts of the demo, before the run and after.

use std::fmt::Write as _;
use std::path::Path;

use super::report::Row;
use super::setup::Setup;

/// The number of payments up to which the time in [`intro`] is about right.
const USUAL: u16 = 150;

/// Returns a description of the run and of the table's columns.
pub(crate) fn intro(payments: u16, seed: u64) -> String {
    let time = if payments <= USUAL { " It takes\nabout 20 seconds." } else { "" };
    format!(
        "Four setups: no gateway, and the gateway with each --on-unknown. Behind it a payments \
         service\nthat loses replies, fails, stalls and is killed; in front of it clients that \
         disconnect, click\ntwice, and retry with the same key until a response is final. All are \
         real processes.{time}\n\n\
         payments  made in each setup, each with its own key: {payments}\n\
         requests  sent for them, retries included\n\
         charges   in the service's ledger: more than payments are too many\n\
         client    duplicates where only the client was at fault: it disconnected or clicked twice\n\
         server    duplicates where service or gateway failed between a charge and its reply\n\
         unknown   payments whose client never got a final response\n\n\
         --seed {seed} gives the same payments the same faults again; the timing differs.\n"
    )
}

/// Returns the table, one line for each setup.
pub(crate) fn table(rows: &[Row]) -> String {
    let head = ["setup", "payments", "requests", "charges", "client", "server", "unknown"];
    // The heading of two columns.
    let mut text = format!("{:>62}\n", "duplicates by fault of");
    line(&mut text, head.map(str::to_owned));
    for row in rows {
        let Row { payments, requests, charges, client_side, server_side, unknown, .. } = *row;
        let numbers = [payments, requests, charges, client_side, server_side, unknown];
        let [a, b, c, d, e, f] = numbers.map(|number| number.to_string());
        line(&mut text, [row.setup.to_owned(), a, b, c, d, e, f]);
    }
    text
}

fn line(text: &mut String, [name, cells @ ..]: [String; 7]) {
    // Writing to a string does not fail.
    let _ = write!(text, "{name:<12}");
    for cell in cells {
        let _ = write!(text, "{cell:>10}");
    }
    text.push('\n');
}

/// Returns a summary of the table, and commands to try next, with this program's path `called`;
/// `kept`: the gateway is still up.
pub(crate) fn words(rows: &[Row], called: &str, kept: bool) -> String {
    let of = |setup: Setup, number: fn(&Row) -> u32| {
        rows.iter().find(|row| row.setup == setup.name()).map_or(0, number)
    };
    let gateways = [Setup::Reexecute, Setup::Block, Setup::Reconcile];
    let next =
        if kept { String::new() } else { format!("; or {called} demo --keep, to try this one") };
    format!(
        "Clients that disconnected or clicked twice: {} charges too many without a gateway, {} with \
         one, with\nany --on-unknown.\n\
         Failures behind the gateway, after which the charge may have been made: reexecute executed \
         it again\n({} too many; {} without a gateway). block, the default, did not ({}), and left {} \
         payments to an\noperator. reconcile queried the service: {} too many, {} left open.\n\
         Next: {called} gateway --upstream http://127.0.0.1:3000\n\
         in front of your own service{next}.\n",
        of(Setup::NoGateway, |row| row.client_side),
        gateways.map(|setup| of(setup, |row| row.client_side)).iter().sum::<u32>(),
        of(Setup::Reexecute, |row| row.server_side),
        of(Setup::NoGateway, |row| row.server_side),
        of(Setup::Block, |row| row.duplicates),
        of(Setup::Block, |row| row.unknown),
        of(Setup::Reconcile, |row| row.duplicates),
        of(Setup::Reconcile, |row| row.unknown),
    )
}

/// Returns the command with which a shell in the folder `here` starts `program`.
pub(crate) fn called(program: &Path, here: &Path) -> String {
    let name = match program.strip_prefix(here) {
        Ok(below) if below.components().count() > 1 => below.display().to_string(),
        Ok(below) => format!("./{}", below.display()),
        Err(_) => program.display().to_string(),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    if name.chars().all(plain) { name } else { format!("'{}'", name.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_named_as_it_can_be_called() {
        let call = |program: &str, here: &str| called(Path::new(program), Path::new(here));
        assert_eq!(call("/src/target/release/hapax", "/src"), "target/release/hapax");
        assert_eq!(call("/src/hapax", "/src"), "./hapax");
        assert_eq!(call("/usr/bin/hapax", "/src"), "/usr/bin/hapax");
        assert_eq!(call("/my files/hapax", "/src"), "'/my files/hapax'");
        assert_eq!(call("/it's/hapax", "/src"), r"'/it'\''s/hapax'");
    }

    #[test]
    fn what_is_kept_is_not_advised() {
        assert!(words(&[], "x/hapax", false).contains("x/hapax demo --keep"));
        let kept = words(&[], "x/hapax", true);
        assert!(!kept.contains("--keep") && kept.contains("Next: x/hapax gateway "), "{kept}");
    }

    #[test]
    fn nothing_is_wider_than_a_usual_window() {
        let said = intro(120, u64::from(u32::MAX)) + &words(&[], "target/release/hapax", false);
        for line in said.lines() {
            assert!(line.len() <= 100, "{line}");
        }
    }
}
