//! Bugs that can be planted, each where a developer could make it.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A bug that the simulator must find.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Bug {
            $($(#[$doc])* $bug,)*
        }

        impl Bug {
            /// All bugs.
            pub(crate) const ALL: &[Self] = &[$(Self::$bug,)*];
        }
    };
}

bugs! {
    /// The entry is removed before the outcome is recorded.
    RemovesBeforeCompletion,
    /// All entries of an operation are removed, also that of another start.
    RemovesByOperation,
    /// After parking, no process loads signals and cancellations once more.
    ParksWithoutASecondLook,
    /// A process that claims a parked saga does not load the signals that the process which parked it, and
    /// crashed, did not load.
    PostponesWithoutALook,
    /// The record of an unfinished saga has the retention of an outcome.
    ShortRetention,
    /// Undos run in the order of the steps.
    UndoesInOrder,
    /// Logged results are found by position.
    ResumesByPosition,
    /// A try is saved with its result, and not before its call.
    CountsTriesAfterwards,
    /// A late entry runs with its own input, although the record is of another request.
    RunsForeignEntries,
    /// A runner calls without a look at its lease.
    CallsWithoutALease,
    /// A step whose last try may still arrive is undone.
    UndoesWithoutSettling,
    /// A step that may not be repeated is called again after a crash.
    RepeatsOnce,
    /// An entry is postponed, although it was made due meanwhile.
    PostponesBlindly,
    /// The entry is inserted after the saga has begun.
    InsertsAfterBegin,
    /// The reason of a compensation is not saved before the first undo.
    UndoesBeforeTheReason,
    /// A signal is answered before its saga is woken.
    AnswersBeforeTheWakeUp,
    /// A look at an entry creates a record.
    AdoptsNothing,
    /// A wake-up counts a saga as parked that runs again.
    WakesTheRunning,
    /// A start that takes over a saga inserts no entry.
    TakesOverWithoutAnEntry,
    /// A look for a cancellation that fails counts as one that finds none.
    CallsWithoutALook,
    /// A duplicate counts as accepted before there is a log.
    AcceptsDuplicatesEarly,
    /// A transaction of a step commits without the log, which is saved afterwards.
    CommitsWithoutTheLog,
    /// A step that panics counts as one that called nothing.
    TakesPanicsForNothing,
    /// A step whose result is too large counts as one that was not called.
    TakesLargeResultsForNothing,
    /// A flow gets another value for a logged result that it cannot read.
    ReplacesUnreadableResults,
    /// The record of a signal is named by the saga's key alone.
    SignalsAnyGeneration,
    /// A process runs the sagas of versions that it does not have, with its own.
    RunsOtherVersions,
    /// A duplicate counts as accepted once there is a log, whether or not its entry exists.
    AcceptsByTheLog,
    /// The entry is inserted together with the first log, and the step is called before it is there.
    CallsBeforeTheEntry,
    /// An owner that took over saves its log while it inserts its entry, although another entry may have
    /// been accepted.
    SavesBesideAnEntry,
    /// An owner whose insertion has failed releases the record.
    ReleasesWhatMayBeAccepted,
    /// A call that was frozen between two requests goes on after its timeout.
    CallsAfterItsTimeout,
}
