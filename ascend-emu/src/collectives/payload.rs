//! The bytes that one rank hands to another.

use crate::lock::Lock;
use std::ops::Deref;
use std::sync::Arc;

/// Memory of payloads that are gone, for the next ones: the pages of new memory cost more than the bytes that are
/// copied to them.
static FREE: Lock<Vec<Vec<u8>>> = Lock::new(Vec::new());

/// The most bytes that are kept free: those of a communicator's two buffers in HCCL, unless `HCCL_BUFFSIZE` is set.
const MOST_FREE: usize = 400 << 20;

/// The least bytes of a payload whose memory is kept.
const LEAST_KEPT: usize = 64 << 10;

/// What one rank hands to another, shared by those who get the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Payload(Arc<Bytes>);

impl Payload {
    /// Whether both are the same memory.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.0
    }
}

impl From<&[u8]> for Payload {
    fn from(bytes: &[u8]) -> Self {
        Self::from(copied(bytes))
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Bytes(bytes)))
    }
}

/// A copy of bytes, in memory of a payload that is gone where there is some.
pub(super) fn copied(bytes: &[u8]) -> Vec<u8> {
    let mut memory = taken(bytes.len()).unwrap_or_default();
    memory.extend_from_slice(bytes);
    memory
}

/// The smallest free memory that holds so many bytes, if there is one that is not much larger.
fn taken(bytes: usize) -> Option<Vec<u8>> {
    let fits = bytes.max(LEAST_KEPT)..=bytes.saturating_mul(2);
    let mut free = FREE.lock();
    let fitting = free.iter().enumerate().filter(|(_, memory)| fits.contains(&memory.capacity()));
    let (at, _) = fitting.min_by_key(|(_, memory)| memory.capacity())?;
    Some(free.swap_remove(at))
}

/// The memory of a payload.
#[derive(Debug, PartialEq, Eq)]
struct Bytes(Vec<u8>);

impl Drop for Bytes {
    fn drop(&mut self) {
        let mut memory = std::mem::take(&mut self.0);
        if memory.capacity() < LEAST_KEPT {
            return;
        }
        memory.clear();
        let mut free = FREE.lock();
        let kept: usize = free.iter().map(Vec::capacity).sum();
        if memory.capacity() <= MOST_FREE.saturating_sub(kept) {
            free.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_again() {
        // No other test has payloads of such a length.
        let bytes = vec![7; (3 << 20) + 1];
        let one = Payload::from(&bytes[..]);
        let (clone, place) = (one.clone(), one.as_ptr());
        drop(one);
        let two = Payload::from(&bytes[..]);
        assert!(!two.is(&clone) && two == clone);
        drop(clone);
        let three = Payload::from(&bytes[1..]);
        assert_eq!((three.as_ptr(), &three[..]), (place, &bytes[1..]));
    }
}
