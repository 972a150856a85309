//! Mask tensor and sparse mode.

use super::{Report, lint, prefix};
use crate::allowed::Outcome;
use crate::attention_problem;
use crate::ops::flash_attention_score::{FlashAttentionProblem, FullMask, MaskKind, Parameter, Sequence, Version};
use crate::rule::{require, rules};
use crate::{Change, DType, Dims, Lengths, MaskDemand, NewArgument, Operator, SparseMode, TensorDesc, View, Violation};

rules! {
    in Scope::ALL;
    DTYPE = "flash.atten_mask_dtype", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, attenMask",
        "attenMask is BOOL or UINT8",
        "convert the mask to BOOL: INT8, which FusedInferAttentionScore takes, is refused here";
    RANK = "flash.atten_mask_rank", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, attenMask",
        "attenMask has two or four axes",
        "drop or add axes of size 1";
    MODE = "flash.sparse_mode", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, sparseMode",
        "with a mask sparseMode is from 0 to 6 with a batch axis, 0 to 4 or 6 to 8 with packed sequences",
        "mode 5 needs a batch axis, modes 7 and 8 packed sequences";
    SHAPE = "flash.atten_mask_shape", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, attenMask",
        "a full mask has an element for each row and key of the longest sequence, for all, for each sequence, or for \
         each sequence and head; two axes may also cover the rows and keys of all packed sequences",
        "expand the mask to every row and key: a padding mask [B, 1, 1, Skv] is not broadcast";
    COMPRESSED = "flash.atten_mask_compressed", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, attenMask",
        "the mask of modes 2, 3, 4, 7 and 8 is [2048, 2048], that of mode 6 is [3072, 2048]",
        "pass the compressed mask, or use mode 1 for a full one";
    MODE_UNMASKED = "flash.mode_without_mask", Lint("no mask is read"), V1, "FlashAttentionScore, sparseMode",
        "a sparse mode that hides keys has a mask: without one every row sees every key",
        "pass the mask, or mode 0 to have every row see every key";
    PACKED = "flash.atten_mask_packed",
        Lint("less of the mask is read than there is"),
        VarLenV1, "FlashAttentionScore kernel, attenMask of packed sequences",
        "a mask of four axes for each packed sequence goes with sequences of one length: it is read one sequence's \
         scores behind the other's, not as its shape says",
        "pack the masks of the sequences, or pass one of [1, 1, max Sq, max Skv] or [sum Sq, sum Skv]";
    LOOSE = "flash.atten_mask_loose", Lint("only numbers change"), V1, "FlashAttentionScore kernel, sparseMode 0 and 5",
        "the mask of modes 0 and 5 hides all that preTokens, nextTokens and prefix hide: of them the operator asks by \
         blocks alone",
        "hide those keys in the mask too, or pass a mode with a compressed mask, which keeps to them exactly";
}

/// Types of a mask.
const ALLOWED: &[DType] = &[DType::Bool, DType::UInt8];

/// Checks mask and mode, and returns the mode in force and what the tensor is for.
pub(crate) fn check(p: &FlashAttentionProblem<'_>) -> Result<(SparseMode, MaskKind), Violation> {
    let Some(mask) = p.call.mask() else {
        return Ok((SparseMode::DefaultMask, MaskKind::None));
    };
    DTYPE.takes(mask.dtype, ALLOWED).fix(|| {
        (
            Change::to(Parameter::AttenMask, NewArgument::DType(DType::Bool)),
            "INT8, which FusedInferAttentionScore takes, is refused here",
        )
    })?;
    require!(matches!(mask.shape.rank(), 2 | 4), RANK, mask.shape, "two or four axes",);
    let (operator, modes) = match p.unequal() {
        Some(_) => (Operator::FlashAttentionVarLenScore, "0 to 4, 6, 7, 8"),
        None => (Operator::FlashAttentionScore, "0 to 6"),
    };
    let Some(mode) = operator.sparse_mode(p.call.sparse_mode) else {
        return Err(MODE.broken(p.call.sparse_mode, modes));
    };
    let full = full(p, mask);
    // A mask of four axes is checked against the lengths even if it is a compressed one.
    let shape = match (mode.demand(), mask.shape.rank()) {
        (MaskDemand::Compressed(_), 2) => None,
        _ => Some(full.ok_or_else(|| no_shape(p, mask))?),
    };
    let usage = match mode.demand() {
        MaskDemand::Compressed(template) => {
            let size = template.shape();
            let last = mask.shape.get(mask.shape.rank() - 2..);
            require!(last == Some(&size[..]), COMPRESSED, format_args!("{} in mode {mode}", mask.shape), size,);
            MaskKind::Compressed
        }
        _ => shape.map_or(MaskKind::None, MaskKind::Full),
    };
    Ok((prefix::check(p, mode, mask)?, usage))
}

