//! The kernels against the oracle.

mod call;
#[path = "../../../tests/calls/mod.rs"]
mod calls;
mod case;
mod data;
mod edges;
mod formulas;
mod layouts;
mod masks;
mod paths;
mod places;
mod properties;
