//! What releases from 8.5 on take unchecked: the split-fuse path, single rows of the unified checker, and sinks.

use super::masks::fix_of_one_row;
use super::{Report, lint};
use crate::allowed::{MultiplesOf, Named, Outcome};
use crate::attention_problem::MaskUse;
use crate::operator::Fix;
use crate::ops::fused_infer_attention_score::rules::{lengths, packed};
use crate::ops::fused_infer_attention_score::{Cache, CheckedCall, Checker, Parameter, Route, Version};
use crate::rule::rules;
use crate::{Cann, Change, DType, NewArgument, Operator, SparseMode};

rules! {
    in Scope::A2_A3.since(V8_5);
    ENDS = "split_fuse.ends", Overrun("rows are read from where the ends lead"), V1, "split-fuse path, lengths",
        "packed rows without rotary parts have ends that do not fall, as many for the keys, and over a cache key \
         lengths within the block table's row",
        "pass cumulative sums for the query, and for cached keys each sequence's own length";
    EACH = "split_fuse.lengths_each",
        Lint("rows after the last end are padding, which is not written"),
        V1, "9.2, split-fuse path, lengths" in Scope::A2_A3.since(V9_2),
        "ends of packed sequences that leave rows at the end do not look like the lengths of sequences that fill them",
        "pass cumulative sums";
    CAUSAL = "split_fuse.causal_rows", Lint("only numbers change"), V1, "split-fuse path, sparse mode 3",
        "sparse mode 3 over packed rows has no more query rows than keys in any sequence",
        "count the new tokens as keys too";
    KV_HEADS = "split_fuse.kv_heads",
        Overrun("keys are read by numKeyValueHeads, whatever the tensor has"), V1, "split-fuse path, numKeyValueHeads",
        "numKeyValueHeads is the key's number of heads for packed rows",
        "set numKeyValueHeads to the key's number of heads";
    GROUPS = "split_fuse.heads_divide",
        Overrun("query heads beyond a whole number for each key head are not written"),
        V1, "X kernel, split-fuse path, groups of heads",
        "packed rows without rotary parts have as many query heads for each key head: numHeads divides by \
         numKeyValueHeads",
        "every key head must serve the same number of query heads";
    DIVIDES = "split_fuse.kv_heads_zero",
        HostCrash("x86 hosts divide by numKeyValueHeads"),
        V1, "split-fuse path, numKeyValueHeads" in Scope::A2_A3.since(V9_0),
        "packed rows with as many key heads as query heads say numKeyValueHeads",
        "set numKeyValueHeads to the number of key heads: a division by 0 ends the process on x86 hosts";
    OUT_DTYPE = "split_fuse.output_dtype",
        Overrun("the output is written in the query's dtype"), V1, "split-fuse path, output",
        "packed rows without rotary parts have an output of the query's dtype",
        "make attentionOut of the query's dtype";
    IGNORED = "split_fuse.ignored", Lint("the arguments are not looked at"), V1, "split-fuse path, arguments",
        "packed rows without rotary parts come with no left padding, shared prefix or quantisation",
        "drop the argument";
    SINGLE_MASK = "sparse_mode.single_row",
        Lint("the mask is checked as the full one that it is read as"), V1, "single-query decode, mask",
        "a single row has no sparse mode above 1 with a mask",
        "pass mode 0, with a full mask where the mode hides keys from a single row: the operator reads the triangle as \
         a full mask, which hides others";
    SINGLE_ROWS = "atten_mask.row_each",
        Overrun("row number b is read for sequence b"), V1, "single-query decode, mask" in Scope::A2_A3.since(V9_1),
        "a mask of two axes has a row for each sequence of a single row",
        "pass [B, Skv]";
    PADDED = "atten_mask.padded_keys",
        Overrun("columns are read up to where the padded keys end"),
        V1, "left padding, mask" in Scope::UNIFIED.since(V9_1),
        "beside kvPaddingSize a full mask has a column for each row of the key tensor",
        "expand the mask to the rows of the key: it is read by their places, not counted from the first valid one";
    TREE_SIZE = "tree_mask.size",
        Overrun("the mask is read by the numbers of rows, whatever its size"),
        V3, "sparse mode 9, shapes" in Scope::A2_A3.since(V9_1),
        "the tree mask has an element for each row and each of the last keys, as many as rows",
        "pass [B, S, S], or for packed sequences the squares of their rows one after another";
    TREE_KEYS = "tree_mask.more_rows",
        Overrun("where the mask of such a sequence begins is written nowhere"),
        V3, "sparse mode 9, rules" in Scope::A2_A3.since(V9_1),
        "in sparse mode 9 no sequence that has keys has more rows than keys",
        "count the rows of the tree as keys too";
    TREE_SHAPE = "tree_mask.shape",
        Lint("each element is read where the mask's last two axes put it"),
        V3, "sparse mode 9, shapes" in Scope::A2_A3.since(V9_1),
        "the tree mask is [B, S, S], for packed sequences of one axis with the squares of their rows",
        "shape the mask by the query's rows";
    TREE_IGNORED = "tree_mask.ignored",
        Lint("nothing is read of the tensor"), V3, "sparse mode 9, full quantisation" in Scope::A2_A3.since(V9_1),
        "the tree mask of packed INT8 queries has one axis with the squares of their rows one after another, and no \
         sequence that has keys has more rows than keys",
        "pass a mask of that size: the operator leaves another one out, and every row sees every key";
    SINK = "learnable_sink.combined", Lint("only numbers change"), V4, "learnableSink, features",
        "a learnable sink comes with no left padding, shared prefix, position bias, quantised keys or INT8 output",
        "drop the sink or the argument: what the operator makes of both is written nowhere";
    BIAS_TYPE = "pse_type.ignored", Lint("only an attribute is ignored"), V5, "pseType" in Scope::A2_A3.since(V9_0),
        "pseType is 0",
        "pass 0 with a bias tensor: 9.0, and from then on the split-fuse path, ignore the type on these products";
    LIST_BATCH = "key.list_batch_unchecked",
        Lint("the first entry of each tensor alone is read"),
        V1, "tensor lists; Ascend 950, tensor lists" in Scope::UNIFIED.since(V9_1),
        "each tensor of a list has batch 1",
        "give each sequence a tensor of its own";
    LIST_EMPTY = "key.list_batch_empty",
        Overrun("the first entry of each tensor is read, also where there is none"),
        V1, "tensor lists; Ascend 950, tensor lists" in Scope::UNIFIED.since(V9_1),
        "no tensor of a list has batch 0",
        "give a sequence without keys the length 0";
    BIAS_ROW_ATLAS = "pse_shift.one_row_taken",
        Overrun("what is read behind the one row is written nowhere"),
        V1, "pseShift, one row" in Scope::A2_A3.since(V9_1),
        "a position bias of several query rows has a row for each",
        "expand the bias to every query row";
    BIAS_ROW = "pse_shift.one_row", Lint("one row is read for all"), V5, "Ascend 950, pseShift" in Scope::ASCEND_950,
        "a position bias has a row for each query row",
        "expand the bias to every query row";
    UNALIGNED = "head_dim.unaligned",
        Lint("rows are read as they lie"), V5, "Ascend 950, head dimensions" in Scope::ASCEND_950,
        "the head dimension is a multiple of 16",
        "pad the head dimension with zeros: the documents ask for it";
    DEPRECATED = "version.deprecated", Lint("nothing changes yet"), V1, "header of the operator, deprecation" in
        Scope::A2_A3.since(V9_0),
        "calls go to V4 or V5: V1 to V3 are announced to go in December 2026",
        "call aclnnFusedInferAttentionScoreV4, which takes the same arguments and more";
    PORTABLE_REFUSED = "portable.refused",
        Lint("the release that the call runs on takes it"), V1, "differences between releases" in Scope::ALL,
        "a call that is to be portable is one that every release that it is meant for takes",
        "change what the rule of that release names";
    PORTABLE_MEANING = "portable.meaning",
        Lint("the release that the call runs on reads it as it is checked"),
        V1, "differences between releases" in Scope::ALL,
        "a call that is to be portable means the same on every release that it is meant for",
        "drop what releases read differently: masks and modes of single rows, arguments that one of them ignores";
}

