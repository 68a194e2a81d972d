//! The privileges of the roles that use the messages of a database: what each needs, and no more.

use std::fmt::Write as _;

use super::args::RoleArgs;

/// Privileges on tables, views and sequences.
type Privileges = [(&'static str, &'static str)];

/// A service cannot read what other services wrote to the outbox, nor decisions of operators.
const SERVICE: &Privileges = &[
    (
        "SELECT, INSERT, UPDATE, DELETE",
        "hapax_inbox, hapax_attempts, hapax_dead_letters, hapax_sequences, hapax_sequence_messages",
    ),
    ("INSERT", "hapax_outbox"),
    ("SELECT, INSERT, UPDATE", "hapax_positions"),
    ("USAGE", "SEQUENCE hapax_outbox_ids, hapax_position_fences"),
    ("SELECT", "hapax_sequence_gaps"),
];

const RELAY: &Privileges = &[
    ("SELECT, DELETE", "hapax_outbox"),
    ("SELECT", "SEQUENCE hapax_outbox_ids"),
    ("SELECT", "hapax_outbox_epoch"),
    ("SELECT, INSERT", "hapax_dead_letters"),
];

/// Decisions are only added.
const OPERATOR: &Privileges = &[
    ("SELECT, UPDATE, DELETE", "hapax_dead_letters"),
    ("SELECT, INSERT", "hapax_dead_letter_decisions"),
    ("SELECT, DELETE", "hapax_inbox, hapax_attempts"),
    ("SELECT, INSERT", "hapax_outbox"),
    ("SELECT, UPDATE", "hapax_outbox_epoch"),
    ("SELECT, INSERT, UPDATE", "hapax_positions"),
    ("USAGE", "SEQUENCE hapax_position_fences"),
    ("SELECT", "hapax_sequences, hapax_sequence_messages, hapax_sequence_gaps"),
];

const STORE: &Privileges = &[(
    "SELECT, INSERT, UPDATE, DELETE",
    "hapax_cells, hapax_secrets, hapax_schedule, hapax_migrations",
)];

/// Returns the SQL that grants each role what it needs, and creates the tables of a store if one needs
/// them; nothing for no role.
pub(super) fn script(roles: &RoleArgs) -> String {
    let RoleArgs { services, relays, operators, stores } = roles;
    let mut script = String::new();
    let stores: Vec<_> = relays.iter().chain(stores).collect();
    if !stores.is_empty() {
        script
            .push_str("\n-- The tables of a store: a relay has the leases of its shards there.\n");
        script.push_str(hapax_postgres::migrations());
    }
    let mut grants = String::new();
    let mut grant = |role: &str, privileges: &Privileges| {
        let role = role.replace('"', "\"\"");
        for (privileges, on) in privileges {
            // Writing to a string does not fail.
            let _ = writeln!(grants, "GRANT {privileges} ON {on} TO \"{role}\";");
        }
    };
    services.iter().for_each(|role| grant(role, SERVICE));
    relays.iter().for_each(|role| grant(role, RELAY));
    operators.iter().for_each(|role| grant(role, OPERATOR));
    stores.iter().for_each(|role| grant(role, STORE));
    if !grants.is_empty() {
        let _ = write!(script, "\nBEGIN;\n{grants}COMMIT;\n");
    }
    script
}
