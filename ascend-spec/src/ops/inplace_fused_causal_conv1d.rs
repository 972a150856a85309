//! InplaceFusedCausalConv1d: [FusedCausalConv1d](super::fused_causal_conv1d) that writes its outputs to `x`. The rules
//! are the same.

use super::fused_causal_conv1d::FusedConvCall;
use crate::Cann::V9_1;
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::ops::convolution::{ConvProblem, checked_by_numbers};
use crate::{Dims, Rule, Target, TensorDesc, Violation};

declare_operator! {
    /// Source: aclnnInplaceFusedCausalConv1d, parameter table.
    inplace_fused_causal_conv1d_arguments, "InplaceFusedCausalConv1d", #[derive(Copy)] InplaceFusedConvCall;
    1 { x: inout, X, "x", "Rows, `[T, dim]` of all sequences, or `[B, L, dim]`, which become the convolved ones." }
    1 { weight: tensor, Weight, "weight", "As for FusedCausalConv1d." }
    1 { conv_states: inout, ConvStates, "convStates", "As for FusedCausalConv1d." }
    1 { query_start_loc: tensor, QueryStartLoc, "queryStartLoc", "As for FusedCausalConv1d." }
    1 { cache_indices: tensor, CacheIndices, "cacheIndices", "As for FusedCausalConv1d." }
    1 { initial_state_mode: tensor, InitialStateMode, "initialStateMode", "Not read." }
    1 { bias: tensor, Bias, "bias", "Not read." }
    1 { num_accepted_tokens: tensor, NumAcceptedTokens, "numAcceptedTokens", "As for FusedCausalConv1d." }
    1 { num_computed_tokens: tensor, NumComputedTokens, "numComputedTokens", "As for FusedCausalConv1d." }
    1 { block_idx_first_scheduled_token: tensor, BlockIdxFirstScheduledToken, "blockIdxFirstScheduledToken",
        "As for FusedCausalConv1d." }
    1 { block_idx_last_scheduled_token: tensor, BlockIdxLastScheduledToken, "blockIdxLastScheduledToken",
        "As for FusedCausalConv1d." }
    1 { initial_state_idx: tensor, InitialStateIdx, "initialStateIdx", "As for FusedCausalConv1d." }
    1 { activation_mode: int = 0, ActivationMode, "activationMode", "Not read: there is no activation." }
    1 { pad_slot_id: int = -1, PadSlotId, "padSlotId", "As for FusedCausalConv1d." }
    1 { run_mode: int = 0, RunMode, "runMode", "Not read." }
    1 { max_query_len: int = -1, MaxQueryLen, "maxQueryLen", "As for FusedCausalConv1d." }
    1 { residual_connection: int = 0, ResidualConnection, "residualConnection", "As for FusedCausalConv1d." }
    1 { block_size: int = 128, BlockSize, "blockSize", "As for FusedCausalConv1d." }
    1 { conv_mode: int = 0, ConvMode, "convMode", "As for FusedCausalConv1d." }
}

versions! {
    /// The version of InplaceFusedCausalConv1d.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnInplaceFusedCausalConv1d", "9.1").exported_since(V9_1).on_ascend950(V9_1),
    }
}

/// The rules are those that FusedCausalConv1d lists.
const OWN_RULES: &[&Rule] = &[];

described_by! { InplaceFusedCausalConv1d, OWN_RULES }

impl CallContract for InplaceFusedCausalConv1d {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target }

    fn imply_outputs(_: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {}

    checked_by_numbers! { InplaceFusedConvCall, FusedConvCall }
}

impl InplaceFusedConvCall {
    /// The tensors whose numbers lead to rows and lines, in the order of
    /// [`FusedConvCall::CONTENTS`].
    pub const CONTENTS: [Parameter; 7] = [
        Parameter::QueryStartLoc,
        Parameter::CacheIndices,
        Parameter::NumAcceptedTokens,
        Parameter::NumComputedTokens,
        Parameter::BlockIdxFirstScheduledToken,
        Parameter::BlockIdxLastScheduledToken,
        Parameter::InitialStateIdx,
    ];
    /// Checks the call against the contract of the operator on `target`, and resolves it. The numbers in starts, lines,
    /// counts and blocks are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<ConvProblem, Violation> {
        FusedConvCall::from(*self).check_in_place(target)
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        FusedConvCall::from(*self).lint(target, allowed)
    }
}

/// Makes a call of one form from the fields that both forms have, and the others.
macro_rules! with_fields_of {
    ($from:ident, $to:ident $(, $field:ident: $value:expr)?) => {
        $to {
            x: $from.x,
            weight: $from.weight,
            conv_states: $from.conv_states,
            query_start_loc: $from.query_start_loc,
            cache_indices: $from.cache_indices,
            initial_state_mode: $from.initial_state_mode,
            bias: $from.bias,
            num_accepted_tokens: $from.num_accepted_tokens,
            num_computed_tokens: $from.num_computed_tokens,
            block_idx_first_scheduled_token: $from.block_idx_first_scheduled_token,
            block_idx_last_scheduled_token: $from.block_idx_last_scheduled_token,
            initial_state_idx: $from.initial_state_idx,
            activation_mode: $from.activation_mode,
            pad_slot_id: $from.pad_slot_id,
            run_mode: $from.run_mode,
            max_query_len: $from.max_query_len,
            residual_connection: $from.residual_connection,
            block_size: $from.block_size,
            conv_mode: $from.conv_mode,
            $($field: $value,)?
        }
    };
}

impl From<FusedConvCall> for InplaceFusedConvCall {
    /// The call with the same arguments, but `y`.
    fn from(call: FusedConvCall) -> Self {
        with_fields_of!(call, InplaceFusedConvCall)
    }
}

impl From<InplaceFusedConvCall> for FusedConvCall {
    /// The call with the same arguments, without an output.
    fn from(call: InplaceFusedConvCall) -> Self {
        with_fields_of!(call, FusedConvCall, y: None)
    }
}
