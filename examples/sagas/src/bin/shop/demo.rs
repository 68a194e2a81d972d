//! The demo: runs the three processes, kills each in the middle of sagas, and prints what happened.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::Stdio;
use std::time::Duration;

use axum::http::Method;
use hapax_sagas_examples::{ProgramError, Remote};
use serde_json::Value;
use sqlx::PgPool;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::order::Order;
use crate::table::{Counts, EFFECTS, Row, Table, Wish};

/// The processes, in the order in which they start.
const NAMES: [&str; 3] = ["stock", "payment", "order"];
const STOCK: usize = 0;
const PAYMENT: usize = 1;
const ORDER: usize = 2;

/// Number of orders that are placed at one time.
const BATCH: usize = 9;

/// Attempts to kill a process in a given part of a saga, which may be over too soon.
const ATTEMPTS: u32 = 100;

/// Time within which a process must listen, and all orders must end.
const LIMIT: Duration = Duration::from_secs(120);

/// Part of a saga.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    /// Between two steps.
    Forward,
    /// Before the last undo.
    Undoing,
}

/// Returns true if the demo printed a table without a wrong row.
pub(crate) async fn run(databases: &[String; 2], folder: &str) -> Result<bool, ProgramError> {
    let mut demo = Demo::start(databases, folder).await?;
    for process in [ORDER, PAYMENT, STOCK] {
        for part in [Part::Forward, Part::Undoing] {
            let sagas = demo.hit(process, part).await?;
            println!("killed {} in the middle of {sagas} sagas: {part:?}", NAMES[process]);
        }
    }
    let table = timeout(LIMIT, demo.table()).await??;
    println!("{table}");
    Ok(table.is_right())
}

struct Demo {
    arguments: [Vec<String>; 3],
    ports: [u16; 3],
    processes: Vec<Child>,
    pools: [PgPool; 2],
    shop: Remote,
    orders: Vec<(String, Wish)>,
}

impl Demo {
    async fn start([stock, payment]: &[String; 2], folder: &str) -> Result<Self, ProgramError> {
        std::fs::create_dir_all(folder)?;
        let ports = ports()?;
        let [at_stock, at_payment, at_order] = ports.map(|port| format!("127.0.0.1:{port}"));
        let url = |address: &str| format!("http://{address}");
        let shop = Remote::new(url(&at_order));
        let services = [url(&at_stock), url(&at_payment)];
        let file = format!("{folder}/orders.db");
        let arguments = [
            vec![at_stock, stock.clone()],
            vec![at_payment, payment.clone()],
            [vec![at_order, file], services.to_vec()].concat(),
        ];
        let pools = [PgPool::connect(stock).await?, PgPool::connect(payment).await?];
        let (processes, orders) = (Vec::new(), Vec::new());
        let mut demo = Self { arguments, ports, processes, pools, shop, orders };
        for process in [STOCK, PAYMENT, ORDER] {
            let child = demo.spawn(process).await?;
            demo.processes.push(child);
        }
        match demo.effects().await?.len() {
            0 => Ok(demo),
            found => Err(format!("expected new databases, found {found} orders").into()),
        }
    }

    async fn spawn(&self, process: usize) -> Result<Child, ProgramError> {
        let child = Command::new(std::env::current_exe()?)
            .arg(NAMES[process])
            .args(&self.arguments[process])
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let listens = async {
            while TcpStream::connect(("127.0.0.1", self.ports[process])).await.is_err() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LIMIT, listens).await?;
        Ok(child)
    }

    /// Kills a process in this part of at least one saga, and starts it again. Returns the number of
    /// sagas that were there once it was dead.
    async fn hit(&mut self, process: usize, part: Part) -> Result<usize, ProgramError> {
        for _ in 0..ATTEMPTS {
            self.place().await?;
            while self.in_part(process, part).await? == 0 && !self.are_over().await? {
                sleep(Duration::from_millis(1)).await;
            }
            self.processes[process].kill().await?;
            let sagas = self.in_part(process, part).await?;
            self.processes[process] = self.spawn(process).await?;
            if sagas > 0 {
                return Ok(sagas);
            }
        }
        Err(format!("expected a saga of which {} is killed, found none", NAMES[process]).into())
    }

