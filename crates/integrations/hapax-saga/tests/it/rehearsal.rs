//! The rehearsal, and the planted faults that it must find.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::Verdict;
use hapax_saga::rehearsal::{Rehearsal, RehearsalFindingKind, RehearsalReport, rehearse};
use hapax_saga::{Saga, SagaBuilder, StepContext, StepEffect, StepError, StepHandle, UndoError};
use tokio::time::Instant;

use crate::shop::{DAY, Systems, cart, order};

/// A bank that honors keys, with planted faults.
#[derive(Clone, Default)]
struct Bank {
    state: Arc<Mutex<BankState>>,
    forgets_keys: bool,
    undoes_once: bool,
    needs_result: bool,
    always_happened: bool,
}

#[derive(Default)]
struct BankState {
    charges: BTreeMap<String, u64>,
    calls: u64,
    undone: Vec<String>,
}

async fn charge(at: StepContext<Bank>, cents: u64) -> Result<String, StepError<String>> {
    if cents == 13 {
        return Err(StepError::Rejected("declined".into()));
    }
    let mut state = at.state.lock().unwrap();
    state.calls += 1;
    let calls = state.calls;
    state.charges.insert(at.key().as_str().to_owned(), cents);
    match at.forgets_keys {
        true => Ok(format!("ch_{calls}")),
        false => Ok(format!("ch_{}", &at.key().as_str()[..8])),
    }
}

async fn refund(
    at: StepContext<Bank>,
    _: u64,
    charge: StepEffect<String>,
) -> Result<(), UndoError> {
    if at.needs_result && charge == StepEffect::Unknown {
        return Err("expected the id of a charge".into());
    }
    let mut state = at.state.lock().unwrap();
    let key = at.key().as_str().to_owned();
    if at.undoes_once && state.undone.contains(&key) {
        return Err("refunded already".into());
    }
    state.undone.push(key);
    Ok(())
}

fn order_of(bank: &Bank) -> (SagaBuilder<Bank>, StepHandle<u64, String, String>) {
    let mut order = Saga::define("order", 1, bank.clone());
    let charge = order.keyed("charge", DAY, charge);
    let charge = match bank.always_happened {
        true => charge.reconcile(async |_, _| Verdict::Happened("ch".to_owned())).undo(refund),
        false => charge.undo(refund),
    };
    (order, charge)
}

fn charging(bank: &Bank) -> Saga<u64, String, String> {
    let (order, charge) = order_of(bank);
    order.flow(move |op, cents| async move { op.run(charge, cents).await }).unwrap()
}

fn faults<O, E>(report: &RehearsalReport<O, E>) -> Vec<(RehearsalFindingKind, Option<&str>)> {
    report.findings.iter().map(|it| (it.fault, it.step.as_deref())).collect()
}

#[tokio::test]
async fn a_saga_without_faults_passes_with_its_output_and_each_step_twice() {
    let bank = Bank::default();
    let report = rehearse(&charging(&bank), &1999).await;
    assert_eq!(report.steps.len(), 1);
    assert!(report.steps[0].happened);
    let output = report.into_outcome().unwrap().unwrap();
    let state = bank.state.lock().unwrap();
    assert!(output.starts_with("ch_"));
    // Three sagas called the step; the one that died before the call did not.
    assert_eq!((state.charges.len(), state.calls), (3, 6));
}

#[tokio::test]
async fn the_error_of_the_flow_is_the_outcome_and_earlier_steps_are_undone() {
    let bank = Bank::default();
    let (order, charge) = order_of(&bank);
    let order = order
        .flow(move |op, cents: u64| async move {
            op.run(charge, cents).await?;
            op.run(charge.nth(1), 13).await
        })
        .unwrap();
    let report = rehearse(&order, &1999).await;
    assert_eq!(report.into_outcome().unwrap(), Err("declined".to_owned()));
    assert!(!bank.state.lock().unwrap().undone.is_empty());
}

#[tokio::test]
async fn a_flow_with_a_random_argument_is_found() {
    let bank = Bank::default();
    let (order, charge) = order_of(&bank);
    let random = bank.clone();
    let order = order
        .flow(move |op, cents: u64| {
            let state = Arc::clone(&random.state);
            async move {
                let number = {
                    let mut state = state.lock().unwrap();
                    state.calls += 1;
                    state.calls
                };
                op.run(charge, cents + number).await
            }
        })
        .unwrap();
    let report = rehearse(&order, &1999).await;
    assert_eq!(faults(&report), [(RehearsalFindingKind::Diverged, None)]);
    assert!(report.findings[0].detail.contains("argument"), "{:?}", report.findings);
    assert_eq!(report.outcome, None);
}

