//! Admission of sagas that are due, before they are claimed.

use std::fmt;
use std::time::Duration;

use hapax_core::OperationId;

type Admit = dyn Fn(&OperationId, &[u8]) -> Result<Box<dyn Send>, Duration> + Send + Sync;

/// The decision of a process whether it runs a saga that is due.
pub(crate) struct Admission(Box<Admit>);

impl Admission {
    pub(crate) fn new(
        admit: impl Fn(&OperationId, &[u8]) -> Result<Box<dyn Send>, Duration> + Send + Sync + 'static,
    ) -> Self {
        Self(Box::new(admit))
    }

    /// Admits a saga with this input. What is returned is dropped when its run has ended; the error is the
    /// time after which it is due again.
    pub(crate) fn admit(&self, id: &OperationId, input: &[u8]) -> Result<Box<dyn Send>, Duration> {
        (self.0)(id, input)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admission")
    }
}
