//! One set of tables in a database, in the schema that the script names.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::store::BoxFuture;
use hapax_messages::{BatchInbox as _, BatchItem, MessageFailure};
use hapax_postgres_messages::{
    PgDeadLetterStore, PgInbox, PgOutbox, SchemaName, message_migrations,
    message_migrations_beside_others, message_schemas, put_messages,
};
use hapax_testkit::messages::MemoryBroker;
use hapax_testkit::servers::PostgresServer;

use super::batch::{Connection, run_inbox, send, with_effects, write};
use super::relay::{Collected, message, relay_of};
use super::{connections, server};

/// Schemas with an outbox.
const SETS: &str = "SELECT string_agg(schemaname, ' ' ORDER BY schemaname) FROM pg_tables WHERE tablename = 'hapax_outbox'";

fn named(name: &str) -> SchemaName {
    SchemaName::new(name).unwrap()
}

/// Creates tables in a second schema, as earlier scripts did.
async fn second_set(server: &PostgresServer, schema: &str) {
    let copy = format!(
        "CREATE SCHEMA {schema};
         CREATE TABLE {schema}.hapax_messages_migrations (version integer PRIMARY KEY, applied timestamptz
             NOT NULL DEFAULT clock_timestamp())"
    );
    server.sql("postgres", &copy).await;
    server.sql("postgres", &message_migrations(&named(schema))).await;
}

#[tokio::test]
async fn migrations_that_are_run_after_a_schema_named_like_the_role_has_appeared_use_the_same_tables()
 {
    let server = PostgresServer::start().await;
    server.sql("postgres", "CREATE ROLE owner; GRANT ALL ON SCHEMA public TO owner").await;
    server.sql("postgres", "GRANT CREATE ON DATABASE postgres TO owner").await;
    let as_owner =
        async |text: &str| server.try_sql("postgres", &format!("SET ROLE owner;\n{text}")).await;
    let script = message_migrations(&Default::default());
    as_owner(&script).await.unwrap();
    let enter = "SELECT state FROM public.hapax_inbox('c', ARRAY['m-1'])";
    assert!(as_owner(enter).await.unwrap().ends_with("new"));
    as_owner("CREATE SCHEMA owner").await.unwrap();
    as_owner(&script).await.unwrap();
    assert_eq!(server.sql("postgres", SETS).await, "public");
    let entered = as_owner("SELECT state FROM hapax_inbox('c', ARRAY['m-1'])").await.unwrap();
    assert!(entered.ends_with("duplicate"), "{entered}");
}

#[tokio::test]
async fn migrations_for_another_schema_than_that_of_the_tables_are_refused_unless_asked_for() {
    let server = server().await;
    let failed =
        server.try_sql("postgres", &message_migrations(&named("other"))).await.unwrap_err();
    assert!(failed.contains("in the schema other or in none, found them in public"), "{failed}");
    assert!(failed.contains("hapax sql --part messages --schema NAME"), "{failed}");
    assert_eq!(server.sql("postgres", SETS).await, "public");
    for _ in 0..2 {
        server.sql("postgres", &message_migrations_beside_others(&named("other"))).await;
    }
    assert_eq!(server.sql("postgres", SETS).await, "other public");
}

#[tokio::test]
async fn a_function_that_is_called_by_its_name_uses_its_own_tables() {
    let server = server().await;
    second_set(&server, "app").await;
    let path = "CREATE TEMP TABLE hapax_outbox (LIKE public.hapax_outbox); SET search_path = app;";
    let put = "SELECT public.hapax_outbox_put_text('d', 'x'); \
               SELECT state FROM public.hapax_inbox('c', ARRAY['m'])";
    server.sql("postgres", &format!("{path} {put}")).await;
    let rows = "SELECT (SELECT count(*) FROM public.hapax_outbox), (SELECT count(*) FROM app.hapax_outbox), \
                (SELECT count(*) FROM public.hapax_inbox), (SELECT count(*) FROM app.hapax_inbox)";
    assert_eq!(server.sql("postgres", rows).await, "1|0|1|0");
}

