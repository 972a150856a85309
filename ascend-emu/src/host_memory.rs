//! Allocations of the host whose size a call's descriptors decide. They can fail: a view of stride 0 takes few bytes
//! of the device however many elements it has, and a launch may need memory for each element.

use std::fmt;

/// The host has no memory for this number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMemoryExhausted(pub(crate) usize);

impl fmt::Display for HostMemoryExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no host memory for {} elements", self.0)
    }
}

impl From<HostMemoryExhausted> for String {
    fn from(exhausted: HostMemoryExhausted) -> Self {
        exhausted.to_string()
    }
}

/// An empty vector with the capacity for `count` elements.
pub(crate) fn try_with_capacity<T>(count: usize) -> Result<Vec<T>, HostMemoryExhausted> {
    let mut elements = Vec::new();
    let reserved = elements.try_reserve_exact(count);
    reserved.map(|()| elements).map_err(|_| HostMemoryExhausted(count))
}

/// `count` copies of an element.
pub(crate) fn try_repeat<T: Clone>(element: T, count: usize) -> Result<Vec<T>, HostMemoryExhausted> {
    let mut elements = try_with_capacity(count)?;
    elements.resize(count, element);
    Ok(elements)
}

/// The elements of an iterator of known length.
pub(crate) fn try_collect<T>(elements: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>, HostMemoryExhausted> {
    let mut all = try_with_capacity(elements.len())?;
    all.extend(elements);
    Ok(all)
}
