//! What 9.2 changes besides rules: statuses, calls that end early, and strides.

use ascend_spec::attention_problem::Work;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Soc, Target, TensorDesc};

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_2);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_2);

fn bf16(shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(DType::Bf16, shape).unwrap()
}

fn plain(key: &[TensorDesc]) -> FiaCall<'_> {
    FiaCall {
        query: Some(bf16(&[2, 8, 4, 64])),
        key,
        value: key,
        num_heads: 8,
        num_key_value_heads: 2,
        attention_out: Some(bf16(&[2, 8, 4, 64])),
        ..FiaCall::new("BNSD")
    }
}

#[test]
fn hand_written_entry_points_give_every_inner_refusal_one_status() {
    let key = [bf16(&[2, 2, 32, 64])];
    let call = plain(&key);
    let status = |call: &FiaCall<'_>, version, target| {
        call.check(version, target).err().map(|refusal| (refusal.rule.id, refusal.status()))
    };
    assert_eq!(status(&call, Version::V4, A2), None);
    let tiling = FiaCall { inner_precise: 9, ..call.clone() };
    let dtype = FiaCall { query: TensorDesc::contiguous(DType::Float, &[2, 8, 4, 64]), ..call.clone() };
    let layout = FiaCall { input_layout: "DNSB", ..call.clone() };
    let null = FiaCall { query: None, ..call.clone() };
    let older = Target::new(Soc::AtlasA2, Cann::V9_1);
    for (call, id, before, after) in [
        (&tiling, "inner_precise.range", 561_002, 561_103),
        (&dtype, "dtype.registered", 161_002, 561_103),
        (&layout, "input_layout.known", 561_002, 561_103),
        (&null, "call.required", 161_001, 161_001),
    ] {
        assert_eq!(status(call, Version::V4, older), Some((id, before)));
        assert_eq!(status(call, Version::V4, A2), Some((id, after)));
        assert_eq!(status(call, Version::V5, A2), Some((id, before)));
    }
    let chip = status(&tiling, Version::V5, ASCEND_950);
    assert_eq!(chip, Some(("inner_precise.range", 561_002)));
}

#[test]
fn an_empty_output_ends_a_call_before_it_is_looked_at() {
    let key = [bf16(&[2, 2, 32, 64])];
    let nonsense = FiaCall {
        num_heads: -3,
        input_layout: "none",
        sparse_mode: 77,
        attention_out: Some(bf16(&[2, 0, 4, 64])),
        ..plain(&key)
    };
    let checked = nonsense.check(Version::V4, A2).unwrap();
    assert_eq!(checked.problem.work, Work::Nothing);
    checked.each_lint(&mut |_| {});
    assert!(nonsense.check(Version::V5, A2).is_err());
    let null = FiaCall { softmax_lse_flag: true, ..nonsense };
    assert_eq!(null.check(Version::V4, A2).unwrap_err().status(), 161_001);
}

#[test]
fn strides_are_copied_kept_or_refused_by_entry_point_and_cache() {
    let strided = |shape: &[i64], strides: &[i64]| TensorDesc { strides: Dims::new(strides).unwrap(), ..bf16(shape) };
    let paged = |key: TensorDesc, version, target| {
        let caches = [key];
        let call = FiaCall {
            block_table: TensorDesc::contiguous(DType::Int32, &[2, 2]),
            block_size: 128,
            actual_seq_lengths_kv: Some(&[100, 128]),
            ..plain(&caches)
        };
        call.check(version, target).map(|_| ()).map_err(|refusal| refusal.rule.id)
    };
    let blocks_apart = strided(&[6, 128, 128], &[20_000, 128, 1]);
    let rows_apart = strided(&[6, 128, 128], &[32_768, 256, 1]);
    let heads_apart = strided(&[6, 2, 128, 64], &[40_000, 20_000, 64, 1]);
    let heads_rows_apart = strided(&[6, 2, 128, 64], &[40_000, 20_000, 80, 1]);
    let one_place = strided(&[6, 128, 128], &[0, 128, 1]);
    const REFUSED: Result<(), &str> = Err("tensor.contiguous");
    for (key, kept) in [
        (blocks_apart, Ok(())),
        (rows_apart, REFUSED),
        (heads_apart, Ok(())),
        (heads_rows_apart, REFUSED),
        (one_place, REFUSED),
    ] {
        assert_eq!(paged(key, Version::V5, ASCEND_950), kept, "{key}");
        assert_eq!(paged(key, Version::V4, A2), Ok(()), "{key}");
        assert_eq!(paged(key, Version::V5, A2), REFUSED, "{key}");
        for soc in [Soc::AtlasA2, Soc::Ascend950] {
            let older = Target::new(soc, Cann::V9_1);
            assert_eq!(paged(key, Version::V5, older), REFUSED, "{key}");
        }
    }

    // V5 on Atlas A2 keeps the strides of blocks in the split-fuse path.
    let packed = |key: TensorDesc, version| {
        let caches = [key];
        let call = FiaCall {
            query: Some(bf16(&[9, 8, 64])),
            attention_out: Some(bf16(&[9, 8, 64])),
            actual_seq_lengths: Some(&[4, 8]),
            actual_seq_lengths_kv: Some(&[100, 128]),
            block_table: TensorDesc::contiguous(DType::Int32, &[2, 2]),
            block_size: 128,
            input_layout: "TND",
            ..plain(&caches)
        };
        call.check(version, A2).map(|_| ()).map_err(|refusal| refusal.rule.id)
    };
    assert_eq!(packed(blocks_apart, Version::V5), Ok(()));
    assert_eq!(packed(rows_apart, Version::V5), REFUSED);
    assert_eq!(packed(rows_apart, Version::V4), Ok(()));
}
