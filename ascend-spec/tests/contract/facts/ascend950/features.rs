//! Lists, bias, prefix, padding, sinks, outputs and latent attention.

use super::super::{Call, Probe, float, kept, mask, of, probe, triangle, with};
use super::{hold, masked};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

#[test]
fn lists_bias_prefix_and_padding() {
    let p = |layout, rows| probe(layout, [2, 4, 4, rows, 64, 64]);
    let bias = |call: Call, shape: &[i64]| FiaCall { pse_shift: of(DType::Float16, shape), ..call };
    let prefixed = |layout, rows, len: Option<&'static [i64]>| {
        let prefix = Some(Probe { batch: 1, ..p(layout, rows) }.input(4, 16, 64));
        FiaCall {
            key_shared_prefix: prefix,
            value_shared_prefix: prefix,
            actual_shared_prefix_len: len,
            ..p(layout, rows).call()
        }
    };
    let padded = |layout, rows, size: &[i64]| FiaCall {
        kv_padding_size: of(DType::Int64, size),
        actual_seq_lengths_kv: Some(kept(vec![5, 6])),
        ..p(layout, rows).call()
    };
    let list = |layout, rows| p(layout, rows).list();
    hold(&[
        ("list", 'a', list("BSND", 4)),
        ("list, BNSD_BSND, one row", 'a', list("BNSD_BSND", 1)),
        ("list, BSND_BNSD", 'r', list("BSND_BNSD", 4)),
        ("a list of 300", 'a', probe("BNSD", [300, 1, 1, 1, 4, 64]).list()),
        ("a list with rotary parts", 'a', {
            let p = Probe { dim: 128, value_dim: 128, ..p("BSND", 4).bf16() };
            FiaCall { query_rope: p.rope().query_rope, key_rope: p.rope().key_rope, ..p.list() }
        }),
        ("bias", 'a', bias(p("BSND", 4).call(), &[1, 4, 4, 64])),
        ("bias of one row", 'a', bias(p("BSND", 4).call(), &[1, 4, 1, 64])),
        ("bias of two rows", 'r', bias(p("BSND", 4).call(), &[1, 4, 2, 64])),
        ("bias in NTD", 'r', bias(p("NTD", 4).call(), &[1, 4, 4, 64])),
        ("an empty bias", 'r', bias(p("BSND", 4).call(), &[0])),
        ("bias of 7 channels", 'a', bias(probe("BSND", [2, 4, 4, 4, 64, 7]).call(), &[1, 4, 4, 64])),
        (
            "bias and sink",
            'r',
            FiaCall { learnable_sink: of(DType::Float16, &[4]), ..bias(p("BSND", 4).call(), &[1, 4, 4, 64]) },
        ),
        ("prefix", 'a', prefixed("BNSD", 4, Some(&[10]))),
        ("prefix without a length", 'a', prefixed("BSH", 1, None)),
        ("prefix of length 17", 'r', prefixed("BNSD", 4, Some(&[17]))),
        ("prefix with two lengths", 'r', prefixed("BNSD", 4, Some(&[1, 1]))),
        ("prefix in BSND_BNSD", 'r', prefixed("BSND_BNSD", 4, None)),
        ("left padding", 'a', padded("BNSD", 4, &[1])),
        ("left padding of two elements", 'r', padded("BNSD", 4, &[2])),
        ("left padding in BSND_BNSD", 'r', padded("BSND_BNSD", 4, &[1])),
        ("left padding without lengths", 'r', FiaCall { actual_seq_lengths_kv: None, ..padded("BNSD", 4, &[1]) }),
        ("the same, one row", 'a', FiaCall { actual_seq_lengths_kv: None, ..padded("BNSD", 1, &[1]) }),
        (
            "of the query without lengths, one row",
            'r',
            FiaCall { query_padding_size: of(DType::Int64, &[1]), ..p("BNSD", 1).call() },
        ),
    ]);
}

