//! Mask tensor, sparse mode and token window of the unified checker.

use crate::allowed::{Axis, Outcome, Shapes};
use crate::attention_problem::{MaskTensor, MaskUse, TreeMask};
use crate::geometry::TOKENS_UNBOUNDED;
use crate::ops::fused_infer_attention_score::rules::{Facts, mask, padding, prefix, quant};
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{broken, require, rules};
use crate::{Cann, Operator, SparseMode, TensorDesc, Violation};

use super::Form;
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;

rules! {
    in Scope::UNIFIED;
    MODE = "sparse_mode.unified", TILING_ERROR, V1, "check I4; Ascend 950, masks",
        "sparseMode is from 0 to 4; on Atlas A2 and A3 from 9.1 on also 9, the tree mask",
        "modes 5 to 8 belong to the training operators; mode 9, the tree mask, exists from CANN 9.1 on, on Atlas A2 \
         and A3 with rotary parts: elsewhere pass the tree as a full mask, in mode 1 or over latents in mode 0, or \
         leave it to the safe layer's TreeVerification";
    FORM_MODE = "sparse_mode.form", TILING_ERROR, V3, "check I4; Ascend 950, M7",
        "the absorbed form takes sparse modes 0, 3, 4 and where there is one the tree mask of mode 9",
        "use mode 3 for causal attention, mode 4 for a window, mode 0 for neither";
    ONE_ROW = "sparse_mode.one_row", TILING_ERROR, V5, "Ascend 950, K3" in Scope::ASCEND_950,
        "single rows over quantised keys have sparse mode 0",
        "pass mode 0, with a full mask where the mode hides keys from a single row";
    FULL = "atten_mask.full", TILING_ERROR, V1, "checks I4, I5; Ascend 950, M3",
        "the mask of sparse modes 0 and 1 covers every query row and key in two, three or four axes; two axes go on \
         Atlas A2 and A3 with BSH, BSND, BNSD and BNSD_BSND without rotary parts, four have one mask for all heads",
        "expand the mask to [B, 1, rows, keys]: three and four axes go everywhere";
    TREE = "tree_mask.form", TILING_ERROR, V3, "sparse mode 9, rules" in Scope::A2_A3.since(V9_1),
        "the tree mask of sparse mode 9 goes with rotary parts, and with no left padding, position bias, shared prefix \
         or INT8 output",
        "use mode 1 with a full mask";
    TREE_RANK = "tree_mask.rank", TILING_ERROR, V3, "sparse mode 9, shapes" in Scope::A2_A3.since(V9_1),
        "the tree mask of sparse mode 9 has one axis or three",
        "pass [B, S, S], or for packed sequences the squares of their rows one after another";
    TREE_ROWS = "tree_mask.rows", TILING_ERROR, V3, "sparse mode 9, rules" in Scope::A2_A3.since(V9_1),
        "in sparse mode 9 without a block table the query has no more rows than the key: with a batch axis by the \
         tensors, whatever the lengths, in packed layouts in each sequence that has keys",
        "count the rows of the tree as keys too";
}

/// CANN's number of the tree mask.
pub(crate) const TREE_MODE: i64 = SparseMode::Tree.acl();

impl Facts<'_> {
    /// The sparse mode in force: a single row has mode 0 whatever the call has.
    pub(crate) fn mode(&self) -> i64 {
        match self.single {
            true => SparseMode::DefaultMask.acl(),
            false => self.call.mode(),
        }
    }

    /// Whether the mask is a tree mask.
    pub(crate) fn tree(&self) -> bool {
        self.mode() == TREE_MODE && self.since(Cann::V9_1) && !self.is_950()
    }
}

