//! BatchMatMul: products of matrices, one for each entry of the first axis.
//!
//! [`BatchMatMul`] describes a call, which is planned once and launched with other tensors of the same shapes as a
//! [`BatchMatMulPlan`].

mod plan;

pub use plan::{BatchMatMul, BatchMatMulOperation, BatchMatMulPlan, CubeMathType};
pub(crate) use plan::{phase_one, phases_of};
