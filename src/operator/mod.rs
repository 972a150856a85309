//! The launch machinery that all operators share.
//!
//! An operator names its tensors by a [`Parameter`], makes a [`PreparedCall`] of a call that the contract has accepted,
//! and launches it with the [`Tensors`] of each layer. The prepared call holds the repeatable executor, checks that
//! tensors are as planned, gives the executor their addresses, queues phase two on a [`Queue`](crate::Queue) and keeps
//! memory for as long as the device may use it.

mod allowed_lints;
mod argument;
mod descriptor;
mod descriptors;
mod executor;
mod phases;
mod prepared_call;

pub(crate) use allowed_lints::{AllowedLints, lints_of};
pub(crate) use argument::{Addressed, Lengths, NamedTensors, Parameter, Tensors, addressed, heads};
use argument::{outputs_first, standing_in};
pub(crate) use descriptors::Descriptors;
pub(crate) use phases::{EntryPoints, PhaseOne, Phases, argument, entry_points, phase_one};
pub(crate) use prepared_call::{PreparedCall, reach};
