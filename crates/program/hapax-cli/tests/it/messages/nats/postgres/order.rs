//! Dead letters with an order key: redriven in order, whatever is selected, and until the key is free.

use std::sync::Mutex;

use hapax_core::{DefiniteVerdict, Resolve, Store as _};
use hapax_nats::NatsOrderKey;

use super::*;
use crate::world::run;

/// An ordered consumer in claim mode, whose records are in PostgreSQL.
struct Ordered {
    world: World,
    url: String,
    store: Arc<PostgresStore>,
    engine: Idempotency,
    rejects: Arc<AtomicBool>,
    /// Ids of the messages for which the handler was called.
    called: Arc<Mutex<Vec<String>>>,
}

/// The consumer while it runs.
struct Running {
    stop: oneshot::Sender<()>,
    consumer: JoinHandle<bool>,
}

impl Running {
    async fn stop(self) {
        self.stop.send(()).unwrap();
        assert!(self.consumer.await.unwrap());
    }
}

impl Ordered {
    /// Starts a world with dead letters of `a-1` (rejected), `a-2` and `a-3` (blocked).
    async fn start() -> (Self, Running) {
        Self::start_in("").await
    }

    /// Starts such a world with a consumer of a namespace.
    async fn start_in(namespace: &str) -> (Self, Running) {
        let world = World::start().await;
        let url = world.database.url("postgres");
        let options = url.parse::<PostgresOptions>().unwrap();
        let store = Arc::new(PostgresStore::connect(options).await.unwrap());
        let engine = Idempotency::builder(Arc::clone(&store)).namespace(namespace).build().unwrap();
        let rejects = Arc::new(AtomicBool::new(true));
        let this = Self { world, url, store, engine, rejects, called: Arc::default() };
        let running = this.run().await;
        for id in ["a-1", "a-2", "a-3"] {
            this.publish(id, None).await;
        }
        this.world.until("SELECT count(*) FROM hapax_dead_letters", "3").await;
        let reasons = "SELECT string_agg(message_id || ' ' || reason, ', ' ORDER BY message_id)
            FROM hapax_dead_letters";
        assert_eq!(this.world.sql(reasons).await, "a-1 rejected, a-2 blocked, a-3 blocked");
        assert_eq!(this.take_called(), ["a-1"]);
        (this, running)
    }

    async fn run(&self) -> Running {
        let dead_letters = Arc::new(PgDeadLetterStore::new(&connections(self.url.clone())));
        let inbox = Inbox::builder("payments", self.engine.clone());
        let inbox = inbox.reexecute().ordered().dead_letters(dead_letters).build().unwrap();
        let source = NatsSource::builder(self.world.context.clone(), "ORDERS", "payments")
            .ack_wait(Duration::from_secs(2))
            .order_key(NatsOrderKey::Header("message-order-key".to_owned()));
        let source = Arc::new(source.start().await.unwrap());
        let (rejects, called) = (Arc::clone(&self.rejects), Arc::clone(&self.called));
        let handler = move |message: MessageExecution| {
            called.lock().unwrap().push(message.id().to_string());
            std::future::ready(match rejects.load(Ordering::SeqCst) {
                true => Err(MessageFailure::reject("no such customer")),
                false => Ok(()),
            })
        };
        let consumer = Consumer::new(inbox, source, handler, ConsumerLimits::default()).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let consumer = tokio::spawn(consumer.run(async {
            let _ = stopped.await;
        }));
        Running { stop, consumer }
    }

    /// Publishes a message of the key `a`, perhaps as a redrive of a dead letter does.
    async fn publish(&self, id: &str, redriven: Option<&str>) {
        let payload = format!("payload of {id}");
        let mut message =
            OutgoingMessage::new("orders.created", MessageId::new(id).unwrap(), payload);
        message.key = Some("a".to_owned());
        message.broker_id = Some(format!("{id} {redriven:?}"));
        if let Some(dead_letter) = redriven {
            message.headers.push(("hapax-redrive".to_owned(), dead_letter.to_owned().into()));
        }
        NatsSink::new(self.world.context.clone()).publish(&message).await.unwrap();
    }

    /// Releases the record of a parked message.
    async fn release(&self, id: &str) {
        let key = MessageId::new(id).unwrap().to_key();
        let id = self.engine.operation_id(&Inbox::scope("payments"), &key);
        let fence = self.store.load(&id).await.unwrap().stored.unwrap().fence;
        let resolution = DefiniteVerdict::DidNotHappen;
        let resolve = Resolve {
            expected: fence,
            force: false,
            forget: true,
            resolution,
            note: None,
            restart: false,
        };
        self.engine.resolve(id, resolve).await.unwrap();
    }