#[test]
fn sinks_outputs_and_what_is_left_over() {
    let p = probe("BSND", [2, 4, 4, 4, 64, 64]);
    let sink = |p: Probe, dtype| FiaCall { learnable_sink: of(dtype, &[4]), ..p.call() };
    let out = |p: Probe, dtype, scale: Option<TensorDesc>| {
        with(&p.call(), |call| {
            call.attention_out = call.attention_out.map(|out| TensorDesc::packed(dtype, out.shape));
            call.quant_scale2 = scale;
        })
    };
    let plain = |change: fn(&mut Call)| with(&p.call(), change);
    let small = [DType::Int8, DType::Float8E4M3Fn, DType::HiFloat8];
    let mut facts = Vec::new();
    for dtype in small {
        facts.push(("one scale", 'a', out(p, dtype, float(&[1]))));
        facts.push(("no scale", 'r', out(p, dtype, None)));
        facts.push(("a scale a channel in a row", 'a', out(p, dtype, float(&[256]))));
        facts.push(("192 and 128", 'a', out(Probe { dim: 192, ..p }.value(128), dtype, float(&[1]))));
    }
    facts.extend([
        ("NTD, a scale a channel", 'a', out(probe("NTD", [2, 4, 4, 4, 64, 64]), DType::Int8, float(&[4, 64]))),
        ("NTD, a scale a channel in a row", 'r', out(probe("NTD", [2, 4, 4, 4, 64, 64]), DType::Int8, float(&[256]))),
        ("NTD, one scale of two axes", 'r', out(probe("NTD", [2, 4, 4, 4, 64, 64]), DType::Int8, float(&[1, 1]))),
        ("a FLOAT16 scale", 'r', out(p, DType::Int8, of(DType::Float16, &[1]))),
        ("a BF16 scale", 'r', out(p, DType::Int8, of(DType::Bf16, &[1]))),
        ("a BF16 scale of a BF16 query", 'a', out(p.bf16(), DType::Int8, of(DType::Bf16, &[1]))),
        ("a scale without need", 'a', plain(|call| call.quant_scale2 = float(&[1]))),
        ("a FLOAT16 scale without need", 'r', plain(|call| call.quant_scale2 = of(DType::Float16, &[1]))),
        ("sink", 'a', sink(p, DType::Float16)),
        ("sink of BF16", 'r', sink(p, DType::Bf16)),
        ("sink, 96 channels", 'r', sink(Probe { dim: 96, value_dim: 96, ..p }, DType::Float16)),
        ("sink, 192 and 128", 'a', sink(Probe { dim: 192, ..p }.value(128), DType::Float16)),
        ("sink, precision 1", 'r', FiaCall { inner_precise: 1, ..sink(p, DType::Float16) }),
        ("sink over a cache", 'a', FiaCall { learnable_sink: of(DType::Float16, &[4]), ..p.paged(128, 4) }),
        ("deqScale1", 'r', plain(|call| call.deq_scale1 = float(&[1]))),
        ("keyAntiquantScale", 'r', plain(|call| call.key_antiquant_scale = of(DType::Float16, &[4, 64]))),
        ("dequantScaleQuery", 'r', plain(|call| call.dequant_scale_query = float(&[2, 4, 4]))),
        ("keyRopeAntiquantScale", 'a', plain(|call| call.key_rope_antiquant_scale = float(&[1]))),
        (
            "modes",
            'a',
            plain(|call| {
                call.antiquant_mode = 1;
                call.key_antiquant_mode = 1;
                call.query_quant_mode = 2;
            }),
        ),
        ("no keys, anything else", 'a', FiaCall { inner_precise: 9, sparse_mode: 3, ..Probe { keys: 0, ..p }.call() }),
        ("no queries", 'a', Probe { rows: 0, ..p }.call()),
        (
            "no queries and an output",
            'r',
            FiaCall { attention_out: p.call().attention_out, ..Probe { rows: 0, ..p }.call() },
        ),
        ("the log-sum-exp of NTD_TND", 'a', {
            let p = probe("NTD_TND", [2, 4, 4, 4, 64, 64]);
            FiaCall { softmax_lse_flag: true, softmax_lse: p.lse(), ..p.call() }
        }),
    ]);
    hold(&facts);
}

#[test]
fn absorbed_latent_attention() {
    let p = |layout, heads, rows| probe(layout, [2, heads, 1, rows, 100, 512]).bf16();
    let mut facts = Vec::new();
    for layout in ["BSH", "BSND", "BNSD", "TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"] {
        facts.push((layout, 'a', p(layout, 32, 4).paged_rope(128, 3)));
        facts.push((layout, 'a', p(layout, 32, 20).rope()));
    }
    for layout in ["NTD", "BNSD_BSND", "BSH_BNSD", "NTD_TND"] {
        facts.push((layout, 'r', p(layout, 32, 4).paged_rope(128, 4)));
    }
    let one = p("BSND", 32, 1);
    facts.extend([
        ("24 heads", 'r', p("BSND", 24, 1).rope()),
        ("numKeyValueHeads 0", 'r', FiaCall { num_key_value_heads: 0, ..p("BSND", 1, 1).rope() }),
        ("mode 1", 'r', masked(one.rope(), 1, mask(&[2, 1, 100]))),
        ("mode 0 with a mask", 'a', masked(one.rope(), 0, mask(&[2, 1, 100]))),
        ("mode 4", 'a', masked(one.rope(), 4, triangle())),
        ("the log-sum-exp", 'a', FiaCall { softmax_lse_flag: true, softmax_lse: one.lse(), ..one.rope() }),
        ("a sink", 'r', FiaCall { learnable_sink: of(DType::Bf16, &[32]), ..one.rope() }),
        ("query lengths", 'a', FiaCall { actual_seq_lengths: Some(&[1]), ..one.rope() }),
        (
            "an INT8 output",
            'a',
            FiaCall { attention_out: of(DType::Int8, &[2, 1, 32, 512]), quant_scale2: float(&[1]), ..one.rope() },
        ),
        (
            "an INT8 output in TND_NTD",
            'r',
            FiaCall {
                attention_out: of(DType::Int8, &[32, 8, 512]),
                quant_scale2: float(&[1]),
                ..p("TND_NTD", 32, 4).paged_rope(128, 3)
            },
        ),
        ("a list", 'r', FiaCall { query_rope: one.rope().query_rope, key_rope: one.rope().key_rope, ..one.list() }),
    ]);
    hold(&facts);
}
