//! Parameters of a schedule, drawn once from its seed.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use hapax_core::machine::HookTiming;
use hapax_core::{Fingerprint, FingerprintScheme, OnUnknown, OperationId, Outcome, Terms};

use crate::SeededEntropy;

pub(super) const WORKERS: usize = 4;
/// Workers that are threads of one process: they crash and pause together.
pub(super) const TOGETHER: usize = 2;
pub(super) const KEYS: usize = 3;
pub(super) const OPERATIONS: u32 = 10;
/// Number of distinct outcomes in a schedule.
pub(super) const OUTCOMES: usize = 4_096;
/// First outcome of operators.
pub(super) const OPERATORS_OUTCOMES: u16 = 3_072;

pub(super) const MS: u64 = 1_000;
/// Time that a sender waits for a reply to its first copy.
pub(super) const TIMEOUT: u64 = 50 * MS;
/// Duration of a pause after which a process finds every earlier record expired.
pub(super) const PAST_RETENTION: u64 = 8_000 * MS;
/// The shortest lease, and the limit of the clock's steps back except in some schedules.
const SHORTEST_LEASE: u64 = 400 * MS;

/// Parameters of a schedule. Chances are per mille.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) lose: u64,
    pub(super) delay: u64,
    pub(super) repeat: u64,
    pub(super) refuse: u64,
    pub(super) fail_load: u64,
    /// Weights of the policies, in their order.
    policies: [u64; 3],
    pub(super) hookless: u64,
    pub(super) other_request: u64,
    pub(super) other_scheme: u64,
    /// Error of each process's clock; the last is the operators'.
    pub(super) skew: [i64; WORKERS + 1],
    pub(super) crashes: u64,
    pub(super) pauses: u64,
    pub(super) steps: u64,
    /// Limit of the sum of steps back of the store's clock.
    pub(super) back: u64,
    /// Chance that an execution sends a request to another system.
    pub(super) settles: u64,
    pub(super) operators: u64,
    /// In schedules of odd seeds; the others show bugs that a verdict would hide.
    pub(super) reconcilers: u64,
    /// Chance that an execution without an effect ends with a redirect.
    pub(super) redirects: u64,
    pub(super) reaps: u64,
}

impl Plan {
    pub(super) fn draw(rng: &SeededEntropy) -> Self {
        let rate = [5, 30, 120][rng.below(3) as usize];
        let policies = match rng.below(6) {
            0 => [1, 0, 0],
            1 => [0, 1, 0],
            2 => [0, 0, 1],
            _ => [3, 2, 2],
        };
        let far_back = rng.below(4) == 0;
        Self {
            lose: rate,
            delay: rate,
            repeat: rate,
            refuse: rate / 2,
            fail_load: 2 * rate,
            policies,
            hookless: 300,
            other_request: 100,
            other_scheme: if rng.below(2) == 0 { 300 } else { 0 },
            skew: std::array::from_fn(|_| rng.below(6_000 * MS) as i64 - 3_000 * MS as i64),
            crashes: rng.below(4),
            pauses: rng.below(4),
            steps: rng.below(4),
            back: if far_back { 10_000 * MS } else { SHORTEST_LEASE - MS },
            settles: [100, 900][rng.below(2) as usize],
            operators: rng.below(9),
            reconcilers: 0,
            redirects: [0, 0, 500][rng.below(3) as usize],
            reaps: 16,
        }
    }

    /// Returns whether the clock may step back so far that the fences of purged keys may fall back.
    pub(super) const fn far_back(&self) -> bool {
        self.back > SHORTEST_LEASE
    }

    pub(super) fn terms(&self, rng: &SeededEntropy) -> Terms {
        let micros = Duration::from_micros;
        let mut at = rng.below(self.policies.iter().sum());
        let mut on_unknown = OnUnknown::Block;
        for (policy, weight) in
            [OnUnknown::Reexecute, OnUnknown::Reconcile, OnUnknown::Block].iter().zip(self.policies)
        {
            if at < weight {
                on_unknown = *policy;
                break;
            }
            at -= weight;
        }
        let lease = micros([SHORTEST_LEASE, 1_000 * MS][rng.below(2) as usize]);
        let retention = lease * [1, 2, 3, 6][rng.below(4) as usize];
        Terms { lease, retention, on_unknown }
    }

