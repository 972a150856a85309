//! The parameters of each entry point: no version of FlashAttentionVarLenScore begins with the arguments of another,
//! and sinks come before older arguments.

use super::{Parameter, Version};
use crate::operator::EntryPoint;
use crate::{arguments_of_version, flash_attention_score_arguments, flash_attention_var_len_score_arguments};

macro_rules! listed {
    ({} $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*) => {
        &[$(Parameter::$variant),*]
    };
}

impl Version {
    /// The entry point's parameters, in its own order.
    pub const fn parameters(self) -> &'static [Parameter] {
        match self {
            Version::V1 => flash_attention_score_arguments! { arguments_of_version { 1 listed {} } },
            Version::V2 => flash_attention_score_arguments! { arguments_of_version { 2 listed {} } },
            Version::V3 => flash_attention_score_arguments! { arguments_of_version { 3 listed {} } },
            Version::V4 => flash_attention_score_arguments! { arguments_of_version { 4 listed {} } },
            Version::VarLenV1 => flash_attention_var_len_score_arguments! { 1 listed {} },
            Version::VarLenV2 => flash_attention_var_len_score_arguments! { 2 listed {} },
            Version::VarLenV3 => flash_attention_var_len_score_arguments! { 3 listed {} },
            Version::VarLenV4 => flash_attention_var_len_score_arguments! { 4 listed {} },
            Version::VarLenV5 => flash_attention_var_len_score_arguments! { 5 listed {} },
        }
    }

    /// The entry point's parameters, with their numbers among its inputs and outputs.
    pub const fn entry_point(self) -> EntryPoint<Parameter> {
        EntryPoint::Own(self.parameters())
    }

    /// Whether the entry point has a parameter.
    pub fn has(self, parameter: Parameter) -> bool {
        self.parameters().contains(&parameter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts of the signatures in `aclnn_flash_attention_score.h`: arguments, inputs among them, and the number of
    /// the mask and of the prefix.
    const COUNTS: [(Version, usize, usize, usize, usize); 9] = [
        (Version::V1, 20, 8, 6, 7),
        (Version::V2, 23, 10, 6, 7),
        (Version::V3, 24, 11, 6, 8),
        (Version::V4, 35, 18, 6, 13),
        (Version::VarLenV1, 22, 10, 6, 7),
        (Version::VarLenV2, 25, 12, 6, 7),
        (Version::VarLenV3, 27, 14, 8, 9),
        (Version::VarLenV4, 23, 10, 6, 7),
        (Version::VarLenV5, 29, 15, 8, 10),
    ];

    #[test]
    fn each_entry_point_numbers_its_own_arguments() {
        for (version, arguments, inputs, mask, prefix) in COUNTS {
            let entry_point = version.entry_point();
            assert_eq!(version.parameters().len(), arguments, "{version}");
            assert_eq!(entry_point.inputs(), inputs, "{version}");
            assert_eq!(entry_point.outputs(), 4, "{version}");
            assert_eq!(entry_point.input_number(Parameter::AttenMask), Some(mask));
            assert_eq!(entry_point.input(prefix), Some(Parameter::Prefix));
            assert_eq!(entry_point.input(inputs), None);
            assert_eq!(entry_point.output(3), Some(Parameter::AttentionOut));
            assert_eq!(entry_point.output_number(Parameter::SoftmaxMax), Some(0));
            assert_eq!(entry_point.output_number(Parameter::Query), None);
        }
        let third = Version::VarLenV3.entry_point();
        assert_eq!(third.input(1), Some(Parameter::QueryRope));
        assert_eq!(third.input_number(Parameter::Key), Some(2));
        assert_eq!(third.input_number(Parameter::Sink), None);
    }
}
