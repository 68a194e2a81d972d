//! One connection, and transactions on it.
//!
//! 1. A transaction is sent whole, BEGIN to COMMIT, before its first reply is read: one trip, and
//!    one connection to a pooler that hands them out by transaction. It leaves nothing behind in
//!    the session.
//! 2. Its time-outs are set within it, and `statement_timeout` is off again at COMMIT: a COMMIT
//!    that waits for a synchronous standby and is cut short *succeeds*, with a warning, without
//!    that standby. For the same reason nothing here ever sends a cancel request.
//!    COMMIT of a transaction that has failed rolls back and answers without an error, so that it
//!    counts only together with everything before it.
//! 3. A transaction whose future is dropped leaves the connection in a state that nobody knows.
//!    Whoever does that must not use the link again; dropping the link closes the connection.
//!
//! # What is read counts only if it is replicated
//! A COMMIT that waits for a synchronous standby is invisible to others until the wait ends, and
//! PostgreSQL ends it without the standby when the server crashes, when any one of its backends
//! does, and when the waiting backend is terminated. From then on the row is read by everybody, and
//! is lost if the standby is promoted. A read waits for no standby. So a write that waits, in the
//! same transaction as the read or after it, confirms what was read: the log is replicated in its
//! order, so that the standby that has the write has everything that could be read before it.
//!
//! 1. *Once for each backend.* A crash ends every backend of the server (the postmaster kills those
//!    that are left), and with them every connection that was made before: what a crash made
//!    visible is read on new backends only. So [`PgConnection::reach`] confirms before anything that is read
//!    on a new connection is believed. Behind a pooler our connection outlives the backend. That is
//!    what the setting [`CONFIRMED`] of the session is for: it is gone with its backend, and the
//!    next transaction on another backend writes, and waits, by itself.
//! 2. *After a lost reply.* A terminated backend ends alone, and old connections read what it was
//!    waiting for. Where it was ours, its reply is lost, and [`ConnectionSetup::distrust_connections`] has every connection
//!    of the store confirm again in its next transaction: before a swap that is sent again reads its
//!    own write, and before a COMMIT of a caller's is settled.
//! 3. Not covered: somebody ends the wait of another process (`pg_terminate_backend`,
//!    `pg_cancel_backend`). Its row is then read here without a reason to doubt it. Writing in every
//!    transaction that reads would cover that, at the price of a claim for each replay.
//!
//! Whatever is written is confirmed by its own COMMIT, together with what was read for it. Wake-ups
//! (LISTEN) are hints: who gets one loads the record, on a connection that is confirmed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Error, Row, Statement};

use crate::error::{PostgresConnectError, TransactionFailure};
use crate::hosts::Hosts;
use crate::identity::{ExpectedIdentity, recognise};
use crate::options::PostgresOptions;
use crate::secret::{Purpose, agree};
use crate::server_info;
use crate::sql::{Statements, VERBS, Verb, types};
use crate::tls::{Connected, drive};

/// A parameter.
pub(crate) type Parameter<'a> = &'a (dyn ToSql + Sync);

/// What every connection of a store is made by.
#[derive(Debug)]
pub(crate) struct ConnectionSetup {
    pub(crate) options: PostgresOptions,
    pub(crate) statements: Statements,
    /// How long an answer may take, however it turns out.
    pub(crate) answer: Duration,
    begin: String,
    /// What ends a transaction: confirms if the session has not been.
    confirm_once: String,
    /// The same whether or not it has.
    confirm: String,
    /// Everybody was found to use our secret.
    pub(crate) agreed: AtomicBool,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) known: ExpectedIdentity,
    /// Replies lost so far to transactions that may have been committed.
    doubts: AtomicU64,
}

/// A statement and its parameters.
#[derive(Debug)]
pub(crate) struct StatementCall<'a> {
    pub(crate) verb: Verb,
    pub(crate) parameters: Vec<Parameter<'a>>,
}

/// The task that reads and writes; ended when dropped.
#[derive(Debug)]
pub(crate) struct Driving(JoinHandle<()>);

/// A connection; closed when dropped.
#[derive(Debug)]
pub(crate) struct PgConnection {
    client: Client,
    driver: Driving,
    prepared: Option<Vec<Statement>>,
    /// `ConnectionSetup::doubts` when the last write that waited began.
    confirmed: AtomicU64,
}

/// Before COMMIT, which may wait for standbys for as long as it takes.
const PROLONG: &str = "SET LOCAL statement_timeout = 0";

/// The setting of a session in which a write was waited for.
const CONFIRMED: &str = "hapax.confirmed";

