//! `actualSeqQLen` and `actualSeqKvLen`.

use super::entry::Required;
use super::{Report, lint};
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, Version};
use crate::rule::{require, rules};
use crate::{Dims, Lengths, Violation};

rules! {
    in Scope::ALL;
    REQUIRED = "flash.lengths_required",
        PARAM_NULLPTR, VarLenV1, "FlashAttentionVarLenScore documentation, actualSeqQLenOptional",
        "packed sequences have their ends in actualSeqQLen and actualSeqKvLen",
        "pass running sums of the lengths, the first entry that of the first sequence";
    COUNT = "flash.lengths_count", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, lengths",
        "actualSeqQLen and actualSeqKvLen have as many entries",
        "give each sequence an entry in both";
    ROWS = "flash.lengths_sum", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, lengths",
        "the lengths of the sequences sum up to no more than the rows of query and key",
        "pass running sums that end with the rows of the tensor";
    TAIL = "flash.padded_tail", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, padded tail",
        "where query and key both have rows behind the last sequence, both arrays end with 0",
        "pass running sums, not lengths: entries that add up to the rows look like lengths; with sums, append a 0 to \
         both arrays or cut the tensors to the last ones";
    SOME = "flash.lengths_all_zero", PARAM_NULLPTR, VarLenV1, "FlashAttentionScore tiling, lengths",
        "some sequence has rows, and some sequence has keys",
        "leave the call out where there is nothing to attend to";
    ASCEND = "flash.lengths_descend",
        Overrun("where the next sequence begins is written nowhere"),
        VarLenV1, "FlashAttentionVarLenScore documentation, actualSeqQLenOptional",
        "the ends of the sequences do not descend, but for zeros behind the last one",
        "pass running sums, not lengths";
    UNWRITTEN = "flash.tail_unwritten",
        Lint("rows of the outputs stay as they were"), VarLenV1, "FlashAttentionScore tiling, padded tail",
        "the sequences cover every row of query, or zeros at the end of both arrays mark the rest",
        "append a 0 to both arrays and give the key rows behind the last sequence too, or cut the query";
}

/// Checks the lengths of packed sequences, and returns them.
pub(crate) fn packed<'a>(call: &FlashAttentionCall<'a>, required: &Required<'_>) -> Result<Lengths<'a>, Violation> {
    let given = |ends: Option<&'a [i64]>, name: &str| {
        ends.filter(|ends| !ends.is_empty()).ok_or_else(|| {
            let given = format_args!("no {name}");
            REQUIRED.broken(given, "both arrays")
        })
    };
    let q_ends = given(call.actual_seq_lengths, "actualSeqQLen")?;
    let kv_ends = given(call.actual_seq_lengths_kv, "actualSeqKvLen")?;
    let lengths = Lengths::Packed { q_ends, kv_ends };
    let (of_query, of_key) = (q_ends.len(), kv_ends.len());
    require!(of_query == of_key, COUNT, format_args!("{of_query} and {of_key}"), "as many of both",);
    let rows = |shape: &Dims| shape.first().copied().unwrap_or(0);
    let (query, key) = (rows(&required.query.shape), rows(&required.key.shape));
    let (q_sum, kv_sum) = lengths.sums();
    require!(
        q_sum <= query && kv_sum <= key,
        ROWS,
        format_args!("{q_sum} rows and {kv_sum} keys"),
        format_args!("at most {query} and {key}"),
    );
    require!(
        query == q_sum || key == kv_sum || lengths.end_with_zero(),
        TAIL,
        format_args!("{query} rows for {q_sum}, {key} keys for {kv_sum}"),
        "a 0 at the end of both arrays",
    );
    require!(q_sum > 0 && kv_sum > 0, SOME, format_args!("{q_sum} rows and {kv_sum} keys"), "1 and above of both",);
    Ok(lengths)
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let Lengths::Packed { q_ends, kv_ends } = p.lengths else {
        return;
    };
    for (ends, name) in [(q_ends, "actualSeqQLen"), (kv_ends, "actualSeqKvLen")] {
        let trailing = ends.iter().rev().take_while(|&&end| end == 0).count();
        let ends = ends.get(..ends.len() - trailing).unwrap_or(ends);
        let ascend = ends.is_sorted() && ends.first().is_none_or(|&first| first >= 0);
        lint!(report, ascend, ASCEND, name, "ends that do not descend");
    }
    let (sum, _) = p.lengths.sums();
    let (rows, _) = p.axis_rows();
    let covered = usize::try_from(sum).is_ok_and(|sum| sum == rows);
    lint!(
        report,
        covered || p.fills_tail(),
        UNWRITTEN,
        format_args!("{rows} rows, of which {sum} are in sequences"),
        "as many rows as the sequences have",
    );
}
