//! Inbox, outbox, sequences, positions and dead letters in PostgreSQL.

mod postgres {
    use axum::Router;
    use axum::http::HeaderMap;
    use hapax_testkit::servers::PostgresServer;
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::{Upgraded, words};
    use crate::messages::{RelayProcess, blocking, migrations, until};
    use crate::world::ok;

    #[tokio::test(flavor = "multi_thread")]
    async fn messages_of_an_earlier_release_are_handled_once_and_in_order() {
        let server = PostgresServer::start().await;
        let store = Upgraded::postgres(&server).await;
        let sql = async |text: &str| server.sql("postgres", text).await;
        // Before the new migrations too: the programs may start first.
        for migrated in [false, true] {
            if migrated {
                sql(&migrations()).await;
            }
            let inbox = "SELECT string_agg(state, ' ' ORDER BY item) FROM hapax_inbox('invoices', \
                         ARRAY['b-handled', 'b-new'], ARRAY['\\x01', '\\x02']::bytea[])";
            let second = if migrated { "duplicate" } else { "new" };
            assert_eq!(sql(inbox).await, format!("duplicate {second}"));
            let other = "SELECT state FROM hapax_inbox('invoices', ARRAY['b-handled'], \
                         ARRAY['\\x03']::bytea[])";
            assert_eq!(sql(other).await, "mismatch");
        }
        let sequence = async |number: u32| {
            let step = "SELECT step FROM hapax_sequence('invoices', 'order-1', {}, 's', '{}', 'x', 10, \
                        '36500 days', 'fetch')";
            sql(&step.replacen("{}", &number.to_string(), 1)).await
        };
        let steps = [sequence(1).await, sequence(3).await, sequence(2).await];
        assert_eq!(steps, ["duplicate", "duplicate", "apply"]);
        let next = "SELECT step, number, message_id, convert_from(payload, 'UTF8') \
                    FROM hapax_sequence_next('invoices', 'order-1', '36500 days', 'fetch')";
        assert_eq!(sql(next).await, "apply|3|s-3|of s-3");
        let position =
            "SELECT next_offset, is_new FROM hapax_position_acquire('invoices', 'orders', 0, 0)";
        assert_eq!(sql(position).await, "42|f");

        let (posted, mut received) = unbounded_channel();
        let endpoint = Router::new().fallback(move |headers: HeaderMap| {
            let id = headers["message-id"].to_str().unwrap().to_owned();
            posted.send(id).unwrap();
            async { "" }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = format!("http://{}/hooks", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, endpoint).await });
        let url = server.url("postgres");
        let secret = ["--secret-file", &store.path("secret")].map(str::to_owned);
        let relay = blocking(|| RelayProcess::start(&url, &to, &words(&[], &secret)));
        assert_eq!(received.recv().await.unwrap(), "o-waiting");
        until(&server, "SELECT string_agg(message_id, ' ') FROM hapax_outbox", "o-blocked").await;
        let listed = blocking(|| ok(&["messages", "list", "--database", &url]));
        assert!(listed.contains("o-rejected") && listed.contains("m-parked"), "{listed}");
        let dead =
            "SELECT encode(id, 'hex') FROM hapax_dead_letters WHERE message_id = 'o-rejected'";
        let dead = sql(dead).await;
        let redrive = ["messages", "redrive", &dead, "--reason", "fixed", "--database", &url];
        blocking(|| ok(&redrive));
        let order = [received.recv().await.unwrap(), received.recv().await.unwrap()];
        assert_eq!(order, ["o-rejected", "o-blocked"]);
        until(&server, "SELECT count(*) FROM hapax_outbox", "0").await;
        assert_eq!(blocking(|| relay.end()), Some(0));
    }
}