/// Checks mask, mode and tokens, and returns the mode in force and what the tensor is for.
pub(crate) fn check(f: &Facts<'_>) -> Result<(SparseMode, MaskUse), Violation> {
    if f.tree() {
        let mask = tree(f)?;
        return Ok((SparseMode::Tree, MaskUse::Tree(mask)));
    }
    let Some(mode) = Operator::FusedInferAttentionScore.sparse_mode(f.mode()) else {
        return Err(MODE.broken(f.mode(), "0 to 4"));
    };
    let one = f.kind() == QuantisationKind::Antiquant && f.most_rows() == 1;
    require!(!one || mode == SparseMode::DefaultMask, ONE_ROW, mode, 0, mask::fix_of_rows(f, width(f)),);
    require!(
        f.form() != Form::Absorbed
            || matches!(mode, SparseMode::DefaultMask | SparseMode::RightDownCausal | SparseMode::Band),
        FORM_MODE,
        mode,
        "0, 3, 4",
    );
    empty(f, mode)?;
    let usage = match f.call.mask() {
        None => {
            require!(
                mode == SparseMode::DefaultMask,
                mask::REQUIRED,
                format_args!("no mask in mode {mode}"),
                "the compressed [2048, 2048] mask for modes 2, 3 and 4, a full mask for mode 1",
                mask::fix_of_missing(mode),
            );
            MaskUse::None
        }
        Some(given) if mode.takes_compressed_mask() => {
            mask::compressed(given, mode)?;
            MaskUse::Compressed
        }
        Some(given) => MaskUse::Full(full(f, given)?),
    };
    if !one {
        let (pre, next) = tokens(f, mode, usage != MaskUse::None)?;
        // From 9.1 on only calls with several rows a sequence are asked.
        if !f.is_950() && !f.single && (f.most_rows() > 1 || !f.since(Cann::V9_1)) {
            quant::rows(f, mode, pre, next)?;
        }
    }
    // A single row sees what the mask leaves of all keys, whatever the tokens.
    let mode = match (f.single, usage) {
        (true, MaskUse::Full(_)) => SparseMode::AllMask,
        _ => mode,
    };
    Ok((mode, usage))
}

/// Checks a mask without elements. It counts as none, but until 9.0 its shape is checked, and later its last axis over
/// a paged cache.
fn empty(f: &Facts<'_>, mode: SparseMode) -> Result<(), Violation> {
    let Some(given) = f.call.atten_mask.as_ref().filter(|mask| mask.is_empty()) else {
        return Ok(());
    };
    if mode.takes_compressed_mask() {
        return Ok(());
    }
    if !f.since(Cann::V9_1) {
        return full(f, given).map(drop);
    }
    let keys = f.mask_width();
    require!(
        !f.paged() || given.shape.last().is_none_or(|&last| last >= keys),
        FULL,
        given.shape,
        format_args!("a last axis of {keys} or more"),
    );
    Ok(())
}

/// Number of keys that a full mask covers.
pub(super) fn width(f: &Facts<'_>) -> i64 {
    let prefix = prefix::length(f);
    if f.paged() {
        // Over quantised keys the operator takes the block table's size for the number of keys.
        return match f.since(Cann::V9_1) && f.kind() != QuantisationKind::Antiquant {
            true => f.mask_width(),
            false => f.key_rows,
        };
    }
    match f.since(Cann::V9_1) {
        true => f.longest_key().saturating_add(prefix),
        false => longest_axis(f).saturating_add(prefix),
    }
}

/// Rows of the longest key; with packed sequences, the longest key length.
fn longest_axis(f: &Facts<'_>) -> i64 {
    match f.packed() {
        true => f.longest_key(),
        false => f.key_rows,
    }
}

fn full(f: &Facts<'_>, mask: &TensorDesc) -> Result<MaskTensor, Violation> {
    let (rows, batch, keys) = (f.most_rows(), f.batch, width(f));
    let two = !f.is_950() && f.classic_layout() && f.form() == Form::Plain;
    let (b, i, j) = (Axis::OneOr(batch), Axis::From(rows), Axis::From(keys));
    let (three, four) = ([b, i, j], [b, Axis::Of(1), i, j]);
    // One row a sequence: the rows of a mask of two axes are the sequences.
    let first = match f.q.rows == 1 && !f.packed() {
        true if f.since(Cann::V9_1) => Axis::From(1),
        true => Axis::Of(batch),
        false => i,
    };
    let allowed: &[&[Axis]] = match two {
        true => &[&[first, j], &three, &four],
        false => &[&three, &four],
    };
    FULL.takes(mask.shape, Shapes(allowed)).fix(|| {
        match f.single && triangle(mask) && f.call.mode() > SparseMode::AllMask.acl() {
            true => Ok(mask::fix_of_rows(f, keys)),
            false => Err(FULL.fix),
        }
    })?;
    let (batch_stride, row, key) = match (&mask.shape[..], &mask.strides[..]) {
        ([_, _], &[b, j]) if f.q.rows == 1 && !f.packed() => (b, 0, j),
        ([_, _], &[i, j]) => (0, i, j),
        ([b, ..], &[s, i, j] | &[s, _, i, j]) => (if *b == 1 { 0 } else { s }, i, j),
        _ => (0, 0, 0),
    };
    Ok(MaskTensor { offset: mask.offset, batch: batch_stride, row, key })
}

