//! Responses of the upstream. A response is a function of key and fence, so that it can be checked
//! byte for byte without being stored.

use crate::dice::{Dice, mix};

/// Header that names the execution of a response: its fence.
pub(crate) const EXECUTION: &str = "x-execution";

/// A response of the upstream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct UpstreamResponse {
    /// A final status: 200, 201, 303 or 402.
    pub(crate) status: u16,
    /// A body of zero bytes to some pages of the file, so that writes span pages.
    pub(crate) body: Vec<u8>,
}

impl UpstreamResponse {
    /// Returns the response of the execution of `key` under `fence`.
    pub(crate) fn of(key: &str, fence: u64) -> Self {
        let seed = key.bytes().fold(mix(fence), |sum, byte| mix(sum ^ u64::from(byte)));
        let mut dice = Dice::new(seed);
        let status = match dice.below(8) {
            0 => 402,
            1 => 303,
            2 | 3 => 200,
            _ => 201,
        };
        let length = match dice.below(16) {
            0 => 0,
            1 => dice.below(64 << 10),
            _ => dice.below(1 << 10),
        };
        let body = std::iter::repeat_with(|| dice.roll().to_le_bytes()).flatten();
        Self { status, body: body.take(length as usize).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::UpstreamResponse;

    #[test]
    fn every_execution_has_an_answer_of_its_own() {
        assert_eq!(UpstreamResponse::of("a", 1), UpstreamResponse::of("a", 1));
        assert_ne!(UpstreamResponse::of("a", 1).body, UpstreamResponse::of("a", 2).body);
        assert_ne!(UpstreamResponse::of("a", 1).body, UpstreamResponse::of("b", 1).body);
    }
}
