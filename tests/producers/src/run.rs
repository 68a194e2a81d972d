//! The run of one producer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hapax_testkit::servers::PostgresServer;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::Producer;
use crate::broker::{Kind, Outcome, Place, Servers};
use crate::program::{self, Consumer};
use crate::raw::{Raw, differences};
use crate::service::Service;

/// Name of the consumer.
const CONSUMER: &str = "invoices";

/// Time without progress after which a consumer is stuck.
const STUCK: Duration = Duration::from_secs(30);

struct Run<'a> {
    producer: &'a Producer,
    messages: usize,
    database: &'a PostgresServer,
    place: Place<'a>,
    service: Service,
    flags: Vec<String>,
    faults: Vec<String>,
}

/// Publishes, rejects, redrives and accepts the messages of a producer. Returns what is wrong.
pub(crate) async fn run(
    producer: &Producer,
    messages: usize,
    servers: &Servers,
    database: &PostgresServer,
) -> Outcome<Vec<String>> {
    let name = producer.name.replace('-', "_");
    database.create_database(&name).await;
    let script = program::run(&["sql"]).await?;
    database.sql(&name, script.trim_start_matches("\\set ON_ERROR_STOP on\n")).await;
    let (place, service) =
        (Place::create(servers, producer.kind, &name).await?, Service::default());
    let address = service.serve().await?;
    let mut flags = place.flags();
    let rest = [
        ["--consumer", CONSUMER],
        ["--to", &format!("http://{address}/orders")],
        ["--store", &database.url(&name)],
        ["--id", producer.ids[0]],
        ["--id", producer.ids[1]],
    ];
    flags.extend(rest.concat().into_iter().map(str::to_owned));
    let faults = Vec::new();
    let mut run = Run { producer, messages, database, place, service, flags, faults };

    let count = messages.to_string();
    let arguments = [producer.name, &run.place.address(), &name, &count];
    let summary = program::produce(producer.script, &arguments).await?;
    let summary: Value = serde_json::from_str(&summary)?;
    println!("{}: rejected by the client: {}", producer.name, summary["rejected"]);
    let first = run.place.read().await?;
    run.expect("messages of the producer", messages, first.len());
    run.reject(&summary, &first).await?;
    run.redrive(&first).await?;
    run.accept(&first).await?;
    Ok(run.faults)
}

