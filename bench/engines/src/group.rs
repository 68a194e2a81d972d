//! Group commit around any engine: what waits while one batch is written goes into the next.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use futures_channel::oneshot;
use hapax_core::store::{BoxFuture, Swap, Swapped};
use hapax_core::{Sealer, Store, SystemEntropy};
use hapax_file::{FileStore, FileOptions, SecretSource};

use crate::engine::{self, Engine, Failure, Prepared};

const MAX_SWAPS: usize = 512;

/// The seam: one conditional write, durable when it is answered.
pub trait Seam: Send + Sync {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<bool, Failure>>;
}

type Job = (Prepared, oneshot::Sender<Result<bool, Failure>>);

pub struct Grouped {
    jobs: SyncSender<Job>,
    sealer: Sealer,
}

impl Grouped {
    pub fn new(engine: Box<dyn Engine>) -> Self {
        let (jobs, queue) = sync_channel(4096);
        std::thread::spawn(move || work(engine, &queue));
        Self { jobs, sealer: Sealer::checksum() }
    }
}

impl Seam for Grouped {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<bool, Failure>> {
        Box::pin(async move {
            let Swap { id: key, expected, write_id, draft } = swap;
            // As long as the store's columns.
            let mut value = write_id.as_bytes().to_vec();
            value.resize(82, 0);
            value.extend(self.sealer.seal(&key, write_id, &draft.record, &SystemEntropy)?);
            let prepared = Prepared {
                key: *key.as_bytes(),
                expected: expected.map(|write_id| *write_id.as_bytes()),
                due: draft.keep.unwrap_or_default().as_micros() as u64,
                value,
            };
            let (reply, answer) = oneshot::channel();
            self.jobs.try_send((prepared, reply))?;
            answer.await?
        })
    }
}

impl Seam for FileStore {
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<bool, Failure>> {
        Box::pin(async move { Ok(matches!(Store::swap(self, swap).await?, Swapped::Stored(_))) })
    }
}

fn work(mut engine: Box<dyn Engine>, queue: &Receiver<Job>) {
    while let Ok(first) = queue.recv() {
        let jobs = std::iter::once(first).chain(queue.try_iter()).take(MAX_SWAPS);
        let (batch, replies): (Vec<_>, Vec<_>) = jobs.unzip();
        match engine.apply(&batch) {
            Ok(written) => {
                for (reply, written) in replies.into_iter().zip(written) {
                    reply.send(Ok(written)).ok();
                }
            }
            Err(error) => {
                let text = error.to_string();
                for reply in replies {
                    reply.send(Err(text.clone().into())).ok();
                }
            }
        }
    }
}

/// An engine by name, or the store itself: `hapax`, and with the map of pages in every commit,
/// `hapax-quick`.
pub fn open(name: &str, directory: &Path) -> Result<Arc<dyn Seam>, Failure> {
    std::fs::create_dir_all(directory)?;
    let options = FileOptions::new(directory.join("hapax.db")).secret(SecretSource::None);
    Ok(match name {
        "hapax" => Arc::new(FileStore::open(options.quick_recovery_above(u64::MAX))?),
        "hapax-quick" => Arc::new(FileStore::open(options.quick_recovery_above(0))?),
        name => Arc::new(Grouped::new(engine::open(name, directory)?)),
    })
}
