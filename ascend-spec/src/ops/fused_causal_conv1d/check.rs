//! The check of a call of FusedCausalConv1d, or of its in-place form, against its rules.

use super::rules::{
    BLOCK_SIZE, BLOCKS, CHANNELS, COMPUTED, CONTENTS, DTYPE, FORMAT, LEFT_OUT, LINE_ROWS, LINES, MODE, MOST_ROWS,
    PAD_SLOT, PRODUCT, RANK, REQUIRED, ROWS, SEQUENCES, SHAPE, SHARED, STARTS, STRIDES, UNCHECKED_NULL, UNREAD,
    UNREAD_MODE, WIDTH,
};
use super::{FusedConvCall, Parameter, Version};
use crate::DType::{Bf16, Float16, Int32};
use crate::allowed::{Checked, Named, Noted, Outcome, Rank, Report, has_shape};
use crate::ops::convolution::{ContentRules, ConvForm, ConvProblem, FusedConv};
use crate::rule::require;
use crate::{Target, TensorDesc, Violation};

/// Most rows of a sequence for which the kernel for few rows runs.
const FEW_ROWS: i64 = 8;

impl FusedConvCall {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The numbers in starts, lines,
    /// counts and blocks are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<ConvProblem, Violation> {
        let problem = self.check_but_y(target)?;
        let y = REQUIRED.requires(self.y, "y")?;
        self.x.map_or(Ok(()), |x| strided(Parameter::X, &x, false))?;
        self.is(Parameter::Y, &self.x.map_or(y.shape, |x| x.shape))?;
        let given = format_args!("y {} strides {}", y.shape, y.strides);
        require!(y.is_contiguous(), STRIDES, given, "row-major strides");
        Ok(problem)
    }

    /// As [`Self::check`], of the in-place form, which writes `x`.
    pub(crate) fn check_in_place(&self, target: Target) -> Result<ConvProblem, Violation> {
        let problem = self.check_but_y(target)?;
        self.x.map_or(Ok(problem), |x| strided(Parameter::X, &x, true).map(|()| problem))
    }

    /// Checks everything but `y` and the strides of `x`.
    fn check_but_y(&self, target: Target) -> Result<ConvProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let given = if UNCHECKED_NULL.scope.holds(target) { &UNCHECKED_NULL } else { &REQUIRED };
        let x = given.requires(self.x, "x")?;
        let weight = given.requires(self.weight, "weight")?;
        let states = given.requires(self.conv_states, "convStates")?;
        self.dtypes(&x)?;
        FORMAT.formats(self)?;
        require!(
            matches!(x.shape.rank(), 2 | 3),
            RANK,
            format_args!("x {}", x.shape),
            "2 axes, rows and channels, or 3, sequences before them",
        );
        RANK.takes(Named("weight", weight.shape), Rank(2))?;
        RANK.takes(Named("convStates", states.shape), Rank(3))?;
        let (sequences, each) = self.sequences(&x)?;
        let few = self.is_of_few_rows();
        let channels = x.shape[x.shape.rank() - 1];
        let least = if few { 64 } else { 16 };
        require!(
            channels % 16 == 0 && (least..=16384).contains(&channels),
            CHANNELS,
            format_args!("{channels} channels"),
            format_args!("multiples of 16 from {least} to 16384"),
        );
        WIDTH.takes(Noted(weight.shape[0], "rows of weights"), 3)?;
        let [lines, line_rows] = [states.shape[0], states.shape[1]];
        self.is(Parameter::Weight, &[3, channels])?;
        self.is(Parameter::Bias, &[channels])?;
        self.is(Parameter::ConvStates, &[lines, line_rows, channels])?;
        let rows = each.unwrap_or(1).saturating_mul(x.shape[0]);
        self.check_blocks(sequences)?;
        for parameter in [
            Parameter::InitialStateMode,
            Parameter::NumAcceptedTokens,
            Parameter::NumComputedTokens,
            Parameter::BlockIdxFirstScheduledToken,
            Parameter::BlockIdxLastScheduledToken,
            Parameter::InitialStateIdx,
        ] {
            self.is(parameter, &[sequences])?;
        }
        self.check_attributes(target, rows, sequences, each.is_some())?;
        let least = if self.cache_indices.is_some() { 1 } else { sequences };
        LINES.takes(Noted(lines, "lines"), least..)?;
        LINE_ROWS.takes(Noted(line_rows, "rows of a line"), each.map_or(2, |each| each.saturating_add(1).max(2))..)?;
        strided(Parameter::ConvStates, &states, true)?;
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        let most_rows = each.or(Some(self.max_query_len)).filter(|most| *most > 0).map(count);
        let blocks = self.caches_prefixes();
        Ok(ConvProblem {
            sequences: count(sequences),
            rows: count(rows),
            fixed_rows: each.map(count),
            channels: count(channels),
            width: 3,
            lines: count(lines),
            line_rows: count(line_rows),
            // The kernel for few rows keeps the lowest 8 bits.
            pad_slot_id: if few { i64::from(self.pad_slot_id as i8) } else { self.pad_slot_id },
            form: ConvForm::Fused(FusedConv {
                residual: self.residual_connection == 1,
                whole_windows: self.conv_mode == 1,
                few_rows: few,
                most_rows,
                block_size: blocks.then(|| count(self.block_size)),
            }),
            rules: ContentRules { contents: &CONTENTS, left_out: &LEFT_OUT, shared: &SHARED },
        })
    }

    /// Reports the lints that the call, which holds every rule, breaks.
    pub(super) fn lints(&self, report: Report<'_>) {
        UNREAD.leaves_out(self, &UNREAD_PARAMETERS).report(report);
        if self.has_fixed_rows() {
            let starts = UNREAD.leaves_out(self, &[Parameter::QueryStartLoc]);
            starts.fix(|| "leave it out: x [B, L, dim] says the rows of each sequence").report(report);
        }
        if self.is_of_few_rows() && !self.caches_prefixes() {
            PAD_SLOT.takes(Named("padSlotId", self.pad_slot_id), -128..=127).report(report);
        }
    }

    /// Whether each sequence has lines for its blocks.
    fn caches_prefixes(&self) -> bool {
        self.block_idx_last_scheduled_token.is_some()
    }

    /// Whether `x` is `[B, L, dim]`.
    fn has_fixed_rows(&self) -> bool {
        self.x.is_some_and(|x| x.shape.rank() == 3)
    }

    /// Whether the kernel for few rows of a sequence runs.
    fn is_of_few_rows(&self) -> bool {
        self.has_fixed_rows() || (1..=FEW_ROWS).contains(&self.max_query_len)
    }

    /// The sequences of a call, and the rows of each where x says them.
    fn sequences(&self, x: &TensorDesc) -> Result<(i64, Option<i64>), Violation> {
        let (sequences, each) = match x.shape[..] {
            [sequences, rows, _] => (sequences, Some(rows)),
            _ => {
                let starts = STARTS.requires(self.query_start_loc, "queryStartLoc")?;
                RANK.takes(Named("queryStartLoc", starts.shape), Rank(1))?;
                (starts.shape[0].saturating_sub(1).max(0), None)
            }
        };
        SEQUENCES.takes(Noted(sequences, "sequences"), 1..=256)?;
        match each {
            Some(each) => ROWS.takes(Noted(each, "rows of a sequence"), 1..=FEW_ROWS)?,
            None => ROWS.takes(Noted(x.shape[0], "rows"), 1..=1 << 20)?,
        }
        Ok((sequences, each))
    }

    /// Checks that prefix caching has all its tensors, and the shape of the lines.
    fn check_blocks(&self, sequences: i64) -> Checked {
        let blocks =
            [Parameter::BlockIdxFirstScheduledToken, Parameter::BlockIdxLastScheduledToken, Parameter::InitialStateIdx];
        if blocks.iter().all(|block| self.tensor(*block).is_none()) {
            return self.is(Parameter::CacheIndices, &[sequences]);
        }
        for block in blocks {
            BLOCKS.requires(self.tensor(block), block.acl_name())?;
        }
        let lines = BLOCKS.requires(self.cache_indices, "cacheIndices")?;
        RANK.takes(Named("cacheIndices", lines.shape), Rank(2))?;
        let wanted = [sequences, lines.shape[1].max(1)];
        self.is(Parameter::CacheIndices, &wanted)
    }

    /// Checks the attributes, and what they need.
    fn check_attributes(&self, target: Target, rows: i64, sequences: i64, fixed: bool) -> Checked {
        MODE.takes(Named("residualConnection", self.residual_connection), 0..=1)?;
        MODE.takes(Named("convMode", self.conv_mode), 0..=1)?;
        UNREAD_MODE.takes_on(target, Named("activationMode", self.activation_mode), 0..=2)?;
        UNREAD_MODE.takes_on(target, Named("runMode", self.run_mode), 0..=1)?;
        if !fixed {
            let least = rows.saturating_add(sequences).saturating_sub(1) / sequences.max(1);
            MOST_ROWS.takes_on(target, Named("maxQueryLen", self.max_query_len), least..)?;
        }
        let blocks = self.caches_prefixes();
        if blocks {
            BLOCK_SIZE.takes(Named("blockSize", self.block_size), 2..)?;
        }
        if blocks || self.conv_mode == 1 {
            COMPUTED.requires(self.num_computed_tokens, "numComputedTokens")?;
        }
        Ok(())
    }

    fn dtypes(&self, x: &TensorDesc) -> Checked {
        DTYPE.takes(Named("x", x.dtype), [Float16, Bf16])?;
        DTYPE.dtypes(self, |parameter| {
            let rows = [Parameter::X, Parameter::Weight, Parameter::Bias, Parameter::ConvStates, Parameter::Y];
            Some(if rows.contains(&parameter) { x.dtype } else { Int32 })
        })
    }

    /// Checks that a tensor, if it is given, has this shape.
    fn is(&self, parameter: Parameter, shape: &[i64]) -> Checked {
        has_shape([&RANK, &SHAPE], parameter.acl_name(), self.tensors(parameter).first(), shape)
    }
}

