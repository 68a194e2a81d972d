//! Differences between processes that keep them from sharing records.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::StoreUser;

/// The settings by which the messages of a consumer are named and ordered.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConsumerNaming {
    /// The name of the consumer.
    pub consumer: String,
    /// The stream, the queue or the topics: `nats://ORDERS`.
    pub sources: Vec<String>,
    /// Digest of the addresses of the broker. Processes with another namespace differ only if they have it.
    pub broker: String,
    /// The mode in which ids are kept.
    pub mode: String,
    /// The rules that find the id of a message.
    pub ids: String,
    /// The rule that finds the order key; `none` without an order.
    pub order_by: String,
    /// Fields of later versions, which stay as they are.
    #[serde(flatten)]
    pub later: BTreeMap<String, serde_json::Value>,
}

/// A difference between two processes of one namespace, or of one consumer.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "expected {setting} {} for {subject}, as {name} has it in the namespace {namespace:?} of this store, found {}: {}",
    .subject.shown(.theirs), .subject.shown(.ours), .subject.consequence(.setting)
)]
pub struct UserDifference {
    /// The other process.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// The route or consumer.
    pub subject: DifferenceSubject,
    /// The setting that differs: `scope`, `key_header` or `fingerprint` of a path; `mode`, `--id`, `--order-by` or
    /// `--namespace` of a consumer.
    pub setting: &'static str,
    /// The value of this process.
    pub ours: String,
    /// The value of the other process.
    pub theirs: String,
}

/// Where two processes differ.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DifferenceSubject {
    /// In the route of this path.
    Path(String),
    /// In the consumer of this name.
    Consumer(String),
}

impl DifferenceSubject {
    /// Returns a value of a setting, which of a consumer may be empty.
    fn shown(&self, value: &str) -> String {
        match self {
            Self::Path(_) => value.to_owned(),
            Self::Consumer(_) => format!("{value:?}"),
        }
    }

    /// Returns what happens otherwise, and what to do.
    fn consequence(&self, setting: &str) -> String {
        match self {
            Self::Path(_) => format!(
                "requests with one key would execute once in each. Set the same {setting}, or give this service a \
                 namespace of its own; to change {setting}, stop all processes of the namespace first"
            ),
            Self::Consumer(_) => format!(
                "a message that is delivered to each of them would be handled twice, or out of order. Set the same \
                 {setting}, or give this consumer a name of its own; to change {setting}, stop all processes of the \
                 consumer first"
            ),
        }
    }
}

impl fmt::Display for DifferenceSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "path {path}"),
            Self::Consumer(name) => write!(f, "the consumer {name}"),
        }
    }
}

/// Returns the first difference between the consumers of two processes.
pub(super) fn of_consumers(ours: &StoreUser, theirs: &StoreUser) -> Option<UserDifference> {
    let is_same_namespace = ours.namespace == theirs.namespace;
    let find = |one: &ConsumerNaming, other: &ConsumerNaming| {
        let shares_source = || one.sources.iter().any(|it| other.sources.contains(it));
        if one.consumer != other.consumer || !shares_source() {
            return None;
        }
        let settings = match is_same_namespace {
            true => [
                ("mode", &one.mode, &other.mode),
                ("--id", &one.ids, &other.ids),
                ("--order-by", &one.order_by, &other.order_by),
            ]
            .into_iter()
            .find(|(_, one, other)| one != other)?,
            // At another broker they are other messages.
            false if one.broker != other.broker => return None,
            false => ("--namespace", &ours.namespace, &theirs.namespace),
        };
        let (setting, ours, of_theirs) = settings;
        Some(UserDifference {
            name: theirs.name.clone(),
            namespace: theirs.namespace.clone(),
            subject: DifferenceSubject::Consumer(one.consumer.clone()),
            setting,
            ours: ours.clone(),
            theirs: of_theirs.clone(),
        })
    };
    let pairs =
        ours.consumers.iter().flat_map(|one| theirs.consumers.iter().map(move |it| (one, it)));
    pairs.into_iter().find_map(|(one, other)| find(one, other))
}

#[cfg(test)]
mod tests {
    use hapax_core::Namespace;

    use super::*;

    fn user(namespace: &str, change: impl FnOnce(&mut ConsumerNaming)) -> StoreUser {
        let mut naming = ConsumerNaming {
            consumer: "invoices".to_owned(),
            sources: vec!["kafka://mails".to_owned(), "kafka://orders".to_owned()],
            broker: "1f".to_owned(),
            mode: "claim".to_owned(),
            ids: "the header message-id".to_owned(),
            order_by: "none".to_owned(),
            later: BTreeMap::new(),
        };
        change(&mut naming);
        let namespace = Namespace::new(namespace).unwrap();
        let mut user =
            StoreUser::new(&namespace, "the consumer invoices, process 7".to_owned()).unwrap();
        user.consumers.push(naming);
        user
    }

    #[test]
    fn processes_of_one_consumer_with_other_ids_order_or_namespace_differ() {
        let ours = user("shop", |_| {});
        assert_eq!(ours.difference(&user("shop", |_| {})), None);
        for (namespace, change, setting, theirs) in [
            (
                "shop",
                (|it| it.ids = "position".to_owned()) as fn(&mut ConsumerNaming),
                "--id",
                "position",
            ),
            ("shop", |it| it.order_by = "subject".to_owned(), "--order-by", "subject"),
            ("shop", |it| it.mode = "batch".to_owned(), "mode", "batch"),
            // One topic is enough.
            (
                "shop",
                |it| {
                    it.sources = vec!["kafka://orders".to_owned()];
                    it.ids = "position".to_owned();
                },
                "--id",
                "position",
            ),
            // The addresses of one broker may be written otherwise.
            (
                "shop",
                |it| (it.broker, it.ids) = ("2f".to_owned(), "position".to_owned()),
                "--id",
                "position",
            ),
            ("bank", |_| {}, "--namespace", "bank"),
        ] {
            let found = ours.difference(&user(namespace, change)).unwrap();
            let subject = DifferenceSubject::Consumer("invoices".to_owned());
            assert_eq!(
                (found.setting, &*found.theirs, &found.subject),
                (setting, theirs, &subject)
            );
            let text = found.to_string();
            for part in
                [setting, theirs, &found.ours, "process 7", "stop all processes of the consumer"]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }

    #[test]
    fn consumers_with_other_names_or_sources_or_namespaces_at_other_brokers_do_not_differ() {
        let ours = user("shop", |_| {});
        type Change = fn(&mut ConsumerNaming);
        let others: [(&str, Change); 3] = [
            ("shop", |it| (it.consumer, it.ids) = ("mails".to_owned(), "position".to_owned())),
            ("shop", |it| {
                (it.sources, it.ids) = (vec!["kafka://x".to_owned()], "position".to_owned())
            }),
            ("bank", |it| it.broker = "2f".to_owned()),
        ];
        for (namespace, change) in others {
            assert_eq!(ours.difference(&user(namespace, change)), None);
        }
    }
}
