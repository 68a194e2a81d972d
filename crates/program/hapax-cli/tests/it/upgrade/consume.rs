//! Records of messages that `hapax consume` posted, with a real broker.

mod nats {
    mod postgres {
        use std::time::Duration;

        use axum::Router;
        use axum::http::HeaderMap;
        use hapax_messages::{MessageId, MessageSink as _, OutgoingMessage};
        use hapax_nats::NatsSink;
        use hapax_testkit::servers::{NatsServer, PostgresServer, RedisServer};
        use tokio::sync::mpsc::unbounded_channel;

        use crate::messages::consume::ConsumeProcess;
        use crate::messages::{blocking, migrations};
        use crate::upgrade::{Upgraded, words};
        use crate::world::ok;

        /// The broker delivers all messages again. The one that was in progress is posted, as a new one is; the
        /// one that was accepted is not, and the parked one is once it is redriven.
        async fn messages_that_were_accepted_are_not_posted_again(
            store: &Upgraded,
            database: &PostgresServer,
        ) {
            let broker = NatsServer::start().await;
            let context = hapax_nats::jetstream(&broker.url()).await.unwrap();
            hapax_nats::create_stream(&context, "ORDERS", &["orders.>"]).await.unwrap();
            let sink = NatsSink::new(context.clone());
            for id in ["m-handled", "m-parked", "m-killed", "m-new"] {
                let (at, payload) = ("orders.created", format!("of {id}"));
                let message = OutgoingMessage::new(at, MessageId::new(id).unwrap(), payload);
                sink.publish(&message).await.unwrap();
            }
            let (posted, mut received) = unbounded_channel();
            let service = Router::new().fallback(move |headers: HeaderMap| {
                posted.send(headers["webhook-id"].to_str().unwrap().to_owned()).unwrap();
                async { "" }
            });
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let to = format!("http://{}/invoices", listener.local_addr().unwrap());
            tokio::spawn(async move { axum::serve(listener, service).await });

            let (at, from, database) = (store.at(), broker.url(), database.url("postgres"));
            let consumer =
                ["--from", &from, "--stream", "ORDERS", "--consumer", "invoices", "--to", &to];
            let own = ["--database", &database, "--lease", "1s", "--retention", "36500d"];
            let flags = words(&[&consumer[..], &own, &["--store-must-exist"]].concat(), &at);
            let process = blocking(|| ConsumeProcess::start(&flags));
            let mut ids = [received.recv().await.unwrap(), received.recv().await.unwrap()];
            ids.sort();
            assert_eq!(ids, ["m-killed", "m-new"]);
            until_empty(&context).await;
            assert!(received.is_empty());

            // The dead letters of the others are not in their fixtures.
            if store.store.starts_with("postgres:") {
                let redrive = ["messages", "redrive", "--consumer", "invoices", "--to", &from];
                let why = ["--reason", "fixed", "--database", &database];
                blocking(|| ok(&words(&[&redrive[..], &why].concat(), &at)));
                assert_eq!(received.recv().await.unwrap(), "m-parked");
                until_empty(&context).await;
            }
            assert!(received.is_empty());
            blocking(|| process.end());
        }

        /// Waits until the broker has no message that is not acknowledged.
        async fn until_empty(context: &hapax_nats::JetStream) {
            let stream = context.get_stream("ORDERS").await.unwrap();
            loop {
                let info = stream.consumer_info("invoices").await.unwrap();
                if info.num_pending == 0 && info.num_ack_pending == 0 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }

        async fn empty_database() -> PostgresServer {
            let database = PostgresServer::start().await;
            database.sql("postgres", &migrations()).await;
            database
        }

        #[tokio::test(flavor = "multi_thread")]
        async fn messages_in_a_file_that_were_accepted_are_not_posted_again() {
            let database = empty_database().await;
            messages_that_were_accepted_are_not_posted_again(&Upgraded::file(), &database).await;
        }

        #[tokio::test(flavor = "multi_thread")]
        async fn messages_in_a_database_that_were_accepted_are_not_posted_again() {
            let database = PostgresServer::start().await;
            let store = Upgraded::postgres(&database).await;
            messages_that_were_accepted_are_not_posted_again(&store, &database).await;
        }

        mod redis {
            use super::*;

            #[tokio::test(flavor = "multi_thread")]
            async fn messages_that_were_accepted_are_not_posted_again() {
                let (server, database) = (RedisServer::start().await, empty_database().await);
                let store = Upgraded::redis(&server).await;
                super::messages_that_were_accepted_are_not_posted_again(&store, &database).await;
            }
        }
    }
}
