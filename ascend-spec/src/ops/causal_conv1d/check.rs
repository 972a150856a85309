//! The check of a call of CausalConv1d against its rules.

use super::rules::{
    ACCEPTED, CHANNELS, CONTENTS, CONTIGUOUS, DTYPE, EMPTY, FORMAT, HISTORY, LEFT_OUT, LINE_ROWS, LINES, MODE, PRODUCT,
    RANK, REQUIRED, SHAPE, SHARED, STARTS, WIDTH,
};
use super::{CausalConvCall, Parameter, Version};
use crate::DType::{Bf16, Bool, Float16, Int32, Int64};
use crate::allowed::{Checked, Multiples, Named, Noted, Rank, has_shape};
use crate::ops::convolution::{ContentRules, ConvForm, ConvProblem};
use crate::rule::require;
use crate::{DType, Target, TensorDesc, Violation};

/// Width of the window with which a call takes accepted counts.
const ACCEPTED_WIDTH: i64 = 4;

impl CausalConvCall {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of starts,
    /// lines and accepted counts are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<ConvProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let x = REQUIRED.requires(self.x, "x")?;
        let weight = REQUIRED.requires(self.weight, "weight")?;
        let states = REQUIRED.requires(self.conv_states, "convStates")?;
        let y = REQUIRED.requires(self.y, "y")?;
        MODE.takes(Named("activationMode", self.activation_mode), 0..=1)?;
        MODE.takes(Named("runMode", self.run_mode), 0..=1)?;
        let update = self.run_mode == 1;
        self.dtypes(&x)?;
        FORMAT.formats(self)?;
        for (name, desc) in [("convStates", &states), ("y", &y)] {
            let given = format_args!("{name} {} strides {}", desc.shape, desc.strides);
            require!(desc.is_contiguous(), CONTIGUOUS, given, "row-major strides");
        }
        require!(
            matches!(x.shape.rank(), 2 | 3),
            RANK,
            format_args!("x {}", x.shape),
            "2 axes, rows and channels, or 3, sequences before them",
        );
        RANK.takes(Named("weight", weight.shape), Rank(2))?;
        RANK.takes(Named("convStates", states.shape), Rank(3))?;
        let axis = |desc: &TensorDesc, axis: usize| desc.shape.get(axis).copied().unwrap_or(0);
        let channels = axis(&x, x.shape.rank().saturating_sub(1));
        CHANNELS.takes(Noted(channels, "channels"), Multiples(16, ..=i64::MAX))?;
        require!(channels > 0, CHANNELS, "no channels", "multiples of 16, at least 16");
        let [width, lines, line_rows] = [axis(&weight, 0), axis(&states, 0), axis(&states, 1)];
        WIDTH.takes(Noted(width, "rows of weights"), 2..=4)?;
        self.is(Parameter::Weight, &[width, channels])?;
        self.is(Parameter::Bias, &[channels])?;
        self.is(Parameter::ConvStates, &[lines, line_rows, channels])?;
        self.is(Parameter::Y, &x.shape)?;
        let (sequences, each) = self.sequences(&x, update)?;
        HISTORY.forbids([("initialStateMode", update && self.initial_state_mode.is_some())])?;
        let accepts = update && width == ACCEPTED_WIDTH;
        ACCEPTED.forbids([("numAcceptedTokens", !accepts && self.num_accepted_tokens.is_some())])?;
        self.is(Parameter::QueryStartLoc, &[sequences.saturating_add(1)])?;
        self.is(Parameter::InitialStateMode, &[sequences])?;
        self.is(Parameter::NumAcceptedTokens, &[sequences])?;
        if let Some(indices) = &self.cache_indices {
            let ranks = matches!(indices.shape.rank(), 1 | 2);
            require!(ranks, RANK, format_args!("cacheIndices {}", indices.shape), "1 or 2 axes");
            let columns = indices.shape.get(1).copied().unwrap_or(1).max(1);
            let wanted = [sequences, columns];
            self.is(Parameter::CacheIndices, &wanted[..indices.shape.rank()])?;
        }
        let least = if self.cache_indices.is_some() { 1 } else { sequences.max(1) };
        LINES.takes(Noted(lines, "lines"), least..)?;
        let wanted = match (self.num_accepted_tokens, x.shape.rank()) {
            (Some(_), 3) => axis(&x, 1).saturating_add(2),
            _ => 0,
        };
        LINE_ROWS.takes(Noted(line_rows, "rows of a line"), wanted.max(width.saturating_sub(1))..)?;
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        Ok(ConvProblem {
            sequences: count(sequences),
            rows: x.shape[..x.shape.rank() - 1].iter().map(|&axis| count(axis)).product(),
            fixed_rows: each.map(count),
            channels: count(channels),
            width: count(width),
            lines: count(lines),
            line_rows: count(line_rows),
            pad_slot_id: self.pad_slot_id,
            form: ConvForm::Package { silu: self.activation_mode == 1, update },
            rules: ContentRules { contents: &CONTENTS, left_out: &LEFT_OUT, shared: &SHARED },
        })
    }

    /// The sequences of a call, and the rows of each where no tensor says them.
    fn sequences(&self, x: &TensorDesc, update: bool) -> Result<(i64, Option<i64>), Violation> {
        let starts = self.query_start_loc.as_ref();
        if let Some(starts) = starts {
            RANK.takes(Named("queryStartLoc", starts.shape), Rank(1))?;
            EMPTY.takes(Noted(starts.shape[0].saturating_sub(1), "sequences of queryStartLoc"), 1..)?;
        }
        let rows = x.shape[0];
        if x.shape.rank() == 3 {
            EMPTY.takes(Noted(rows, "sequences"), 1..)?;
            EMPTY.takes(Noted(x.shape[1], "rows of a sequence"), 1..)?;
            return Ok((rows, Some(x.shape[1])));
        }
        match starts.map(|starts| starts.shape[0].saturating_sub(1)) {
            // As many sequences as rows: the operator takes a row for each, whatever the starts say.
            Some(sequences) => Ok((sequences, (update && sequences == rows).then_some(1))),
            None if update => {
                EMPTY.takes(Noted(rows, "sequences"), 1..)?;
                Ok((rows, Some(1)))
            }
            None => {
                STARTS.requires(starts, "queryStartLoc")?;
                Ok((0, None))
            }
        }
    }

    fn dtypes(&self, x: &TensorDesc) -> Checked {
        DTYPE.takes(Named("x", x.dtype), [Float16, Bf16])?;
        for (argument, desc) in self.each_tensor() {
            let allowed: &[DType] = match argument.parameter {
                Parameter::InitialStateMode => &[Bool, Int32, Int64],
                Parameter::QueryStartLoc | Parameter::CacheIndices | Parameter::NumAcceptedTokens => &[Int32],
                _ => &[x.dtype],
            };
            DTYPE.takes(Named(argument.acl_name(), desc.dtype), allowed)?;
        }
        Ok(())
    }

    /// Checks that a tensor, if it is given, has this shape.
    fn is(&self, parameter: Parameter, shape: &[i64]) -> Checked {
        has_shape([&RANK, &SHAPE], parameter.acl_name(), self.tensors(parameter).first(), shape)
    }
}
