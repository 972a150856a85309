//! The kernels against the oracle.

mod call;
mod case;
mod data;
mod edges;
mod paths;
mod places;
mod properties;
mod quantised;