pub(super) fn deprecated(p: &CheckedCall<'_>, report: Report<'_>) {
    let is_kept = !p.version.info().is_deprecated(p.target.cann);
    lint!(report, is_kept, DEPRECATED, p.version, "V4 or V5");
}

pub(super) fn check(p: &CheckedCall<'_>, report: Report<'_>) {
    if p.target.cann == Cann::V8_1 {
        return;
    }
    let call = p.call;
    lint!(
        report,
        p.route != Route::Decode
            || p.checker != Checker::Unified
            || p.problem.mask == MaskUse::None
            || call.mode() <= SparseMode::AllMask.acl(),
        SINGLE_MASK,
        format_args!("sparseMode {} with a mask", call.sparse_mode),
        "0, or no mask",
        single_mask(p),
    );
    masks(p, report);
    if call.learnable_sink.is_some() {
        SINK.forbids([
            ("queryPaddingSize", call.query_padding_size.is_some()),
            ("kvPaddingSize", call.kv_padding_size.is_some()),
            ("keySharedPrefix", call.key_shared_prefix.is_some()),
            ("pseShift", call.pse_shift.is_some()),
            ("quantised keys", p.problem.key_quantisation.is_some()),
            ("an INT8 output", p.problem.out_dtype() == DType::Int8),
        ])
        .report(report);
    }
    BIAS_TYPE.takes(call.pse_type, 0).report(report);
    let all = || call.key.iter().chain(call.value);
    if p.problem.list.is_some()
        && let Some(key) = all().find(|desc| desc.shape.first() != Some(&1))
    {
        let none = all().find(|desc| desc.shape.first() == Some(&0));
        match none {
            Some(none) => lint!(report, false, LIST_EMPTY, none.shape, "batch 1"),
            None => lint!(report, false, LIST_BATCH, key.shape, "batch 1"),
        }
    }
    let value = Named("value", p.problem.value_dim);
    (UNALIGNED.takes(p.problem.head_dim, MultiplesOf(16)))
        .and_then(|()| UNALIGNED.takes(value, MultiplesOf(16)))
        .report(report);
    if let Some([_, _, 1, _]) = call.pse_shift.as_ref().map(|bias| &bias.shape[..]) {
        let rule = match p.target.is_950() {
            true => &BIAS_ROW,
            false => &BIAS_ROW_ATLAS,
        };
        rule.takes(1, p.problem.query_rows).report(report);
    }
    if p.checker == Checker::SplitFuse {
        split_fused(p, report);
    }
}

