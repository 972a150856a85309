//! What the versions of the operator answer on each product and release.

use std::env;
use std::process::Command;

use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::spec::{Cann, DType, Dims, Extents, Layout, Soc, Target, TensorDesc};
use ascend_attention::{Machine, Runtime};

use super::calls::{Call, desc};
use super::{ALONE, raw, strictly_on, upload};

use Cann::{V8_1, V8_5, V9_0, V9_1, V9_2};

const RUNTIME: i32 = 361_001;
const NULL: i32 = 161_001;
const INVALID: i32 = 161_002;
const TILING: i32 = 561_002;
const INNER_NULL: i32 = 561_103;

/// A call on a target.
fn call(target: Target, layout: Layout, dtype: DType, [heads, dim]: [i64; 2]) -> Call {
    let packed = layout.is_packed();
    let rows = if packed { 9 } else { 4 };
    let of = Extents { batch: if packed { 1 } else { 2 }, heads, rows, dim };
    let mut call = Call::new(layout, dtype, of, 21);
    let keys = Extents { heads: 2, rows: rows + 8, ..of };
    call.keys(dtype, keys, dim);
    if packed {
        (call.q_lens, call.kv_lens) = (Some(vec![4, 9]), Some(vec![5, 17]));
    }
    call.target = target;
    call
}

/// What a phase one answers; its executor is launched.
fn answer(call: &Call, version: Version, measure: bool) -> (i32, String) {
    let memory = upload(call, None).unwrap();
    let prepared = match measure {
        true => raw::measure(call, version, &memory),
        false => raw::prepare(call, version, &memory),
    };
    if prepared.status != 0 {
        return (prepared.status, raw::message());
    }
    assert_eq!(prepared.workspace_bytes, 16 << 20);
    assert_eq!(prepared.run(std::ptr::null_mut()), (0, 0), "{}", raw::message());
    (0, String::new())
}

#[track_caller]
fn refused(call: &Call, version: Version, status: i32, rule: &str) {
    let context = format!("{} on {}", version.symbol(), call.target);
    let (got, message) = answer(call, version, false);
    assert_eq!(got, status, "{context}: {message}");
    assert!(message.contains(rule), "{context}: {message}");
}

#[track_caller]
fn taken(call: &Call, version: Version) {
    let context = format!("{} on {}", version.symbol(), call.target);
    let (got, message) = answer(call, version, false);
    assert_eq!(got, 0, "{context}: {message}");
}

#[test]
fn each_release_answers_by_the_versions_that_it_has() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let products = [(Soc::AtlasA2, &Cann::ALL[..]), (Soc::AtlasA3, &Cann::ALL), (Soc::Ascend950, &[V9_0, V9_1, V9_2])];
    for (soc, releases) in products {
        for &cann in releases {
            let target = Target::new(soc, cann);
            let runtime = Runtime::emulated_as(&Machine::new(soc, cann)).unwrap();
            let stream = runtime.device(0).unwrap().stream().unwrap();
            let call = call(target, Layout::Bnsd, DType::Float16, [2, 64]);
            for version in Version::ALL {
                let there = version <= Version::newest_of(cann) && (soc != Soc::Ascend950 || version == Version::V5);
                for measure in [false, true] {
                    if measure && version == Version::V1 {
                        continue;
                    }
                    let (status, message) = answer(&call, version, measure);
                    let want = if there { 0 } else { RUNTIME };
                    assert_eq!(status, want, "{} on {target}: {message}", version.symbol());
                }
            }
            stream.synchronize().unwrap();
        }
    }
}