    /// Places orders. A request that gets no answer is sent again, under the same key.
    async fn place(&mut self) -> Result<(), ProgramError> {
        for _ in 0..BATCH {
            let number = self.orders.len();
            let (id, wish) = (format!("o-{}", number + 1), Wish::ALL[number % Wish::ALL.len()]);
            let order = Order {
                id: id.clone(),
                article: if wish == Wish::Vase { "vase" } else { "lamp" }.to_owned(),
                card: if wish == Wish::ExpiredCard { "expired" } else { "visa" }.to_owned(),
                cents: 1_999,
            };
            let headers = [("idempotency-key", id.as_str()), ("prefer", "respond-async")];
            let body = serde_json::to_vec(&order)?;
            let placing = async {
                loop {
                    let sent = self.shop.send(Method::POST, "/orders", &headers, body.clone());
                    match sent.await {
                        Ok(answer) if answer.status.as_u16() < 500 => break,
                        _ => sleep(Duration::from_millis(20)).await,
                    }
                }
            };
            timeout(LIMIT, placing).await?;
            self.orders.push((id, wish));
        }
        Ok(())
    }

    /// Returns the number of sagas that are in this part, with a step or an undo of `process` ahead.
    async fn in_part(&self, process: usize, part: Part) -> Result<usize, ProgramError> {
        let effects = self.effects().await?;
        let is_there = |(order, wish): &&(String, Wish)| {
            let [reserved, charged, shipped, refunded, freed] =
                effects.get(order).copied().unwrap_or_default().map(|count| count > 0);
            match (part, wish) {
                (Part::Forward, Wish::Lamp) => match process {
                    PAYMENT => reserved && !charged,
                    STOCK => charged && !shipped,
                    _ => reserved && !shipped,
                },
                (Part::Undoing, Wish::Vase) => match process {
                    PAYMENT => charged && !refunded,
                    _ => refunded && !freed,
                },
                _ => false,
            }
        };
        Ok(self.orders.iter().filter(is_there).count())
    }

    async fn are_over(&self) -> Result<bool, ProgramError> {
        let effects = self.effects().await?;
        let is_over = |(order, wish): &(String, Wish)| effects.get(order) == Some(&wish.end().1);
        Ok(self.orders.iter().all(is_over))
    }

    /// Returns the effects on each order that has any.
    async fn effects(&self) -> Result<BTreeMap<String, Counts>, ProgramError> {
        let mut effects = BTreeMap::<String, Counts>::new();
        for pool in &self.pools {
            let text = "SELECT order_id, effect, count(*) FROM effects GROUP BY 1, 2";
            let rows: Vec<(String, String, i64)> = sqlx::query_as(text).fetch_all(pool).await?;
            for (order, effect, count) in rows {
                let counts = effects.entry(order).or_default();
                for (name, total) in EFFECTS.iter().zip(counts) {
                    *total += if *name == effect { count } else { 0 };
                }
            }
        }
        Ok(effects)
    }

    /// Waits for the end of all orders, and returns what happened.
    async fn table(&self) -> Result<Table, ProgramError> {
        let mut states = Vec::new();
        for (order, _) in &self.orders {
            states.push(self.end(order).await);
        }
        let mut effects = self.effects().await?;
        let rows = self.orders.iter().zip(states).map(|((order, wish), state)| {
            let counts = effects.remove(order).unwrap_or_default();
            Row { order: order.clone(), wish: *wish, state, counts }
        });
        Ok(Table(rows.collect()))
    }

    /// Waits for the end of an order. Returns its state.
    async fn end(&self, order: &str) -> String {
        loop {
            let path = format!("/orders/{order}");
            if let Ok(answer) = self.shop.send(Method::GET, &path, &[], Vec::new()).await
                && let Some(state) = answer.body.get("state").and_then(Value::as_str)
                && !["running", "parked"].contains(&state)
            {
                return state.to_owned();
            }
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Returns three free ports below those that the system gives to clients: none of them takes the port
/// of a process that is down.
fn ports() -> Result<[u16; 3], ProgramError> {
    let from = 20_000 + u16::try_from(std::process::id() % 10_000)?;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut free = (from..from + 100).filter(is_free);
    match (free.next(), free.next(), free.next()) {
        (Some(one), Some(two), Some(three)) => Ok([one, two, three]),
        _ => Err("expected three free ports, found fewer: try again".into()),
    }
}
