//! Attempts whose transactions leave their outcomes unknown.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::store::{BoxFuture, Stamped, Swap, Swapped};
use hapax_core::transaction::{TransactionBackend, Transactions, Tx, TxError};
use hapax_core::{MemoryStore, Store};
use hapax_messages::{DeadLetterReason, InboxBuilder, MessageExecution, MessageFailure};
use tokio::sync::Notify;

use super::world::*;

/// A database that commits nothing. Its transactions have ended before they are rolled back, unless it can do that.
#[derive(Debug)]
struct Rejecting {
    rolls_back: bool,
}

impl Transactions for Rejecting {
    type Tx = ();

    fn connect(&self) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn begin<'a>(&'a self, (): &'a mut ()) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn swap_in<'a>(&'a self, (): &'a mut (), _: Swap) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(std::future::ready(Err(TxError::failed("it is not committed"))))
    }

    fn commit(&self, (): ()) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(std::future::ready(Err(TxError::failed("it is not committed"))))
    }

    fn rollback(&self, (): ()) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(std::future::ready(match self.rolls_back {
            true => Ok(()),
            false => Err(TxError::ended_early("it has ended")),
        }))
    }

    fn is_conflict(&self, _: &(dyn std::error::Error + 'static)) -> bool {
        false
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_transaction_was_kept_or_ended_stays_with_the_number_of_its_attempt() {
    for keeps in [true, false] {
        let world = World::new();
        world.broker.set_delays_from(Duration::ZERO);
        world.send("m-1");
        let (kept, attempts) =
            (Arc::<Mutex<Vec<Tx<()>>>>::default(), Arc::<Mutex<Vec<u32>>>::default());
        let seen = Arc::clone(&attempts);
        let handler = move |message: MessageExecution| {
            let kept = Arc::clone(&kept);
            seen.lock().unwrap().push(message.attempt());
            async move {
                if message.attempt() > 1 {
                    return Ok(());
                }
                let tx = message.transaction::<()>().await?;
                if keeps {
                    kept.lock().unwrap().push(tx);
                }
                Err(MessageFailure::retry("once"))
            }
        };
        let backend = TransactionBackend::new(Arc::new(Rejecting { rolls_back: false })).any();
        let process = world.process(|inbox| inbox.reexecute().transactions(backend), handler);
        world.broker.emptied().await;
        assert!(process.stop().await);
        // Another delivery would count the attempt as a crash.
        assert_eq!((world.broker.deliveries(), world.dead_letters()), (1, Vec::new()));
        assert_eq!(*attempts.lock().unwrap(), [1, 2], "kept: {keeps}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_transactions_are_rejected_becomes_a_dead_letter_with_the_error() {
    let world = World::new();
    world.broker.set_delays_from(Duration::ZERO);
    world.send("m-1");
    let handler = |message: MessageExecution| async move {
        drop(message.transaction::<()>().await?);
        Ok(())
    };
    let backend = TransactionBackend::new(Arc::new(Rejecting { rolls_back: true })).any();
    let options =
        |inbox: InboxBuilder| inbox.reexecute().attempts(attempts(3, LEASE)).transactions(backend);
    let process = world.process(options, handler);
    world.broker.emptied().await;
    assert!(process.stop().await);
    let letters = world.dead_letters();
    let [(id, reason, made, error)] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((&**id, *reason, *made), ("m-1", DeadLetterReason::Attempts, 3));
    assert!(error.contains("it is not committed"), "{error}");
}

/// A database that does not commit, and whose reply to COMMIT is lost.
#[derive(Debug)]
struct Unanswered {
    store: Arc<MemoryStore>,
    committing: Arc<Notify>,
    is_down: Arc<Notify>,
}

impl Transactions for Unanswered {
    type Tx = ();

    fn connect(&self) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn begin<'a>(&'a self, (): &'a mut ()) -> BoxFuture<'a, Result<(), TxError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn swap_in<'a>(
        &'a self,
        (): &'a mut (),
        swap: Swap,
    ) -> BoxFuture<'a, Result<Swapped, TxError>> {
        Box::pin(async move {
            let found = self.store.load(&swap.id).await.unwrap();
            let (now, stored) = (found.now, found.stored.unwrap());
            let (fence, lease_until) = (stored.fence, stored.lease_until);
            Ok(Swapped::Stored(Stamped { now, fence, lease_until }))
        })
    }

    fn commit(&self, (): ()) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(async move {
            self.committing.notify_one();
            self.is_down.notified().await;
            Err(TxError::unknown("no reply"))
        })
    }

    fn rollback(&self, (): ()) -> BoxFuture<'_, Result<(), TxError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn is_conflict(&self, _: &(dyn std::error::Error + 'static)) -> bool {
        false
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_commit_has_an_unknown_result_stays_and_its_attempt_is_no_crash() {
    let world = World::new();
    world.broker.set_delays_from(Duration::ZERO);
    world.send("m-1");
    let (committing, is_down) = (Arc::<Notify>::default(), Arc::<Notify>::default());
    let database = Unanswered {
        store: Arc::clone(&world.memory),
        committing: Arc::clone(&committing),
        is_down: Arc::clone(&is_down),
    };
    let effects = Arc::clone(&world.effects);
    let handler = move |message: MessageExecution| {
        let effects = Arc::clone(&effects);
        async move {
            match message.attempt() {
                1 => drop(message.transaction::<()>().await?),
                _ => count(&effects, &message),
            }
            Ok(())
        }
    };
    let backend = TransactionBackend::new(Arc::new(database)).any();
    let process = world.process(|inbox| inbox.reexecute().transactions(backend), handler);
    committing.notified().await;
    process.store.set_down(true);
    is_down.notify_one();
    while process.monitor.stats().held_in_flight == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    process.store.set_down(false);
    world.broker.emptied().await;
    let suspects = process.monitor.stats().suspects;
    assert!(process.stop().await);
    assert_eq!(world.effects(), once(["m-1".to_owned()]));
    assert_eq!((world.broker.deliveries(), suspects), (1, 0));
}