#[test]
fn a_measurement_takes_any_lengths_and_is_not_launched() {
    for target in [Target::new(Soc::AtlasA2, V8_5), Target::new(Soc::AtlasA2, V9_1), Target::new(Soc::Ascend950, V9_1)]
    {
        strictly_on(target, |_, _| {
            let newest = Version::newest_of(target.cann);
            let mut call = call(target, Layout::Bnsd, DType::Float16, [2, 64]);
            for lengths in [vec![5, 12], vec![5, 900], vec![0, -7]] {
                let in_range = lengths.iter().all(|len| (0..=12).contains(len));
                call.kv_lens = Some(lengths);
                let memory = upload(&call, None).unwrap();
                let ordinary = raw::prepare(&call, newest, &memory);
                let measured = raw::measure(&call, newest, &memory);
                assert_eq!(ordinary.status, if in_range { 0 } else { TILING });
                assert_eq!(measured.status, 0, "{target}: {}", raw::message());
                if in_range {
                    assert!(measured.workspace_bytes >= ordinary.workspace_bytes);
                    assert_eq!(ordinary.run(std::ptr::null_mut()), (0, 0));
                }
                assert_eq!(measured.run(std::ptr::null_mut()), (INNER_NULL, 0));
            }
            // What does not hang on lengths is refused as ever.
            call.plain.num_key_value_heads = 3;
            let (status, message) = answer(&call, newest, true);
            assert_eq!(status, TILING, "{message}");
        });
    }
}

#[test]
fn a_measurement_of_packed_rows_is_refused_until_8_3() {
    for cann in Cann::ALL {
        let target = Target::new(Soc::AtlasA2, cann);
        strictly_on(target, |_, _| {
            let mut call = call(target, Layout::Tnd, DType::Bf16, [2, 128]);
            call.q_lens = Some(vec![7, 4]);
            let memory = upload(&call, None).unwrap();
            let measured = raw::measure(&call, Version::V3, &memory);
            match cann {
                V8_1 => {
                    assert_eq!(measured.status, TILING);
                    assert!(raw::message().contains("packed.lengths_data"));
                }
                _ => {
                    assert_eq!(measured.status, 0, "{}", raw::message());
                    assert_eq!(measured.run(std::ptr::null_mut()), (INNER_NULL, 0));
                }
            }
        });
    }
}

/// A tensor of the same elements with room behind each row of its second axis from the end.
fn apart(desc: TensorDesc) -> TensorDesc {
    let rank = desc.shape.rank();
    let mut strides = vec![1; rank];
    for axis in (0..rank - 1).rev() {
        let room = if axis + 2 == rank { 16 } else { 0 };
        strides[axis] = strides[axis + 1] * desc.shape[axis + 1] + room;
    }
    TensorDesc { strides: Dims::new(&strides).unwrap(), ..desc }
}

#[test]
fn keys_and_values_with_gaps_are_refused_by_9_1_and_later_by_v5() {
    const RULE: &str = "tensor.contiguous";
    for cann in Cann::ALL {
        let target = Target::new(Soc::AtlasA2, cann);
        strictly_on(target, |_, _| {
            let plain = call(target, Layout::Bnsd, DType::Bf16, [2, 64]);
            let mut keys = plain.clone();
            keys.key = vec![apart(keys.key[0])];
            let mut values = plain.clone();
            values.value = vec![apart(values.value[0])];
            let mut rope = call(target, Layout::Bnsd, DType::Bf16, [2, 128]);
            rope.plain.query_rope = Some(desc(DType::Bf16, &[2, 2, 4, 64]));
            rope.plain.key_rope = Some(apart(desc(DType::Bf16, &[2, 2, 12, 64])));
            let mut query = plain.clone();
            query.plain.query = query.plain.query.map(apart);
            for version in [Version::V3, Version::newest_of(cann)] {
                for call in [&keys, &values, &rope] {
                    match cann {
                        V9_1 => refused(call, version, TILING, RULE),
                        V9_2 if version == Version::V5 => refused(call, version, TILING, RULE),
                        // Rotary parts in this layout are of 8.5 and later.
                        V8_1 if call.plain.key_rope.is_some() => {}
                        _ => taken(call, version),
                    }
                }
                // Nobody looks at those of the query.
                taken(&query, version);
            }
        });
    }
    let target = Target::new(Soc::Ascend950, V9_1);
    strictly_on(target, |_, _| {
        let mut keys = call(target, Layout::Bnsd, DType::Bf16, [2, 64]);
        keys.key = vec![apart(keys.key[0])];
        refused(&keys, Version::V5, TILING, RULE);
        let mut scales = call(target, Layout::Bnsd, DType::Bf16, [2, 64]);
        for cache in [&mut scales.key, &mut scales.value] {
            cache[0] = desc(DType::Int8, &[2, 2, 12, 64]);
        }
        let scale = desc(DType::Bf16, &[2, 1, 64]);
        scales.plain.key_antiquant_scale = Some(scale);
        scales.plain.value_antiquant_scale = Some(scale);
        taken(&scales, Version::V5);
        scales.plain.value_antiquant_scale = Some(TensorDesc { strides: Dims::of([128, 128, 1]), ..scale });
        refused(&scales, Version::V5, TILING, RULE);
    });
}