impl Run<'_> {
    fn expect(&mut self, what: &str, expected: usize, found: usize) {
        if expected != found {
            self.faults.push(format!("{what}: expected {expected}, found {found}"));
        }
    }

    async fn sql(&self, text: &str) -> String {
        self.database.sql(&self.producer.name.replace('-', "_"), text).await
    }

    async fn dead_letters(&self) -> usize {
        self.sql("SELECT count(*) FROM hapax_dead_letters").await.parse().unwrap_or_default()
    }

    /// Runs a consumer until each message is posted or a dead letter, and nothing is left at the broker.
    async fn consume(&mut self, phase: &str) -> Outcome<()> {
        let log = format!("{}-{phase}", self.producer.name);
        let mut consumer = Consumer::start(&log, &self.flags).await?;
        let (mut seen, mut since) = ((0, 0, 0), Instant::now());
        loop {
            consumer.check()?;
            // Of a NATS consumer that is not there yet.
            let left = self.place.left(CONSUMER).await.unwrap_or(u64::MAX);
            let now = (left, self.service.count(), self.dead_letters().await);
            if left == 0 {
                break;
            }
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > STUCK {
                let (left, posted, parked) = now;
                self.faults.push(format!(
                    "{phase}: the consumer is stuck: {left} messages are left, {posted} were posted, {parked} are dead \
                     letters; see logs/{log}.json"
                ));
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        consumer.end().await
    }

    /// Each message is posted once, and becomes a dead letter for the answer, or for its id or age.
    async fn reject(&mut self, summary: &Value, first: &[Raw]) -> Outcome<()> {
        self.consume("rejected").await?;
        let expected = |reason: &str| {
            summary[reason].as_u64().and_then(|it| usize::try_from(it).ok()).unwrap_or_default()
        };
        let others = ["no-id", "too-old"].map(|reason| (reason, expected(reason)));
        let rejected = self.messages - others.iter().map(|(_, count)| count).sum::<usize>();
        for (reason, count) in others.into_iter().chain([("rejected", rejected)]) {
            let text = format!("SELECT count(*) FROM hapax_dead_letters WHERE reason = '{reason}'");
            let found = self.sql(&text).await.parse().unwrap_or_default();
            self.expect(&format!("dead letters with the reason {reason}"), count, found);
        }
        let others = "error NOT LIKE '%422%' AND reason NOT IN ('no-id', 'too-old')";
        self.note_parked("parked without the answer 422", others).await;
        let text = format!("SELECT count(*) FROM hapax_dead_letters WHERE {others}");
        let unposted = self.sql(&text).await.parse().unwrap_or_default();
        let rejected = rejected.saturating_sub(unposted);
        self.check_posts("rejected", rejected, first);
        Ok(())
    }

    /// Notes the dead letters that are none, by their errors.
    async fn note_parked(&mut self, what: &str, condition: &str) {
        let text = format!(
            "SELECT string_agg(line, E'\\n') FROM (SELECT format('%s of %s: %s', count(*), reason, error) AS line FROM \
             (SELECT reason, left(regexp_replace(error, '\"[^\"]*\"|found \\d+', '…', 'g'), 200) AS error FROM \
             hapax_dead_letters WHERE {condition}) AS parked GROUP BY reason, error ORDER BY 1) AS lines"
        );
        let parked = self.sql(&text).await;
        let parked = parked.lines().filter(|line| !line.is_empty());
        self.faults.extend(parked.map(|line| format!("{what}: {line}")));
    }

    /// Checks that each id was posted once, and only payloads of the producer.
    fn check_posts(&mut self, phase: &str, expected: usize, first: &[Raw]) {
        let posted = self.service.take();
        self.expect(&format!("{phase}: posts"), expected, posted.len());
        let ids: BTreeSet<_> = posted.iter().map(|(id, _)| id).collect();
        self.expect(&format!("{phase}: ids that were posted"), posted.len(), ids.len());
        let mut payloads: BTreeMap<&[u8], usize> = BTreeMap::new();
        for raw in first {
            *payloads.entry(&raw.payload).or_default() += 1;
        }
        let is_other = |(_, body): &&(String, Vec<u8>)| match payloads.get_mut(&body[..]) {
            Some(left @ 1..) => {
                *left -= 1;
                false
            }
            _ => true,
        };
        let others = posted.iter().filter(is_other).count();
        self.expect(&format!("{phase}: posts that are no message of the producer"), 0, others);
    }

    /// Each redriven message is what it was.
    async fn redrive(&mut self, first: &[Raw]) -> Outcome<()> {
        let database = self.database.url(&self.producer.name.replace('-', "_"));
        let command =
            ["messages", "redrive", "--consumer", CONSUMER, "--new-id", "--reason", "mended"];
        let places = ["--database", &database, "--store", &database, "--to", &self.place.to()];
        let parked = self.dead_letters().await;
        if let Err(error) = program::run(&[&command[..], &places].concat()).await {
            self.faults.push(format!("redrive: {error}"));
        }
        let redriven = self.place.read().await?;
        self.expect("redriven messages", parked, redriven.len());
        let mut by_payload: BTreeMap<&[u8], Vec<&Raw>> = BTreeMap::new();
        for raw in first {
            by_payload.entry(&raw.payload).or_default().push(raw);
        }
        let mut differ: BTreeMap<String, (usize, String)> = BTreeMap::new();
        for raw in &redriven {
            let candidates = by_payload.entry(&raw.payload).or_default();
            let compared = candidates.iter().map(|was| differences(self.producer.kind, was, raw));
            let closest = compared.enumerate().min_by_key(|(_, found)| found.len());
            let Some((at, found)) = closest else {
                self.faults
                    .push(format!("redriven: the payload {} is new", raw.payload.escape_ascii()));
                continue;
            };
            candidates.swap_remove(at);
            for (field, text) in found {
                differ.entry(field).or_insert((0, text)).0 += 1;
            }
        }
        let differ = differ.into_iter();
        self.faults.extend(differ.map(|(field, (count, text))| {
            format!("redriven: {field} of {count} messages differs, for example: {text}")
        }));
        Ok(())
    }

    /// Each redriven message is accepted once. Those that are too old stay dead letters.
    async fn accept(&mut self, first: &[Raw]) -> Outcome<()> {
        self.service.accept();
        self.consume("accepted").await?;
        let left = self.dead_letters().await;
        self.note_parked("parked after the redrive", "true").await;
        self.check_posts("accepted", self.messages - left, first);
        if self.producer.kind == Kind::Nats {
            let published = self.place.read().await?.len();
            self.expect("messages after the redrive", 0, published);
        }
        Ok(())
    }
}
