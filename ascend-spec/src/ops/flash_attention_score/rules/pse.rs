//! Position bias: `realShift`, `pseType`, and the first positions that slopes use.

use super::entry::Required;
use super::{Report, lint};
use crate::attention_problem::BiasLints;
use crate::ops::flash_attention_score::bias::BiasForm;
use crate::ops::flash_attention_score::{Bias, FlashAttentionCall, FlashAttentionProblem, MaskKind, Version};
use crate::rule::{require, rules};
use crate::{DType, Dims, Lengths, SparseMode, TensorDesc, View, Violation};

rules! {
    in Scope::ALL;
    DTYPE = "flash.pse_dtype", PARAM_INVALID, V1, "FlashAttentionScore documentation, realShiftOptional",
        "a bias of pseType 0 and 1 has the dtype of attentionOutOut",
        "convert the bias to the dtype of query";
    SLOPES = "flash.pse_slopes", PARAM_INVALID, V2, "FlashAttentionScoreV2 documentation, pseType",
        "pseType 2 and 3 come with slopes of FLOAT",
        "pass one FLOAT slope for each head";
    TYPE = "flash.pse_type", PARAM_NULLPTR, V2, "FlashAttentionScore tiling, pseType",
        "pseType is from 0 to 3",
        "pass 1 to add the bias before the scale, 0 behind it, 2 or 3 for slopes";
    REQUIRED = "flash.pse_required", PARAM_NULLPTR, V2, "FlashAttentionScore tiling, realShift",
        "pseType 0 comes with a bias",
        "pass pseType 1 where there is no bias";
    SHAPE = "flash.pse_shape", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, realShift",
        "a bias is [B or 1, N, Sq or 1 or 1024, Skv]",
        "expand the bias to every head and key";
    LAST_ROWS = "flash.pse_last_rows", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, realShift of 1024 rows",
        "a bias of 1024 rows goes with at least as many rows, and with more with as many keys and a causal mask: mode \
         2, mode 3, or mode 0 with nextTokens 0 and preTokens of at least Sq",
        "expand the bias to every row, or pass a causal mask";
    PACKED_SHAPE = "flash.pse_packed_shape",
        PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, realShift of packed sequences",
        "the bias of packed sequences has one axis, of N times the keys or N times the scores of all, or is [B or 1, \
         N, 1024, max Skv]",
        "flatten the bias: [N, Sq, Skv] or [N, 1, Skv] of each sequence, one behind the other";
    PACKED_LAST_ROWS = "flash.pse_packed_last_rows",
        PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, realShift of packed sequences",
        "a bias of 1024 rows goes with packed sequences of as many rows as keys and a causal mask: mode 2, mode 3, or \
         mode 4 or 0 with nextTokens 0 and preTokens of the longest sequence",
        "flatten the bias of each sequence, or pass a causal mask";
    SLOPES_SHAPE = "flash.pse_slopes_shape", PARAM_NULLPTR, V2, "FlashAttentionScore tiling, slopes",
        "slopes are [N] or [B, N]",
        "pass one axis with a slope for each query head, or as many such rows as there are sequences";
    SLOPES_SQUARE = "flash.pse_slopes_square", PARAM_NULLPTR, V2, "FlashAttentionScore tiling, slopes",
        "with a batch axis slopes go with as many rows as keys",
        "pass the bias as a tensor in pseType 0";
    SLOPES_CUT = "flash.pse_slopes_cut", PARAM_NULLPTR, VarLenV2, "FlashAttentionScore tiling, slopes",
        "slopes do not go with mode 7, and with mode 8 if the first sequence begins as far behind its keys as it is \
         shorter, and each other has as many rows as keys",
        "pass qStartIdx and kvStartIdx that make up for the first sequence's length, or another mode";
    CUT = "flash.pse_cut",
        Lint("only numbers change"), VarLenV1, "sparse mode document, modes 7 and 8",
        "a bias does not go with modes 7 and 8, whose sequence is cut over calls",
        "add the bias in the call of the whole sequence, or pass slopes and start indices in mode 8";
    EMPTY = "flash.pse_empty_sequence",
        Lint("only numbers change"), VarLenV1, "FlashAttentionVarLenScore documentation, constraints",
        "packed sequences without rows or keys go with no bias",
        "leave out the empty sequences";
    START_LONE = "flash.start_index_lone",
        Lint("the number is not looked at"), V2, "FlashAttentionScore kernel, start indices",
        "qStartIdx and kvStartIdx are both given, or neither",
        "pass both, the other one as [0]";
    START_UNREAD = "flash.start_index_unread",
        Lint("the numbers are not looked at"), V2, "FlashAttentionScoreV2 documentation, qStartIdxOptional",
        "qStartIdx and kvStartIdx go with pseType 2 and 3, and have one entry",
        "pass null, or slopes; the first entry counts for all sequences";
    START_FIRST = "flash.start_index_first",
        Lint("only numbers change"), VarLenV2, "FlashAttentionScore kernel, start indices in mode 8",
        "in mode 8 start indices other than 0 go with one sequence",
        "they count for sequence 0 alone: pass the other sequences in a call of their own";
    FINITE = "flash.pse_finite",
        Lint("only numbers change, to NaN in whole rows"), V1, "reports from hardware, realShift of -inf",
        "the numbers of a bias are finite: hardware may make NaN of a row with an infinity",
        "hide keys by attenMask, or by the lowest finite number of the type in the bias";
    HIDDEN_ROW = "flash.pse_hidden_row",
        Lint("only numbers change"), V1, "FlashAttentionScore kernel, softmax of equal scores",
        "a bias hides some keys of a row by the lowest number of its type, never all: softmax weighs keys by \
         differences, so that such a row becomes a mean of hidden values",
        "hide keys by attenMask, and leave out rows that see none";
}

