//! The launch machinery that all operators share.
//!
//! An operator names its tensors by a [`Parameter`], makes a [`Plan`] of a call that the contract has accepted, and launches
//! it with the [`Tensors`] of each layer. The plan holds the repeatable executor, checks that tensors are as planned, gives
//! the executor their addresses, queues phase two on a [`Queue`] and keeps memory for as long as the device may use it.

mod argument;
mod descriptor;
mod descriptors;
mod executor;
mod phases;
mod plan;

pub(crate) use argument::{Addressed, Parameter, Tensors, addressed};
pub(crate) use descriptors::Descriptors;
pub(crate) use phases::{PhaseOne, Phases, argument, phase_one, phases};
pub(crate) use plan::{Plan, reach};