/// The layout of a mask of this shape, if it is a full one.
fn full(p: &FlashAttentionProblem<'_>, mask: &TensorDesc) -> Option<FullMask> {
    let (rows, keys) = (p.q_rows, p.kv_rows);
    let one = rows.saturating_mul(keys);
    let batched = |batch, head| FullMask::Batched(View { offset: 0, batch, head, row: keys, dim: 1 });
    let shared = |b: i64, n: i64| b == 1 && n == 1;
    match mask.shape[..] {
        [s, t] if (s, t) == (rows, keys) => Some(batched(0, 0)),
        [s, t] if p.sums() == Some((s, t)) => Some(FullMask::Diagonal { row: t }),
        [b, n, s, t] if (s, t) == (rows, keys) => match p.lengths {
            _ if shared(b, n) => Some(batched(0, 0)),
            Lengths::Packed { .. } if b == p.batch && n == 1 => Some(FullMask::Packed { heads: false }),
            Lengths::Packed { .. } if b == p.batch && n == p.heads => Some(FullMask::Packed { heads: true }),
            Lengths::Dense { .. } if b == p.batch && n == 1 => Some(batched(one, 0)),
            Lengths::Dense { .. } if b == p.batch && n == p.heads => Some(batched(one.saturating_mul(p.heads), one)),
            _ => None,
        },
        _ => None,
    }
}

#[cold]
fn no_shape(p: &FlashAttentionProblem<'_>, mask: &TensorDesc) -> Violation {
    let (b, n, s, t) = (p.batch, p.heads, p.q_rows, p.kv_rows);
    let of_all = p.sums().map_or(String::new(), |(rows, keys)| format!(", {}", Dims::of([rows, keys])));
    SHAPE.broken(
        format_args!("{} in mode {}", mask.shape, p.call.sparse_mode),
        format_args!("[{s}, {t}], [1, 1, {s}, {t}], [{b}, 1, {s}, {t}], [{b}, {n}, {s}, {t}]{of_all}"),
    )
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let call = &p.call;
    lint!(
        report,
        p.mask != MaskKind::None || call.sparse_mode == 0,
        MODE_UNMASKED,
        format_args!("sparseMode {} without a mask", call.sparse_mode),
        "0",
    );
    if let MaskKind::Full(FullMask::Packed { .. }) = p.mask {
        let longest = p.lengths.longest();
        // If packed sequences are run as a batch, empty ones have no mask. Otherwise empty ones before others have
        // one that is not counted.
        let filled = p.lengths.each().skip_while(|&pair| pair == longest);
        let mut unequal = filled.skip_while(|&pair| pair == (0, 0));
        lint!(
            report,
            p.as_batch || unequal.next().is_none(),
            PACKED,
            call.atten_mask.map_or(Dims::of([]), |mask| mask.shape),
            "sequences of one length",
        );
    }
}

impl FlashAttentionProblem<'_> {
    /// Checks the elements of a full mask, in row-major order, against the tokens of mode 0 and the prefix of mode 5.
    /// If the mask shows keys that these hide, which of them a row sees depends on the blocks in which the operator
    /// computes.
    ///
    /// # Errors
    /// `flash.atten_mask_loose`.
    pub fn admits_mask(&self, hides: &[u8]) -> Result<(), Violation> {
        let MaskKind::Full(mask) = self.mask else {
            return Ok(());
        };
        if !matches!(self.mode, SparseMode::DefaultMask | SparseMode::Prefix) {
            return Ok(());
        }
        let heads = attention_problem::size(self.heads);
        for sequence in self.lengths.sequences() {
            let (geometry, elements) = (self.geometry(&sequence), mask.rows(&sequence, heads));
            for head in 0..heads {
                let (rows, keys) = (0..sequence.q_len, 0..sequence.kv_len);
                let shown = rows
                    .flat_map(|i| keys.clone().map(move |j| (i, j)))
                    .filter(|&(i, j)| !geometry.sees(i as u64, j as u64))
                    .find(|&(i, j)| {
                        let element = usize::try_from(elements.element(head, i, j)).ok();
                        element.and_then(|element| hides.get(element)) == Some(&0)
                    });
                if let Some((i, j)) = shown {
                    return Err(loose(&sequence, head, i, j));
                }
            }
        }
        Ok(())
    }
}

#[cold]
fn loose(sequence: &Sequence, head: usize, i: usize, j: usize) -> Violation {
    LOOSE.broken(format_args!("key {j} for row {i} of sequence {}, head {head}", sequence.index), "1 in the mask")
}