#[tokio::test]
async fn two_sets_of_tables_in_the_search_path_are_refused_unless_one_is_named() {
    let server = with_effects().await;
    second_set(&server, "app").await;
    let outbox = PgOutbox::new(&connections(&server));
    outbox.identity().await.unwrap();
    server.sql("postgres", "ALTER DATABASE postgres SET search_path = app, public").await;
    let expected =
        "expected one set of tables in the search path, found them in the schemas app, public";
    let refused = PgOutbox::new(&connections(&server)).identity().await.unwrap_err();
    assert!(refused.to_string().contains(expected), "{refused}");
    let store = PgDeadLetterStore::new(&connections(&server));
    let refused = store.missing_privileges().await.unwrap_err();
    assert!(refused.to_string().contains(expected), "{refused}");
    let inbox = PgInbox::new("orders", connections(&server), Duration::from_secs(3600), write);
    let refused = inbox.apply(Vec::new(), false).await.unwrap_err();
    assert!(format!("{refused:?}").contains(expected), "{refused:?}");
    assert_eq!(message_schemas(&connections(&server)).await.unwrap(), ["app", "public"]);
    let of_public = connections(&server).schema(named("public"));
    assert!(PgOutbox::new(&of_public).identity().await.is_ok());
    assert!(PgDeadLetterStore::new(&of_public).missing_privileges().await.unwrap().is_empty());
}

#[tokio::test]
async fn an_inbox_whose_handler_finds_the_outbox_of_another_schema_applies_no_batch() {
    let server = with_effects().await;
    second_set(&server, "app").await;
    let inbox = || {
        let connections = connections(&server).schema(named("public"));
        PgInbox::new("orders", connections, Duration::from_secs(3600), put_in_public)
    };
    server.sql("postgres", "ALTER DATABASE postgres SET search_path = app, public").await;
    let refused = format!("{:?}", inbox().apply(Vec::new(), false).await.unwrap_err());
    let expected =
        "tables of messages are in the schema public, or that has none, found those of app";
    assert!(refused.contains(expected), "{refused}");
    // A handler that names no schema finds that of the inbox, or fails.
    let broker = MemoryBroker::default();
    for path in ["public, app", "pg_temp"] {
        server.sql("postgres", &format!("ALTER DATABASE postgres SET search_path = {path}")).await;
        send(&broker, &format!("of {path}"));
        let running = run_inbox(&broker, inbox());
        broker.emptied().await;
        running.stop().await;
    }
    assert_eq!(server.sql("postgres", ROWS).await, "2|0");
}

/// Messages in the outbox of each of two schemas.
const ROWS: &str =
    "SELECT (SELECT count(*) FROM public.hapax_outbox), (SELECT count(*) FROM app.hapax_outbox)";

fn put_in_public<'a>(
    connection: &'a mut Connection,
    messages: &'a [BatchItem],
) -> BoxFuture<'a, Result<(), MessageFailure>> {
    Box::pin(async move {
        let messages: Vec<_> = messages.iter().map(|it| message(it.id().as_str(), None)).collect();
        put_messages(connection, Some(&named("public")), &messages).await?;
        Ok(())
    })
}

#[tokio::test]
async fn a_message_that_is_put_with_a_schema_is_published_whatever_the_search_path_is() {
    let server = server().await;
    second_set(&server, "app").await;
    server.sql("postgres", "ALTER DATABASE postgres SET search_path = app, public").await;
    let mut connection = super::pool(&server).get().await.unwrap();
    let transaction = connection.transaction().await.unwrap();
    let messages = [message("m-1", Some("k"))];
    put_messages(&mut &*transaction, Some(&named("public")), &messages).await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(server.sql("postgres", ROWS).await, "1|0");
    let (leases, sink) = (Arc::default(), Arc::new(Collected::default()));
    let outbox = PgOutbox::new(&connections(&server).schema(named("public")));
    let running = relay_of(Arc::new(outbox), &leases, &sink);
    sink.reached(1).await;
    running.stop().await;
}

