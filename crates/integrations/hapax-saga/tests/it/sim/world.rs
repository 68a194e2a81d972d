//! Simulated time, tasks of nodes, and what can happen to a node.
//!
//! A task is a future that only waits for times and for slots. A node that crashes loses its tasks;
//! one that is frozen polls them later. Both happen at [`World::point`], which every message passes.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use hapax_testkit::SeededEntropy;

use super::bugs::Bug;
use super::facts::Facts;
use super::flows::Definitions;
use super::outside::Outside;
use super::plan::{LEASE, MS, Plan, SECOND};
use super::store::ModelStore;
use super::tally::Tally;

pub(crate) type W = Rc<World>;

type Task = Pin<Box<dyn Future<Output = ()>>>;
type Action = Box<dyn FnOnce(&W)>;
type Restart = fn(&W, usize);

enum What {
    Wake(usize, u64),
    Do(Action),
}

struct RunEvent {
    at: u64,
    seq: u64,
    what: What,
}

impl PartialEq for RunEvent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.seq) == (other.at, other.seq)
    }
}

impl Eq for RunEvent {}

impl PartialOrd for RunEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for RunEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.seq).cmp(&(other.at, other.seq))
    }
}

struct TaskSlot {
    number: u64,
    node: usize,
    future: Option<Task>,
}

#[derive(Clone, Copy, Default)]
struct NodeState {
    frozen_until: u64,
    crashing: bool,
    is_up: bool,
}

/// A broken invariant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Violation {
    pub(crate) what: &'static str,
    pub(crate) detail: String,
}

/// The world of one schedule.
pub(crate) struct World {
    pub(crate) plan: Plan,
    pub(crate) bug: Option<Bug>,
    pub(crate) dice: SeededEntropy,
    pub(crate) ids: SeededEntropy,
    pub(crate) definitions: Rc<Definitions>,
    pub(crate) store: RefCell<ModelStore>,
    pub(crate) outside: RefCell<Outside>,
    pub(crate) facts: RefCell<Facts>,
    pub(crate) tally: RefCell<Tally>,
    pub(crate) trace: Option<RefCell<Vec<String>>>,
    violation: RefCell<Option<Violation>>,
    now: Cell<u64>,
    seq: Cell<u64>,
    current: Cell<(usize, u64)>,
    queue: RefCell<BinaryHeap<Reverse<RunEvent>>>,
    tasks: RefCell<Vec<TaskSlot>>,
    free: RefCell<Vec<usize>>,
    nodes: RefCell<Vec<NodeState>>,
    /// Starts a node.
    pub(crate) restart: Cell<Option<Restart>>,
}

impl World {
    pub(crate) fn new(
        seed: u64,
        bug: Option<Bug>,
        definitions: Rc<Definitions>,
        traced: bool,
    ) -> W {
        let dice = SeededEntropy::new(seed.wrapping_mul(0x9e37_79b9).wrapping_add(1));
        dice.next();
        let plan = Plan::draw(&dice);
        let nodes = vec![NodeState { is_up: true, ..NodeState::default() }; plan.nodes + 1];
        Rc::new(Self {
            bug,
            ids: SeededEntropy::new(seed ^ 0x5851_f42d_4c95_7f2d),
            dice,
            definitions,
            store: RefCell::default(),
            outside: RefCell::default(),
            facts: RefCell::default(),
            tally: RefCell::default(),
            trace: traced.then(RefCell::default),
            violation: RefCell::default(),
            now: Cell::new(0),
            seq: Cell::new(0),
            current: Cell::new((0, 0)),
            queue: RefCell::default(),
            tasks: RefCell::default(),
            free: RefCell::default(),
            nodes: RefCell::new(nodes),
            restart: Cell::new(None),
            plan,
        })
    }

    pub(crate) fn now(&self) -> u64 {
        self.now.get()
    }

