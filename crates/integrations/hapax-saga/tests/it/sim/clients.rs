//! One schedule: what clients, senders, operators and the store's clock do, and when.

use std::rc::Rc;

use hapax_core::schedule::EntryKey;
use hapax_core::{EntryId, Fingerprint};

use super::checks;
use super::facts::{SagaFacts, saga_id};
use super::flows::Input;
use super::node::{Node, Started};
use super::plan::{DAY, EXPIRY, HOUR, SECOND};
use super::senders;
use super::store::{self, Note};
use super::world::{Slot, W, World};

/// Plays the schedule of a world.
pub(crate) fn play(w: &W) {
    w.tell(|| format!("{:?}", w.plan));
    w.restart.set(Some(|w, node| w.spawn(node, Node::start(w, node).poll())));
    for node in 0..w.plan.nodes {
        w.spawn(node, Node::start(w, node).poll());
    }
    for saga in 0..w.plan.sagas {
        plan_saga(w, saga);
    }
    plan_store(w);
    w.run(w.plan.faults_until);
    w.thaw();
    // Requests of before may arrive for some time.
    w.run(w.plan.faults_until + 6 * HOUR);
    if w.violation().is_none() {
        checks::quiet(w);
    }
    let mut number = 1_000;
    for _ in 0..400 {
        let facts = w.facts.borrow();
        let is_over = !facts.sagas.iter().any(SagaFacts::is_unfinished) && facts.to_come == 0;
        drop(facts);
        if w.violation().is_some() || is_over {
            break;
        }
        for saga in 0..w.plan.sagas {
            number += 1;
            let node = Node::start(w, w.plan.nodes);
            w.spawn(w.plan.nodes, senders::operate(node, saga, number));
        }
        w.run(w.now() + 3 * HOUR);
    }
    if w.violation().is_none() {
        checks::finally(w);
    }
}

fn note(saga: usize, input: Input, transactional: bool) -> Rc<Note> {
    let fingerprint = Fingerprint::builder("saga/1").field(&input.salt.to_be_bytes()).finish();
    Rc::new(Note { saga, input, fingerprint, transactional, version: 1 })
}

/// Returns a time at which something happens: mostly early, sometimes at any time.
fn moment(w: &World) -> u64 {
    let span = match w.dice.below(4) {
        0 => w.plan.faults_until,
        1 => 3 * HOUR.min(w.plan.faults_until),
        _ => 300 * SECOND,
    };
    w.dice.below(span.max(SECOND))
}

fn plan_saga(w: &W, saga: usize) {
    let transactional = w.dice.below(6) == 0;
    let first = note(saga, Input::draw(&w.dice), transactional);
    let mut notes = vec![first];
    if !transactional && w.dice.below(3) == 0 {
        notes.push(note(saga, Input::draw(&w.dice), false));
    }
    w.facts.borrow_mut().sagas.push(SagaFacts::new(saga, notes.clone()));
    let at = w.dice.below(60 * SECOND);
    for (number, note) in notes.into_iter().enumerate() {
        if number > 0 {
            w.count("start of another input");
        }
        let delay = at + if number > 0 { w.dice.below(120 * SECOND) } else { 0 };
        let client = w.plan.nodes;
        w.after(delay, move |w| {
            let world = Rc::clone(w);
            match note.transactional {
                true => start_in(w, &note),
                false => w.spawn(client, start(world, note)),
            }
        });
    }
    for _ in 0..w.dice.below(3) {
        let (at, value) = (moment(w), w.dice.below(1 << 40));
        on_a_node(w, at, move |w, node| {
            w.spawn(node, senders::send(Node::start(w, node), saga, "s0".to_owned(), value));
        });
    }
    if w.dice.below(5) == 0 {
        let at = moment(w);
        on_a_node(w, at, move |w, node| {
            w.spawn(node, senders::send(Node::start(w, node), saga, String::new(), 7));
        });
    }
    for number in 0..w.dice.below(4) {
        let at = moment(w);
        on_a_node(w, at, move |w, node| {
            w.spawn(node, senders::operate(Node::start(w, node), saga, number));
        });
    }
}