/// The fix for a single row with a mode: the mask that the mode stands for, or mode 0 with the full mask that the
/// call has.
fn single_mask(p: &CheckedCall<'_>) -> impl Fix {
    let square = SparseMode::COMPRESSED_MASK_SIZE;
    let mask = p.call.mask();
    match mask.is_some_and(|mask| mask.shape.ends_with(&[square, square])) {
        true => Ok(fix_of_one_row(p, Operator::FusedInferAttentionScore.sparse_mode(p.call.mode()))),
        false => Err(Change::set(Parameter::SparseMode, 0)),
    }
}

fn masks(p: &CheckedCall<'_>, report: Report<'_>) {
    let Some(mask) = p.call.mask() else {
        return;
    };
    let size = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    if let (MaskUse::Full(tensor), &[rows, _]) = (p.problem.mask, &mask.shape[..]) {
        let batch = size(p.problem.batch);
        let each = tensor.batch != 0 && p.checker == Checker::Unified;
        lint!(report, !each || rows >= batch, SINGLE_ROWS, mask.shape, format_args!("{batch} rows"),);
    }
    if let (MaskUse::Full(_), true) = (p.problem.mask, p.problem.key_padding.is_some()) {
        let keys = p.problem.distinct_sequences().map(|b| size(p.problem.key_rows_of(b))).max();
        let keys = keys.unwrap_or(0);
        lint!(
            report,
            mask.shape.last().is_some_and(|&columns| columns >= keys),
            PADDED,
            mask.shape,
            format_args!("{keys} columns"),
        );
    }
    if p.problem.mode != SparseMode::Tree {
        return;
    }
    lint!(report, p.problem.mask != MaskUse::None, TREE_IGNORED, mask.shape, "one axis with the squares of the rows",);
    if !p.problem.mask.is_tensor() {
        return;
    }
    let square = |b| size(p.problem.q_len(b).saturating_mul(p.problem.q_len(b)));
    let squares = super::super::lengths::total(p.call, p.problem.batch, square);
    let (batch, rows) = (size(p.problem.batch), size(p.problem.query_rows));
    let documented = match p.problem.packed {
        true => *mask.shape == [squares],
        false => *mask.shape == [batch, rows, rows],
    };
    let inside = mask.byte_range().zip(p.problem.mask_bytes());
    let inside = inside.is_some_and(|(whole, read)| whole.start <= read.start && read.end <= whole.end);
    let documented_shapes = format_args!("[{batch}, {rows}, {rows}], packed [{squares}]");
    let lengths = |b| (p.problem.q_len(b), p.problem.kv_len(b));
    let mut sequences = p.problem.distinct_sequences().map(lengths);
    let longer = sequences.find(|&(rows, keys)| keys > 0 && rows > keys);
    let (more, keys) = longer.unwrap_or_default();
    lint!(
        report,
        longer.is_none(),
        TREE_KEYS,
        format_args!("{more} rows, {keys} keys"),
        "at least as many keys as rows",
    );
    lint!(report, inside, TREE_SIZE, mask.shape, documented_shapes);
    lint!(report, documented || !inside, TREE_SHAPE, mask.shape, documented_shapes,);
}

