//! TriangleMix: prefill that leaves out the middle of the causal triangle, by calls of the stock operator.

mod mix;
mod prefill;
mod rows;

pub use mix::TriangleMixPrefill;
pub use prefill::{TrianglePlan, TrianglePrefill};
pub use rows::{TriangleChoice, TriangleGate, WhyDense};