#[tokio::test]
async fn a_message_that_is_put_without_a_schema_is_in_the_only_outbox_or_in_none() {
    let server = server().await;
    let put = async |path: &str| {
        server.sql("postgres", &format!("ALTER DATABASE postgres SET search_path = {path}")).await;
        let mut connection = super::pool(&server).get().await.unwrap();
        let transaction = connection.transaction().await.unwrap();
        let written = put_messages(&mut &*transaction, None, &[message("m-1", Some("k"))]).await;
        match written {
            Ok(()) => transaction.commit().await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    };
    // Whatever the search path is.
    put("pg_temp").await.unwrap();
    second_set(&server, "app").await;
    put("public").await.unwrap();
    put("app").await.unwrap();
    assert_eq!(server.sql("postgres", ROWS).await, "2|1");
    for (path, place) in [("app, public", "search path"), ("pg_temp", "database")] {
        let refused = put(path).await.unwrap_err();
        let expected =
            format!("one set of tables in the {place}, found them in the schemas app, public");
        assert!(refused.contains(&expected), "{refused}");
    }
    assert_eq!(server.sql("postgres", ROWS).await, "2|1");
}

#[tokio::test]
async fn a_schema_with_a_dollar_sign_has_its_tables_and_ends_no_quote() {
    let server = PostgresServer::start().await;
    for name in ["tenant$1", "a$$b", "$tables$", "$schema", "schema$"] {
        for _ in 0..2 {
            server.sql("postgres", &message_migrations(&named(name))).await;
        }
        let connections = connections(&server).schema(named(name));
        PgOutbox::new(&connections).identity().await.unwrap();
        let tables = format!("DROP SCHEMA \"{name}\" CASCADE");
        server.sql("postgres", &tables).await;
    }
}

#[tokio::test]
async fn a_new_constraint_waits_half_a_second_for_open_transactions_and_the_rest_as_before() {
    let server = server().await;
    let older = "DELETE FROM hapax_messages_migrations WHERE version = 4;
         ALTER TABLE hapax_outbox DROP CONSTRAINT hapax_outbox_bounds;
         CREATE TABLE waits (tag text, lock_timeout text);
         CREATE FUNCTION note_wait() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
             INSERT INTO public.waits VALUES (tg_tag, current_setting('lock_timeout'));
         END $$;
         CREATE EVENT TRIGGER note_wait ON ddl_command_start EXECUTE FUNCTION note_wait()";
    server.sql("postgres", older).await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    let waits = "SELECT string_agg(DISTINCT lock_timeout, ' ') FROM waits WHERE ";
    let of = async |what: &str| server.sql("postgres", &format!("{waits}{what}")).await;
    assert_eq!(of("tag = 'ALTER TABLE'").await, "500ms");
    assert_eq!(of("tag <> 'ALTER TABLE'").await, "5s");
    let last = "INSERT INTO waits SELECT 'last', current_setting('lock_timeout'); COMMIT;";
    let script = message_migrations(&Default::default());
    let script = script.strip_suffix("COMMIT;\n").unwrap();
    server.sql("postgres", "DELETE FROM hapax_messages_migrations WHERE version = 4").await;
    server.sql("postgres", "ALTER TABLE hapax_outbox DROP CONSTRAINT hapax_outbox_bounds").await;
    server.sql("postgres", &format!("{script}{last}")).await;
    assert_eq!(of("tag = 'last'").await, "5s");
}

#[tokio::test]
async fn tables_outside_of_the_search_path_are_used_by_the_name_of_their_schema() {
    let server = PostgresServer::start().await;
    for _ in 0..2 {
        server.sql("postgres", &message_migrations(&named("Of orders"))).await;
    }
    server.sql("postgres", "CREATE TABLE effects (message text NOT NULL)").await;
    let put = "SELECT \"Of orders\".hapax_outbox_put_text('orders', 'x', 'k', 'm-1')";
    server.sql("postgres", put).await;
    let connections = connections(&server).schema(named("Of orders"));
    let (leases, sink) = (Arc::default(), Arc::new(Collected::default()));
    let outbox = PgOutbox::new(&connections);
    assert!(outbox.missing_privileges().await.unwrap().is_empty());
    let running = relay_of(Arc::new(outbox), &leases, &sink);
    sink.reached(1).await;
    running.stop().await;
    let broker = MemoryBroker::default();
    send(&broker, "m-1");
    let inbox = PgInbox::new("orders", connections, Duration::from_secs(3600), write);
    let running = run_inbox(&broker, inbox);
    broker.emptied().await;
    running.stop().await;
    let ids = "SELECT count(*) FROM \"Of orders\".hapax_inbox";
    assert_eq!(server.sql("postgres", ids).await, "1");
}

#[tokio::test]
async fn a_database_of_the_present_release_gets_what_is_new_and_keeps_its_rows() {
    let server = with_effects().await;
    // As the third migration left it.
    server
        .sql(
            "postgres",
            "DELETE FROM hapax_messages_migrations WHERE version = 4;
             ALTER TABLE hapax_outbox DROP CONSTRAINT hapax_outbox_bounds;
             ALTER FUNCTION hapax_inbox SET search_path = \"$user\", public;
             INSERT INTO hapax_outbox (shard, id, message_id, destination, headers, payload)
                 VALUES (77, 1, 'm', 'd', '{}', 'p');
             SELECT hapax_inbox('orders', ARRAY['m-1'])",
        )
        .await;
    server.sql("postgres", &message_migrations(&Default::default())).await;
    let rows = "SELECT count(*), max(shard) FROM hapax_outbox";
    assert_eq!(server.sql("postgres", rows).await, "1|77");
    let config = "SELECT proconfig FROM pg_proc WHERE proname = 'hapax_inbox'";
    assert_eq!(server.sql("postgres", config).await, "{\"search_path=public, pg_temp\"}");
    let again = "SELECT state FROM hapax_inbox('orders', ARRAY['m-1'])";
    assert_eq!(server.sql("postgres", again).await, "duplicate");
}
