//! Events that the polling thread reads from the queue of the client, and the records that wait for them.

/// Most events that are read at a time.
const EVENTS: usize = 10_000;

/// The result of a read of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The queue is empty.
    None,
    /// An error, or a callback that has run.
    Other,
    /// A record. `pauses` is true if its partition is paused now.
    Record { pauses: bool },
}

/// Whether events, and records before their confirmation, are left.
#[derive(Debug, Default)]
pub(super) struct Events {
    /// Whether the queue may have more.
    has_more: bool,
    /// Whether records were added after which the events were not read to their end.
    has_unconfirmed: bool,
}

impl Events {
    /// Reads events until the queue is empty or a record pauses its partition, [`EVENTS`] at most. Returns the number
    /// of records.
    pub(super) fn read(&mut self, mut next: impl FnMut() -> Event) -> usize {
        self.has_more = true;
        let mut records = 0;
        for _ in 0..EVENTS {
            match next() {
                Event::None => {
                    self.has_more = false;
                    break;
                }
                Event::Other => {}
                Event::Record { pauses } => {
                    records += 1;
                    if pauses {
                        break;
                    }
                }
            }
        }
        records
    }

    /// Returns whether the queue may have more events.
    pub(super) const fn has_more(&self) -> bool {
        self.has_more
    }

    /// Notes that records were added.
    pub(super) const fn added(&mut self) {
        self.has_unconfirmed = true;
    }

    /// Returns whether records were added, and the events after them were read to their end.
    pub(super) const fn confirm(&mut self) -> bool {
        let confirms = self.has_unconfirmed && !self.has_more;
        self.has_unconfirmed &= !confirms;
        confirms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a queue of these events, and returns the number of records, and of events that are left.
    fn read(events: &mut Events, queue: &mut Vec<Event>) -> (usize, usize) {
        let records = events.read(|| queue.pop().unwrap_or(Event::None));
        (records, queue.len())
    }

    #[test]
    fn a_queue_with_many_events_and_no_record_counts_as_empty_once_it_is() {
        let mut events = Events::default();
        let mut queue = vec![Event::Other; EVENTS + 1];
        assert_eq!((read(&mut events, &mut queue), events.has_more()), ((0, 1), true));
        assert_eq!((read(&mut events, &mut queue), events.has_more()), ((0, 0), false));
        assert!(!events.confirm(), "no record");
    }

    #[test]
    fn records_are_confirmed_once_when_the_events_after_them_were_read_to_their_end() {
        let mut events = Events::default();
        events.added();
        let mut queue = vec![Event::Other; EVENTS + 1];
        read(&mut events, &mut queue);
        assert!(!events.confirm(), "an error may be left");
        read(&mut events, &mut queue);
        assert!(events.confirm() && !events.confirm(), "without another record");
    }

    #[test]
    fn a_record_that_pauses_its_partition_ends_the_read_and_confirms_nothing() {
        let mut events = Events::default();
        let [record, last] = [false, true].map(|pauses| Event::Record { pauses });
        let mut queue = vec![Event::Other, record, last, record];
        assert_eq!(read(&mut events, &mut queue), (2, 2));
        events.added();
        assert!(events.has_more() && !events.confirm());
        assert_eq!(read(&mut events, &mut queue), (1, 0));
        assert!(!events.has_more() && events.confirm());
    }
}
