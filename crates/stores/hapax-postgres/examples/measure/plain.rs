//! The baseline of the measurements: one statement per request, over a number of connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::store::{Draft, Swap};
use hapax_core::{Sealer, SystemEntropy};
use hapax_testkit::servers::PostgresServer;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, NoTls, Statement};

use crate::Outcome;
use crate::work::{Request, Server};

const CLAIM: &str = "INSERT INTO hapax_cells
        (key, tag, state, sealed, fence, lease_until, keep_until, due_at, sweep_at)
    SELECT $1, $2, 'in-flight', $3, now, now + $4, now + $5, now + $5 + $4, now + $5 + $4
    FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS now) c
    ON CONFLICT (key) DO NOTHING RETURNING fence, lease_until";

const COMPLETE: &str = "UPDATE hapax_cells SET tag = $3, state = 'done', sealed = $4,
        lease_until = now, keep_until = now + $5, due_at = now + $5 + $6
    FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8 AS now) c
    WHERE key = $1 AND tag = $2 RETURNING fence, lease_until";

/// Connections that callers share.
pub(crate) struct Pool {
    connections: Vec<Mutex<Connection>>,
    next: AtomicUsize,
    sealer: Sealer,
    prepared: bool,
}

struct Connection {
    client: Client,
    claim: Statement,
    complete: Statement,
}

type Parameters<'a> = [(&'a (dyn ToSql + Sync), Type)];

impl Pool {
    pub(crate) async fn new(
        server: &PostgresServer,
        connections: usize,
        prepared: bool,
    ) -> Outcome<Self> {
        let mut all = Vec::new();
        for _ in 0..connections {
            let (client, driver) = tokio_postgres::connect(&server.url("postgres"), NoTls).await?;
            tokio::spawn(driver);
            let claim = client.prepare(CLAIM).await?;
            let complete = client.prepare(COMPLETE).await?;
            all.push(Mutex::new(Connection { client, claim, complete }));
        }
        let next = AtomicUsize::new(0);
        Ok(Self { connections: all, next, sealer: Sealer::checksum(), prepared })
    }

    async fn one(&self, claim: bool, parameters: &Parameters<'_>) -> Outcome<()> {
        // Each request waits for the next connection in order, as in a fair pool.
        let at = self.next.fetch_add(1, Ordering::Relaxed) % self.connections.len();
        let connection = self.connections[at].lock().await;
        let rows = if self.prepared {
            let values: Vec<_> = parameters.iter().map(|(value, _)| *value).collect();
            let statement = if claim { &connection.claim } else { &connection.complete };
            connection.client.query(statement, &values).await?
        } else {
            let text = if claim { CLAIM } else { COMPLETE };
            connection.client.query_typed(text, parameters).await?
        };
        if rows.len() == 1 { Ok(()) } else { Err("not one row".into()) }
    }

    fn seal(&self, swap: &Swap) -> Outcome<Vec<u8>> {
        Ok(self.sealer.seal(&swap.id, swap.write_id, &swap.draft.record, &SystemEntropy)?)
    }
}

fn micros(duration: Duration) -> i64 {
    duration.as_micros() as i64
}

impl Server for Pool {
    async fn serve(&self, request: Request) -> Outcome<Duration> {
        let Request { claim, complete } = request;
        let sealed = self.seal(&claim)?;
        let Draft { record, lease, .. } = &claim.draft;
        let (lease, keep) = (micros(*lease), micros(record.terms.retention));
        let key = &claim.id.as_bytes()[..];
        let first = &claim.write_id.as_bytes()[..];
        let before = Instant::now();
        self.one(
            true,
            &[
                (&key, Type::BYTEA),
                (&first, Type::BYTEA),
                (&sealed, Type::BYTEA),
                (&lease, Type::INT8),
                (&keep, Type::INT8),
            ],
        )
        .await?;
        let took = before.elapsed();
        let sealed = self.seal(&complete)?;
        let second = &complete.write_id.as_bytes()[..];
        self.one(
            false,
            &[
                (&key, Type::BYTEA),
                (&first, Type::BYTEA),
                (&second, Type::BYTEA),
                (&sealed, Type::BYTEA),
                (&keep, Type::INT8),
                (&lease, Type::INT8),
            ],
        )
        .await?;
        Ok(took)
    }
}