/// The answers of a machine of 9.1 to keys with gaps, for `ASCEND_EMU_STRIDED`.
#[test]
fn child_passes_keys_with_gaps_to_9_1() {
    let Ok(reading) = env::var("ASCEND_EMU_STRIDED") else {
        return;
    };
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let _stream = Runtime::emulated().unwrap().device(0).unwrap().stream().unwrap();
    let target = Target::new(Soc::AtlasA2, V9_1);
    let mut keys = call(target, Layout::Bnsd, DType::Bf16, [2, 64]);
    keys.key = vec![apart(keys.key[0])];
    refused(&keys, Version::V5, TILING, "tensor.contiguous");
    match reading.as_str() {
        "copy" => taken(&keys, Version::V4),
        _ => refused(&keys, Version::V4, TILING, "tensor.contiguous"),
    }
}

#[test]
fn the_environment_says_whether_9_1_copies_keys_with_gaps() {
    for reading in ["copy", "refuse"] {
        let name = "entry_points::child_passes_keys_with_gaps_to_9_1";
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", name])
            .env("ASCEND_TEST_CHILD", "1")
            .env("ASCEND_EMU_STRIDED", reading)
            .output()
            .unwrap();
        assert!(child.status.success(), "{child:?}");
    }
}

#[test]
fn sinks_have_the_types_of_release_and_checker() {
    use DType::{Bf16, Float, Float16};
    // Layout, head dimension, query, sink, and the answers of 8.5, 9.0 and 9.1.
    let unified = (Layout::Bsnd, 64);
    let split_fuse = (Layout::Tnd, 128);
    let narrow = (Layout::Tnd, 64);
    let cases = [
        (unified, Bf16, Bf16, [0, 0, 0]),
        (unified, Float16, Bf16, [0, 0, 0]),
        (unified, Bf16, Float16, [INVALID, TILING, TILING]),
        (unified, Float16, Float16, [INVALID, TILING, TILING]),
        (split_fuse, Bf16, Bf16, [0, 0, 0]),
        (split_fuse, Float16, Bf16, [0, TILING, TILING]),
        (split_fuse, Bf16, Float16, [INVALID, TILING, TILING]),
        (split_fuse, Float16, Float16, [INVALID, 0, 0]),
        (narrow, Float16, Bf16, [0, 0, 0]),
        (narrow, Float16, Float16, [INVALID, 0, 0]),
        (unified, Bf16, Float, [INVALID; 3]),
        (split_fuse, Bf16, Float, [INVALID; 3]),
    ];
    for (at, cann) in [V8_5, V9_0, V9_1].into_iter().enumerate() {
        let target = Target::new(Soc::AtlasA2, cann);
        strictly_on(target, |_, _| {
            for ((layout, dim), query, sink, answers) in cases {
                let mut call = call(target, layout, query, [4, dim]);
                call.plain.learnable_sink = Some(desc(sink, &[4]));
                for version in [Version::V4, Version::newest_of(cann)] {
                    let (status, message) = answer(&call, version, false);
                    let context = format!("{layout} {dim} {query} {sink} on {target}");
                    assert_eq!(status, answers[at], "{context}: {message}");
                }
            }
        });
    }
    let target = Target::new(Soc::Ascend950, V9_1);
    strictly_on(target, |_, _| {
        for query in [Bf16, Float16] {
            for sink in [Bf16, Float16, Float] {
                let mut call = call(target, Layout::Bsnd, query, [4, 64]);
                call.plain.learnable_sink = Some(desc(sink, &[4]));
                match sink {
                    Float => refused(&call, Version::V5, INVALID, "dtype.registered"),
                    _ if sink == query => taken(&call, Version::V5),
                    _ => refused(&call, Version::V5, TILING, "learnable_sink"),
                }
            }
        }
    });
}

