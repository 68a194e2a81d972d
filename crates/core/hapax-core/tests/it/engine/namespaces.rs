//! Engines with different namespaces over one store share no record and no entry of the schedule.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hapax_core::schedule::{EntryKey, NewEntry, QueueName};
use hapax_core::{
    Claim, EngineError, EntryId, Idempotency, MemoryStore, Namespace, NamespaceError, OperationId,
    Scope, Secret,
};

use super::{World, claim, key, outcome, own, reexecute, replayed};

const MANY: NonZeroU32 = NonZeroU32::new(100).unwrap();

fn engine(store: &Arc<MemoryStore>, namespace: &str) -> Idempotency {
    Idempotency::builder(Arc::clone(store)).namespace(namespace).build().unwrap()
}

#[tokio::test]
async fn two_services_on_one_store_execute_one_key_each() {
    let store = Arc::new(MemoryStore::default());
    let (orders, invoices) = (engine(&store, "orders"), engine(&store, "invoices"));
    own(&orders, &reexecute()).await.complete(outcome("ordered"), None).await.unwrap();
    let lease = own(&invoices, &reexecute()).await;
    assert!(matches!(claim(&orders, "a", &reexecute()).await, Claim::Replay(_)));
    lease.complete(outcome("invoiced"), None).await.unwrap();
    assert_eq!(replayed(&orders).await, outcome("ordered"));
    assert_eq!(replayed(&engine(&store, "invoices")).await, outcome("invoiced"));
    own(&engine(&store, ""), &reexecute()).await.complete(outcome("other"), None).await.unwrap();
}

#[test]
fn the_default_namespace_has_the_ids_of_records_without_one() {
    let secret = Secret::new([7; 32]);
    let id = |secret, namespace: &str| {
        let namespace = Namespace::new(namespace).unwrap();
        OperationId::derive(secret, &namespace, &Scope::of([("user", "c-1")]), &key()).to_string()
    };
    // From a build without namespaces.
    assert_eq!(id(None, ""), "4c4b2d5b9d5fa966ba746f1a7bf9d57922340788c24f58fed701ccdc7d186ab0");
    assert_eq!(
        id(Some(&secret), ""),
        "5f56d47180c88d57b16a805cdbad890a533373d673c1c3536f0fd4d919ee530b"
    );
    // The boundary between namespace and scope is part of the hash.
    let scope = |name: &str, value: &str| Scope::of([(name, value)]);
    let of = |namespace: &str, scope: &Scope| {
        OperationId::derive(None, &Namespace::new(namespace).unwrap(), scope, &key())
    };
    assert_ne!(of("a", &scope("b", "c")), of("ab", &scope("", "c")));
    assert_ne!(of("a", &Scope::shared()), of("", &Scope::shared()));
}

#[tokio::test(start_paused = true)]
async fn an_engine_over_a_store_that_processes_share_needs_a_namespace() {
    let world = World::new();
    let shared = super::WithCapabilities {
        store: world.store.clone(),
        secrets: None,
        notify: None,
        shared: true,
    };
    let shared = Arc::new(shared);
    let missing = Idempotency::builder(Arc::clone(&shared)).build().unwrap_err();
    assert_eq!(missing, EngineError::NoNamespace);
    let text = missing.to_string();
    assert!(
        text.contains(".namespace(\"\")") && text.contains("the name of this service"),
        "{text}"
    );
    assert!(Idempotency::builder(Arc::clone(&shared)).namespace("").build().is_ok());
    let found = Idempotency::builder(shared).namespace("two words").build().unwrap_err();
    let expected = NamespaceError::Character { found: ' ' };
    assert_eq!(found, EngineError::Namespace(expected));
    assert_eq!(Namespace::new("n".repeat(33)), Err(NamespaceError::Length { found: 33 }));
    assert!(Namespace::new("Orders-2.eu_west").is_ok());
}

#[tokio::test]
async fn each_namespace_has_its_own_entries_of_a_queue() {
    let store = Arc::new(MemoryStore::default());
    let engines = ["", "orders", "invoices"].map(|namespace| engine(&store, namespace));
    let queue = QueueName::new("saga:pay:1").unwrap();
    for (number, engine) in (0..).zip(&engines) {
        let key = EntryKey {
            operation: OperationId::from_bytes([number; 32]),
            id: EntryId::from_bytes([number; 16]),
        };
        let (queue, note) = (queue.clone(), Bytes::from(vec![number]));
        let entry = NewEntry { key, queue, due_in: Duration::ZERO, note };
        engine.schedule().unwrap().insert(entry).await.unwrap();
    }
    for (number, engine) in (0..).zip(&engines) {
        let schedule = engine.schedule().unwrap();
        let due = schedule.due(std::slice::from_ref(&queue), MANY).await.unwrap().entries;
        // A page of one entry may have only an entry of another namespace.
        let first = schedule.entries(None, NonZeroU32::MIN).await.unwrap();
        assert_eq!(first.entries.len(), usize::from(number == 0), "{number}");
        assert_eq!(first.next().map(|key| key.operation), Some(OperationId::from_bytes([0; 32])));
        let mut page = schedule.entries(None, MANY).await.unwrap();
        for entries in [due, std::mem::take(&mut page.entries)] {
            let [(_, Ok(entry))] = &entries[..] else { panic!("{entries:?}") };
            assert_eq!((&entry.queue, &entry.note[..]), (&queue, &[number][..]));
        }
        let queues = schedule.queues().await.unwrap();
        let queues: Vec<_> = queues.iter().map(|it| (&it.queue, it.entries)).collect();
        assert_eq!(queues, [(&queue, 1)]);
    }
    let long = QueueName::new("q".repeat(QueueName::MAX_LEN)).unwrap();
    assert!(Namespace::new("orders").unwrap().queue(&long).is_err());
}