/// Writes to the log and nowhere else: COMMIT then waits for synchronous standbys. Every role may.
const WRITE: &str = "pg_logical_emit_message(true, 'hapax', '')::text";

fn confirm(condition: &str) -> String {
    format!(
        "{PROLONG}; SELECT CASE WHEN {condition} \
         THEN {WRITE} || set_config('{CONFIRMED}', 'yes', false) END"
    )
}

impl ConnectionSetup {
    pub(crate) fn new(mut options: PostgresOptions) -> Self {
        let answer = options.timeout;
        let begin = begin(&options, answer * 3 / 4, answer / 4);
        // So that the system gives up on a peer that is gone, too.
        options.config.connect_timeout(answer).tcp_user_timeout(answer.max(Duration::from_secs(1)));
        let statements = Statements::new(options.schema.as_deref(), options.allow_forgetting);
        let hosts = Arc::new(Hosts::of(&options.config));
        let known = ExpectedIdentity::new(options.identity.clone());
        let unconfirmed = format!("current_setting('{CONFIRMED}', true) IS DISTINCT FROM 'yes'");
        Self {
            options,
            statements,
            answer,
            begin,
            confirm_once: confirm(&unconfirmed),
            confirm: confirm("true"),
            agreed: AtomicBool::default(),
            hosts,
            known,
            doubts: AtomicU64::default(),
        }
    }

    /// The reply to a transaction that may have been committed is lost: every connection confirms
    /// again before what is read on it counts. To be called before anybody gets to know of the loss,
    /// so that whatever is sent because of it is sent after this.
    pub(crate) fn distrust_connections(&self) {
        self.doubts.fetch_add(1, Ordering::SeqCst);
    }

    /// For a transaction with others' work in it: it waits for a lock no longer than a quarter of
    /// the time.
    pub(crate) fn begin(&self) -> &str {
        &self.begin
    }

    /// For a transaction that may take `statement`, and wait for a lock for as long as `lock`.
    pub(crate) fn begin_with(&self, statement: Duration, lock: Duration) -> String {
        begin(&self.options, statement, lock)
    }
}

fn begin(options: &PostgresOptions, statement: Duration, lock: Duration) -> String {
    // Whatever the defaults of role and database are: the statements rely on this isolation. Zero
    // would mean no limit. Who vanishes half-way has its locks taken away once nobody waits for an
    // answer any more.
    let mut begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
         SET LOCAL statement_timeout = {}; SET LOCAL lock_timeout = {}; \
         SET LOCAL idle_in_transaction_session_timeout = {}",
        statement.as_millis().max(1),
        lock.as_millis().max(1),
        options.timeout.as_millis().max(1)
    );
    // The setting may have changed since the server was looked at, and a pooler's sessions have
    // those of others.
    if !options.allow_forgetting {
        begin.push_str("; SET LOCAL synchronous_commit = on");
    }
    begin
}

impl PgConnection {
    /// Reaches the primary, and looks whether our secret is the one in use: it may be another server
    /// than before, or the same with older tables.
    pub(crate) async fn open(
        setup: &ConnectionSetup,
        purpose: Purpose,
    ) -> Result<Self, PostgresConnectError> {
        let mut link = Self::reach(setup).await?;
        let opened = async {
            agree(&link.client, setup, purpose).await?;
            recognise(&link.client, setup, purpose).await?;
            link.prepare(setup).await
        };
        timeout(setup.answer, opened).await.unwrap_or(Err(PostgresConnectError::TimedOut))?;
        Ok(link)
    }

