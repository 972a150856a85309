//! Lists of keys, outputs and log-sum-exp.

use super::{Probe, float, hold, hold_for_both, kept, of, probe, with};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

#[test]
fn lists() {
    hold_for_both(|d| {
        let one = probe("BSND", [2, 4, 4, 1, 64, d]);
        let more = probe("BNSD", [2, 4, 4, 16, 64, d]);
        let two_values = |p: Probe| with(&p.call(), |call| call.value = kept(vec![call.value[0]; 2]));
        let whole = |p: Probe| {
            with(&p.call(), |call| {
                call.key = kept(vec![call.key[0]; 2]);
                call.value = kept(vec![call.value[0]; 2]);
            })
        };
        let longer = |p: Probe| {
            let three = Probe { batch: 3, ..p }.list();
            FiaCall { key: three.key, value: three.value, ..p.call() }
        };
        vec![
            ("a key and two values", ["arrr", "aarr"], two_values(more)),
            ("a key and two values, one row", ["arrr", "aarr"], two_values(one)),
            ("two whole keys for two sequences", ["arra", "aara"], whole(more)),
            ("two whole keys for two sequences, one row", ["arra", "aara"], whole(one)),
            ("a list longer than the batch", ["aaar"; 2], longer(one)),
            ("300 tensors", ["arra", "aara"], probe("BNSD", [300, 1, 1, 1, 16, d]).list()),
            ("256 tensors", ["aaaa"; 2], probe("BNSD", [256, 1, 1, 1, 16, d]).list()),
            ("BNSD_BSND, one row", ["raaa", "rraa"], probe("BNSD_BSND", [2, 4, 4, 1, 64, d]).list()),
            ("BNSD_BSND, rows", ["aaaa"; 2], probe("BNSD_BSND", [2, 4, 4, 4, 64, d]).list()),
            ("BSND_BNSD", ["rarr", "rrrr"], probe("BSND_BNSD", [2, 4, 4, 4, 64, d]).list()),
            ("BSH_BNSD", ["rarr", "rrrr"], probe("BSH_BNSD", [2, 4, 4, 4, 64, d]).list()),
        ]
    });
}

#[test]
fn outputs() {
    hold_for_both(|d| {
        let one = probe("BSND", [2, 4, 4, 1, 64, d]);
        let more = probe("BSND", [2, 4, 4, 16, 64, d]);
        let lse = |p: Probe, lse: Option<TensorDesc>| FiaCall { softmax_lse_flag: true, softmax_lse: lse, ..p.call() };
        let out = |p: Probe, dtype, shape: &[i64]| FiaCall { attention_out: of(dtype, shape), ..p.call() };
        vec![
            ("log-sum-exp, one row", ["aaaa"; 2], lse(one, one.lse())),
            ("log-sum-exp, rows", ["aaaa"; 2], lse(more, more.lse())),
            ("of another shape, one row", ["arrr", "aarr"], lse(one, float(&[2, 4, 2, 1]))),
            ("of another rank, one row", ["arrr", "aarr"], lse(one, float(&[2, 4, 1]))),
            ("of another shape, rows", ["rrrr"; 2], lse(more, float(&[2, 4, 15, 1]))),
            ("of another dtype, one row", ["arrr", "aarr"], lse(one, of(DType::Float16, &[2, 4, 1, 1]))),
            ("of another dtype, rows", ["-rrr", "--rr"], lse(more, of(DType::Float16, &[2, 4, 16, 1]))),
            ("none, one row", ["arrr", "aarr"], lse(one, None)),
            ("an empty one, one row", ["arrr", "aarr"], lse(one, float(&[0]))),
            ("an output of BF16", ["-rrr", "--rr"], out(more, DType::Bf16, &[2, 16, 4, d])),
            ("BSND of another shape", ["arrr"; 2], out(more, DType::Float16, &[2, 15, 4, d])),
            ("BSND of another shape, one row", ["arrr"; 2], out(one, DType::Float16, &[2, 1, 5, d])),
        ]
    });
}

#[test]
fn reordered_outputs_are_compared_in_part_from_9_1_on() {
    let p = |layout| probe(layout, [2, 4, 2, 16, 64, 64]);
    let out = |p: Probe, shape: &[i64]| FiaCall { attention_out: of(DType::Float16, shape), ..p.call() };
    hold(&[
        ("BNSD_BSND", "aaaa", out(p("BNSD_BSND"), &[2, 16, 4, 64])),
        ("BNSD_BSND, another batch", "rrra", out(p("BNSD_BSND"), &[3, 16, 4, 64])),
        ("BNSD_BSND, other rows", "rrrr", out(p("BNSD_BSND"), &[2, 15, 4, 64])),
        ("BNSD_BSND, other heads", "rrrr", out(p("BNSD_BSND"), &[2, 16, 5, 64])),
        ("BNSD_BSND, another dim", "rrrr", out(p("BNSD_BSND"), &[2, 16, 4, 32])),
        ("NTD_TND, other rows", "rrrr", out(p("NTD_TND").bf16(), &[31, 4, 64])),
        ("BSH_BNSD, other rows", "rrra", out(p("BSH_BNSD"), &[2, 4, 15, 64])),
    ]);
}

