//! Parameters of a schedule, drawn once from its seed.

use std::time::Duration;

use hapax_testkit::SeededEntropy;

pub(crate) const MS: u64 = 1_000;
pub(crate) const SECOND: u64 = 1_000 * MS;
pub(crate) const HOUR: u64 = 3_600 * SECOND;
pub(crate) const DAY: u64 = 24 * HOUR;
/// The lease of a saga's record.
pub(crate) const LEASE: u64 = 30 * SECOND;
/// Time that a sender waits for a reply of the store.
pub(crate) const TIMEOUT: u64 = 2 * SECOND;
/// Timeout of a try.
pub(crate) const CALL_TIMEOUT: u64 = 5 * SECOND;
/// Time after it in which a try may still take effect.
pub(crate) const SETTLE: u64 = 15 * SECOND;
/// The short lifetime of a key; its tenth is longer than a call may take to arrive.
pub(crate) const LIFETIME: u64 = 600 * SECOND;

/// The short retention of an outcome: no late request or entry of a saga is left after it, and the called
/// systems have forgotten its keys.
pub(crate) const EXPIRY: u64 = 5 * DAY;

/// Parameters of a schedule. Chances are per mille.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) nodes: usize,
    pub(crate) sagas: usize,
    pub(crate) faults_until: u64,
    pub(crate) crashes: u64,
    pub(crate) freezes: u64,
    pub(crate) shutdowns: u64,
    /// Bound of the usual time that a message takes.
    pub(crate) latency: u64,
    pub(crate) lose: u64,
    pub(crate) delay: u64,
    pub(crate) repeat: u64,
    /// Chance that an insertion into the schedule is delayed.
    pub(crate) late_inserts: u64,
    /// Chance that a call of a step goes wrong, in each of several ways.
    pub(crate) calls: u64,
    pub(crate) outage: Option<(u64, u64)>,
    /// True if the store's clock may step, or its leases may all lapse.
    pub(crate) lapses: bool,
    /// True if the called systems reject calls with smaller fences.
    pub(crate) fences: bool,
    /// True if an undo or a verdict makes the called system reject earlier tries. Otherwise the
    /// settle time alone keeps them apart.
    pub(crate) guards: bool,
    /// Time at which the flow changes.
    pub(crate) change_at: u64,
    /// True if outcomes expire, and another saga begins under the key.
    pub(crate) expires: bool,
    /// Times at which processes get the second version of the definition, and whether they keep the
    /// first; the first process keeps it, so that every saga ends.
    pub(crate) upgrades: Vec<(u64, bool)>,
}

impl Plan {
    pub(crate) fn draw(dice: &SeededEntropy) -> Self {
        let pick = |from: &[u64]| from[dice.below(from.len() as u64) as usize];
        let rate = pick(&[2, 10, 50]);
        let faults_until = pick(&[600 * SECOND, HOUR, HOUR, DAY, 4 * DAY]);
        let lapses = dice.below(4) == 0;
        let nodes = 2 + dice.below(2) as usize;
        let upgraded = dice.below(4) == 0;
        Self {
            nodes,
            sagas: 1 + dice.below(3) as usize,
            faults_until,
            crashes: pick(&[0, 4, 15, 40]),
            freezes: pick(&[0, 4, 15, 40]),
            shutdowns: pick(&[0, 0, 10, 50]),
            latency: pick(&[8, 8, 400]) * MS,
            lose: rate,
            delay: rate,
            repeat: rate,
            late_inserts: pick(&[0, 0, 700]),
            calls: pick(&[10, 50, 150]),
            outage: (dice.below(3) == 0).then(|| {
                let from = dice.below(600 * SECOND);
                (from, from + pick(&[60, 300, 700, 2_000]) * SECOND)
            }),
            lapses,
            fences: lapses || dice.below(2) == 0,
            guards: lapses || dice.below(2) == 0,
            change_at: match dice.below(10) {
                0 if !upgraded => dice.below(600 * SECOND),
                _ => u64::MAX,
            },
            expires: dice.below(3) == 0,
            upgrades: (0..nodes)
                .filter(|_| upgraded)
                .map(|node| (pick(&[60, 400]) * SECOND, node))
                .map(|(until, node)| (dice.below(until), node == 0 || dice.below(2) == 0))
                .collect(),
        }
    }
}

pub(crate) const fn duration(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

pub(crate) const fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}
