//! The connection that listens.
//!
//! Behind a pooler there is no separate session, and LISTEN would remain in a session that others
//! use. So a setting is sent with the connection and then queried on it: poolers reject or drop the
//! setting, and then the store does not listen.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use tokio::time::{Instant, interval, sleep, timeout};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config};

use super::{ANNOUNCE_EVERY, AWAITED, REQUEST_CHANNEL, WRITTEN, WakeBoard};
use crate::error::PostgresConnectError;
use crate::hosts::Hosts;
use crate::options::PostgresOptions;
use crate::tls::{Connected, drive};

/// Pause between the end of a connection and the next attempt: doubled from the first to the last,
/// until a connection lasts.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// A setting of the session, which no pooler passes on.
const OWN: &str = "-c hapax.session=own";
const IS_OWN: &str = "SELECT pg_backend_pid(), current_setting('hapax.session', true) = 'own'";

/// Reasons for which a connection does not listen.
enum ListenError {
    /// There is a pooler in between.
    Pooled,
    Failed(PostgresConnectError),
}

/// Connections that did not last.
#[derive(Debug)]
struct Outage {
    pause: Duration,
    told: Option<String>,
}

impl Default for Outage {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE, told: None }
    }
}

impl Outage {
    /// Returns whether the reason differs from the last one, which was logged.
    fn is_new_reason(&mut self, why: String) -> bool {
        let is_new_reason = self.told.as_ref() != Some(&why);
        self.told = Some(why);
        is_new_reason
    }

    /// Returns the pause before the next attempt.
    fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(LAST_PAUSE);
        pause
    }
}

/// Listens on one connection after the other, until a pooler is detected.
pub(super) async fn run(board: Arc<WakeBoard>, options: PostgresOptions, hosts: Arc<Hosts>) {
    let mut outage = Outage::default();
    loop {
        let began = Instant::now();
        // The host that the store's other connections found to be the primary, if any did:
        // notifications are hints, so this connection does not look for the primary itself.
        let mut config = hosts.current().clone();
        let theirs = config.get_options().map(|theirs| format!("{theirs} {OWN}"));
        config.options(theirs.unwrap_or_else(|| OWN.into()));
        let ended = listen(&board, &options, &config).await;
        if began.elapsed() > LAST_PAUSE {
            outage = Outage::default();
        }
        match ended {
            Ok(()) => {}
            Err(ListenError::Pooled) => {
                tracing::warn!("no notifications from PostgreSQL behind a pooler: waiters poll");
                return;
            }
            Err(ListenError::Failed(error)) => {
                if outage.is_new_reason(error.to_string()) {
                    tracing::warn!(
                        %error,
                        "no notifications from PostgreSQL: waiters poll"
                    );
                }
            }
        }
        sleep(outage.pause()).await;
    }
}

/// Listens, and sends notifications, until the connection ends.
async fn listen(
    board: &Arc<WakeBoard>,
    options: &PostgresOptions,
    config: &Config,
) -> Result<(), ListenError> {
    let connecting = options.connector.connect(config);
    let connected = timeout(options.timeout, connecting).await;
    let Connected { client, driver } = match connected {
        Ok(Ok(connected)) => connected,
        Ok(Err(error)) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => {
            return Err(ListenError::Pooled);
        }
        Ok(Err(error)) => return Err(ListenError::Failed(PostgresConnectError::Connect(error))),
        Err(_) => return Err(ListenError::Failed(PostgresConnectError::TimedOut)),
    };
    let hearing = Arc::clone(board);
    let own = Arc::new(AtomicI32::new(0));
    let own_there = Arc::clone(&own);
    let hear = move |said| hearing.hear(&said, own_there.load(Ordering::Relaxed));
    let mut driving = std::pin::pin!(drive(driver, hear));
    let saying = async {
        let began = timeout(options.timeout, begin(&client, &own)).await;
        began.unwrap_or(Err(ListenError::Failed(PostgresConnectError::TimedOut)))?;
        board.wake_all();
        say_all(board, &client, options.timeout).await.map_err(ListenError::Failed)
    };
    tokio::select! {
        () = &mut driving => Ok(()),
        said = saying => said.map(|never| match never {}),
    }
}

async fn begin(client: &Client, own: &AtomicI32) -> Result<(), ListenError> {
    let failed = |error| ListenError::Failed(PostgresConnectError::Query(error));
    let row = client.query_typed_one(IS_OWN, &[]).await.map_err(failed)?;
    own.store(row.try_get(0).map_err(failed)?, Ordering::Relaxed);
    if row.try_get::<_, Option<bool>>(1).map_err(failed)? != Some(true) {
        return Err(ListenError::Pooled);
    }
    let listen = format!(
        "LISTEN {AWAITED}; LISTEN {WRITTEN}; LISTEN {REQUEST_CHANNEL}; NOTIFY {REQUEST_CHANNEL}"
    );
    client.batch_execute(&listen).await.map_err(failed)
}

async fn say_all(
    board: &WakeBoard,
    client: &Client,
    limit: Duration,
) -> Result<Infallible, PostgresConnectError> {
    let mut again = interval(ANNOUNCE_EVERY);
    loop {
        tokio::select! {
            () = board.said.notified() => {}
            _ = again.tick() => board.say_all_again(),
        }
        for (channel, payload) in board.take() {
            // A connection that does not answer is given up, together with its notifications.
            let said = timeout(limit, say(client, channel, &payload)).await;
            said.unwrap_or(Err(PostgresConnectError::TimedOut))?;
        }
    }
}

async fn say(client: &Client, channel: &str, payload: &str) -> Result<(), PostgresConnectError> {
    let parameters: [(crate::link::Parameter<'_>, Type); 2] =
        [(&channel, Type::TEXT), (&payload, Type::TEXT)];
    let said = client.query_typed("SELECT pg_notify($1, $2)", &parameters).await;
    said.map(drop).map_err(PostgresConnectError::Query)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_logged_once_and_retried_with_growing_pauses() {
        let mut outage = Outage::default();
        let told = ["refused", "refused", "no answer", "no answer", "refused"]
            .map(|why| outage.is_new_reason(why.into()));
        assert_eq!(told, [true, false, true, false, true]);
        let pauses = [(); 7].map(|()| outage.pause().as_secs());
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
    }
}
