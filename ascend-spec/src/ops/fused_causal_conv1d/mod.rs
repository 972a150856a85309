//! FusedCausalConv1d: the causal convolution of CANN for Ascend 950, with windows of 3 rows, over lines of a pool that
//! keep the last rows of each sequence. Made for Pangu; it has no activation.
//!
//! A line is filled from its end: its last 2 rows are in front of the sequence's next row. With drafts, whose rows may
//! be rejected, lines are longer, and accepted counts say which 2 rows a sequence goes on behind. For prefix caching
//! the sequence has a line for each block of tokens, and each keeps the last rows in front of its block's end.
//!
//! Where sequences begin, their lines, blocks and counts are numbers on the device, which a
//! [`ConvProblem`](super::convolution::ConvProblem) follows.

mod check;
pub mod rules;

use crate::Cann::V9_1;
use crate::contract::{CallContract, checked_for, described_by, first_lint};
use crate::operator::{OperatorVersion, versions};
use crate::ops::convolution::{ConvContents, checked_by_numbers};
use crate::{Dims, Target, TensorDesc, Violation};

declare_operator! {
    /// Source: aclnnFusedCausalConv1d, parameter table.
    fused_causal_conv1d_arguments, "FusedCausalConv1d", #[derive(Copy)] FusedConvCall;
    1 { x: tensor, X, "x", "Rows, `[T, dim]` of all sequences, or `[B, L, dim]`." }
    1 { weight: tensor, Weight, "weight", "Weights, `[3, dim]`; that of the row itself is the last." }
    1 { conv_states: inout, ConvStates, "convStates", "The pool of lines, `[lines, C, dim]`." }
    1 { query_start_loc: tensor, QueryStartLoc, "queryStartLoc",
        "Number of each sequence's first row, and of all rows at the end, `[B + 1]`; of `[B, L, dim]` it is not read." }
    1 { cache_indices: tensor, CacheIndices, "cacheIndices",
        "The line of each sequence, `[B]`, null is its own number; with prefix caching that of each of its blocks, \
         `[B, blocks]`." }
    1 { initial_state_mode: tensor, InitialStateMode, "initialStateMode", "Not read." }
    1 { bias: tensor, Bias, "bias", "Not read." }
    1 { num_accepted_tokens: tensor, NumAcceptedTokens, "numAcceptedTokens",
        "`[B]`: a sequence goes on behind the 2 rows of its line that begin with this number, counted from 1. Null is \
         the last 2." }
    1 { num_computed_tokens: tensor, NumComputedTokens, "numComputedTokens",
        "Tokens in front of each sequence's rows, `[B]`: one with 0 begins with zeros. Null is that each goes on." }
    1 { block_idx_first_scheduled_token: tensor, BlockIdxFirstScheduledToken, "blockIdxFirstScheduledToken",
        "The block with each sequence's first row, `[B]`." }
    1 { block_idx_last_scheduled_token: tensor, BlockIdxLastScheduledToken, "blockIdxLastScheduledToken",
        "The block with each sequence's last row, `[B]`, in whose line its last rows are kept." }
    1 { initial_state_idx: tensor, InitialStateIdx, "initialStateIdx",
        "The block from whose line each sequence goes on, `[B]`." }
    1 { activation_mode: int = 0, ActivationMode, "activationMode", "Not read: there is no activation." }
    1 { pad_slot_id: int = -1, PadSlotId, "padSlotId",
        "The line of a sequence that is left out, without prefix caching. The kernel for few rows reads its lowest 8 \
         bits." }
    1 { run_mode: int = 0, RunMode, "runMode", "Not read." }
    1 { max_query_len: int = -1, MaxQueryLen, "maxQueryLen",
        "Most rows of a sequence: with 1 to 8 the kernel for few rows runs, which `[B, L, dim]` always has." }
    1 { residual_connection: int = 0, ResidualConnection, "residualConnection", "1 adds the row itself to its sum." }
    1 { block_size: int = 128, BlockSize, "blockSize", "Tokens of a block for prefix caching." }
    1 { conv_mode: int = 0, ConvMode, "convMode",
        "1 makes outputs zero whose windows begin in front of the sequence's first token, as Pangu V2 does." }
    1 { y: output, Y, "y", "The convolved rows, with the shape of `x`." }
}

versions! {
    /// The version of FusedCausalConv1d.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnFusedCausalConv1d", "9.1").exported_since(V9_1).on_ascend950(V9_1),
    }
}

described_by! { FusedCausalConv1d, rules::RULES }

impl CallContract for FusedCausalConv1d {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.y = arguments.y.or_else(|| arguments.call().output());
    }

    checked_by_numbers! { FusedConvCall, FusedConvCall }
}

impl FusedConvCall {
    /// The tensors whose numbers lead to rows and lines: starts, lines, accepted and computed counts, and blocks.
    pub const CONTENTS: [Parameter; 7] = [
        Parameter::QueryStartLoc,
        Parameter::CacheIndices,
        Parameter::NumAcceptedTokens,
        Parameter::NumComputedTokens,
        Parameter::BlockIdxFirstScheduledToken,
        Parameter::BlockIdxLastScheduledToken,
        Parameter::InitialStateIdx,
    ];

    /// The numbers of the tensors of [`Self::CONTENTS`].
    pub fn contents(numbers: &[Vec<i64>; 7]) -> ConvContents<'_> {
        let [starts, lines, accepted, computed, first_block, last_block, initial_block] = numbers;
        ConvContents { starts, lines, accepted, computed, first_block, last_block, initial_block, ..Default::default() }
    }

    /// The output, as the rows imply it.
    pub fn output(&self) -> Option<TensorDesc> {
        let x = self.x?;
        Some(TensorDesc::packed(x.dtype, x.shape))
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, _: Target, allowed: &[&str]) -> Result<(), Violation> {
        first_lint(allowed, |report| self.lints(report))
    }
}
