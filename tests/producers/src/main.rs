//! The program `hapax-producers`, which `cargo xtask producers` runs. Frameworks publish messages with their defaults, and
//! hostile ones. A consumer whose service rejects each message makes dead letters of them; redriven, each is what it was;
//! and a service that accepts them gets each once.
#![allow(clippy::print_stdout, reason = "a program")]

mod amqp;
mod broker;
mod program;
mod raw;
mod run;
mod service;

use std::process::ExitCode;

use clap::Parser;
use hapax_testkit::servers::{NatsServer, PostgresServer, RabbitMqServer};

use broker::{Kind, Servers};

/// A framework, and the rules by which its messages have ids.
pub(crate) struct Producer {
    name: &'static str,
    script: &'static str,
    kind: Kind,
    ids: [&'static str; 2],
}

const fn producer(name: &'static str, kind: Kind, ids: [&'static str; 2]) -> Producer {
    Producer { name, script: "producers.py", kind, ids }
}

/// Only aio-pika and FastStream for RabbitMQ give each message an id, the property `message-id`.
const POSITION: [&str; 2] = ["header:message-id", "position"];
const PAYLOAD: [&str; 2] = ["header:message-id", "payload-hash"];

const PRODUCERS: [Producer; 11] = [
    producer("kombu", Kind::Rabbitmq, PAYLOAD),
    producer("celery", Kind::Rabbitmq, ["header:message-id", "header:id"]),
    producer("pika", Kind::Rabbitmq, PAYLOAD),
    producer("aio-pika", Kind::Rabbitmq, PAYLOAD),
    producer("faststream-rabbit", Kind::Rabbitmq, PAYLOAD),
    Producer { script: "producers.js", ..producer("amqplib", Kind::Rabbitmq, PAYLOAD) },
    producer("nats-py", Kind::Nats, POSITION),
    producer("faststream-nats", Kind::Nats, POSITION),
    producer("confluent-kafka", Kind::Kafka, POSITION),
    producer("faststream-kafka", Kind::Kafka, POSITION),
    Producer { script: "producers.js", ..producer("kafkajs", Kind::Kafka, POSITION) },
];

/// Consumes and redrives messages that frameworks publish
#[derive(Parser)]
struct Args {
    /// Messages of each framework
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(20..))]
    messages: u32,
    /// Only these frameworks
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    only: Vec<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let is_chosen = |producer: &&Producer| {
        args.only.is_empty() || args.only.iter().any(|name| name == producer.name)
    };
    let chosen: Vec<_> = PRODUCERS.iter().filter(is_chosen).collect();
    let has = |kind| chosen.iter().any(|producer| producer.kind == kind);
    let mut servers = Servers { rabbitmq: None, nats: None };
    if has(Kind::Rabbitmq) {
        servers.rabbitmq = Some(RabbitMqServer::start().await);
    }
    if has(Kind::Nats) {
        servers.nats = Some(NatsServer::start().await);
    }
    let database = PostgresServer::start().await;
    let (mut passed, mut failed) = (0, 0);
    for producer in chosen {
        let messages = usize::try_from(args.messages).unwrap_or(usize::MAX);
        let faults = match run::run(producer, messages, &servers, &database).await {
            Ok(faults) => faults,
            Err(error) => vec![error.to_string()],
        };
        let verdict = if faults.is_empty() { "ok" } else { "FAILED" };
        println!("{}: {verdict}", producer.name);
        for fault in &faults {
            println!("    {fault}");
        }
        *if faults.is_empty() { &mut passed } else { &mut failed } += 1;
    }
    println!("{passed} passed, {failed} failed");
    match (passed, failed) {
        (1.., 0) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