/// Plans the next saga under the key of one that has just ended, for once its outcome has expired, and a
/// late signal to the one that has ended.
pub(crate) fn plan_next(w: &W, saga: usize, facts: &mut SagaFacts) {
    let is_late = w.now() > w.plan.faults_until + 10 * DAY;
    if !w.plan.expires || is_late || w.dice.below(2) == 0 {
        return;
    }
    let next = note(saga, Input::draw(&w.dice), false);
    facts.next = Some(Rc::clone(&next));
    let (generation, at) = (facts.generation, EXPIRY + w.dice.below(DAY));
    // Not now: the facts are in use.
    w.after(0, |w| w.facts.borrow_mut().to_come += 1);
    w.after(at, move |w| {
        w.facts.borrow_mut().to_come -= 1;
        w.spawn(w.plan.nodes, start(Rc::clone(w), next));
    });
    if let Some(generation) = generation {
        w.after(at + w.dice.below(10 * SECOND), move |w| {
            let node = Node::start(w, w.plan.nodes);
            w.spawn(w.plan.nodes, async move {
                senders::put_signal(&node, saga, generation, "s0", 1).await;
            });
        });
    }
}

/// Sends a signal shortly after a flow looks for it.
pub(crate) fn react(w: &W, saga: usize, name: &str) {
    if w.now() >= w.plan.faults_until || name.is_empty() && w.dice.below(2) > 0 {
        return;
    }
    let near = 3 * w.plan.latency;
    let span = [near, near, near, 5 * SECOND, 60 * SECOND][w.dice.below(5) as usize];
    let (at, value, name) = (w.dice.below(span), w.dice.below(1 << 40), name.to_owned());
    on_a_node(w, at, move |w, node| {
        w.spawn(node, senders::send(Node::start(w, node), saga, name, value));
    });
}

fn on_a_node(w: &W, at: u64, action: impl FnOnce(&W, usize) + 'static) {
    let node = w.dice.below(w.plan.nodes as u64) as usize;
    w.after(at, move |w| {
        if w.is_up(node) {
            action(w, node);
        }
    });
}

/// Starts a saga in a transaction of the caller, which has committed.
fn start_in(w: &W, note: &Rc<Note>) {
    w.count("transactional start");
    let id = EntryId::fresh(&w.ids).expect("there is entropy");
    let key = EntryKey { operation: saga_id(note.saga), id };
    store::insert_now(w, key, note);
    w.facts.borrow_mut().sagas[note.saga].accepted = Some(note.fingerprint);
}

/// A client: repeats its start until it is answered, or gives up.
async fn start(w: W, note: Rc<Note>) {
    let tries = 1 + w.dice.below(6);
    for _ in 0..tries {
        let node = w.dice.below(w.plan.nodes as u64) as usize;
        let answer = Slot::default();
        if w.is_up(node) {
            w.facts.borrow_mut().sagas[note.saga].unclear += 1;
            let handler = Node::start(&w, node).handle_start(Rc::clone(&note), answer.clone());
            w.spawn(node, handler);
        }
        let answered = w.receive(&answer, w.now() + 30 * SECOND).await;
        if answered.is_some() {
            w.facts.borrow_mut().sagas[note.saga].unclear -= 1;
        } else {
            w.count("start without reply");
        }
        match answered {
            Some(Started::Accepted | Started::Ended | Started::Mismatch) => return,
            Some(Started::Withdrawn) => {
                w.facts.borrow_mut().sagas[note.saga].withdrawn += 1;
                if w.dice.below(2) == 0 {
                    return;
                }
            }
            // The client may give up: whatever was not accepted has called nothing.
            Some(Started::InFlight) | None if w.dice.below(8) == 0 => return,
            Some(Started::InFlight) | None => {}
        }
        w.sleep(w.dice.below(40 * SECOND)).await;
    }
}

/// Lets the store's clock step forward.
pub(crate) fn step_clock(w: &W, span: u64) {
    w.count("clock step");
    w.tell(|| format!("the store's clock steps by {} s", span / SECOND));
    w.store.borrow_mut().offset += span;
}

fn plan_store(w: &W) {
    if w.plan.lapses {
        for _ in 0..1 + w.dice.below(3) {
            let is_step = w.dice.below(2) == 0;
            let at = moment(w);
            let span = [20, 60, 3_600][w.dice.below(3) as usize] * SECOND;
            w.after(at, move |w| {
                if is_step {
                    step_clock(w, span);
                } else {
                    w.count("all leases lapsed");
                    w.tell(|| "all leases lapse".to_owned());
                    w.reopen();
                }
            });
        }
    }
    for (node, (at, _)) in w.plan.upgrades.iter().enumerate() {
        w.after(*at, move |w| {
            w.count("process upgraded");
            w.tell(|| format!("node {node} has version 2"));
            w.crash(node);
        });
    }
    for day in 0..60 {
        w.after(day * DAY + HOUR, |w| w.reap());
    }
    w.after(10 * 60 * SECOND, |w| w.reap());
}
