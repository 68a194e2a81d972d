//! JSON pointers (RFC 6901).

use std::collections::BTreeMap;

/// A set of JSON pointers: `/customer/id`, `/items/0`, or the empty one for the whole text.
///
/// ```
/// use hapax_core::{JsonPointers, canonicalize_except};
/// let noise = JsonPointers::new(["/sent_at", "/meta/trace"])?;
/// let text = br#"{"sent_at":1700000000,"meta":{"trace":"x","to":"a"},"amount":5}"#;
/// assert_eq!(canonicalize_except(text, &noise)?, br#"{"amount":5,"meta":{"to":"a"}}"#);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct JsonPointers {
    texts: Vec<String>,
    root: Node,
}

/// A step of one or more pointers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Node {
    /// Index of the pointer that ends here.
    pub(super) ends: Option<usize>,
    steps: BTreeMap<Vec<u8>, Node>,
}

impl JsonPointers {
    /// Returns the set of these pointers. Order and repetitions do not matter.
    ///
    /// # Errors
    /// [`PointerError`] if one is not a pointer.
    pub fn new<T: AsRef<str>>(pointers: impl IntoIterator<Item = T>) -> Result<Self, PointerError> {
        let mut texts: Vec<_> = pointers.into_iter().map(|text| text.as_ref().to_owned()).collect();
        texts.sort_unstable();
        texts.dedup();
        let mut root = Node::default();
        for (at, text) in texts.iter().enumerate() {
            let mut node = &mut root;
            for step in steps(text)? {
                node = node.steps.entry(step).or_default();
            }
            node.ends = Some(at);
        }
        Ok(Self { texts, root })
    }

    /// Returns the pointers, sorted.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.texts.iter().map(String::as_str)
    }

    pub(super) const fn root(&self) -> &Node {
        &self.root
    }
}

impl Node {
    /// Returns the step to the member of this name.
    pub(super) fn member(&self, name: &[u8]) -> Option<&Self> {
        self.steps.get(name)
    }

    /// Returns the step to the element at this index.
    pub(super) fn element(&self, index: usize) -> Option<&Self> {
        if self.steps.is_empty() { None } else { self.steps.get(index.to_string().as_bytes()) }
    }
}

/// Error for a text that is not an RFC 6901 pointer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a JSON pointer is empty or begins with `/`, and writes `~` as `~0` and `/` as `~1`")]
pub struct PointerError;

fn steps(text: &str) -> Result<Vec<Vec<u8>>, PointerError> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let rest = text.strip_prefix('/').ok_or(PointerError)?;
    rest.split('/').map(unescape).collect()
}

fn unescape(step: &str) -> Result<Vec<u8>, PointerError> {
    let mut plain = Vec::with_capacity(step.len());
    let mut bytes = step.bytes();
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'~' => match bytes.next() {
                Some(b'0') => b'~',
                Some(b'1') => b'/',
                _ => return Err(PointerError),
            },
            _ => byte,
        });
    }
    Ok(plain)
}
