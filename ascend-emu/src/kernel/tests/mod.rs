//! The kernels against the oracle.

mod case;
mod edges;
mod properties;
