//! One connection, and transactions on it.
//!
//! 1. A transaction is sent as a whole, BEGIN to COMMIT, before its first reply is read: one round
//!    trip, and one connection of a pooler in transaction mode. It leaves no state in the session.
//! 2. Its timeouts are set within it, and `statement_timeout` is off again at COMMIT: a COMMIT that
//!    waits for a synchronous standby and is interrupted *succeeds*, with a warning, without that
//!    standby. For the same reason nothing here ever sends a cancel request. COMMIT of a failed
//!    transaction rolls back and returns no error, so its result is valid only together with the
//!    results of everything before it.
//! 3. A transaction whose future is dropped leaves the connection in an unknown state. After that
//!    the link must not be used again; dropping the link closes the connection.
//!
//! # Reads are valid only once they are replicated
//! A COMMIT that waits for a synchronous standby is invisible to others until the wait ends.
//! PostgreSQL ends the wait without the standby when the server crashes, when any one of its
//! backends does, and when the waiting backend is terminated. From then on the row is visible to
//! all, and is lost if the standby is promoted. A read waits for no standby. So a write that waits,
//! in the same transaction as the read or after it, confirms the read: the log is replicated in
//! order, so the standby that has the write has everything that was visible before it.
//!
//! 1. *Once per backend.* A crash ends every backend of the server (the postmaster kills the
//!    remaining ones), and with them every earlier connection: commits that a crash made visible
//!    are read on new backends only. So [`PgConnection::reach`] confirms before any read on a new
//!    connection is used. Behind a pooler our connection outlives the backend. The session's
//!    setting `hapax.confirmed` covers that: it ends with its backend, so the next transaction on
//!    another backend writes, and waits, on its own.
//! 2. *After a lost reply.* A terminated backend ends alone, and old connections see the commit
//!    that it was waiting for. If it was ours, its reply is lost, and
//!    [`ConnectionSetup::distrust_connections`] makes every connection of the store confirm again
//!    in its next transaction: before a swap that is sent again reads its own write, and before a
//!    caller's COMMIT is resolved.
//! 3. *Each read that decides.* An operator ends the wait of another process (`pg_cancel_backend`,
//!    `pg_terminate_backend`), and its row is visible to old connections. So a transaction that claims, or
//!    loads a record, and wrote nothing ([`Verb::decides`]) writes too, if `synchronous_standby_names` is
//!    set: a replay then costs as much as a claim. Entries of the schedule need none: the claim of
//!    their operation, which commits later, confirms them before anything is executed.
//! 4. *A cancelled wait of our own* is a COMMIT that succeeds, with a warning. The connection ends at that
//!    warning ([`crate::tls::drive`]), so that its reply is lost: see 2. A connection of a caller's pool does
//!    not end: there, a cancelled COMMIT counts as recorded.
//!
//! Every write is confirmed by its own COMMIT, together with the reads for it. Notifications
//! (LISTEN) are hints: a notified waiter loads the record, on a confirmed connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hapax_core::store::parts::ExpectedIdentity;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Error, Row, Statement};

use crate::error::{PostgresConnectError, TransactionFailure, is_missing};
use crate::hosts::Hosts;
use crate::identity::recognise;
use crate::options::PostgresOptions;
use crate::secret::{Purpose, agree};
use crate::server_info;
use crate::sql::{Statements, VERBS, Verb, types};
use crate::tls::{Connected, drive};

/// A parameter of a statement.
pub(crate) type Parameter<'a> = &'a (dyn ToSql + Sync);

/// The settings from which every connection of a store is made.
#[derive(Debug)]
pub(crate) struct ConnectionSetup {
    pub(crate) options: PostgresOptions,
    pub(crate) statements: Statements,
    /// Timeout of an answer, in every case.
    pub(crate) answer: Duration,
    begin: String,
    /// The end of a transaction, which confirms if the session has not confirmed yet.
    confirm_once: String,
    /// The same, which also confirms if the transaction wrote nothing and there are standbys to wait for.
    confirm_reads: String,
    /// The end of a transaction, which always confirms.
    confirm: String,
    /// Whether the tables were found to be used with our secret.
    pub(crate) agreed: AtomicBool,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) known: ExpectedIdentity,
    /// Number of lost replies so far to transactions that may have been committed.
    doubts: AtomicU64,
}

