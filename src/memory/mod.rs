//! Device memory and pinned host memory.

mod device_buffer;
mod element;
mod host_buffer;
mod overlap;

pub use device_buffer::DeviceBuffer;
pub use element::Element;
pub(crate) use element::{as_bytes, vec_from, zeros};
pub use host_buffer::{HostBuffer, Transfer};
pub(crate) use overlap::overlap;
