//! BatchMatMul: products of matrices, one for each entry of the first axis.
//!
//! `out[b] = self[b] mat2[b]`, where a factor with a first axis of 1 serves every product. Factors and products may be
//! strided.

mod arguments;
mod problem;
pub mod rules;

pub use arguments::{Argument, Arguments, BatchMatMulCall, Parameter};
pub use problem::BatchMatMulProblem;

use crate::Cann::{V8_1, V9_0};
use crate::contract::{CallContract, DescribedOperator, each_lint};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, Rule, Target, TensorDesc, Violation};

versions! {
    /// The version of BatchMatMul.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnBatchMatMul", "8.1").on_a2_a3(V8_1).on_ascend950(V9_0)
            .on_inference_cards(V8_1).on_training_cards(V8_1),
    }
}

/// The values of `cubeMathType`.
pub mod cube_math_type {
    /// FLOAT is multiplied as FLOAT. Not on 310P and 910A.
    pub const KEEP_DTYPE: i8 = 0;
    /// FLOAT may lose digits: it is multiplied as HFLOAT32, on 310P and 910A as FLOAT16.
    pub const ALLOW_FP32_DOWN_PRECISION: i8 = 1;
    /// FLOAT is multiplied as FLOAT16.
    pub const USE_FP16: i8 = 2;
    /// FLOAT is multiplied as HFLOAT32. Not on 310P and 910A.
    pub const USE_HF32: i8 = 3;
}

/// BatchMatMul in the list of operators.
pub(crate) struct BatchMatMul;

impl DescribedOperator for BatchMatMul {
    type Version = Version;
    type Parameter = Parameter;

    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::RULES.iter().copied()
    }
}

impl CallContract for BatchMatMul {
    type Arguments = Arguments<TensorDesc>;

    fn check(
        of: &Self::Arguments,
        _: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        let call = of.call();
        call.check(target.soc)?;
        each_lint(|allowed| call.lint(target.soc, allowed), report);
        Ok(())
    }

    fn imply_outputs(of: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        of.out = of.out.or(of.call().implied_out());
    }
}
