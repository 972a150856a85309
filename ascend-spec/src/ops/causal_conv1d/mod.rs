//! CausalConv1d of vLLM-Ascend's operator package: the causal convolution in front of linear attention, each channel
//! by itself, over lines of a pool that keep the last rows of each sequence. CANN has no operator of this name.
//!
//! The window of a row is the row and the `W - 1` before it, of the same sequence: `y = Σ weight[j] window[j] + bias`,
//! followed by SiLU where it is asked for. What is in front of a sequence's first row is the first `W - 1` rows of its
//! line, or zeros. Afterwards the line begins with the last `W - 1` rows.
//!
//! A sequence with accepted counts (`W` is 4) has longer lines: the last step's window, then its rows. The count says
//! behind which of them the sequence goes on, and the line becomes two rows of that window and the new rows.
//!
//! Where sequences begin, their lines and the counts are numbers on the device, which a
//! [`ConvProblem`](super::convolution::ConvProblem) follows.

mod check;
pub mod rules;

use crate::Cann::{V8_5, V9_0};
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::ops::convolution::{ConvContents, checked_by_numbers};
use crate::{Dims, Target, TensorDesc, Violation};

declare_operator! {
    /// Source: CausalConv1d of vLLM-Ascend's operator package.
    causal_conv1d_arguments, "CausalConv1d", #[derive(Copy)] CausalConvCall;
    1 { x: tensor, X, "x", "Rows, `[T, dim]` of all sequences, or `[B, L, dim]`." }
    1 { weight: tensor, Weight, "weight", "Weights, `[W, dim]`; that of the row itself is the last." }
    1 { bias: tensor, Bias, "bias", "What is added to each sum, `[dim]`; null is nothing." }
    1 { conv_states: inout, ConvStates, "convStates", "The pool of lines, `[lines, C, dim]`." }
    1 { query_start_loc: tensor, QueryStartLoc, "queryStartLoc",
        "Number of each sequence's first row, and of all rows at the end, `[B + 1]`. Null where every sequence \
         has L rows, in mode 1 also one row of `[T, dim]`." }
    1 { cache_indices: tensor, CacheIndices, "cacheIndices",
        "The line of each sequence, `[B]`, or the first of each row, `[B, n]`; null is its own number." }
    1 { initial_state_mode: tensor, InitialStateMode, "initialStateMode",
        "Whether each sequence goes on from its line, `[B]`, in mode 0; null is from zeros." }
    1 { num_accepted_tokens: tensor, NumAcceptedTokens, "numAcceptedTokens",
        "Rows of each sequence's last step that it goes on behind, `[B]`, in mode 1 of width 4." }
    1 { activation_mode: int = 0, ActivationMode, "activationMode", "1 is SiLU behind the sum, 0 none." }
    1 { pad_slot_id: int = -1, PadSlotId, "padSlotId", "The line of a sequence that is left out." }
    1 { run_mode: int = 0, RunMode, "runMode",
        "0: a sequence goes on from its line where `initial_state_mode` says so. 1: each does." }
    1 { y: output, Y, "y", "The convolved rows, with the shape of `x`." }
}

versions! {
    /// The version of CausalConv1d.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnCausalConv1d", "8.5 with vLLM-Ascend's operator package")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_0),
    }
}

described_by! { CausalConv1d, rules::RULES }

impl CallContract for CausalConv1d {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.y = arguments.y.or_else(|| arguments.call().output());
    }

    checked_by_numbers! { CausalConvCall, CausalConvCall }
}

impl CausalConvCall {
    /// The tensors whose numbers lead to rows and lines: starts, lines, which sequences go on, and accepted counts.
    pub const CONTENTS: [Parameter; 4] =
        [Parameter::QueryStartLoc, Parameter::CacheIndices, Parameter::InitialStateMode, Parameter::NumAcceptedTokens];

    /// The numbers of the tensors of [`Self::CONTENTS`].
    pub fn contents([starts, lines, initial_state_mode, accepted]: &[Vec<i64>; 4]) -> ConvContents<'_> {
        ConvContents { starts, lines, initial_state_mode, accepted, ..ConvContents::default() }
    }

    /// The output, as the rows imply it.
    pub fn output(&self) -> Option<TensorDesc> {
        let x = self.x?;
        Some(TensorDesc::packed(x.dtype, x.shape))
    }

    /// No lint of the operator is about what a call describes; those about numbers on the device are found there.
    ///
    /// # Errors
    /// None.
    pub fn lint(&self, _: Target, _: &[&str]) -> Result<(), Violation> {
        Ok(())
    }
}
