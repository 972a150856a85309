//! Device memory and pinned host memory.

use std::ops::Range;

mod device_buffer;
mod element;
mod host_buffer;

pub use device_buffer::DeviceBuffer;
pub use element::Element;
pub(crate) use element::{as_bytes, room, vec_from, zeros};
pub use host_buffer::{HostBuffer, Transfer};

/// Whether two ranges of addresses have a byte in common. Empty ones have none.
#[inline]
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn neighbours_and_empty_ranges_share_nothing() {
        assert!(overlap(&(0..4), &(3..9)));
        assert!(overlap(&(2..3), &(0..9)));
        assert!(!overlap(&(0..4), &(4..9)));
        assert!(!overlap(&(0..9), &(4..4)));
        assert!(!overlap(&(0..0), &(0..0)));
    }
}
