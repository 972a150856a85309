//! What all operators share: descriptors, executors, and launches of a prepared call with other tensors.

mod descriptor;
mod launches;
mod prepared;
mod queue;
mod repeatable;

pub(crate) use descriptor::{Owned, int_array, tensor, tensor_list};
pub(crate) use launches::{Launches, Slot};
pub(crate) use prepared::{Operand, Place, Prepared, Symbols};
pub(crate) use queue::Queue;
pub(crate) use repeatable::Executor;