#[tokio::test]
async fn a_flow_with_a_random_output_is_found() {
    let bank = Bank::default();
    let (order, charge) = order_of(&bank);
    let random = bank.clone();
    let order = order
        .flow(move |op, cents: u64| {
            let state = Arc::clone(&random.state);
            async move {
                op.run(charge, cents).await?;
                let mut state = state.lock().unwrap();
                state.calls += 1;
                Ok::<_, String>(state.calls)
            }
        })
        .unwrap();
    let report = rehearse(&order, &1999).await;
    assert_eq!(faults(&report), [(RehearsalFindingKind::Diverged, None)]);
}

#[tokio::test]
async fn a_keyed_step_with_another_result_the_second_time_is_found() {
    let bank = Bank { forgets_keys: true, ..Bank::default() };
    let report = rehearse(&charging(&bank), &1999).await;
    assert_eq!(faults(&report), [(RehearsalFindingKind::OtherResult, Some("charge"))]);
    assert!(report.outcome.is_some(), "the rehearsal goes on");
    let failed = report.into_outcome().unwrap_err();
    assert!(failed.to_string().contains("`charge`"), "{failed}");
}

#[tokio::test]
async fn a_repeatable_step_may_have_another_result_the_second_time() {
    let bank = Bank { forgets_keys: true, ..Bank::default() };
    let mut order = Saga::define("order", 1, bank);
    let look_up = order.again("look-up", charge).no_undo();
    let order = order.flow(move |op, cents: u64| async move { op.run(look_up, cents).await });
    rehearse(&order.unwrap(), &1999).await.into_outcome().unwrap().unwrap();
}

#[tokio::test]
async fn an_undo_that_fails_the_second_time_is_found() {
    let bank = Bank { undoes_once: true, ..Bank::default() };
    let report = rehearse(&charging(&bank), &1999).await;
    assert_eq!(faults(&report), [(RehearsalFindingKind::RepeatedUndo, Some("charge"))]);
    assert!(report.findings[0].detail.contains("refunded already"));
}

#[tokio::test]
async fn an_undo_that_fails_as_unknown_is_found() {
    let bank = Bank { needs_result: true, ..Bank::default() };
    let report = rehearse(&charging(&bank), &1999).await;
    let stuck = (RehearsalFindingKind::Stuck, Some("charge"));
    assert_eq!(faults(&report), [(RehearsalFindingKind::UnknownUndo, Some("charge")), stuck]);
}

#[tokio::test]
async fn a_reconcile_function_that_finds_what_never_happened_is_found() {
    let bank = Bank { always_happened: true, ..Bank::default() };
    let report = rehearse(&charging(&bank), &1999).await;
    assert_eq!(faults(&report), [(RehearsalFindingKind::Reconciled, Some("charge"))]);
}

#[tokio::test(start_paused = true)]
async fn pauses_signals_and_backoffs_take_no_time() {
    let bank = Bank::default();
    let (order, charge) = order_of(&bank);
    let order = order
        .flow(move |op, cents: u64| async move {
            op.sleep("cool-off", Duration::from_secs(7 * 86_400)).await;
            let missing: Option<u64> = op.signal("refusal", DAY).await;
            let approved: Option<u64> = op.signal("approval", DAY).await;
            let id = op.run(charge, cents).await?;
            Ok::<_, String>((id, missing, approved))
        })
        .unwrap();
    let begin = Instant::now();
    let rehearsal = Rehearsal::new(&order).signal("approval", &7_u64).unwrap();
    let (_, missing, approved) = rehearsal.run(&1999).await.into_outcome().unwrap().unwrap();
    assert_eq!((missing, approved), (None, Some(7)));
    assert_eq!(begin.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn the_shop_passes_though_its_steps_fail_at_first() {
    use crate::shop::Answer::{NotSent, Unknown};
    let systems = Systems::default();
    systems.answer("charge", &[NotSent, Unknown]);
    systems.answer("refund", &[Unknown]);
    let begin = Instant::now();
    let output = rehearse(&order(&systems), &cart()).await.into_outcome().unwrap();
    assert_eq!(output.unwrap(), "visa:1999");
    assert_eq!(begin.elapsed(), Duration::ZERO);
    let names = systems.names();
    let notified = names.iter().filter(|name| *name == "notify").count();
    // Never twice in one saga: those that run to their end.
    assert_eq!(notified, 3);
    assert!(names.contains(&"void".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_flow_that_waits_for_something_else_than_a_step_is_found() {
    let order = Saga::define("order", 1, ())
        .flow(|_, _: u64| async move { std::future::pending::<Result<u64, String>>().await });
    let report = rehearse(&order.unwrap(), &1).await;
    assert_eq!(faults(&report), [(RehearsalFindingKind::Endless, None)]);
}