/// What the operator takes and does not read.
const UNREAD_PARAMETERS: [Parameter; 4] =
    [Parameter::Bias, Parameter::InitialStateMode, Parameter::ActivationMode, Parameter::RunMode];

/// Checks that the elements of each row stand next to each other, that rows which are `written` share none, and for
/// rows of `x` that they are at equal distances: the kernel takes that of the rows of a sequence for all.
fn strided(parameter: Parameter, desc: &TensorDesc, written: bool) -> Checked {
    let (&[ref apart @ .., next], &[ref sizes @ .., row]) = (&desc.strides[..], &desc.shape[..]) else {
        return Ok(());
    };
    let mut outer = [(0, 0); 2];
    let axes = apart.iter().zip(sizes).filter(|(_, size)| **size > 1);
    axes.zip(&mut outer).for_each(|((&apart, &size), axis)| *axis = (apart, size));
    outer.sort_unstable();
    let mut extent = row;
    let disjoint = outer.iter().all(|&(apart, size)| {
        let fits = size == 0 || apart >= extent;
        extent = extent.saturating_add(apart.saturating_mul(size.saturating_sub(1)));
        fits
    });
    let even = match (parameter, apart, sizes) {
        (Parameter::X, &[sequences, rows], &[count, each]) => count < 2 || sequences == rows.saturating_mul(each),
        _ => true,
    };
    let holds = next == 1 && apart.iter().all(|&stride| stride >= 1) && even && (disjoint || !written);
    let name = parameter.acl_name();
    let given = format_args!("{name} {} strides {}", desc.shape, desc.strides);
    let allowed = match sizes {
        [_, _] => {
            "whole rows apart from each other, and those of [B, L, dim] at equal distances: stride 0 is stride 1 times L"
        }
        _ => "whole rows apart from each other",
    };
    require!(holds, STRIDES, given, allowed);
    Ok(())
}