    /// Connects to the first host that is a primary, keeps what it acknowledges, and confirms what is
    /// read there. A former primary, from which its standbys have gone, does not confirm.
    pub(crate) async fn reach(setup: &ConnectionSetup) -> Result<Self, PostgresConnectError> {
        let mut failed: Option<PostgresConnectError> = None;
        for attempt in setup.hosts.attempts() {
            match Self::reach_at(setup, attempt.config()).await {
                Ok(link) => {
                    attempt.works();
                    return Ok(link);
                }
                // A standby beside the primary is as it should be: what the primary said counts.
                Err(PostgresConnectError::Standby) if failed.is_some() => {}
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or(PostgresConnectError::TimedOut))
    }

    async fn reach_at(
        setup: &ConnectionSetup,
        config: &Config,
    ) -> Result<Self, PostgresConnectError> {
        let connected = async {
            let link = Self::connect(setup, config).await?;
            server_info::check(&link.client, &setup.options).await?;
            Ok(link)
        };
        let connected = timeout(setup.answer, connected).await;
        let link = connected.unwrap_or(Err(PostgresConnectError::TimedOut))?;
        let confirmed = timeout(setup.answer, link.confirm(setup)).await;
        confirmed.unwrap_or(Err(PostgresConnectError::Unconfirmed))?;
        Ok(link)
    }

    /// Waits until a write on this connection is on every standby that a COMMIT waits for.
    async fn confirm(&self, setup: &ConnectionSetup) -> Result<(), PostgresConnectError> {
        let doubts = setup.doubts.load(Ordering::SeqCst);
        let (began, written, committed) = tokio::join!(
            biased;
            self.client.batch_execute(&setup.begin),
            self.client.batch_execute(&setup.confirm),
            self.client.batch_execute("COMMIT"),
        );
        // In this order: a COMMIT after an error rolls back and says nothing.
        began.and(written).and(committed).map_err(PostgresConnectError::Query)?;
        self.confirmed.store(doubts, Ordering::Relaxed);
        Ok(())
    }

    /// Prepares the statements, if that is wanted.
    pub(crate) async fn prepare(
        &mut self,
        setup: &ConnectionSetup,
    ) -> Result<(), PostgresConnectError> {
        if setup.options.prepare {
            let mut prepared = Vec::with_capacity(VERBS.len());
            for verb in VERBS {
                let text = setup.statements.text(verb);
                let statement = self.client.prepare_typed(text, types(verb)).await;
                prepared.push(statement.map_err(PostgresConnectError::Query)?);
            }
            self.prepared = Some(prepared);
        }
        Ok(())
    }

    /// Connects only. What is read on it was not confirmed.
    pub(crate) async fn connect(
        setup: &ConnectionSetup,
        config: &Config,
    ) -> Result<Self, PostgresConnectError> {
        let Connected { client, driver } =
            setup.options.connector.connect(config).await.map_err(PostgresConnectError::Connect)?;
        let driver = Driving(tokio::spawn(drive(driver, drop)));
        Ok(Self { client, driver, prepared: None, confirmed: AtomicU64::new(u64::MAX) })
    }

    pub(crate) const fn client(&self) -> &Client {
        &self.client
    }

    /// Whether it is known to be gone, so that there is no use in sending anything.
    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Says good-bye, so that the server need not find out.
    pub(crate) async fn close(self) {
        let Self { client, mut driver, .. } = self;
        drop(client);
        // It ends once the good-bye is written. A frozen server is not waited for.
        timeout(Duration::from_millis(200), &mut driver.0).await.ok();
    }

    /// Runs a statement in a transaction that `begin` begins, and returns its rows, once they are
    /// confirmed: see the module.
    pub(crate) async fn transact(
        &self,
        setup: &ConnectionSetup,
        begin: &str,
        call: StatementCall<'_>,
    ) -> Result<Vec<Row>, TransactionFailure> {
        let doubts = setup.doubts.load(Ordering::SeqCst);
        let doubted = self.confirmed.load(Ordering::Relaxed) != doubts;
        let prolong = if doubted { &setup.confirm } else { &setup.confirm_once };
        // Polled in this order: each request is sent by the first poll of its future.
        let (began, rows, prolonged, committed) = tokio::join!(
            biased;
            self.client.batch_execute(begin),
            self.call(setup, call),
            self.client.batch_execute(prolong),
            self.client.batch_execute("COMMIT"),
        );
        // The statement ran outside of a transaction: who knows what was kept.
        began.map_err(TransactionFailure::of_session)?;
        // Refused, and rolled back at COMMIT; or its answer lost.
        let rows = rows.map_err(TransactionFailure::of)?;
        // The same. The answer to COMMIT does not tell: it is the same when it rolls back.
        prolonged.map_err(TransactionFailure::of)?;
        // Refused at COMMIT, which rolled back; or lost then.
        committed.map_err(TransactionFailure::of)?;
        self.confirmed.store(doubts, Ordering::Relaxed);
        Ok(rows)
    }

    async fn call(
        &self,
        setup: &ConnectionSetup,
        call: StatementCall<'_>,
    ) -> Result<Vec<Row>, Error> {
        let StatementCall { verb, parameters } = call;
        match &self.prepared {
            Some(prepared) => self.client.query(&prepared[verb as usize], &parameters).await,
            None => {
                let typed: Vec<(Parameter<'_>, Type)> =
                    parameters.into_iter().zip(types(verb).iter().cloned()).collect();
                self.client.query_typed(setup.statements.text(verb), &typed).await
            }
        }
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        // Closes the socket at once, whether or not the server still reads from it.
        self.0.abort();
    }
}