/// The lints on the numbers of a bias.
pub(crate) const NUMBERS: BiasLints = BiasLints { non_finite: &FINITE, hidden_row: &HIDDEN_ROW };

/// The bias; `None` for one without elements, which counts as not given.
fn given<'c>(call: &'c FlashAttentionCall<'_>) -> Option<&'c TensorDesc> {
    call.real_shift.as_ref().filter(|bias| !bias.is_empty())
}

/// Checks the types of bias and slopes. Returns whether sinks are checked too: for calls with slopes these checks end
/// here.
pub(crate) fn dtype(call: &FlashAttentionCall<'_>, required: &Required<'_>) -> Result<bool, Violation> {
    let bias = call.real_shift.as_ref();
    if matches!(call.pse_type, 2 | 3) {
        require!(
            bias.is_some_and(|slopes| slopes.dtype == DType::Float),
            SLOPES,
            bias.map_or("no slopes", |slopes| slopes.dtype.name()),
            DType::Float,
        );
        return Ok(false);
    }
    let out = required.attention_out.dtype;
    require!(
        !matches!(call.pse_type, 0 | 1) || bias.is_none_or(|bias| bias.dtype == out),
        DTYPE,
        bias.map_or(out, |bias| bias.dtype),
        out,
    );
    Ok(true)
}

/// Checks `pseType`.
pub(crate) fn known(call: &FlashAttentionCall<'_>) -> Result<(), Violation> {
    TYPE.takes(call.pse_type, 0..=3)
}

/// Checks the bias for the mode in force, and returns its layout.
pub(crate) fn check(p: &FlashAttentionProblem<'_>) -> Result<Bias, Violation> {
    let pse_type = p.call.pse_type;
    let Some(bias) = given(&p.call) else {
        require!(
            pse_type == FlashAttentionCall::DEFAULT_PSE_TYPE,
            REQUIRED,
            format_args!("no bias for pseType {pse_type}"),
            "a bias, or pseType 1",
        );
        return Ok(Bias::None);
    };
    if matches!(pse_type, 2 | 3) {
        return slopes(p, bias);
    }
    let causal = p.mask != MaskKind::None && is_causal(p);
    let form = match p.lengths {
        Lengths::Dense { .. } => dense(p, bias, causal)?,
        Lengths::Packed { .. } => packed(p, bias, causal)?,
    };
    Ok(Bias::Tensor { before_scale: pse_type == FlashAttentionCall::DEFAULT_PSE_TYPE, form })
}

/// Whether the host treats the mode as causal.
fn is_causal(p: &FlashAttentionProblem<'_>) -> bool {
    let (pre, next) = (p.call.pre_tokens, p.call.next_tokens);
    match p.mode {
        SparseMode::LeftUpCausal => true,
        SparseMode::RightDownCausal => p.layout.is_packed() || p.q_rows == p.kv_rows,
        SparseMode::DefaultMask => pre >= p.q_rows && next == 0,
        SparseMode::Band => p.layout.is_packed() && pre >= p.kv_rows && next == 0,
        _ => false,
    }
}