#[test]
fn the_last_axis_of_outputs_of_heads_of_192_and_128_is_free_over_a_cache_from_9_1_on() {
    let p = |layout| probe(layout, [2, 4, 2, 16, 64, 192]).bf16().value(128);
    let out = |call: FiaCall<'static>, shape: &[i64]| FiaCall { attention_out: of(DType::Bf16, shape), ..call };
    let paged = |layout| p(layout).paged(128, 3);
    let sink = |call| FiaCall { learnable_sink: of(DType::Bf16, &[4]), ..call };
    hold(&[
        ("as implied", "-aaa", out(paged("BNSD"), &[2, 4, 16, 128])),
        ("wider", "rrra", out(paged("BNSD"), &[2, 4, 16, 144])),
        ("the query's", "rrra", out(paged("BNSD"), &[2, 4, 16, 192])),
        ("BSH", "rrra", out(paged("BSH"), &[2, 16, 513])),
        ("TND", "rrra", out(paged("TND"), &[32, 4, 127])),
        ("TND with a sink", "rrra", sink(out(paged("TND"), &[32, 4, 127]))),
        ("NTD", "rrra", out(paged("NTD"), &[4, 32, 127])),
        ("other rows", "rrrr", out(paged("BNSD"), &[2, 4, 15, 128])),
        ("other heads", "rrrr", out(paged("TND"), &[32, 5, 128])),
        ("another axis", "rrrr", out(paged("BNSD"), &[2, 4, 16, 128, 1])),
        ("dense", "rrrr", out(p("BNSD").call(), &[2, 4, 16, 144])),
        ("dense, a remainder of the hidden size", "rrra", out(p("BSH").call(), &[2, 16, 515])),
        ("dense, another hidden size", "rrrr", out(p("BSH").call(), &[2, 16, 516])),
        ("one head dimension", "rrrr", out(probe("BNSD", [2, 4, 2, 16, 64, 128]).paged(128, 3), &[2, 4, 16, 144])),
    ]);
}

#[test]
fn an_output_offset_needs_a_key_for_each_of_several_rows() {
    let p = |layout, rows, keys| probe(layout, [2, 4, 2, rows, keys, 128]).bf16();
    let offset = |p: Probe| FiaCall {
        attention_out: p.call().attention_out.map(|out| TensorDesc::packed(DType::Int8, out.shape)),
        quant_scale2: of(DType::Float, &[1]),
        quant_offset2: of(DType::Float, &[1]),
        sparse_mode: 3,
        atten_mask: of(DType::Bool, &[2048, 2048]),
        ..p.call()
    };
    let scale = |call| FiaCall { quant_offset2: None, ..call };
    hold(&[
        ("as many keys", "aaaa", offset(p("BNSD", 16, 16))),
        ("more rows than keys", "rrrr", offset(p("BNSD", 16, 15))),
        ("without the offset", "aaaa", scale(offset(p("BNSD", 16, 15)))),
        // Of packed sequences the ends are compared.
        ("packed", "rrra", offset(p("NTD", 16, 16))),
        ("packed, more rows than keys", "rrrr", offset(p("NTD", 16, 15))),
        ("packed, single rows", "rrra", offset(p("NTD", 1, 1))),
    ]);
}

#[test]
fn scales_that_a_half_precision_output_ignores_have_a_dtype_all_the_same() {
    let scaled = |dtype| FiaCall { quant_scale2: of(dtype, &[1]), ..probe("BNSD", [2, 4, 2, 16, 64, 128]).call() };
    let offset = |dtype| FiaCall { quant_offset2: of(dtype, &[1]), ..probe("BNSD", [2, 4, 2, 16, 64, 128]).call() };
    hold(&[
        ("FLOAT", "--ra", scaled(DType::Float)),
        ("BF16 under FLOAT16", "--ra", scaled(DType::Bf16)),
        ("FLOAT16", "--rr", scaled(DType::Float16)),
        ("an offset of FLOAT", "---a", offset(DType::Float)),
        ("an offset of FLOAT16", "---r", offset(DType::Float16)),
    ]);
}
