//! The bytes that one rank hands to another.

use crate::lock::Lock;
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;

/// Memory of payloads that are gone, for the next ones: the pages of new memory cost more than the bytes that are
/// copied to them.
static FREE: Lock<FreeMemory> = Lock::new(FreeMemory { memory: VecDeque::new(), bytes: 0 });

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

/// The smallest free memory that holds `bytes` bytes, if there is one that is not much larger.
pub(super) fn taken(bytes: usize) -> Option<Vec<u8>> {
    FREE.lock().take(bytes)
}

/// Memory that is kept free, at most [`MOST_FREE`] bytes of it.
struct FreeMemory {
    /// Each is empty; that which was kept first is in front.
    memory: VecDeque<Vec<u8>>,
    /// What all of it could hold.
    bytes: usize,
}

impl FreeMemory {
    fn take(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let fits = bytes.max(LEAST_KEPT)..=bytes.saturating_mul(2);
        let fitting = self.memory.iter().enumerate().filter(|(_, memory)| fits.contains(&memory.capacity()));
        let (at, _) = fitting.min_by_key(|(_, memory)| memory.capacity())?;
        let memory = self.memory.remove(at)?;
        self.bytes -= memory.capacity();
        Some(memory)
    }

    /// Keeps memory, and gives back what was kept first where it is too much together. Nothing is kept of memory that
    /// is too little or too much by itself.
    fn keep(&mut self, mut memory: Vec<u8>) {
        if !(LEAST_KEPT..=MOST_FREE).contains(&memory.capacity()) {
            return;
        }
        memory.clear();
        self.bytes += memory.capacity();
        self.memory.push_back(memory);
        while self.bytes > MOST_FREE
            && let Some(first) = self.memory.pop_front()
        {
            self.bytes -= first.capacity();
        }
    }
}

/// The memory of a payload.
#[derive(Debug, PartialEq, Eq)]
struct Bytes(Vec<u8>);

impl Drop for Bytes {
    fn drop(&mut self) {
        if self.0.capacity() >= LEAST_KEPT {
            FREE.lock().keep(std::mem::take(&mut self.0));
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

    /// Payloads of another size than those before are kept too, in the place of what was kept first.
    #[test]
    fn what_was_kept_first_goes_first() {
        let mut free = FreeMemory { memory: VecDeque::new(), bytes: 0 };
        // Nothing is written to this memory, so that it has no pages.
        (0..5).for_each(|_| free.keep(Vec::with_capacity(MOST_FREE / 4)));
        assert_eq!((free.memory.len(), free.bytes), (4, MOST_FREE));
        free.keep(Vec::with_capacity(MOST_FREE + 1));
        free.keep(Vec::with_capacity(LEAST_KEPT - 1));
        assert_eq!(free.bytes, MOST_FREE);
        free.keep(vec![1; LEAST_KEPT]);
        assert_eq!((free.memory.len(), free.bytes), (4, 3 * (MOST_FREE / 4) + LEAST_KEPT));
        assert_eq!(free.take(LEAST_KEPT), Some(Vec::new()));
        assert_eq!(free.take(LEAST_KEPT), None);
        assert_eq!((free.memory.len(), free.bytes), (3, 3 * (MOST_FREE / 4)));
    }
}