/// The last rows of a bias of `heads` heads for `keys` keys, whose first axis has size `batch`.
fn last_rows([batch, heads, keys]: [i64; 3]) -> BiasForm {
    let head = BiasForm::LAST_ROWS.saturating_mul(keys);
    let batch = if batch == 1 { 0 } else { heads.saturating_mul(head) };
    BiasForm::LastRows(View { offset: head - 1, batch, head, row: -1, dim: 1 })
}

fn dense(p: &FlashAttentionProblem<'_>, bias: &TensorDesc, causal: bool) -> Result<BiasForm, Violation> {
    let shape = || {
        SHAPE.broken(
            bias.shape,
            format_args!("[1 or {}, {}, {} or 1 or 1024, {}]", p.batch, p.heads, p.q_rows, p.kv_rows),
        )
    };
    let &[b, n, rows, keys] = &bias.shape[..] else {
        return Err(shape());
    };
    if !(b == 1 || b == p.batch) || n != p.heads || keys != p.kv_rows {
        return Err(shape());
    }
    if rows == p.q_rows || rows == 1 {
        let head = rows.saturating_mul(keys);
        return Ok(BiasForm::Batched(View {
            offset: 0,
            batch: if b == 1 { 0 } else { head.saturating_mul(n) },
            head,
            row: if rows == 1 { 0 } else { keys },
            dim: 1,
        }));
    }
    if rows != BiasForm::LAST_ROWS {
        return Err(shape());
    }
    require!(
        p.q_rows > rows && p.q_rows == p.kv_rows && causal,
        LAST_ROWS,
        format_args!("{} for {} rows and {} keys in mode {}", bias.shape, p.q_rows, p.kv_rows, p.call.sparse_mode),
        "1024 rows and more, as many keys, and a causal mask",
    );
    Ok(last_rows([b, p.heads, p.kv_rows]))
}

fn packed(p: &FlashAttentionProblem<'_>, bias: &TensorDesc, causal: bool) -> Result<BiasForm, Violation> {
    let heads = i128::from(p.heads);
    let keys = i128::from(p.lengths.sums().1);
    let [of_keys, of_scores] = [keys, p.lengths.scores()].map(|count| count.saturating_mul(heads));
    // The operator checks only the first axis.
    let first = bias.shape.first().map_or(0, |&first| i128::from(first));
    if first == of_scores {
        return Ok(BiasForm::Packed { rows: true });
    }
    if first == of_keys {
        return Ok(BiasForm::Packed { rows: false });
    }
    let batch = match bias.shape[..] {
        [b, n, rows, keys]
            if (b == 1 || b == p.batch) && (n, rows, keys) == (p.heads, BiasForm::LAST_ROWS, p.kv_rows) =>
        {
            b
        }
        _ => {
            return Err(PACKED_SHAPE.broken(
                bias.shape,
                format_args!(
                    "[{of_keys}], [{of_scores}] or {}",
                    Dims::of([p.batch, p.heads, BiasForm::LAST_ROWS, p.kv_rows])
                ),
            ));
        }
    };
    require!(
        causal && p.lengths.each().all(|(rows, keys)| rows == keys),
        PACKED_LAST_ROWS,
        format_args!("{} in mode {}", bias.shape, p.call.sparse_mode),
        "as many rows as keys in each sequence, and a causal mask",
    );
    Ok(last_rows([batch, p.heads, p.kv_rows]))
}

fn slopes(p: &FlashAttentionProblem<'_>, slopes: &TensorDesc) -> Result<Bias, Violation> {
    let per_sequence = per_sequence(p, slopes);
    match p.lengths {
        Lengths::Dense { .. } => {
            require!(
                per_sequence.is_some(),
                SLOPES_SHAPE,
                slopes.shape,
                format_args!("[{0}] or [{1}, {0}]", p.heads, p.batch),
            );
            require!(
                p.q_rows == p.kv_rows,
                SLOPES_SQUARE,
                format_args!("{} rows and {} keys", p.q_rows, p.kv_rows),
                "as many of both",
            );
        }
        Lengths::Packed { .. } => cut(p)?,
    }
    Ok(Bias::Slopes { root: p.call.pse_type == 3, per_sequence: per_sequence.unwrap_or(false) })
}

/// Whether each sequence has its own slopes; `None` for another shape than `[N]` and `[B, N]`.
fn per_sequence(p: &FlashAttentionProblem<'_>, slopes: &TensorDesc) -> Option<bool> {
    match slopes.shape[..] {
        [n] if n == p.heads => Some(false),
        [b, n] if (b, n) == (p.batch, p.heads) => Some(b > 1),
        _ => None,
    }
}

