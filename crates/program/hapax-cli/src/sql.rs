//! `hapax sql`: the SQL of the tables and functions in PostgreSQL, and the privileges of the roles that use them:
//! what each needs, and no more.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use hapax_postgres_messages::{SchemaName, message_migrations, message_migrations_beside_others};

/// Print the SQL that creates or migrates the tables and functions in PostgreSQL
///
/// Run it with psql, any number of times: with an error psql ends with an exit code of 3. For a
/// migration tool leave out the first line, which is a command of psql. The script names its schema, whatever
/// the search path of the role is. The script fails if only another schema of the database has the
/// tables of a part: print that part with that schema.
#[derive(Debug, Args)]
pub(crate) struct SqlArgs {
    /// The schema of all tables and functions, which is created if it is missing
    #[arg(long, value_name = "NAME", default_value = "public")]
    schema: SchemaName,
    /// Print this part only; may be repeated [default: all]
    #[arg(long = "part", value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// With --part: create its tables also if other schemas of the database have some. Its rows are not
    /// theirs: for a service whose role has this schema first in its search path
    #[arg(long, requires = "parts")]
    new_schema: bool,
    #[command(flatten)]
    roles: RoleArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Inbox, outbox, positions, sequences and dead letters
    Messages,
    /// Records and schedule of a store, in which a relay also has its leases
    Store,
}

/// Roles that do not own the tables. Each option may be repeated.
#[derive(Debug, Args)]
pub(crate) struct RoleArgs {
    /// Also print the GRANTs for this role of a service: it writes messages to the outbox, and consumes
    /// them in batch mode or parks them in claim mode
    #[arg(long = "service-role", value_name = "NAME")]
    services: Vec<String>,
    /// Also print the GRANTs for this role of a relay, and those of --store-role
    #[arg(long = "relay-role", value_name = "NAME")]
    relays: Vec<String>,
    /// Also print the GRANTs for this role of an operator, who runs `hapax messages`
    #[arg(long = "operator-role", value_name = "NAME")]
    operators: Vec<String>,
    /// Also print the GRANTs on a store in this database for this role: a gateway, a consumer in claim mode
    /// whose records are there, or an operator who redrives its messages
    #[arg(long = "store-role", value_name = "NAME")]
    stores: Vec<String>,
}

/// Runs `hapax sql`.
pub(crate) fn run(args: &SqlArgs) -> ExitCode {
    let has = |part| args.parts.is_empty() || args.parts.contains(&part);
    let scripts = match args.new_schema {
        true => Scripts {
            messages: message_migrations_beside_others,
            store: hapax_postgres::migrations_beside_others,
        },
        false => SCRIPTS,
    };
    print(&args.schema, has(Part::Messages), has(Part::Store), scripts, &args.roles);
    ExitCode::SUCCESS
}

/// Runs `hapax messages migrations`, the earlier name, which prints a store only for a role that needs one.
pub(crate) fn run_by_earlier_name(roles: &RoleArgs) {
    eprintln!(
        "hapax: `hapax messages migrations` is now `hapax sql`, which also has --schema and --part"
    );
    let has_store = !roles.relays.is_empty() || !roles.stores.is_empty();
    print(&SchemaName::default(), true, has_store, SCRIPTS, roles);
}

/// The scripts of the parts, for a schema.
struct Scripts {
    messages: fn(&SchemaName) -> String,
    store: fn(&SchemaName) -> String,
}

const SCRIPTS: Scripts =
    Scripts { messages: message_migrations, store: hapax_postgres::migrations };

fn print(
    schema: &SchemaName,
    has_messages: bool,
    has_store: bool,
    scripts: Scripts,
    roles: &RoleArgs,
) {
    // Without that, psql goes on after an error and reports success.
    let mut script = "\\set ON_ERROR_STOP on\n".to_owned();
    if has_messages {
        script.push_str(&(scripts.messages)(schema));
    }
    if has_store {
        script
            .push_str("\n-- The tables of a store: a relay has the leases of its shards there.\n");
        script.push_str(&(scripts.store)(schema));
    }
    script.push_str(&grants(schema, has_messages, has_store, roles));
    // Standard output may be closed.
    let _ = std::io::stdout().write_all(script.as_bytes());
}

/// Privileges, the kind of object, and the objects.
type Privileges = [(&'static str, &'static str, &'static [&'static str])];

/// A service cannot read what other services wrote to the outbox, nor decisions of operators.
const SERVICE: &Privileges = &[
    (
        "SELECT, INSERT, UPDATE, DELETE",
        "",
        &[
            "hapax_inbox",
            "hapax_attempts",
            "hapax_dead_letters",
            "hapax_sequences",
            "hapax_sequence_messages",
        ],
    ),
    ("INSERT", "", &["hapax_outbox"]),
    ("SELECT, INSERT, UPDATE", "", &["hapax_positions"]),
    ("USAGE", "SEQUENCE ", &["hapax_outbox_ids", "hapax_position_fences"]),
    ("SELECT", "", &["hapax_sequence_gaps"]),
];

const RELAY: &Privileges = &[
    ("SELECT, DELETE", "", &["hapax_outbox"]),
    ("SELECT", "SEQUENCE ", &["hapax_outbox_ids"]),
    ("SELECT", "", &["hapax_outbox_epoch"]),
    ("SELECT, INSERT", "", &["hapax_dead_letters"]),
];

/// Decisions are only added.
const OPERATOR: &Privileges = &[
    ("SELECT, UPDATE, DELETE", "", &["hapax_dead_letters"]),
    ("SELECT, INSERT", "", &["hapax_dead_letter_decisions"]),
    ("SELECT, DELETE", "", &["hapax_inbox", "hapax_attempts"]),
    ("SELECT, INSERT", "", &["hapax_outbox"]),
    ("SELECT, UPDATE", "", &["hapax_outbox_epoch"]),
    ("SELECT, INSERT, UPDATE", "", &["hapax_positions"]),
    ("USAGE", "SEQUENCE ", &["hapax_position_fences"]),
    ("SELECT", "", &["hapax_sequences", "hapax_sequence_messages", "hapax_sequence_gaps"]),
];

const STORE: &Privileges = &[(
    "SELECT, INSERT, UPDATE, DELETE",
    "",
    &["hapax_cells", "hapax_secrets", "hapax_schedule", "hapax_migrations"],
)];

/// Returns the SQL that grants each role what it needs of the parts; nothing for no role.
fn grants(schema: &SchemaName, has_messages: bool, has_store: bool, roles: &RoleArgs) -> String {
    let RoleArgs { services, relays, operators, stores } = roles;
    let mut grants = String::new();
    let mut grant = |roles: &[String], privileges: &Privileges| {
        for role in roles {
            let role = role.replace('"', "\"\"");
            if *schema != SchemaName::default() {
                // Writing to a string does not fail.
                let _ =
                    writeln!(grants, "GRANT USAGE ON SCHEMA {} TO \"{role}\";", schema.quoted());
            }
            for (privileges, kind, names) in privileges {
                let names: Vec<_> =
                    names.iter().map(|name| format!("{}.{name}", schema.quoted())).collect();
                let names = names.join(", ");
                let _ = writeln!(grants, "GRANT {privileges} ON {kind}{names} TO \"{role}\";");
            }
        }
    };
    if has_messages {
        grant(services, SERVICE);
        grant(relays, RELAY);
        grant(operators, OPERATOR);
    }
    if has_store {
        grant(relays, STORE);
        grant(stores, STORE);
    }
    match grants.is_empty() {
        true => grants,
        false => format!("\nBEGIN READ WRITE;\n{grants}COMMIT;\n"),
    }
}
