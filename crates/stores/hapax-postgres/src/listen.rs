//! Notifications across processes, by LISTEN and NOTIFY.
//!
//! 1. A process with waiters for a key announces the key on one channel, every few seconds. Other
//!    processes remember it for a while, and when they end that record, they publish it on another
//!    channel. Keys without waiters are not published: NOTIFY takes a lock of the whole database
//!    when it commits.
//! 2. Notifications are sent on the listening connection, in separate statements, so that the
//!    batches that write never wait for that lock.
//! 3. Lost notifications are not repeated: waiters also poll.

mod session;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::OperationId;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_postgres::Notification;

use crate::link::ConnectionSetup;

const AWAITED: &str = "hapax_awaited";
const WRITTEN: &str = "hapax_written";
/// Channel on which a process that has just begun to listen requests announcements.
const REQUEST_CHANNEL: &str = "hapax_asked";

/// Interval of announcements, and the time for which other processes remember them.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(5);
const REMEMBER: Duration = Duration::from_secs(16);

/// Limit of keys remembered for others, and of names to be sent. Beyond it, hints are lost.
const MOST: usize = 10_000;

/// Names in one notification, whose payload may have 8,000 bytes.
const IN_ONE: usize = 200;

/// Half of an operation id: enough to distinguish keys, for a hint.
type Name = [u8; 16];

/// Receives and sends notifications of writes; ends when dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    board: Arc<WakeBoard>,
    task: JoinHandle<()>,
}

/// Notifies the waiters in other processes.
#[derive(Clone, Debug)]
pub(crate) struct WakeSender(Arc<WakeBoard>);

#[derive(Debug, Default)]
struct WakeBoard {
    notes: Mutex<WakeState>,
    said: Notify,
}

#[derive(Debug, Default)]
struct WakeState {
    /// Keys with waiters in this process.
    here: HashMap<Name, Watched>,
    /// Keys with waiters in other processes, and until when that is remembered.
    elsewhere: HashMap<Name, Instant>,
    /// Names to be sent.
    awaited: Vec<Name>,
    written: Vec<Name>,
}

#[derive(Debug)]
struct Watched {
    waiting: usize,
    written: watch::Sender<()>,
}

/// A registered waiter for a key. Dropping it ends the registration.
struct WaiterEntry {
    board: Arc<WakeBoard>,
    name: Name,
    written: watch::Receiver<()>,
}

impl Listener {
    pub(crate) fn new(setup: &ConnectionSetup) -> Self {
        let board = Arc::new(WakeBoard::default());
        let hosts = Arc::clone(&setup.hosts);
        let task = tokio::spawn(session::run(Arc::clone(&board), setup.options.clone(), hosts));
        Self { board, task }
    }

    pub(crate) fn bell(&self) -> WakeSender {
        WakeSender(Arc::clone(&self.board))
    }

    /// Returns the number of keys with waiters in other processes.
    pub(crate) fn awaited(&self) -> usize {
        let now = Instant::now();
        self.board.lock().elsewhere.values().filter(|until| **until > now).count()
    }

    /// Resolves when another process has written the key since the call.
    pub(crate) fn written(&self, key: &OperationId) -> impl Future<Output = ()> + Send + use<> {
        let mut place = WaiterEntry::take(&self.board, name(key));
        async move {
            // The sender exists as long as there is a waiter.
            place.written.changed().await.ok();
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl WakeSender {
    /// Notifies that the record is no longer in flight.
    pub(crate) fn ring(&self, key: &OperationId) {
        let name = name(key);
        let mut notes = self.0.lock();
        let awaited = notes.elsewhere.get(&name).is_some_and(|until| *until > Instant::now());
        if awaited && notes.written.len() < MOST {
            notes.written.push(name);
            drop(notes);
            self.0.said.notify_one();
        }
    }
}

impl WaiterEntry {
    fn take(board: &Arc<WakeBoard>, name: Name) -> Self {
        let mut notes = board.lock();
        let watched = notes
            .here
            .entry(name)
            .or_insert_with(|| Watched { waiting: 0, written: watch::Sender::new(()) });
        watched.waiting += 1;
        let written = watched.written.subscribe();
        if notes.awaited.len() < MOST {
            notes.awaited.push(name);
        }
        drop(notes);
        board.said.notify_one();
        Self { board: Arc::clone(board), name, written }
    }
}

impl Drop for WaiterEntry {
    fn drop(&mut self) {
        let mut notes = self.board.lock();
        if let Some(watched) = notes.here.get_mut(&self.name) {
            watched.waiting -= 1;
            if watched.waiting == 0 {
                notes.here.remove(&self.name);
            }
        }
    }
}

impl WakeBoard {
    fn hear(&self, notification: &Notification, own: i32) {
        // A process also receives its own notifications.
        if notification.process_id() == own {
            return;
        }
        let names = notification.payload().split(',').filter_map(parse);
        let mut notes = self.lock();
        match notification.channel() {
            WRITTEN => names.for_each(|name| {
                if let Some(watched) = notes.here.get(&name) {
                    watched.written.send_replace(());
                }
            }),
            AWAITED => {
                let now = Instant::now();
                if notes.elsewhere.len() >= MOST {
                    notes.elsewhere.retain(|_, until| *until > now);
                }
                for name in names {
                    if notes.elsewhere.len() < MOST || notes.elsewhere.contains_key(&name) {
                        notes.elsewhere.insert(name, now + REMEMBER);
                    }
                }
            }
            _ => {
                drop(notes);
                self.say_all_again();
                self.said.notify_one();
            }
        }
    }

    /// Wakes all waiters: without a connection notifications may have been missed.
    fn wake_all(&self) {
        self.lock().here.values().for_each(|watched| {
            watched.written.send_replace(());
        });
    }

    fn say_all_again(&self) {
        let mut notes = self.lock();
        notes.awaited = notes.here.keys().take(MOST).copied().collect();
    }

    /// Returns and removes the payloads to be sent, by channel.
    fn take(&self) -> Vec<(&'static str, String)> {
        let (awaited, written) = {
            let mut notes = self.lock();
            (std::mem::take(&mut notes.awaited), std::mem::take(&mut notes.written))
        };
        let channels = [(AWAITED, awaited), (WRITTEN, written)];
        let payloads = channels.iter().flat_map(|(channel, names)| {
            names
                .chunks(IN_ONE)
                .map(|names| (*channel, names.iter().map(hex).collect::<Vec<_>>().join(",")))
        });
        payloads.collect()
    }

    /// No code that can panic runs under the lock, so a poisoned board is consistent.
    fn lock(&self) -> MutexGuard<'_, WakeState> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name(key: &OperationId) -> Name {
    let (name, _) = key.as_bytes().split_at(16);
    name.try_into().unwrap_or_default()
}

fn hex(name: &Name) -> String {
    format!("{:032x}", u128::from_be_bytes(*name))
}

fn parse(hex: &str) -> Option<Name> {
    let is_name = hex.len() == 32 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_name.then(|| u128::from_str_radix(hex, 16).ok().map(u128::to_be_bytes))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_decoded_from_a_payload() {
        let name = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 254, 255];
        assert_eq!(parse(&hex(&name)), Some(name));
        assert_eq!(parse("+0000000000000000000000000000001"), None);
        assert_eq!(parse(""), None);
        assert_eq!(parse(&"g".repeat(32)), None);
    }

    #[test]
    fn a_key_without_waiters_is_not_announced() {
        let board = Arc::new(WakeBoard::default());
        WakeSender(Arc::clone(&board)).ring(&OperationId::from_bytes([7; 32]));
        assert!(board.take().is_empty());
    }
}