/// A statement and its parameters.
#[derive(Debug)]
pub(crate) struct StatementCall<'a> {
    pub(crate) verb: Verb,
    pub(crate) parameters: Vec<Parameter<'a>>,
}

/// The task that reads and writes a connection; ended when dropped.
#[derive(Debug)]
pub(crate) struct Driving(JoinHandle<()>);

/// A connection; closed when dropped.
#[derive(Debug)]
pub(crate) struct PgConnection {
    client: Client,
    driver: Driving,
    prepared: Option<Vec<Statement>>,
    /// The value of `ConnectionSetup::doubts` when the last write that waited began.
    confirmed: AtomicU64,
}

/// Precedes COMMIT, which may wait for standbys for any time.
const DISABLE_TIMEOUT: &str = "SET LOCAL statement_timeout = 0";

/// An expression that writes to the log only, and notes it in the session. COMMIT then waits for
/// synchronous standbys. Every role may call it.
macro_rules! noted_write {
    () => {
        concat!(
            "pg_logical_emit_message(true, 'hapax', '')::text || ",
            "set_config('hapax.confirmed', 'yes', false)"
        )
    };
}

/// A condition: the session has not confirmed yet.
macro_rules! unconfirmed {
    () => {
        "current_setting('hapax.confirmed', true) IS DISTINCT FROM 'yes'"
    };
}

const CONFIRM_ONCE: &str =
    concat!("SELECT CASE WHEN ", unconfirmed!(), " THEN ", noted_write!(), " END");

const CONFIRM_DECISION: &str = concat!(
    "SELECT CASE WHEN ",
    unconfirmed!(),
    " OR (pg_current_xact_id_if_assigned() IS NULL AND current_setting('synchronous_standby_names') <> '') \
     THEN ",
    noted_write!(),
    " END"
);

/// An expression of the type text that confirms what its statement reads, for programs that read, on
/// connections of their own, what must not be lost in a failover. It writes to the log only, which every role
/// may do, so that the COMMIT of its transaction waits until the log is on disk and on the synchronous
/// standbys, whatever `synchronous_commit` is: with everything that was visible before. A wait that is cancelled
/// is reported as a warning of the routine `SyncRepWaitForLSN` only.
pub const CONFIRM_READS: &str = "(set_config('synchronous_commit', \
     CASE current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true) \
     || set_config('client_min_messages', 'warning', true) \
     || pg_logical_emit_message(true, 'hapax', '')::text)";

/// The same, in any case.
const CONFIRM_AGAIN: &str = concat!("SELECT ", noted_write!());

impl ConnectionSetup {
    pub(crate) fn new(mut options: PostgresOptions) -> Self {
        let answer = options.timeout;
        let begin = begin(&options, answer * 3 / 4, answer / 4);
        let mut config = options.config.clone();
        options.detect_loss(&mut config);
        options.config = config;
        let statements = Statements::new(options.schema.as_deref(), options.allow_lost_writes);
        let hosts = Arc::new(Hosts::of(&options.config));
        let known = ExpectedIdentity::new(options.identity.clone());
        Self {
            options,
            statements,
            answer,
            begin,
            confirm_once: format!("{DISABLE_TIMEOUT}; {CONFIRM_ONCE}"),
            confirm_reads: format!("{DISABLE_TIMEOUT}; {CONFIRM_DECISION}"),
            confirm: format!("{DISABLE_TIMEOUT}; {CONFIRM_AGAIN}"),
            agreed: AtomicBool::default(),
            hosts,
            known,
            doubts: AtomicU64::default(),
        }
    }

    /// Records the lost reply of a transaction that may have been committed: every connection
    /// confirms again before its reads are used. It must be called before any caller is answered,
    /// so that every request that follows from the loss is sent after this.
    pub(crate) fn distrust_connections(&self) {
        self.doubts.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the BEGIN of a transaction with requests of several callers: it waits for a lock for
    /// at most a quarter of the timeout.
    pub(crate) fn begin(&self) -> &str {
        &self.begin
    }

    /// Returns the BEGIN of a transaction with these timeouts of a statement and of a lock.
    pub(crate) fn begin_with(&self, statement: Duration, lock: Duration) -> String {
        begin(&self.options, statement, lock)
    }
}

fn begin(options: &PostgresOptions, statement: Duration, lock: Duration) -> String {
    // Independent of the defaults of role and database: the statements rely on this isolation. Zero
    // would mean no limit. A session that is lost in a transaction releases its locks once no
    // caller waits for an answer any more.
    let mut begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
         SET LOCAL statement_timeout = {}; SET LOCAL lock_timeout = {}; \
         SET LOCAL idle_in_transaction_session_timeout = {}",
        statement.as_millis().max(1),
        lock.as_millis().max(1),
        options.timeout.as_millis().max(1)
    );
    // The setting may have changed since the server was checked, and a pooler's sessions may have
    // the settings of others.
    if !options.allow_lost_writes {
        // With the level of the warning that a wait for a standby was cancelled.
        begin.push_str(
            "; SET LOCAL synchronous_commit = on; SET LOCAL client_min_messages = warning",
        );
    }
    begin
}

