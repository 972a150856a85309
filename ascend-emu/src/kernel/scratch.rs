//! Working memory of a thread, kept between calls.

use super::simd::{Vector, WIDTH};
use std::cell::Cell;

/// Bytes of a cache line, and of a vector.
const ALIGN: usize = 64;

/// Working memory with arbitrary content, which grows to the largest size that was requested.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    floats: Vec<f32>,
    bits: Vec<u16>,
    /// The most bytes that were requested at once since the work began.
    used: usize,
}

thread_local! {
    static SPARE: Cell<Option<Scratch>> = const { Cell::new(None) };
}

impl Scratch {
    /// Runs `work` with the working memory of this thread.
    pub(super) fn with<R>(work: impl FnOnce(&mut Scratch) -> R) -> R {
        let mut scratch = SPARE.take().unwrap_or_default();
        scratch.used = 0;
        let result = work(&mut scratch);
        SPARE.set(Some(scratch));
        result
    }

    /// The most bytes that the work has requested at once.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// `count` vectors, each on its own cache line.
    pub(super) fn vectors(&mut self, count: usize) -> &mut [Vector] {
        self.vectors_and_bits(count, 0).0
    }

    /// `count` vectors, each on its own cache line, and `bits` words of 16 bits.
    pub(super) fn vectors_and_bits(&mut self, count: usize, bits: usize) -> (&mut [Vector], &mut [u16]) {
        let floats = count * WIDTH + ALIGN / size_of::<f32>();
        let bytes = floats * size_of::<f32>() + bits * size_of::<u16>();
        self.used = self.used.max(bytes);
        if self.floats.len() < floats {
            self.floats.resize(floats, 0.0);
        }
        if self.bits.len() < bits {
            self.bits.resize(bits, 0);
        }
        let skip = self.floats.as_ptr().align_offset(ALIGN).min(self.floats.len());
        let (aligned, _) = self.floats[skip..].as_chunks_mut();
        (&mut aligned[..count], &mut self.bits[..bits])
    }
}

/// Splits the first `count` elements off `rest`.
pub(super) fn take<'a, T>(rest: &mut &'a mut [T], count: usize) -> &'a mut [T] {
    let (head, tail) = std::mem::take(rest).split_at_mut(count);
    *rest = tail;
    head
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_lie_on_cache_lines_and_parts_are_apart() {
        let mut scratch = Scratch::default();
        for size in [1, 7, 1000, 3] {
            let mut vectors = scratch.vectors(size);
            assert_eq!(vectors.len(), size);
            assert_eq!(vectors.as_ptr().addr() % ALIGN, 0);
            let first = take(&mut vectors, 1);
            assert_eq!((first.len(), vectors.len()), (1, size - 1));
        }
    }
}
