//! Boundaries of requests in the bytes of a connection.

use super::MAX_HEAD;
use super::head::{Framing, HeadError, framing};

/// Decisions about the bytes at hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScanResult {
    /// The first so many may pass; at least one.
    Pass(usize),
    /// The first so many are a complete request head, and may pass.
    Head(usize),
    /// A head is not yet complete.
    More,
    /// The bytes begin a request that must not be served.
    Reject(HeadError),
    /// The body breaks the chunked coding.
    BrokenChunk,
}

/// Follows requests through a connection.
///
/// It finds the same boundaries as hyper, by induction: a head that passes defines in exactly one
/// way where its body ends; and only chunks that hyper accepts too are followed, so either both
/// find the same end or the connection fails.
#[derive(Debug)]
pub struct Scanner {
    state: ScanState,
}

#[derive(Clone, Copy, Debug)]
enum ScanState {
    /// In a head; its first `seen` bytes contain no end.
    Head {
        seen: usize,
    },
    /// In a body of which so many bytes are left.
    Length(u64),
    Chunk(Chunk),
}

#[derive(Clone, Copy, Debug)]
enum Chunk {
    /// Before the first digit of a size.
    Start,
    Size(u64),
    Space(u64),
    Extension(u64),
    SizeLineFeed(u64),
    Data(u64),
    DataReturn,
    DataLineFeed,
    /// At the beginning of a trailer line.
    Trailer,
    InTrailer,
    TrailerLineFeed,
    LastLineFeed,
    End,
}

impl Default for Scanner {
    fn default() -> Self {
        Self { state: ScanState::Head { seen: 0 } }
    }
}

impl Scanner {
    /// Returns whether the next byte begins a request.
    #[must_use]
    pub const fn is_between(&self) -> bool {
        matches!(self.state, ScanState::Head { seen: 0 })
    }

    /// Checks `bytes`, which begin where the bytes of the last decision ended and are not empty.
    pub fn judge(&mut self, bytes: &[u8]) -> ScanResult {
        match self.state {
            ScanState::Head { seen } => self.head(bytes, seen),
            ScanState::Length(left) => {
                let here = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                self.state = after(left - here as u64);
                ScanResult::Pass(here)
            }
            ScanState::Chunk(chunk) => self.chunks(bytes, chunk),
        }
    }

    fn head(&mut self, bytes: &[u8], seen: usize) -> ScanResult {
        // Every server skips empty lines before a request line (RFC 9112 2.2).
        if bytes.starts_with(b"\r\n") {
            self.state = ScanState::Head { seen: 0 };
            return ScanResult::Pass(2);
        }
        let mut from = seen;
        while let Some(at) = bytes[from..].iter().position(|byte| *byte == b'\n') {
            let end = from + at + 1;
            if !bytes[..end].ends_with(b"\r\n") {
                return ScanResult::Reject(HeadError::BareLineFeed);
            }
            if end > MAX_HEAD {
                return ScanResult::Reject(HeadError::TooLarge);
            }
            if bytes[..end].ends_with(b"\r\n\r\n") {
                return match framing(&bytes[..end]) {
                    Ok(framing) => {
                        self.state = match framing {
                            Framing::Empty => ScanState::Head { seen: 0 },
                            Framing::Length(length) => ScanState::Length(length),
                            Framing::Chunked => ScanState::Chunk(Chunk::Start),
                        };
                        ScanResult::Head(end)
                    }
                    Err(rejection) => ScanResult::Reject(rejection),
                };
            }
            from = end;
        }
        if bytes.len() > MAX_HEAD {
            return ScanResult::Reject(HeadError::TooLarge);
        }
        self.state = ScanState::Head { seen: bytes.len() };
        ScanResult::More
    }

    fn chunks(&mut self, bytes: &[u8], mut chunk: Chunk) -> ScanResult {
        let mut at = 0;
        while at < bytes.len() {
            if let Chunk::Data(left) = chunk {
                let here = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len() - at);
                at += here;
                let left = left - here as u64;
                chunk = if left == 0 { Chunk::DataReturn } else { Chunk::Data(left) };
                continue;
            }
            let Some(next) = next(chunk, bytes[at]) else { return ScanResult::BrokenChunk };
            at += 1;
            if matches!(next, Chunk::End) {
                self.state = ScanState::Head { seen: 0 };
                return ScanResult::Pass(at);
            }
            chunk = next;
        }
        self.state = ScanState::Chunk(chunk);
        ScanResult::Pass(at)
    }
}

const fn after(left: u64) -> ScanState {
    if left == 0 { ScanState::Head { seen: 0 } } else { ScanState::Length(left) }
}