/// Refuses slopes of packed sequences in another shape: the operator does not check it, and reads whatever there is.
pub(crate) fn computed(p: &FlashAttentionProblem<'_>) -> Result<(), Violation> {
    match (p.bias, given(&p.call)) {
        (Bias::Slopes { .. }, Some(slopes)) if per_sequence(p, slopes).is_none() => Err(Violation::unsupported(
            "slopes of packed sequences (pseType 2 and 3) that are neither [N] nor [B, N], of which the operator \
                          does not ask how many there are",
        )),
        _ => Ok(()),
    }
}

/// Checks slopes beside a cut sequence.
fn cut(p: &FlashAttentionProblem<'_>) -> Result<(), Violation> {
    if p.mask == MaskKind::None {
        return Ok(());
    }
    let holds = match p.call.sparse_mode {
        7 => false,
        8 => {
            let mut each = p.lengths.each();
            let (rows, keys) = each.next().unwrap_or_default();
            // An array without its counterpart counts here, though not in the kernel.
            let [query, key] = [p.call.q_start_idx, p.call.kv_start_idx]
                .map(|starts| starts.and_then(<[i64]>::first).copied().unwrap_or(0));
            let distance =
                [rows, key.saturating_neg()].into_iter().fold(query.saturating_sub(keys), i64::saturating_add);
            distance == 0 && each.all(|(rows, keys)| rows == keys)
        }
        _ => true,
    };
    require!(
        holds,
        SLOPES_CUT,
        format_args!("slopes in mode {}", p.call.sparse_mode),
        "mode 8 with Sq + qStartIdx = Skv + kvStartIdx in the first sequence and Sq = Skv in the others",
    );
    Ok(())
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let is_cut = matches!(p.mode, SparseMode::RightDownCausalBand | SparseMode::BandLeftUpCausal);
    let biased = matches!(p.bias, Bias::Tensor { .. });
    let given = format_args!("a bias in mode {}", p.call.sparse_mode);
    lint!(report, !(is_cut && biased), CUT, given, "another mode, or no bias");
    if p.bias != Bias::None && p.layout.is_packed() {
        let empty = p.lengths.each().filter(|&(rows, keys)| rows == 0 || keys == 0);
        let empty = empty.count();
        lint!(
            report,
            empty == 0,
            EMPTY,
            format_args!("a bias, and {empty} sequences without rows or keys"),
            "sequences that are not empty",
        );
    }
}

pub(crate) fn start_lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let (query, key) = (p.call.q_start_idx, p.call.kv_start_idx);
    lint!(
        report,
        query.is_some() == key.is_some(),
        START_LONE,
        match query {
            Some(_) => "qStartIdx alone",
            None => "kvStartIdx alone",
        },
        "both or neither",
    );
    let slopes = matches!(p.bias, Bias::Slopes { .. });
    let entries = [query, key].map(|indices| indices.map_or(0, <[i64]>::len));
    lint!(
        report,
        entries.iter().all(|&entries| entries <= usize::from(slopes)),
        START_UNREAD,
        format_args!("{} and {} entries", entries[0], entries[1]),
        if slopes { "one of each" } else { "null" },
    );
    let first_alone = p.mode == SparseMode::BandLeftUpCausal && p.lengths.batch() > 1;
    lint!(
        report,
        !first_alone || p.key_offset() == 0,
        START_FIRST,
        format_args!("start indices {} apart for {} sequences", p.key_offset(), p.lengths.batch()),
        "one sequence",
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::flash_attention_score::Sequence;

    #[test]
    fn last_rows_are_read_by_distance_in_each_head() {
        let sequence = Sequence { index: 1, q_len: 4, kv_len: 4, ..Sequence::default() };
        let element = |batch, i, j| last_rows([batch, 2, 4]).rows(&sequence, 2).element(1, i, j);
        // The second of two heads of 1024 rows of 4 numbers; the row's own key is the last number of the last row.
        assert_eq!(element(1, 2, 2), 1024 * 4 + 1023 * 4 + 3);
        assert_eq!(element(1, 2, 0), 1024 * 4 + 1023 * 4 + 1);
        assert_eq!(element(2, 3, 3), 2 * 1024 * 4 + 1024 * 4 + 1023 * 4 + 3);
    }
}
