//! Admission of sagas that are due, before they are claimed.

use std::fmt;
use std::time::Duration;

use hapax_core::OperationId;

type Admit = dyn Fn(&OperationId, &[u8]) -> Result<Box<dyn Send>, AdmissionDenied> + Send + Sync;

/// The reason for which a process does not run a saga that is due, with the time after which it looks again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AdmissionDenied {
    /// No process is to run it now: the saga is postponed for all of them.
    Postponed(Duration),
    /// Another process is to run it: it stays due. If this process leaves too many such sagas alone, further
    /// ones are postponed, so that they hide none of its own.
    LeftAlone(Duration),
}

/// The decision of a process whether it runs a saga that is due.
pub(crate) struct Admission(Box<Admit>);

impl Admission {
    pub(crate) fn new(
        admit: impl Fn(&OperationId, &[u8]) -> Result<Box<dyn Send>, AdmissionDenied>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self(Box::new(admit))
    }

    /// Admits a saga with this input. What is returned is dropped when its run has ended.
    pub(crate) fn admit(
        &self,
        id: &OperationId,
        input: &[u8],
    ) -> Result<Box<dyn Send>, AdmissionDenied> {
        (self.0)(id, input)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Admission")
    }
}
