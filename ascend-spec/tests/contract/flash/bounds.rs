//! No call makes the contract panic, and what it accepts stays within the call's tensors.

use super::described;
use ascend_spec::attention_problem::{SequenceTerms, SoftmaxOutputs};
use ascend_spec::ops::flash_attention_score::{
    Bias, BiasForm, FlashAttentionProblem, MaskKind, Parameter, Sequence, SoftmaxOrder, Version, Work,
};
use ascend_spec::{Cann, Soc, Target, TensorDesc, View};
use std::path::Path;

const TARGETS: [Target; 3] = [
    Target::new(Soc::AtlasA2, Cann::V9_1),
    Target::new(Soc::AtlasA3, Cann::V8_1),
    Target::new(Soc::Ascend950, Cann::V9_1),
];

/// Elements of a tensor; those of one that is not given are none.
fn elements(desc: Option<TensorDesc>) -> u64 {
    desc.and_then(|desc| desc.elements()).unwrap_or(0)
}

/// The first and the last of `0..count`.
fn ends(count: usize) -> impl Iterator<Item = usize> + Clone {
    [0, count.saturating_sub(1)].into_iter().take(count.min(2))
}

/// Asks for what a kernel computes: it touches the tensors alone, and says of each sequence what the problem says.
fn resolved_stays_within(p: &FlashAttentionProblem<'_>, id: &str) {
    let Ok(resolved) = p.attention() else {
        assert!(p.lengths.batch() > 1 << 20, "{id}");
        return;
    };
    resolved.touches(&mut |role, range| {
        let parameter = Parameter::of_role(role).expect("a role of the operator");
        let desc = p.call.tensor(parameter).expect("a tensor of the call");
        let (range, all) = (range.expect("memory"), desc.byte_range().expect("memory"));
        assert!(all.start <= range.start && range.end <= all.end, "{id}: {role:?}");
    });
    let heads = p.heads as usize;
    for of in p.sequences().take(64) {
        let terms = resolved.terms_of(of.index).expect("terms of each sequence");
        assert_eq!(terms.geometry, p.geometry(&of), "{id}");
        if of.q_len > 0 && of.kv_len > 0 {
            stands_where_documented(p, terms, &of, heads, id);
        }
    }
}

/// Compares the elements for the last key of the last row of the last head with the documented orders, spelled out.
fn stands_where_documented(
    p: &FlashAttentionProblem<'_>,
    terms: &SequenceTerms,
    of: &Sequence,
    heads: usize,
    id: &str,
) {
    let (head, i, j) = (heads - 1, of.q_len - 1, of.kv_len - 1);
    let row = match p.softmax_order {
        SoftmaxOrder::Batches => (of.index * heads + head) * of.q_len + i,
        SoftmaxOrder::SequenceBlocks => of.q_first * heads + head * of.q_len + i,
        SoftmaxOrder::SameAsInput => (of.q_first + i) * heads + head,
    };
    assert_eq!(terms.softmax.at(0, head, i), (row * SoftmaxOutputs::COPIES) as i64, "{id}");
    let score = of.scores_before as i64 * heads as i64 + ((head * of.q_len + i) * of.kv_len + j) as i64;
    assert!(terms.dropped.is_none_or(|dropped| dropped.element(head, i, j) == score), "{id}");
    if let (Bias::Tensor { form: BiasForm::Packed { rows }, .. }, Some(bias)) = (p.bias, terms.bias) {
        let key = (of.kv_first * heads + head * of.kv_len + j) as i64;
        assert_eq!(bias.element(head, i, j), if rows { score } else { key }, "{id}");
    }
}

/// Asks a problem for the places of corners of its sequences.
fn stays_within(p: &FlashAttentionProblem<'_>, id: &str) {
    p.each_lint(&mut |violation| assert!(!violation.to_string().is_empty()));
    resolved_stays_within(p, id);
    let (rows, keys) = p.axis_rows();
    let (query, key) = (elements(p.call.query), elements(p.call.key));
    assert_eq!(p.heads % p.kv_heads, 0, "{id}");
    assert!(query >= (p.heads * p.head_dim) as u64 && key >= (p.kv_heads * p.head_dim) as u64);
    for of in p.sequences().take(64) {
        assert!(of.q_first + of.q_len <= rows, "{id}: {of:?}");
        assert!(of.kv_first + of.kv_len <= keys, "{id}: {of:?}");
        let geometry = p.geometry(&of);
        assert_eq!((geometry.q_len(), geometry.kv_len()), (of.q_len as u64, of.kv_len as u64));
        for head in ends(p.heads as usize) {
            for i in ends(of.q_len) {
                row_stays_within(p, &of, head, i, id);
            }
        }
    }
}

fn row_stays_within(p: &FlashAttentionProblem<'_>, of: &Sequence, head: usize, i: usize, id: &str) {
    let heads = p.heads as usize;
    let softmax = p.softmax_order.rows(of, heads).at(0, head, i) as u64;
    assert!(softmax + SoftmaxOutputs::COPIES as u64 <= elements(p.call.softmax_max), "{id}");
    for j in ends(of.kv_len) {
        let within = |rows: View, count: u64| assert!((rows.element(head, i, j) as u64) < count, "{id}");
        if let MaskKind::Full(mask) = p.mask {
            within(mask.rows(of, heads), elements(p.call.atten_mask));
        }
        if let Bias::Tensor { form, .. } = p.bias
            && (j <= i || !matches!(form, BiasForm::LastRows(_)))
        {
            within(form.rows(of, heads), elements(p.call.real_shift));
        }
        within(of.scores(heads), p.drop_bits());
        let bytes = elements(p.call.drop_mask);
        assert!(bytes == 0 || p.drop_bits().div_ceil(8) <= bytes, "{id}");
    }
}

#[test]
fn extreme_sizes_lengths_and_attributes_are_answered_within_the_tensors() {
    let mut computed = 0;
    for mut described in described::sample() {
        described.each_mutation(&[i64::MIN, -1, 0, 1, 2, 17, i64::MAX], &mut |changed| {
            let call = changed.call();
            for target in TARGETS {
                for version in [changed.version, Version::chosen_on(&call, target)] {
                    match call.check(version, target) {
                        Ok(problem) if problem.work == Work::Attend => {
                            computed += 1;
                            stays_within(&problem, &changed.id);
                        }
                        Ok(_) => {}
                        Err(violation) if violation.is_unsupported() => {}
                        Err(violation) => {
                            let rule = violation.rule;
                            assert!(rule.scope.holds(target), "{} for {target}", rule.id);
                        }
                    }
                }
            }
        });
    }
    assert!(computed > 1000, "{computed}");
}

#[test]
fn recorded_calls_stay_within_their_tensors() {
    let mut calls = described::sample();
    if let Some(folder) = std::env::var_os("ASCEND_VECTORS") {
        let folder = Path::new(&folder);
        calls.extend(described::lines(&folder.join("params/targets/flash_attention_score.jsonl")));
        calls.extend(described::cases(&folder.join("train")));
    }
    let mut computed = 0;
    for described in &calls {
        if let Ok(problem) = described.call().check(described.version, TARGETS[0])
            && problem.work == Work::Attend
        {
            computed += 1;
            stays_within(&problem, &described.id);
        }
    }
    println!("{computed} of {} calls", calls.len());
    assert!(computed > 20);
}
