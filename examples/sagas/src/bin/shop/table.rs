//! The table of what happened.

use std::collections::BTreeMap;
use std::fmt;

/// The effects, in the order of the columns.
pub(crate) const EFFECTS: [&str; 5] = ["reserve", "charge", "ship", "refund", "free"];

/// How often each effect happened.
pub(crate) type Counts = [i64; EFFECTS.len()];

/// Orders that end differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wish {
    /// Nothing is wrong.
    Lamp,
    /// The card is declined.
    ExpiredCard,
    /// The article is found broken when it is shipped.
    Vase,
}

impl Wish {
    pub(crate) const ALL: [Self; 3] = [Self::Lamp, Self::ExpiredCard, Self::Vase];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Lamp => "lamp",
            Self::ExpiredCard => "expired-card",
            Self::Vase => "vase",
        }
    }

    /// Returns the end of its saga, and the effects at that time.
    pub(crate) const fn end(self) -> (&'static str, Counts) {
        match self {
            Self::Lamp => ("done", [1, 1, 1, 0, 0]),
            Self::ExpiredCard => ("undone", [1, 0, 0, 0, 1]),
            Self::Vase => ("undone", [1, 1, 0, 1, 1]),
        }
    }
}

/// An order and what happened.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) order: String,
    pub(crate) wish: Wish,
    pub(crate) state: String,
    pub(crate) counts: Counts,
}

impl Row {
    fn is_right(&self) -> bool {
        (self.state.as_str(), self.counts) == self.wish.end()
    }
}

/// The rows of all orders.
#[derive(Debug)]
pub(crate) struct Table(pub(crate) Vec<Row>);

impl Table {
    pub(crate) fn is_right(&self) -> bool {
        self.0.iter().all(Row::is_right)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<7} {:<13} {:<7}", "order", "wish", "saga")?;
        for effect in EFFECTS {
            write!(f, " {effect:>7}")?;
        }
        writeln!(f)?;
        for row in &self.0 {
            write!(f, "{:<7} {:<13} {:<7}", row.order, row.wish.name(), row.state)?;
            for count in row.counts {
                write!(f, " {count:>7}")?;
            }
            writeln!(f, "{}", if row.is_right() { "" } else { "  WRONG" })?;
        }
        let mut states = BTreeMap::<&str, usize>::new();
        for row in &self.0 {
            *states.entry(&row.state).or_default() += 1;
        }
        let states: Vec<_> =
            states.iter().map(|(state, count)| format!("{count} {state}")).collect();
        write!(f, "{} orders: {}", self.0.len(), states.join(", "))
    }
}
