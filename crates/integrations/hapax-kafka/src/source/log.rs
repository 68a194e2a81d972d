//! Lines of the client's log that concern the identity of a topic.
//!
//! The client fetches again after an error about a topic or partition, and returns no such error. Nor does it return that
//! the id of a topic has changed, or that the epoch of a leader is an earlier one. It logs all of these in its debugging
//! context `topic`, before it fetches further records ([`Properties::consumer`](crate::config::Properties::consumer)
//! turns the context on). The lines are those of librdkafka 2.12; a test shows that they are found.

/// Meaning of a line of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogLine<'a> {
    /// The topic, or its partition with this number, may be another one than before.
    Unverified { topic: &'a str, number: Option<i32> },
    /// The topic was created again: its id is another one.
    Recreated { topic: &'a str, before: &'a str, now: &'a str },
}

/// The id of a topic that is not known yet: 16 zero bytes in base 64.
const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

impl<'a> LogLine<'a> {
    /// Parses a line of this facility; `None` for another line.
    pub(super) fn parse(facility: &str, message: &'a str) -> Option<Self> {
        // The name of the client's thread.
        let text = match message.strip_prefix("[thrd:") {
            Some(rest) => rest.split_once("]: ")?.1,
            None => message,
        };
        match facility {
            // "orders [0]: broker unavailable: fetch: Broker: Unknown topic or partition"
            "BROKERUA" => Self::of_partition(text),
            // "orders [0]: ignoring outdated metadata update with leader epoch 1 which is older than …"
            "BROKER" if text.contains("]: ignoring outdated metadata") => Self::of_partition(text),
            // "Topic orders does not exist, …", "Topic orders exists after being deleted, …"
            "TOPICPROP" => Self::of_topic(text),
            // "Topic orders changed state exists -> notexists"
            "STATE" if text.ends_with("-> notexists") => Self::of_topic(text),
            // "Topic orders changed id from … to …"
            "METADATA" => {
                let (topic, ids) = text.strip_prefix("Topic ")?.split_once(" changed id from ")?;
                let (before, now) = ids.split_once(" to ")?;
                match (before.starts_with(NO_ID), now.starts_with(NO_ID)) {
                    (true, _) => None,
                    // The broker that answered knows no ids of topics.
                    (false, true) => Some(Self::Unverified { topic, number: None }),
                    (false, false) => Some(Self::Recreated { topic, before, now }),
                }
            }
            _ => None,
        }
    }

    fn of_partition(text: &'a str) -> Option<Self> {
        let (topic, rest) = text.split_once(" [")?;
        let number = rest.split_once(']')?.0.parse().ok()?;
        Some(Self::Unverified { topic, number: Some(number) })
    }

    fn of_topic(text: &'a str) -> Option<Self> {
        let topic = text.strip_prefix("Topic ")?.split(' ').next()?;
        Some(Self::Unverified { topic, number: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_the_identity_of_a_topic_are_found_and_no_others() {
        let id = "Wm9vIGlzIG5vdCBhIHpvbw";
        let thread = |text: &str| format!("[thrd:127.0.0.1:9092/1]: {text}");
        let unverified = |number| Some(LogLine::Unverified { topic: "orders", number });
        for (facility, text, expected) in [
            (
                "BROKERUA",
                "orders [3]: broker unavailable: fetch: Broker: Unknown topic or partition",
                unverified(Some(3)),
            ),
            (
                "BROKER",
                "orders [3]: ignoring outdated metadata update with leader epoch 1 which is older",
                unverified(Some(3)),
            ),
            ("BROKER", "orders [3]: leader 1 epoch 0 -> leader 2 epoch 1", None),
            (
                "TOPICPROP",
                "Topic orders does not exist, allowing 29000ms for metadata",
                unverified(None),
            ),
            ("STATE", "Topic orders changed state exists -> notexists", unverified(None)),
            ("STATE", "Topic orders changed state unknown -> exists", None),
            ("METADATA", &format!("Topic orders changed id from {NO_ID} to {id}"), None),
            (
                "METADATA",
                &format!("Topic orders changed id from {id} to {id}x"),
                Some(LogLine::Recreated { topic: "orders", before: id, now: &format!("{id}x") }),
            ),
            (
                "METADATA",
                &format!("Topic orders changed id from {id} to {NO_ID}"),
                unverified(None),
            ),
            ("METADATA", "Topic orders [3] Leader 1 Epoch 0", None),
            ("FETCH", "orders [3]: broker unavailable", None),
            ("BROKERUA", "", None),
        ] {
            assert_eq!(LogLine::parse(facility, text), expected, "{text}");
            assert_eq!(LogLine::parse(facility, &thread(text)), expected, "{text}");
        }
    }
}