/// Parses the chunked coding (RFC 9112 7.1), a byte at a time; returns `None` if it is broken.
fn next(chunk: Chunk, byte: u8) -> Option<Chunk> {
    let digit = || (byte as char).to_digit(16).map(u64::from);
    match (chunk, byte) {
        (Chunk::Start, _) => Some(Chunk::Size(digit()?)),
        (Chunk::Size(size) | Chunk::Space(size), b' ' | b'\t') => Some(Chunk::Space(size)),
        (Chunk::Size(size) | Chunk::Space(size), b';') => Some(Chunk::Extension(size)),
        (Chunk::Size(size) | Chunk::Space(size) | Chunk::Extension(size), b'\r') => {
            Some(Chunk::SizeLineFeed(size))
        }
        (Chunk::Size(size), _) => Some(Chunk::Size(size.checked_mul(16)?.checked_add(digit()?)?)),
        (Chunk::Extension(_), b'\n') => None,
        (Chunk::Extension(size), _) => Some(Chunk::Extension(size)),
        (Chunk::SizeLineFeed(0), b'\n') => Some(Chunk::Trailer),
        (Chunk::SizeLineFeed(size), b'\n') => Some(Chunk::Data(size)),
        (Chunk::DataReturn, b'\r') => Some(Chunk::DataLineFeed),
        (Chunk::DataLineFeed, b'\n') => Some(Chunk::Start),
        (Chunk::Trailer, b'\r') => Some(Chunk::LastLineFeed),
        (Chunk::Trailer | Chunk::InTrailer, b'\n') => None,
        (Chunk::InTrailer, b'\r') => Some(Chunk::TrailerLineFeed),
        (Chunk::Trailer | Chunk::InTrailer, _) => Some(Chunk::InTrailer),
        (Chunk::TrailerLineFeed, b'\n') => Some(Chunk::Trailer),
        (Chunk::LastLineFeed, b'\n') => Some(Chunk::End),
        (
            Chunk::Space(_)
            | Chunk::SizeLineFeed(_)
            | Chunk::Data(_)
            | Chunk::DataReturn
            | Chunk::DataLineFeed
            | Chunk::TrailerLineFeed
            | Chunk::LastLineFeed
            | Chunk::End,
            _,
        ) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEAD: &[u8] = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n";

    /// Checks `stream` in pieces that end at `cuts`; returns where heads began, and the decision
    /// that ended it.
    fn follow(stream: &[u8], cuts: &[usize]) -> (Vec<usize>, Option<ScanResult>) {
        let mut scanner = Scanner::default();
        let mut heads = Vec::new();
        let mut done = 0;
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
        ends.push(stream.len());
        ends.sort_unstable();
        for end in ends {
            while done < end {
                match scanner.judge(&stream[done..end]) {
                    ScanResult::Pass(n) => done += n,
                    ScanResult::Head(n) => {
                        heads.push(done);
                        done += n;
                    }
                    ScanResult::More => break,
                    other => return (heads, Some(other)),
                }
            }
        }
        (heads, None)
    }

    fn stream(bodies: &[Vec<u8>]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = Vec::new();
        let mut heads = Vec::new();
        for (i, body) in bodies.iter().enumerate() {
            heads.push(bytes.len());
            if i % 2 == 0 {
                bytes.extend_from_slice(HEAD);
                for chunk in body.chunks(3) {
                    bytes.extend_from_slice(format!("{:x} ;x=y\r\n", chunk.len()).as_bytes());
                    bytes.extend_from_slice(chunk);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\nx: y\r\n\r\n");
            } else {
                let head =
                    format!("PUT / HTTP/1.1\r\nhost:a\r\ncontent-length:{}\r\n\r\n", body.len());
                bytes.extend_from_slice(head.as_bytes());
                bytes.extend_from_slice(body);
            }
        }
        (bytes, heads)
    }

    proptest! {
        #[test]
        fn request_boundaries_do_not_depend_on_segmentation(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 1..5),
            cuts in prop::collection::vec(any::<usize>(), 0..12),
        ) {
            let (bytes, heads) = stream(&bodies);
            prop_assert_eq!(follow(&bytes, &cuts), (heads, None));
        }

        #[test]
        fn the_result_of_a_scan_does_not_depend_on_segmentation(
            tail in "[a-zA-Z0-9:; \t\r\n]{0,60}",
            cuts in prop::collection::vec(any::<usize>(), 0..12),
        ) {
            let bytes = [HEAD, tail.as_bytes()].concat();
            prop_assert_eq!(follow(&bytes, &cuts), follow(&bytes, &[]));
        }
    }

    #[test]
    fn a_bare_line_feed_is_rejected_before_the_head_ends() {
        let seen = follow(b"GET / HTTP/1.1\nhost: a", &[]);
        assert_eq!(seen, (vec![], Some(ScanResult::Reject(HeadError::BareLineFeed))));
    }

    #[test]
    fn an_endless_head_is_rejected() {
        let bytes = [b"GET /".as_slice(), &vec![b'a'; MAX_HEAD]].concat();
        assert_eq!(follow(&bytes, &[]), (vec![], Some(ScanResult::Reject(HeadError::TooLarge))));
    }

    #[test]
    fn broken_chunks_are_detected() {
        for tail in ["x\r\n", "1\nab", "1\r\nab\r\n", "11111111111111111\r\n", "1;\n", "0\r\n\n"] {
            let bytes = [HEAD, tail.as_bytes()].concat();
            assert_eq!(follow(&bytes, &[]), (vec![0], Some(ScanResult::BrokenChunk)), "{tail:?}");
        }
    }
}