    /// Returns the settle time of a claim. Most executions of a schedule send requests, or most do not.
    pub(super) fn settle(&self, rng: &SeededEntropy) -> Option<Duration> {
        let settle = Duration::from_micros([300 * MS, 2_000 * MS][rng.below(2) as usize]);
        (rng.below(1_000) < self.settles).then_some(settle)
    }

    pub(super) fn hook(&self, rng: &SeededEntropy, policy: OnUnknown) -> Option<HookTiming> {
        let without = policy != OnUnknown::Reconcile && rng.below(1_000) < self.hookless;
        let hook = HookTiming {
            after: Duration::from_micros(200 * MS),
            timeout: Duration::from_micros(300 * MS),
        };
        (!without).then_some(hook)
    }
}

/// Bytes of all outcomes; each outcome is its own number.
static NUMBERS: [u8; OUTCOMES * 2] = {
    let mut bytes = [0; OUTCOMES * 2];
    let mut at = 0;
    while at < OUTCOMES {
        [bytes[2 * at], bytes[2 * at + 1]] = (at as u16).to_be_bytes();
        at += 1;
    }
    bytes
};

static FORMAT: LazyLock<Arc<str>> = LazyLock::new(|| "sim".into());

static NAMES: LazyLock<Names> = LazyLock::new(|| {
    let schemes = ["sim/0", "sim/1"];
    Names {
        schemes: schemes.map(|name| {
            // The name is far shorter than the limit of a scheme.
            FingerprintScheme::new(name).unwrap_or_else(|_| unreachable!("{name} is short"))
        }),
        fingerprints: schemes.map(|name| {
            [0u8, 1].map(|request| Fingerprint::builder(name).field(&[request]).finish())
        }),
    }
});

pub(super) const fn micros(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

/// Returns the process of a worker.
pub(super) const fn process(worker: u8) -> u8 {
    worker / TOGETHER as u8
}

struct Names {
    schemes: [FingerprintScheme; 2],
    fingerprints: [[Fingerprint; 2]; 2],
}

pub(super) fn key(number: usize) -> OperationId {
    OperationId::from_bytes([number as u8; 32])
}

pub(super) fn scheme(number: u8) -> FingerprintScheme {
    NAMES.schemes[usize::from(number)].clone()
}

/// Returns the number of a scheme of those above.
pub(super) fn scheme_number(scheme: &FingerprintScheme) -> u8 {
    u8::from(*scheme == NAMES.schemes[1])
}

pub(super) fn fingerprint(request: u8, scheme: u8) -> Fingerprint {
    NAMES.fingerprints[usize::from(scheme)][usize::from(request)]
}

/// Returns the number of the request that has a fingerprint.
pub(super) fn request_number(scheme: &FingerprintScheme, fingerprint: &Fingerprint) -> usize {
    let of_scheme = NAMES.fingerprints[usize::from(scheme_number(scheme))];
    usize::from(*fingerprint == of_scheme[1])
}

pub(super) fn bytes(number: u16) -> bytes::Bytes {
    bytes::Bytes::from_static(&NUMBERS[2 * usize::from(number)..][..2])
}

/// Returns the description of a request whose hook is that of a worker.
pub(super) fn description(worker: u8) -> bytes::Bytes {
    bytes(u16::from(worker))
}

pub(super) fn outcome(number: u16) -> Outcome {
    Outcome::new(Arc::clone(&FORMAT), bytes(number))
}

/// Returns the number in `bytes`.
pub(super) fn number(bytes: &bytes::Bytes) -> u16 {
    bytes.iter().fold(0, |number, byte| number << 8 | u16::from(*byte))
}