fn split_fused(p: &CheckedCall<'_>, report: Report<'_>) {
    let call = p.call;
    let (q, kv) = (call.actual_seq_lengths.unwrap_or(&[]), call.actual_seq_lengths_kv.unwrap_or(&[]));
    let rises = |ends: &[i64]| ends.is_sorted() && ends.first().is_none_or(|&first| first >= 0);
    let most = i64::try_from(p.problem.key_rows).unwrap_or(i64::MAX);
    let beyond = kv.iter().position(|len| !(0..=most).contains(len));
    if q.len() != kv.len() {
        lint!(
            report,
            false,
            ENDS,
            format_args!("{} and {} entries", q.len(), kv.len()),
            "as many of each",
            packed::counted(q, kv),
        );
    } else if !rises(q) {
        lint!(
            report,
            false,
            ENDS,
            "actualSeqLengths with an entry below the one before",
            "ends of sequences, each at least the one before",
        );
    } else if p.problem.pages.is_none() {
        lint!(
            report,
            rises(kv),
            ENDS,
            "actualSeqLengthsKv with an entry below the one before",
            "ends of sequences, each at least the one before",
        );
    } else if let Some(b) = beyond {
        lint!(
            report,
            false,
            ENDS,
            format_args!("actualSeqLengthsKv {b} is {}", kv.get(b).copied().unwrap_or(0)),
            format_args!("0 to {most}"),
            lengths::apart(kv, most, ENDS.fix),
        );
    }
    let keys = call.key.first().filter(|_| p.problem.pages.is_none());
    for (parameter, ends, tensor) in
        [(Parameter::ActualSeqLengths, q, call.query.as_ref()), (Parameter::ActualSeqLengthsKv, kv, keys)]
    {
        let rows = tensor.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(0);
        let padded = p.target.cann >= Cann::V9_2 && ends.last().is_some_and(|last| *last < rows);
        let sums = match padded {
            true => lengths::summed(parameter, ends, rows, EACH.fix),
            false => Err(EACH.fix),
        };
        lint!(report, sums.is_err(), EACH, format_args!("{ends:?} of {rows} rows"), "ends", sums);
    }
    if p.problem.mode == SparseMode::RightDownCausal
        && let Some(b) = p.problem.distinct_sequences().find(|&b| p.problem.q_len(b) > p.problem.kv_len(b))
    {
        lint!(
            report,
            false,
            CAUSAL,
            format_args!("sequence {b} has {} rows and {} keys", p.problem.q_len(b), p.problem.kv_len(b)),
            "at least as many keys as rows",
        );
    }
    lint!(
        report,
        call.num_key_value_heads != 0 || p.target.cann < Cann::V9_0,
        DIVIDES,
        0,
        p.problem.kv_heads,
        Change::set(Parameter::NumKeyValueHeads, call.num_heads),
    );
    let axis = |key: &crate::TensorDesc| match (p.problem.pages, &key.shape[..]) {
        (None, &[_, heads, _]) => Some(heads),
        (None, _) => None,
        (Some(_), _) => Cache::heads(key),
    };
    let out = call.attention_out.map(|out| out.dtype);
    let heads = i64::try_from(p.problem.kv_heads).unwrap_or(i64::MAX);
    let own = call.key.first().and_then(axis).unwrap_or(heads);
    KV_HEADS
        .takes(heads, own)
        .fix(|| match call.num_heads.checked_rem(own) {
            Some(0) => Ok(Change::set(Parameter::NumKeyValueHeads, own)),
            _ => Err(KV_HEADS.fix),
        })
        .report(report);
    lint!(
        report,
        p.problem.is_grouped(),
        GROUPS,
        format_args!("{} query heads over {heads}", p.problem.heads),
        format_args!("a divisor of {}", p.problem.heads),
    );
    lint!(
        report,
        out.is_none_or(|out| out == p.problem.query.dtype),
        OUT_DTYPE,
        out.unwrap_or(p.problem.query.dtype),
        p.problem.query.dtype,
        Change::to(Parameter::AttentionOut, NewArgument::DType(p.problem.query.dtype),),
    );
    use Parameter::{KeySharedPrefix, KvPaddingSize, QuantScale2, QueryPaddingSize, ValueSharedPrefix};
    let ignored = [QueryPaddingSize, KvPaddingSize, KeySharedPrefix, ValueSharedPrefix, QuantScale2];
    IGNORED.leaves_out(call, &ignored).report(report);
}