    /// Returns true with this chance per mille, while there are faults.
    pub(crate) fn fault(&self, chance: u64) -> bool {
        self.now() < self.plan.faults_until && self.dice.below(1_000) < chance
    }

    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Returns whether a node has a version of the definition.
    pub(crate) fn has_version(&self, node: usize, version: u32) -> bool {
        let upgrade = self.plan.upgrades.get(node).filter(|(at, _)| self.now() >= *at);
        match version {
            _ if self.has(Bug::RunsOtherVersions) && version == 1 => true,
            1 => upgrade.is_none_or(|(_, keeps)| *keeps),
            _ => upgrade.is_some(),
        }
    }

    pub(crate) fn newest_version(&self, node: usize) -> u32 {
        if self.has_version(node, 2) { 2 } else { 1 }
    }

    pub(crate) fn count(&self, what: &'static str) {
        self.tally.borrow_mut().count(what);
    }

    pub(crate) fn tell(&self, line: impl FnOnce() -> String) {
        if let Some(trace) = &self.trace {
            let line = format!("{:>14.6} {}", self.now() as f64 / SECOND as f64, line());
            trace.borrow_mut().push(line);
        }
    }

    pub(crate) fn fail(&self, what: &'static str, detail: impl FnOnce() -> String) {
        let mut violation = self.violation.borrow_mut();
        if violation.is_none() {
            let detail = detail();
            self.tell(|| format!("VIOLATION {what}: {detail}"));
            *violation = Some(Violation { what, detail });
        }
    }

    pub(crate) fn violation(&self) -> Option<Violation> {
        self.violation.borrow().clone()
    }

    fn push(&self, at: u64, what: What) {
        let seq = self.seq.get();
        self.seq.set(seq + 1);
        self.queue.borrow_mut().push(Reverse(RunEvent { at, seq, what }));
    }

    /// Does something after a time, whatever happens to nodes.
    pub(crate) fn after(&self, span: u64, action: impl FnOnce(&W) + 'static) {
        self.push(self.now() + span, What::Do(Box::new(action)));
    }

    /// Starts a task of a node.
    pub(crate) fn spawn(&self, node: usize, future: impl Future<Output = ()> + 'static) {
        let number = self.seq.get();
        let task = TaskSlot { number, node, future: Some(Box::pin(future)) };
        let mut tasks = self.tasks.borrow_mut();
        let at = match self.free.borrow_mut().pop() {
            Some(at) => {
                tasks[at] = task;
                at
            }
            None => {
                tasks.push(task);
                tasks.len() - 1
            }
        };
        drop(tasks);
        self.push(self.now(), What::Wake(at, number));
    }

    /// Runs until `until`, or until a violation. Returns whether events are left.
    pub(crate) fn run(self: &Rc<Self>, until: u64) -> bool {
        while self.violation.borrow().is_none() {
            let next = self.queue.borrow().peek().map(|Reverse(event)| event.at);
            match next {
                None => return false,
                Some(at) if at > until => break,
                Some(_) => {}
            }
            let Some(Reverse(event)) = self.queue.borrow_mut().pop() else { return false };
            self.now.set(self.now().max(event.at));
            match event.what {
                What::Do(action) => action(self),
                What::Wake(at, number) => self.poll(at, number),
            }
        }
        self.now.set(self.now().max(until));
        true
    }

    fn poll(self: &Rc<Self>, at: usize, number: u64) {
        let (node, future) = {
            let mut tasks = self.tasks.borrow_mut();
            let task = &mut tasks[at];
            if task.number != number || task.future.is_none() {
                return;
            }
            let frozen_until = self.nodes.borrow()[task.node].frozen_until;
            if self.now() < frozen_until {
                drop(tasks);
                return self.push(frozen_until, What::Wake(at, number));
            }
            (task.node, task.future.take())
        };
        let Some(mut future) = future else { return };
        self.current.set((at, number));
        let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if self.nodes.borrow()[node].crashing {
            drop(future);
            self.crashed(node);
        } else if polled.is_pending() {
            self.tasks.borrow_mut()[at].future = Some(future);
            return;
        } else {
            drop(future);
        }
        self.free.borrow_mut().push(at);
    }

    /// Lets a node crash between two steps of its tasks.
    pub(crate) fn crash(self: &Rc<Self>, node: usize) {
        if self.is_up(node) {
            self.crashed(node);
        }
    }