impl PgConnection {
    /// Connects to the primary, and checks that our secret is the one in use: it may be another
    /// server than before, or the same one with older tables.
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

    /// Connects to the first host that is a fit primary, and confirms the reads there. A former
    /// primary without its standbys does not confirm.
    pub(crate) async fn reach(setup: &ConnectionSetup) -> Result<Self, PostgresConnectError> {
        let mut failed: Option<PostgresConnectError> = None;
        for attempt in setup.hosts.attempts() {
            match Self::reach_at(setup, attempt.config()).await {
                Ok(link) => {
                    attempt.works();
                    return Ok(link);
                }
                // A standby next to the primary is normal: the primary's error is returned.
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
        // In this order: a COMMIT after an error rolls back and returns no error.
        began.and(written).and(committed).map_err(PostgresConnectError::Query)?;
        self.confirmed.store(doubts, Ordering::Relaxed);
        Ok(())
    }

    /// Prepares the statements, if enabled.
    pub(crate) async fn prepare(
        &mut self,
        setup: &ConnectionSetup,
    ) -> Result<(), PostgresConnectError> {
        if setup.options.prepare {
            let mut prepared = Vec::with_capacity(VERBS.len());
            for verb in VERBS {
                let text = setup.statements.text(verb);
                match self.client.prepare_typed(text, types(verb)).await {
                    Ok(statement) => prepared.push(statement),
                    // Not migrated: its calls fail.
                    Err(error) if verb.is_of_schedule() && error.code().is_some_and(is_missing) => {
                        break;
                    }
                    Err(error) => return Err(PostgresConnectError::Query(error)),
                }
            }
            self.prepared = Some(prepared);
        }
        Ok(())
    }

    /// Connects without confirming: reads on the connection are not valid yet.
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

    /// Returns whether the connection is known to be closed, so that sending is useless.
    pub(crate) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Closes the connection with a message to the server.
    pub(crate) async fn close(self) {
        let Self { client, mut driver, .. } = self;
        drop(client);
        // The task ends once the message is written. A frozen server is not waited for.
        timeout(Duration::from_millis(200), &mut driver.0).await.ok();
    }

    /// Executes a statement in a transaction that `begin` begins, and returns its rows once they
    /// are confirmed: see the module.
    pub(crate) async fn transact(
        &self,
        setup: &ConnectionSetup,
        begin: &str,
        call: StatementCall<'_>,
    ) -> Result<Vec<Row>, TransactionFailure> {
        let doubts = setup.doubts.load(Ordering::SeqCst);
        let doubted = self.confirmed.load(Ordering::Relaxed) != doubts;
        let prolong = match call.verb.decides() {
            _ if doubted => &setup.confirm,
            true => &setup.confirm_reads,
            false => &setup.confirm_once,
        };
        // Polled in this order: each request is sent by the first poll of its future.
        let (began, rows, prolonged, committed) = tokio::join!(
            biased;
            self.client.batch_execute(begin),
            self.call(setup, call),
            self.client.batch_execute(prolong),
            self.client.batch_execute("COMMIT"),
        );
        // The statement was executed outside of a transaction: its effect is unknown.
        began.map_err(TransactionFailure::of_session)?;
        // Rejected, and rolled back at COMMIT; or its answer was lost.
        let rows = rows.map_err(TransactionFailure::of)?;
        // The same. The answer to COMMIT is no evidence: it is the same when COMMIT rolls back.
        prolonged.map_err(TransactionFailure::of)?;
        // Rejected at COMMIT, which rolled back; or the answer was lost then.
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
        let prepared = self.prepared.as_ref().and_then(|prepared| prepared.get(verb as usize));
        match prepared {
            Some(prepared) => self.client.query(prepared, &parameters).await,
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
