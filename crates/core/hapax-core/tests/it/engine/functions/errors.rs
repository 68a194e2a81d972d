//! Errors and panics of functions.

use std::io::ErrorKind;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hapax_core::machine::{DefiniteVerdict, Resolve};
use hapax_core::{Function, OnUnknown, OutcomeClass, RunError, Scope};
use tokio::task::JoinSet;

use super::super::{World, key, settle};
use super::{
    Charge, Charged, Count, LEASE, Refused, Unwritable, call, charge, declare, declined, executed,
    failed, never, receipt, run,
};

#[tokio::test(start_paused = true)]
async fn a_final_error_is_replayed() {
    let world = World::new();
    let first = charge(&world.process(), OnUnknown::Reexecute);
    let count = Count::default();
    let answer = call(&first, count.then(Err(declined()))).await;
    assert_eq!(failed(&answer), (&declined(), OutcomeClass::Final, false));
    let second = charge(&world.process(), OnUnknown::Reexecute);
    let answer = call(&second, never).await;
    assert_eq!(failed(&answer), (&declined(), OutcomeClass::Final, true));
    assert_eq!(answer.unwrap_err().to_string(), "declined: too poor");
}

#[tokio::test(start_paused = true)]
async fn a_retryable_error_releases_the_key_under_any_policy() {
    let world = World::new();
    let count = Count::default();
    let charge = charge(&world.process(), OnUnknown::Block);
    for _ in 0..3 {
        let answer = call(&charge, count.then(Err(Refused::Busy))).await;
        assert_eq!(failed(&answer), (&Refused::Busy, OutcomeClass::Retryable, false));
    }
    executed(&call(&charge, count.then(Ok(receipt("r-1")))).await);
    assert_eq!(count.get(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_promoted_when_the_owner_fails_retryably() {
    let world = World::new();
    let charge = declare(&world.process()).at_least_once().wait(LEASE).build().unwrap();
    let count = Count::default();
    let mut duplicates = JoinSet::new();
    let (first, counted) = (charge.clone(), count.clone());
    let first = tokio::spawn(async move {
        let work = |_| async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            counted.then(Err(Refused::Busy))(unrelated_lease().await).await
        };
        call(&first, work).await
    });
    settle().await;
    for _ in 0..20 {
        let (charge, work) = (charge.clone(), count.slowly(Duration::from_secs(1)));
        duplicates.spawn(async move { call(&charge, work).await.unwrap() });
    }
    assert_eq!(failed(&first.await.unwrap()).0, &Refused::Busy);
    let duplicates = duplicates.join_all().await;
    assert_eq!(duplicates.iter().filter(|answer| !answer.replayed).count(), 1);
    assert_eq!(count.get(), 2);
}

/// Returns the handle of an unrelated lease.
async fn unrelated_lease() -> hapax_core::LeaseHandle {
    let process = World::new().process();
    super::super::own(&process, &hapax_core::Policy::default()).await.handle()
}

#[tokio::test(start_paused = true)]
async fn an_unknown_error_follows_the_policy() {
    let world = World::new();
    let count = Count::default();
    let again = charge(&world.process(), OnUnknown::Reexecute);
    let answer = call(&again, count.then(Err(Refused::NoAnswer))).await;
    assert_eq!(failed(&answer), (&Refused::NoAnswer, OutcomeClass::Unknown, false));
    executed(&call(&again, count.then(Ok(receipt("r-1")))).await);
    assert_eq!(count.get(), 2);

    let world = World::new();
    let block = charge(&world.process(), OnUnknown::Block);
    call(&block, count.then(Err(Refused::NoAnswer))).await.unwrap_err();
    assert!(matches!(call(&block, never).await, Err(RunError::OutcomeUnknown)));
}

#[tokio::test(start_paused = true)]
async fn an_unclassified_error_is_unknown() {
    let world = World::new();
    let block: Charge = world.process().function("charge").at_most_once().build().unwrap();
    let answer = call(&block, Count::default().then(Err(declined()))).await;
    assert_eq!(failed(&answer), (&declined(), OutcomeClass::Unknown, false));
    assert!(matches!(call(&block, never).await, Err(RunError::OutcomeUnknown)));
    // The error need not be serializable.
    struct Anything;
    let process = World::new().process();
    let failed = run(&process, "r", || async { Err::<u8, _>(Anything) }).await;
    assert!(matches!(failed, Err(RunError::Failed { class: OutcomeClass::Unknown, .. })));
    let again = run(&process, "r", || async { Ok::<u8, Anything>(1) }).await;
    assert!(again.is_ok_and(|answer| !answer.replayed));
}

#[tokio::test(start_paused = true)]
async fn a_panic_follows_the_policy() {
    let world = World::new();
    let again = charge(&world.process(), OnUnknown::Reexecute);
    assert!(matches!(call(&again, never).await, Err(RunError::Panicked)));
    // At once, before the lease lapses.
    executed(&call(&again, Count::default().then(Ok(receipt("r-1")))).await);

    let world = World::new();
    let block = charge(&world.process(), OnUnknown::Block);
    // The same before there is a future.
    let panicked = call(&block, |_| -> std::future::Ready<_> { panic!("at once") }).await;
    assert!(matches!(panicked, Err(RunError::Panicked)));
    assert!(matches!(call(&block, never).await, Err(RunError::OutcomeUnknown)));
    assert_eq!(world.process().stats().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn a_panic_after_the_function_counts_as_one_in_it() {
    let world = World::new();
    let process = world.process();
    let charge: Charge = process
        .function("charge")
        .at_most_once()
        .classify(|_| panic!("while classifying"))
        .build()
        .unwrap();
    let answer = call(&charge, Count::default().then(Err(Refused::Busy))).await;
    assert!(matches!(answer, Err(RunError::Panicked)));
    assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_stored_is_returned_once_and_not_executed_again() {
    let world = World::new();
    let process = world.process();
    let unwritable = || async { Ok::<_, ()>(Unwritable) };
    assert!(run(&process, "r", unwritable).await.is_ok_and(|answer| !answer.replayed));
    let Err(RunError::NotRetained { why }) = run(&process, "r", unwritable).await else { panic!() };
    assert_eq!(why, "this value cannot be written");

    let process = World::new().process();
    let large = || async { Ok::<_, ()>("x".repeat(hapax_core::codec::MAX_OUTCOME)) };
    assert!(run(&process, "r", large).await.is_ok_and(|answer| !answer.replayed));
    let Err(RunError::NotRetained { why }) = run(&process, "r", large).await else { panic!() };
    assert_eq!(why, "the value is larger than the limit");
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_read_is_an_error_and_not_executed_again() {
    let world = World::new();
    let process = world.process();
    let first = charge(&process, OnUnknown::Reexecute);
    call(&first, Count::default().then(Ok(receipt("r-1")))).await.unwrap();
    // The same function in another release.
    let later = process.function::<Vec<u8>, Refused>("charge").at_most_once().build().unwrap();
    let (scope, key) = (Scope::shared(), key());
    let read = later.run(&scope, &key, &("order", 17), |_| async { panic!("executed") });
    let Err(RunError::Undecodable { format, why }) = read.await else { panic!() };
    assert_eq!((&*format, &*why), ("function/1", "invalid type: a map, expected a sequence"));

    // A stored error, read by a function that does not store errors.
    let scope = Scope::of([("customer", "c-1")]);
    let failing = first.run(&scope, &key, "r", Count::default().then(Err(declined())));
    failing.await.unwrap_err();
    let plain: Charge = process.function("charge").at_most_once().build().unwrap();
    let read = plain.run(&scope, &key, "r", never).await;
    assert!(
        matches!(read, Err(RunError::Undecodable { format, .. }) if format == "function-error/1")
    );
}

#[tokio::test(start_paused = true)]
async fn an_error_of_reading_does_not_show_the_stored_value() {
    let process = World::new().process();
    let card = || async { Ok::<_, String>("4111 1111 1111 1111".to_owned()) };
    run(&process, "r", card).await.unwrap();
    let number = run(&process, "r", || async { Ok::<u64, String>(1) }).await.unwrap_err();
    let class = run(&process, "r", || async { Ok::<Refused, String>(Refused::Busy) });
    let class = class.await.unwrap_err();
    for shown in [format!("{number:?} {number}"), format!("{class:?} {class}")] {
        assert!(shown.contains("Undecodable") && !shown.contains("4111"), "{shown}");
    }
}

#[tokio::test(start_paused = true)]
async fn errors_that_cannot_be_stored_can_be_retryable() {
    let world = World::new();
    let connect: Function<u8, std::io::Error> = world
        .process()
        .function("connect")
        .at_most_once()
        .retryable(|error: &std::io::Error| error.kind() == ErrorKind::ConnectionRefused)
        .build()
        .unwrap();
    let call = |error: ErrorKind| {
        let connect = connect.clone();
        async move {
            let work = move |_| async move { Err(std::io::Error::from(error)) };
            match connect.run(&Scope::shared(), &key(), "r", work).await.unwrap_err() {
                RunError::Failed { class, .. } => Some(class),
                RunError::OutcomeUnknown => None,
                other => panic!("{other:?}"),
            }
        }
    };
    assert_eq!(call(ErrorKind::ConnectionRefused).await, Some(OutcomeClass::Retryable));
    assert_eq!(call(ErrorKind::TimedOut).await, Some(OutcomeClass::Unknown));
    assert_eq!(call(ErrorKind::ConnectionRefused).await, None);
}

#[tokio::test(start_paused = true)]
async fn an_operator_can_resolve_with_an_error() {
    let world = World::new();
    let process = world.process();
    let charge = charge(&process, OnUnknown::Block);
    call(&charge, Count::default().then(Err(Refused::NoAnswer))).await.unwrap_err();
    let record = process.operation_id(&charge.scope(&Scope::shared()), &key());
    let expected = process.store().load(&record).await.unwrap().stored.unwrap().fence;
    let resolution = DefiniteVerdict::Happened(charge.error_outcome(&declined()));
    let resolve =
        Resolve { expected, force: false, forget: false, resolution, note: None, restart: false };
    process.resolve(record, resolve).await.unwrap();
    let answer = call(&charge, never).await;
    assert_eq!(failed(&answer), (&declined(), OutcomeClass::Final, true));
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_destructor_counts_as_one_of_the_function() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(std::thread::panicking(), "in the destructor");
        }
    }
    /// A future that panics when it is polled, otherwise when it is dropped.
    struct Work(#[allow(dead_code, reason = "it is dropped")] Bomb, bool);
    impl Future for Work {
        type Output = Result<Charged, Refused>;
        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            assert!(!self.1, "in the function");
            Poll::Ready(Ok(receipt("r-1")))
        }
    }
    for panics in [false, true] {
        let charge = charge(&World::new().process(), OnUnknown::Block);
        let answer = call(&charge, move |_| Work(Bomb, panics)).await;
        assert!(matches!(answer, Err(RunError::Panicked)), "{answer:?}");
        assert!(matches!(call(&charge, never).await, Err(RunError::OutcomeUnknown)));
    }
}