#[test]
fn v5_does_on_a2_and_a3_what_v4_does() {
    for (soc, cann) in [(Soc::AtlasA2, V9_0), (Soc::AtlasA2, V9_1), (Soc::AtlasA3, V9_1), (Soc::AtlasA3, V9_2)] {
        let target = Target::new(soc, cann);
        strictly_on(target, |_, _| {
            for (layout, dim) in [(Layout::Bnsd, 64), (Layout::Tnd, 96)] {
                let call = call(target, layout, DType::Bf16, [4, dim]);
                let results = [Version::V4, Version::V5].map(|version| {
                    let memory = upload(&call, None).unwrap();
                    let prepared = raw::prepare(&call, version, &memory);
                    assert_eq!(prepared.status, 0, "{}", raw::message());
                    assert_eq!(prepared.run(std::ptr::null_mut()), (0, 0));
                    let out = &memory
                        [&ascend_attention::spec::ops::fused_infer_attention_score::Parameter::AttentionOut.into()];
                    assert!(!out.is_untouched());
                    out.written().unwrap()
                });
                assert_eq!(results[0], results[1]);

                let mut typed = call.clone();
                typed.plain.pse_type = 2;
                match (cann, layout) {
                    (V9_1 | V9_2, Layout::Bnsd) => refused(&typed, Version::V5, TILING, "pse_type"),
                    // Elsewhere the type is ignored, and named.
                    _ => {
                        taken(&typed, Version::V5);
                        let described = typed.describe();
                        let checked = described.check(Version::V5, target).unwrap();
                        let lint = checked.lint(&[]).unwrap_err();
                        assert_eq!(lint.rule.id, "pse_type.ignored");
                    }
                }
            }
        });
    }
}

#[test]
fn entry_points_written_by_hand_answer_with_statuses_of_their_own() {
    let target = Target::new(Soc::AtlasA2, V9_2);
    strictly_on(target, |_, _| {
        let plain = call(target, Layout::Bnsd, DType::Bf16, [2, 64]);
        let changed = |change: &dyn Fn(&mut Call)| {
            let mut call = plain.clone();
            change(&mut call);
            call
        };
        let tiling = changed(&|call| call.plain.inner_precise = 9);
        let flagged = changed(&|call| call.plain.softmax_lse_flag = true);
        let uneven = changed(&|call| call.key.push(call.key[0]));
        for (call, status, of_v5) in
            [(&tiling, INNER_NULL, TILING), (&flagged, NULL, TILING), (&uneven, INVALID, TILING)]
        {
            for (version, want) in [(Version::V3, status), (Version::V4, status), (Version::V5, of_v5)] {
                let (got, message) = answer(call, version, false);
                assert_eq!(got, want, "{}: {message}", version.symbol());
            }
        }
        let empty = changed(&|call| {
            call.plain.sparse_mode = 77;
            call.plain.attention_out = Some(desc(DType::Bf16, &[2, 0, 4, 64]));
        });
        let memory = upload(&empty, None).unwrap();
        let prepared = raw::prepare(&empty, Version::V4, &memory);
        assert_eq!(prepared.status, 0, "{}", raw::message());
        assert_eq!(prepared.run(std::ptr::null_mut()), (0, 0), "{}", raw::message());
        let (status, message) = answer(&empty, Version::V5, false);
        assert_eq!(status, TILING, "{message}");
    });
}
