//! Host memory for as many elements as a call's descriptors say. Views of stride 0 are small however many elements they
//! have, so that a launch may find no memory for what it makes of them.

use std::fmt;

/// There is no host memory for so many elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom(pub(crate) usize);

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no host memory for {} elements", self.0)
    }
}

impl From<NoRoom> for String {
    fn from(no_room: NoRoom) -> Self {
        no_room.to_string()
    }
}

/// An empty vector with room for so many elements.
pub(crate) fn room_for<T>(count: usize) -> Result<Vec<T>, NoRoom> {
    let mut elements = Vec::new();
    let reserved = elements.try_reserve_exact(count);
    reserved.map(|()| elements).map_err(|_| NoRoom(count))
}

/// So many equal elements.
pub(crate) fn repeated<T: Clone>(element: T, count: usize) -> Result<Vec<T>, NoRoom> {
    let mut elements = room_for(count)?;
    elements.resize(count, element);
    Ok(elements)
}

/// What an iterator gives, of which it knows how much at least.
pub(crate) fn collected<T>(elements: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>, NoRoom> {
    let mut all = room_for(elements.len())?;
    all.extend(elements);
    Ok(all)
}
