use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};
use hapax_core::schedule::*;
use hapax_core::{EntryId, OperationId};
use hapax_file::*;
#[tokio::main]
#[allow(clippy::disallowed_methods)]
async fn main() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let path = dir.path().join("x.db");
    let opts = || FileOptions::new(&path);
    let store = Arc::new(FileStore::open(opts()).unwrap());
    let count: u64 = std::env::args().nth(1).unwrap().parse().unwrap();
    let began = Instant::now();
    let key = |of: u64| { let mut b=[0;32]; b[..8].copy_from_slice(&of.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()); b[8..16].copy_from_slice(&of.to_be_bytes()); EntryKey { operation: OperationId::from_bytes(b), id: EntryId::from_bytes([1;16]) } };
    let mut tasks = Vec::new();
    for t in 0..1024u64 {
        let store = store.clone();
        tasks.push(tokio::spawn(async move {
            let mut of = t;
            while of < count {
                let due = if of % 2 == 0 { 0 } else { 86_400 + of % 10_000 };
                let e = NewEntry { key: key(of), queue: QueueName::new(if of%2==0 {"other/1"} else {"mine/1"}).unwrap(), due_in: Duration::from_secs(due), note: vec![7u8; 200].into() };
                store.insert(e).await.unwrap();
                of += 1024;
            }
        }));
    }
    for t in tasks { t.await.unwrap(); }
    for of in count..count+20 { store.insert(NewEntry { key: key(of), queue: QueueName::new("mine/1").unwrap(), due_in: Duration::ZERO, note: vec![7u8; 200].into() }).await.unwrap(); }
    println!("inserted {count} in {:?}, {:?}", began.elapsed(), store.stats());
    let time = async |what: &str, store: &FileStore, queues: &[QueueName]| {
        let mut all = Vec::new();
        for _ in 0..200 { let b = Instant::now(); let f = store.due(queues, NonZeroU32::new(20).unwrap()).await.unwrap(); assert_eq!(f.entries.len(), 20); all.push(b.elapsed()); }
        all.sort();
        println!("{what}: first/median/p99 {:?} {:?} {:?}", all[0], all[100], all[197]);
    };
    let mine = [QueueName::new("mine/1").unwrap()];
    let both = [QueueName::new("mine/1").unwrap(), QueueName::new("other/1").unwrap()];
    time("due mine", &store, &mine).await;
    time("due both", &store, &both).await;
    let b = Instant::now(); println!("queues {:?} {:?}", store.queues().await.unwrap(), b.elapsed());
    store.close().await;
    let b = Instant::now(); 
    let store = FileStore::open(opts()).unwrap(); println!("opened {:?}", b.elapsed());
    let b = Instant::now(); store.due(&mine, NonZeroU32::new(20).unwrap()).await.unwrap(); println!("first due {:?}", b.elapsed());
    time("due mine", &store, &mine).await;
    let b = Instant::now();
    let mut n=0; for _ in 0..100 { n+=1; assert!(store.postpone(key(1), None, Duration::from_secs(100_000+n)).await.unwrap()); }
    println!("postpone alone {:?} each", b.elapsed()/100);
    store.close().await;
}
