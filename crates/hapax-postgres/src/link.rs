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

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, Error, Row, Statement};

use crate::error::{ConnectError, Failure};
use crate::look;
use crate::options::Options;
use crate::secret::{Purpose, agree};
use crate::sql::{Statements, VERBS, Verb, types};
use crate::tls::{Connected, drive};

/// A parameter.
pub(crate) type Parameter<'a> = &'a (dyn ToSql + Sync);

/// What every connection of a store is made by.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) options: Options,
    pub(crate) statements: Statements,
    /// How long an answer may take, however it turns out.
    pub(crate) answer: Duration,
    begin: String,
    /// Everybody was found to use our secret.
    pub(crate) agreed: AtomicBool,
}

/// A statement and its parameters.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) verb: Verb,
    pub(crate) parameters: Vec<Parameter<'a>>,
}

/// The task that reads and writes; ended when dropped.
#[derive(Debug)]
pub(crate) struct Driving(JoinHandle<()>);

/// A connection; closed when dropped.
#[derive(Debug)]
pub(crate) struct Link {
    client: Client,
    driver: Driving,
    prepared: Option<Vec<Statement>>,
}

impl Setup {
    pub(crate) fn new(mut options: Options) -> Self {
        let answer = options.timeout;
        let begin = begin(&options, answer * 3 / 4, answer / 4);
        // So that the system gives up on a peer that is gone, too.
        options.config.connect_timeout(answer).tcp_user_timeout(answer.max(Duration::from_secs(1)));
        let statements = Statements::new(options.schema.as_deref(), options.allow_forgetting);
        Self { options, statements, answer, begin, agreed: AtomicBool::default() }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.options.config
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

fn begin(options: &Options, statement: Duration, lock: Duration) -> String {
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

impl Link {
    /// Connects, and looks whether the server keeps what it acknowledges and our secret is the one
    /// in use: it may be another server than before, or the same with older tables.
    pub(crate) async fn open(setup: &Setup, purpose: Purpose) -> Result<Self, ConnectError> {
        let opened = timeout(setup.answer, Self::open_patiently(setup, purpose)).await;
        opened.unwrap_or(Err(ConnectError::TimedOut))
    }

    async fn open_patiently(setup: &Setup, purpose: Purpose) -> Result<Self, ConnectError> {
        let mut link = Self::connect(setup).await?;
        look::check(&link.client, &setup.options).await?;
        agree(&link.client, setup, purpose).await?;
        link.prepare(setup).await?;
        Ok(link)
    }

    /// Prepares the statements, if that is wanted.
    pub(crate) async fn prepare(&mut self, setup: &Setup) -> Result<(), ConnectError> {
        if setup.options.prepare {
            let mut prepared = Vec::with_capacity(VERBS.len());
            for verb in VERBS {
                let text = setup.statements.text(verb);
                let statement = self.client.prepare_typed(text, types(verb)).await;
                prepared.push(statement.map_err(ConnectError::Query)?);
            }
            self.prepared = Some(prepared);
        }
        Ok(())
    }

    /// Connects only.
    pub(crate) async fn connect(setup: &Setup) -> Result<Self, ConnectError> {
        let Connected { client, driver } =
            setup.options.connector.connect(setup.config()).await.map_err(ConnectError::Connect)?;
        let driver = Driving(tokio::spawn(drive(driver, drop)));
        Ok(Self { client, driver, prepared: None })
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

    /// Runs a statement in a transaction that `begin` begins, and returns its rows.
    pub(crate) async fn transact(
        &self,
        setup: &Setup,
        begin: &str,
        call: Call<'_>,
    ) -> Result<Vec<Row>, Failure> {
        // Polled in this order: each request is sent by the first poll of its future.
        let (began, rows, prolonged, committed) = tokio::join!(
            biased;
            self.client.batch_execute(begin),
            self.call(setup, call),
            self.client.batch_execute("SET LOCAL statement_timeout = 0"),
            self.client.batch_execute("COMMIT"),
        );
        // The statement ran outside of a transaction: who knows what was kept.
        began.map_err(Failure::of_session)?;
        // Refused, and rolled back at COMMIT; or its answer lost.
        let rows = rows.map_err(Failure::of)?;
        // The same. The answer to COMMIT does not tell: it is the same when it rolls back.
        prolonged.map_err(Failure::of)?;
        // Refused at COMMIT, which rolled back; or lost then.
        committed.map_err(Failure::of)?;
        Ok(rows)
    }

    async fn call(&self, setup: &Setup, call: Call<'_>) -> Result<Vec<Row>, Error> {
        let Call { verb, parameters } = call;
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