    async fn dead_letter(&self, id: &str) -> String {
        let text = "SELECT encode(id, 'hex') FROM hapax_dead_letters WHERE message_id = ";
        self.world.sql(&format!("{text}'{id}'")).await
    }

    fn take_called(&self) -> Vec<String> {
        std::mem::take(&mut self.called.lock().unwrap())
    }

    /// Returns the arguments of a redrive of `selected`.
    fn redrive<'a>(&'a self, selected: &[&'a str], broker: &'a str) -> Vec<&'a str> {
        let start = ["messages", "redrive", "--reason", "a test", "--database", &*self.url];
        [&start[..], &["--store", &*self.url, "--to", broker], selected].concat()
    }
}

/// Runs a redrive that fails, perhaps after it has published some messages.
fn failed(words: &[&str]) -> (Option<i32>, String) {
    let output = blocking(|| run(words));
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

const BEHIND: &str = "behind older ones, which were not redriven";

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_key_that_are_named_in_any_order_are_redriven_behind_older_ones_only() {
    let (world, running) = Ordered::start().await;
    let broker = world.world.broker.url();
    world.rejects.store(false, Ordering::SeqCst);
    // The oldest is not among them.
    let blocked = ["--consumer", "payments", "--parked-as", "blocked"];
    let (code, said) = failed(&world.redrive(&blocked, &broker));
    assert!(code == Some(1) && said.contains("found 2 behind older ones"), "{code:?} {said}");
    let of = |id: &'static str| world.dead_letter(id);
    let (first, second, third) = (of("a-1").await, of("a-2").await, of("a-3").await);
    let (code, said) = failed(&world.redrive(&[&third, &first], &broker));
    assert!(code == Some(1) && said.contains(BEHIND), "{code:?} {said}");
    assert_eq!(world.take_called(), ["a-1"]);
    // The others stay, and block their key.
    world.publish("a-4", None).await;
    world.world.until("SELECT count(*) FROM hapax_dead_letters", "3").await;
    let fourth = world.dead_letter("a-4").await;
    let said = blocking(|| ok(&world.redrive(&[&third, &second, &third, &fourth], &broker)));
    assert!(said.contains("3 published"), "{said}");
    assert_eq!(world.take_called(), ["a-2", "a-3", "a-4"]);
    assert_eq!(world.world.sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_redriven_in_a_second_run_is_not_handled_before_one_that_fails_again() {
    let (world, running) = Ordered::start().await;
    let broker = world.world.broker.url();
    running.stop().await;
    let (first, second) = (world.dead_letter("a-1").await, world.dead_letter("a-2").await);
    // Published; the consumer that would handle it does not run.
    let only = world.redrive(&[&first, "--wait", "10ms"], &broker);
    let (code, said) = failed(&only);
    assert!(code == Some(1) && said.contains("within --wait"), "{code:?} {said}");
    let (code, said) = failed(&world.redrive(&[&second], &broker));
    assert!(code == Some(1) && said.contains(BEHIND), "{code:?} {said}");
    // As another command would: both copies are in the stream.
    world.release("a-2").await;
    world.publish("a-2", Some(&second)).await;
    world.world.sql("UPDATE hapax_dead_letters SET last_at = 'epoch'").await;
    let running = world.run().await;
    let parked = "SELECT count(*) FROM hapax_dead_letters WHERE last_at > 'epoch'";
    world.world.until(parked, "2").await;
    assert_eq!(world.take_called(), ["a-1"]);
    // The key is free after one run for all.
    world.rejects.store(false, Ordering::SeqCst);
    blocking(|| ok(&world.redrive(&["--consumer", "payments"], &broker)));
    assert_eq!(world.take_called(), ["a-1", "a-2", "a-3"]);
    assert_eq!(world.world.sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
    running.stop().await;
}

/// Redrives dead letters by name, while `a-4` and `a-5` arrive. Returns what the command printed.
async fn redrive_while_two_arrive(world: &Ordered, running: Running, selected: &[&str]) -> String {
    let broker = world.world.broker.url();
    world.rejects.store(false, Ordering::SeqCst);
    running.stop().await;
    let mut named = Vec::new();
    for id in selected {
        named.push(world.dead_letter(id).await);
    }
    let named: Vec<_> = named.iter().map(String::as_str).collect();
    let words: Vec<_> = world.redrive(&named, &broker).into_iter().map(str::to_owned).collect();
    let redriving = tokio::task::spawn_blocking(move || {
        ok(&words.iter().map(String::as_str).collect::<Vec<_>>())
    });
    // Then it waits for the consumer.
    let begun = "SELECT redrives FROM hapax_dead_letters WHERE message_id = 'a-1'";
    world.world.until(begun, "1").await;
    for id in ["a-4", "a-5"] {
        world.publish(id, None).await;
    }
    let running = world.run().await;
    let said = redriving.await.unwrap();
    running.stop().await;
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_arrive_while_named_dead_letters_of_their_key_are_redriven_are_too() {
    let (world, running) = Ordered::start().await;
    let said = redrive_while_two_arrive(&world, running, &["a-1", "a-2", "a-3"]).await;
    assert!(said.contains("5 published"), "{said}");
    assert_eq!(world.take_called(), ["a-1", "a-2", "a-3", "a-4", "a-5"]);
    assert_eq!(world.world.sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_arrive_behind_a_dead_letter_that_is_not_named_stay() {
    let (world, running) = Ordered::start().await;
    let said = redrive_while_two_arrive(&world, running, &["a-1"]).await;
    assert!(said.contains("1 published"), "{said}");
    assert_eq!(world.take_called(), ["a-1"]);
    let running = world.run().await;
    world.world.until("SELECT count(*) FROM hapax_dead_letters", "4").await;
    running.stop().await;
    let left = "SELECT string_agg(message_id, ' ' ORDER BY number) FROM hapax_dead_letters";
    assert_eq!(world.world.sql(left).await, "a-2 a-3 a-4 a-5");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_arrive_while_their_key_is_redriven_are_redriven_too() {
    let (world, running) = Ordered::start().await;
    let broker = world.world.broker.url();
    world.rejects.store(false, Ordering::SeqCst);
    let redriving = async {
        tokio::task::spawn_blocking({
            let words = world.redrive(&["--consumer", "payments"], &broker);
            let words: Vec<_> = words.into_iter().map(str::to_owned).collect();
            move || ok(&words.iter().map(String::as_str).collect::<Vec<_>>())
        })
        .await
        .unwrap()
    };
    // Each is received before the next is published.
    let arriving = async {
        for number in 4..24 {
            world.publish(&format!("a-{number}"), None).await;
            let has_it = format!(
                "SELECT EXISTS (SELECT FROM hapax_dead_letters WHERE message_id = 'a-{number}')"
            );
            let is_handled = || world.called.lock().unwrap().contains(&format!("a-{number}"));
            while !is_handled() && world.world.sql(&has_it).await == "f" {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    };
    let (said, ()) = tokio::join!(redriving, arriving);
    let published = said.lines().filter(|line| line.contains(" published,")).count() - 1;
    assert!(published > 3, "none arrived meanwhile: {said}");
    assert_eq!(world.world.sql("SELECT count(*) FROM hapax_dead_letters").await, "0");
    // The key is free.
    world.publish("a-24", None).await;
    let last = || world.called.lock().unwrap().last().cloned();
    while last().as_deref() != Some("a-24") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let expected: Vec<_> = (1..25).map(|number| format!("a-{number}")).collect();
    assert_eq!(world.take_called(), expected);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_consumer_in_a_namespace_are_redriven_in_its_records() {
    let (world, running) = Ordered::start_in("shop").await;
    let broker = world.world.broker.url();
    world.rejects.store(false, Ordering::SeqCst);
    // The consumer of that name in the default namespace has none.
    let said = blocking(|| ok(&world.redrive(&["--consumer", "payments"], &broker)));
    assert_eq!(said, "no dead letters\n");
    // A dead letter states its namespace.
    let of = |id: &'static str| world.dead_letter(id);
    let (first, second, third) = (of("a-1").await, of("a-2").await, of("a-3").await);
    let said = blocking(|| ok(&world.redrive(&[&first, &second, &third], &broker)));
    assert!(said.contains("published, records released: 3"), "{said}");
    assert_eq!(world.take_called(), ["a-1", "a-2", "a-3"]);
    world.rejects.store(true, Ordering::SeqCst);
    world.publish("a-5", None).await;
    world.world.until("SELECT count(*) FROM hapax_dead_letters", "1").await;
    world.rejects.store(false, Ordering::SeqCst);
    assert_eq!(world.take_called(), ["a-5"]);
    let of_shop = ["--consumer", "payments", "--namespace", "shop"];
    let said = blocking(|| ok(&world.redrive(&of_shop, &broker)));
    assert!(said.contains("1 published, records released: 1"), "{said}");
    assert_eq!(world.take_called(), ["a-5"]);
    running.stop().await;
}
