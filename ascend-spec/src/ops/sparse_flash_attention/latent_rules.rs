//! What the operators of latent attention to chosen keys share: rules of lists, values and scales.

use super::problem::{DIM, ROPE_DIM};
use crate::attention_problem::lint_scale;
use crate::{Rule, TensorDesc, Violation};

/// Declares the rules of an operator of latent attention to chosen keys: those of
/// [`sequence_rules!`](crate::ops::sparse_sequences::sequence_rules), those about lists, values and scales, which each
/// such operator has, and its own between them. Also declares the table `LATENT` of the rules that [`LatentRules`]
/// asks.
macro_rules! latent_rules {
    (
        $id:literal, $operator:literal, on Ascend 950 since $release_950:literal, in $scope:expr;
        { $($arguments:tt)* }
        { $($attributes:tt)* }
        { $($shapes:tt)* }
    ) => {
        $crate::ops::sparse_sequences::sequence_rules! {
            $id, $operator, layout of keys "layoutKv", on Ascend 950 since $release_950,
            columns " with at least one column", multiples " and of sparseBlockSize",
            rows without keys "such rows are zeros", in $scope;
            { $($arguments)* }
            {
                $($attributes)*
                ATTENTION_MODE = $id ".attention_mode", TILING_ERROR, V1, $operator " tiling, attentionMode",
                    "attentionMode is 2",
                    "absorb the projections of keys and values into queries and output, and pass 2";
            }
            {
                $($shapes)*
                INDICES = $id ".indices", TILING_ERROR, V1, $operator " tiling, sparseIndices",
                    "sparseIndices is [B, S1, 1, K] or [T1, 1, K]",
                    "give a list of blocks for each row";
                VALUE = $id ".value", Lint("values are read from key"), V1, $operator " kernel, value",
                    "value is described as key is",
                    "pass the same tensor as key and as value";
                scale of $id, $operator, "scores",
                    "with heads of 128 elements and 64 rotary ones one over the root of 192", "the head dimension",
                    "192, for heads of 128 elements and 64 rotary ones: with 0 all chosen keys weigh alike";
                NONE_CHOSEN = $id ".none_chosen", Lint("all rows are zeros"), V1,
                    $operator " kernel, sparseIndices",
                    "lists of blocks have at least one entry",
                    "leave the call out where nothing is chosen";
            }
        }

        /// The rules of the call's lists, values and scale.
        const LATENT: $crate::ops::sparse_flash_attention::LatentRules =
            $crate::ops::sparse_flash_attention::LatentRules {
                value: &VALUE,
                scale: [&SCALE, &SCALE_ZERO, &SCALE_INVERSE],
                none_chosen: &NONE_CHOSEN,
            };
    };
}

pub(crate) use latent_rules;

/// The lints of an operator's values, scale and lists.
pub(crate) struct LatentRules {
    pub(crate) value: &'static Rule,
    pub(crate) scale: [&'static Rule; 3],
    pub(crate) none_chosen: &'static Rule,
}

impl LatentRules {
    /// Reports values that are not described as keys are.
    pub(crate) fn value(&self, [value, key]: [&TensorDesc; 2], report: &mut dyn FnMut(Violation)) {
        if value != key {
            report(self.value.broken(format_args!("{value} beside {key}"), key));
        }
    }

    /// Reports what is unusual about the factor of the scores and about the lists.
    pub(crate) fn scale_and_lists(&self, scale: f64, indices: &TensorDesc, report: &mut dyn FnMut(Violation)) {
        lint_scale(scale, [DIM as usize, ROPE_DIM as usize], self.scale, report);
        if indices.shape.last() == Some(&0) {
            report(self.none_chosen.broken(indices.shape, "rows and entries"));
        }
    }
}