    fn crashed(self: &Rc<Self>, node: usize) {
        let mut dropped = Vec::new();
        for (at, task) in self.tasks.borrow_mut().iter_mut().enumerate() {
            if task.node == node
                && let Some(future) = task.future.take()
            {
                dropped.push(future);
                self.free.borrow_mut().push(at);
            }
        }
        drop(dropped);
        self.nodes.borrow_mut()[node] = NodeState::default();
        let down = self.dice.below(if self.dice.below(4) == 0 { 300 } else { 10 }) * SECOND;
        self.after(down, move |w| {
            w.nodes.borrow_mut()[node].is_up = true;
            w.tell(|| format!("node {node} starts"));
            if let Some(restart) = w.restart.get() {
                restart(w, node);
            }
        });
    }

    /// Returns whether a node can take a request.
    pub(crate) fn is_up(&self, node: usize) -> bool {
        self.nodes.borrow()[node].is_up
    }

    /// Ends all freezes.
    pub(crate) fn thaw(&self) {
        for node in self.nodes.borrow_mut().iter_mut() {
            node.frozen_until = 0;
        }
    }

    /// A point at which a node may crash or freeze.
    pub(crate) async fn point(&self, node: usize) {
        self.critical_point(node, self.plan.crashes).await;
    }

    /// The same, with another chance of a crash.
    pub(crate) async fn critical_point(&self, node: usize, crashes: u64) {
        // The last node is that of the clients and never fails.
        if node >= self.plan.nodes {
            return;
        }
        if self.fault(crashes) {
            self.count("crash");
            self.tell(|| format!("node {node} crashes"));
            self.nodes.borrow_mut()[node].crashing = true;
            return pending().await;
        }
        if self.fault(self.plan.freezes) {
            let span = match self.dice.below(4) {
                0 => self.dice.below(5 * SECOND),
                1 => LEASE - SECOND + self.dice.below(2 * SECOND),
                2 => LEASE + self.dice.below(60 * SECOND),
                _ => self.dice.below(900 * SECOND),
            };
            self.count("freeze");
            if span > LEASE {
                self.count("freeze past the lease");
            }
            let until = self.now() + span;
            self.tell(|| format!("node {node} is frozen for {} ms", span / MS));
            self.nodes.borrow_mut()[node].frozen_until = until;
            self.sleep(span).await;
        }
    }

    pub(crate) async fn sleep(&self, span: u64) {
        let _ = self.receive(&Slot::<()>::default(), self.now() + span).await;
    }

    /// Waits for a slot until a time.
    pub(crate) async fn receive<T>(&self, slot: &Slot<T>, until: u64) -> Option<T> {
        let mut registered = false;
        poll_fn(|_| {
            if let Some(value) = slot.0.borrow_mut().value.take() {
                return Poll::Ready(Some(value));
            }
            if self.now() >= until {
                return Poll::Ready(None);
            }
            if !registered {
                registered = true;
                let (at, number) = self.current.get();
                slot.0.borrow_mut().waits = Some((at, number));
                self.push(until, What::Wake(at, number));
            }
            Poll::Pending
        })
        .await
    }

    /// Fills a slot; the first value counts until it is taken.
    pub(crate) fn fill<T>(&self, slot: &Slot<T>, value: T) {
        let mut inner = slot.0.borrow_mut();
        inner.value.get_or_insert(value);
        if let Some((at, number)) = inner.waits {
            self.push(self.now(), What::Wake(at, number));
        }
    }

    /// Drops all tasks, which have references to the world.
    pub(crate) fn clear(&self) {
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        let queue = std::mem::take(&mut *self.queue.borrow_mut());
        drop((tasks, queue));
    }
}

struct SlotInner<T> {
    value: Option<T>,
    waits: Option<(usize, u64)>,
}

/// A place for one reply.
pub(crate) struct Slot<T>(Rc<RefCell<SlotInner<T>>>);

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self(Rc::new(RefCell::new(SlotInner { value: None, waits: None })))
    }
}

impl<T> Clone for Slot<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}
