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
    /// After parking, signals and cancellations are not looked for once more, by anybody.
    ParksWithoutASecondLook,
    /// A look at a parked saga whose runner crashed before its second look does not make up for it.
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
    /// A duplicate counts as accepted before there is a log, which proves that the entry exists.
    AcceptsDuplicatesEarly,
}
