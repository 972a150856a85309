//! Head dimensions, head counts and strides.

use approx::assert_abs_diff_eq;
use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::merge::{HostPart, LseNat, merge_on_host};
use ascend_attention::spec::ops::fused_infer_attention_score::{HeadShape, Version};
use ascend_attention::spec::{DType, Soc, Target};
use ascend_attention::{Error, FusedInferAttention, Layout, Tensor, bf16};

use crate::harness;

const A2: Target = Target::snapshot(Soc::AtlasA2);

/// The rule that heads break.
fn why(heads: HeadShape) -> &'static str {
    match heads.check(Version::V3, A2) {
        Err(violation) => violation.rule.id,
        other => panic!("{heads:?}: {other:?}"),
    }
}

/// 8107, 10769: lists of another size than the batch, given by hand: no call of the operator is made.
#[test]
fn lists_of_another_size_given_by_hand() {
    let stream = harness::stream();
    let query = stream.upload(&[bf16::ONE; 3 * 64], [3, 1, 64]).unwrap();
    let cache = stream.upload(&[bf16::ONE; 8 * 128 * 64], [8, 128, 64]);
    let cache = cache.unwrap();
    let rule = |rows: usize, columns: usize, kv: &[usize]| {
        let rows = vec![vec![1; columns]; rows];
        let table = BlockTable::from_rows(&stream, &rows, 128).unwrap();
        let inputs = Inputs::new(&query, &cache, &cache).paged(&table);
        let call = FusedInferAttention::new(Layout::Tnd)
            .scale(1.0)
            .kv_heads(1)
            .actual_seq_lengths([1, 2, 3])
            .actual_seq_lengths_kv(kv)
            .mask(stream.device().masks().chunked_prefill().unwrap());
        match call.plan(inputs) {
            Ok(_) => None,
            Err(Error::Violation(violation)) => Some(violation.rule.id),
            Err(other) => panic!("{other}"),
        }
    };
    assert_eq!(rule(3, 2, &[5, 9, 200]), None);
    // The releases differ in what they check first, and the newest leaves much of it to the safe layer.
    for (rows, columns, kv) in
        [(3, 2, &[5, 9][..]), (3, 2, &[5, 9, 200, 1]), (2, 2, &[5, 9, 200]), (4, 2, &[5, 9, 200]), (3, 1, &[5, 9, 200])]
    {
        let rule = rule(rows, columns, kv).unwrap();
        let subject = rule.split('.').next().unwrap();
        assert!(["packed", "block_table", "split_fuse"].contains(&subject), "{rule}");
    }
}

/// 8045, 9632, 9642, 4020, 12095, 7729, sgl-project/sglang 28635: head dimensions that packed calls do not take. The
/// contract says so before there is a tensor, and which size does; padded with zeros the result is the same.
#[test]
fn head_dimensions_of_packed_calls() {
    for dim in [80, 96, 160, 256] {
        let heads = HeadShape::new(Layout::Tnd, DType::Bf16, 4, dim);
        assert_eq!(why(heads), "packed.head_dim", "{dim}");
    }
    let (tokens, heads, dim) = (6, 2, 80);
    let shape = HeadShape::new(Layout::Tnd, DType::Bf16, heads as i64, dim as i64);
    let padded = shape.padded(Version::V3, A2).unwrap();
    assert_eq!((padded.query_dim, padded.value_dim), (128, 128));

    let stream = harness::stream();
    let rows = |seed| -> Tensor<bf16> {
        let numbers = harness::numbers(seed, tokens * heads * dim);
        let data: Vec<_> = numbers.into_iter().map(bf16::from_f32).collect();
        stream.upload(&data, [tokens, heads, dim]).unwrap()
    };
    let tensors = [rows(1), rows(2), rows(3)];
    let call = |layout| FusedInferAttention::new(layout).heads(heads).kv_heads(heads).scale(1.0 / (dim as f64).sqrt());
    // With a batch axis 80 is taken as it is.
    let [query, key, value] = tensors.each_ref().map(|tensor| tensor.reshape([1, tokens, heads, dim]).unwrap());
    let plan = call(Layout::Bsnd).plan((&query, &key, &value)).unwrap();
    let want = plan.launch(&stream, (&query, &key, &value)).unwrap();
    let want = want.attention.download(&stream).unwrap();

    let [query, key, value] = tensors.map(|tensor| tensor.padded(&stream, 128).unwrap());
    let plan = call(Layout::Tnd)
        .actual_seq_lengths([tokens])
        .actual_seq_lengths_kv([tokens])
        .plan((&query, &key, &value))
        .unwrap();
    let got = plan.launch(&stream, (&query, &key, &value)).unwrap();
    let got = got.attention.download(&stream).unwrap();
    for (row, want) in want.chunks_exact(dim).enumerate() {
        let got = &got[row * 128..(row + 1) * 128];
        for (got, want) in got.iter().zip(want) {
            assert_abs_diff_eq!(got.to_f64(), want.to_f64(), epsilon = 1e-2);
        }
        assert!(got[dim..].iter().all(|x| *x == bf16::ZERO));
    }
}