/// Whether a mask has the size of the compressed ones.
fn triangle(mask: &TensorDesc) -> bool {
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    mask.shape.ends_with(&[size, size])
}

/// Checks the token counts and returns those in force: only these relations between them are left in this checker.
fn tokens(f: &Facts<'_>, mode: SparseMode, masked: bool) -> Result<(i64, i64), Violation> {
    let call = f.call;
    let unbounded = (TOKENS_UNBOUNDED, TOKENS_UNBOUNDED);
    // The parser bounds both counts before they are compared, so that the widest count on one side makes up for any
    // count on the other.
    let most = i64::from(i32::MAX);
    let given = [call.pre_tokens, call.next_tokens].map(|tokens| tokens.clamp(-most, most));
    let (pre, next) = match mode {
        _ if f.single => return Ok(unbounded),
        SparseMode::DefaultMask if masked && !padding::given(f) => given.into(),
        SparseMode::LeftUpCausal | SparseMode::RightDownCausal => (TOKENS_UNBOUNDED, 0),
        SparseMode::Band => given.into(),
        _ => return Ok(unbounded),
    };
    mask::band(f, mode, (pre, next))?;
    Ok((pre, next))
}

fn tree(f: &Facts<'_>) -> Result<TreeMask, Violation> {
    let call = f.call;
    TREE.forbids([
        ("a missing queryRope", !f.rope()),
        ("left padding", padding::given(f)),
        ("a quantised output", !f.out.dtype.is_half()),
    ])?;
    TREE.leaves_out(call, &[Parameter::PseShift])?;
    TREE.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    let Some(mask) = call.mask() else {
        return Err(broken(&mask::REQUIRED, "no mask in mode 9", "a tree mask", "pass the mask of the tree"));
    };
    require!(matches!(mask.shape.rank(), 1 | 3), TREE_RANK, mask.shape, "[B, S, S], or one axis",);
    tree_rows(f)?;
    Ok(drafts(f, mask))
}

/// Rows and keys of the first packed sequence that has keys and more rows than those.
pub(crate) fn longer(f: &Facts<'_>) -> Option<(i64, i64)> {
    let lengths = |b| (f.q_len(b), f.kv_len(b));
    let mut sequences = f.sequences().map(lengths);
    sequences.find(|&(rows, keys)| keys != 0 && rows > keys)
}

/// Checks that no query has more rows than keys. The operator compares the lengths of packed sequences, and with a
/// batch axis the rows of the tensors alone; over a paged cache it compares nothing.
fn tree_rows(f: &Facts<'_>) -> Result<(), Violation> {
    if f.paged() {
        return Ok(());
    }
    let (rows, keys) = match f.packed() {
        true => longer(f).unwrap_or_default(),
        false => (f.q.rows, f.key_rows),
    };
    require!(rows <= keys, TREE_ROWS, format_args!("{rows} rows, {keys} keys"), "at least as many keys as rows",);
    Ok(())
}

/// How a tree mask is read: packed rows define where their squares begin, whatever axes the tensor has; rows with a
/// batch axis use the mask's strides, or those of a contiguous `[B, S, S]` where the mask has one axis alone.
pub(crate) fn drafts(f: &Facts<'_>, mask: &TensorDesc) -> TreeMask {
    let offset = mask.offset;
    match mask.strides[..] {
        _ if f.packed() => TreeMask::Packed { offset },
        [batch, row, key] => TreeMask::Square(MaskTensor { offset, batch, row, key }),
        _ => TreeMask::Square(MaskTensor { offset, batch: f.q.rows.saturating_mul(f.q.rows), row: f.q.rows, key: 1 }),
    }
}