/// 14126, 9560, 15558, 15882: head counts that are no power of two, and ranks whose part of the context is empty.
/// Attention takes any ratio up to 64, the absorbed latent form names its own, and an empty part changes nothing.
#[test]
fn head_counts_and_empty_parts() {
    let heads = |heads, kv_heads| HeadShape { kv_heads, ..HeadShape::new(Layout::Tnd, DType::Bf16, heads, 128) };
    for (q, kv) in [(12, 12), (12, 4), (7, 7), (64, 1), (40, 8)] {
        assert_eq!(heads(q, kv).check(Version::V3, A2), Ok(()), "{q} over {kv}");
    }
    assert_eq!(why(heads(12, 5)), "num_key_value_heads.divides");
    assert_eq!(why(heads(65, 1)), "num_key_value_heads.group");
    assert_eq!(why(heads(4, 8)), "num_key_value_heads.range");
    assert_eq!(why(heads(264, 8)), "num_heads.max");

    let empty = HostPart { attention: &[f64::NAN, 7.0][..], softmax_lse: LseNat(&[f64::NEG_INFINITY][..]) };
    let full = HostPart { attention: &[0.25, -3.0][..], softmax_lse: LseNat(&[1.5][..]) };
    for parts in [[empty, full], [full, empty]] {
        let merged = merge_on_host(&parts).unwrap();
        assert_eq!(merged.attention, full.attention);
        assert_eq!(merged.softmax_lse.0, full.softmax_lse.0);
    }
}

/// 11834, 15145, 12172: strided views of keys and values, which newer CANN refuses. They are refused by name on every
/// version, and a contiguous copy is asked for by name.
#[test]
fn strided_keys_and_values() {
    let stream = harness::stream();
    let (rows, heads) = (5, 2);
    let data = harness::halves(1, rows * heads * 64);
    let packed = stream.upload(&data, [1, rows, heads, 64]).unwrap();
    let strided = packed.permute([0, 2, 1, 3]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(heads);
    let error = call.plan((&strided, &strided, &strided)).unwrap_err();
    assert!(
        matches!(&error, Error::Violation(violation) if ["tensor.strided", "tensor.contiguous"].contains(&violation.rule.id)),
        "{error}"
    );
    let copy = strided.contiguous(&stream).unwrap();
    let plan = call.plan((&copy, &copy, &copy)).unwrap();
    let got = plan.launch(&stream, (&copy, &copy, &copy)).unwrap();
    let call = FusedInferAttention::new(Layout::Bsnd).scale(1.0).heads(heads);
    let plan = call.plan((&packed, &packed, &packed)).unwrap();
    let want = plan.launch(&stream, (&packed, &packed, &packed)).unwrap();
    let want = want.attention.permute([0, 2, 1, 3]).unwrap();
    assert_eq!(got.attention.download(&stream).unwrap(), want.download(&stream).unwrap());
}

/// ggml-org/llama.cpp 20031, 13627: which heads the operator takes is found out by failing. The contract answers
/// ahead, with the reason, and says whether zeros help. (A cap on the scores has no parameter at all, so that it
/// cannot be lost.)
#[test]
fn asking_which_heads_are_taken() {
    let heads = |layout, dtype, dim| HeadShape::new(layout, dtype, 4, dim);
    let answer = |heads: HeadShape| {
        let padded = heads.padded(Version::V3, A2);
        (why(heads), padded.map(|padded| padded.query_dim))
    };
    let half = DType::Float16;
    assert_eq!(answer(heads(Layout::Bnsd, half, 40)), ("head_dim.aligned", Some(48)));
    assert_eq!(answer(heads(Layout::Bnsd, half, 576)), ("head_dim.max", None));
    assert_eq!(answer(heads(Layout::Bnsd, DType::Float, 64)), ("dtype.registered", None));
    assert_eq!(answer(heads(Layout::Tnd, half, 64)), ("packed.dtype", None));
    // 192 for the scores and 128 for the values go packed alone.
    let latent = |layout| HeadShape { value_dim: 128, ..heads(layout, DType::Bf16, 192) };
    assert_eq!(latent(Layout::Tnd).check(Version::V3, A2), Ok(()));
    assert_eq!(answer(latent(Layout::Bnsd)), ("head_dim.equal", Some(192)));
    // The product is part of the question.
    let plain = heads(Layout::Bnsd, half, 64);
    assert_eq!(plain.check(Version::V3, A2), Ok(()));
    let refused = plain.check(Version::V3, Target::snapshot(Soc::AtlasInference)).unwrap_err();
    assert!(refused.to_string().starts_with("call.product: "), "{refused}");
}
