//! What the contents of an attention call's tensors show.

use super::{Cache, Decode, HALF};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclTensor};
use half::f16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

#[test]
fn a_row_of_the_block_table_that_names_a_block_twice() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let cache = Cache::new();
    for first in [0, 16, 32, 48] {
        cache.write(first..first + 16);
    }
    let status = |table: &[i32], keys| {
        let decode = Decode::plain(&cache, table);
        let (status, _) = decode.run(keys);
        decode.destroy();
        status
    };
    assert_eq!(status(&[3, 1, 2], 48), 0);
    // Columns behind the last key are not read, and zeros stand for no block.
    assert_eq!(status(&[3, 1, 3], 32), 0);
    assert_eq!(status(&[0, 0, 0], 48), 0);
    assert_eq!(status(&[0, 0, 2], 48), 0);
    let said = [
        "block named twice",
        "block table entries [0, 0] and [0, 2] name block 3 both",
        "aclnnFusedInferAttentionScore",
    ];
    fails(status(&[3, 1, 3], 33), 507_015, &said);
    cache.destroy();
}

/// The template of a causal mask.
fn above_diagonal(row: usize, column: usize) -> bool {
    column > row
}

/// The status of two rows of one head with a window of keys and a compressed mask, over a cache of two blocks of 128
/// that hold 302 keys in turn.
fn ring(window: i64, hides: impl Fn(usize, usize) -> bool) -> i32 {
    let (block, dim, keys) = (128, 16, 302);
    let half = |shape: &[usize], at| {
        let shape: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        tensor(HALF, &shape, at)
    };
    let cache = [0; 2].map(|_| upload(&vec![f16::ONE; 3 * block * dim]));
    let rows = [0; 2].map(|_| upload(&vec![f16::ONE; 2 * dim]));
    let table = upload(&[1i32, 2, 1]);
    let template: Vec<u8> = (0..2048 * 2048).map(|at| u8::from(hides(at / 2048, at % 2048))).collect();
    let mask = upload(&template);
    let workspace = malloc(16 << 20);
    let [query, output] = rows.map(|at| half(&[1, 2, dim], at));
    let caches = cache.map(|at| list(&[half(&[3, block, dim], at)]));
    let of_table = tensor(aclDataType::ACL_INT32, &[1, 3], table);
    let of_mask = tensor(aclDataType::ACL_BOOL, &[2048, 2048], mask);
    let (mut bytes, mut executor) = (0, null_mut());
    let status = unsafe {
        let [query_rows, key_rows] = [2, keys].map(|len: i64| aclCreateIntArray(&len, 1));
        ok(aclnnFusedInferAttentionScoreGetWorkspaceSize(
            query,
            caches[0],
            caches[1],
            null(),
            of_mask,
            query_rows,
            key_rows,
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            of_table,
            null(),
            null(),
            1,
            0.25,
            window - 1,
            0,
            c"BSH".as_ptr().cast_mut(),
            1,
            4,
            0,
            block as i64,
            0,
            false,
            output,
            null(),
            &mut bytes,
            &mut executor,
        ));
        ok(aclnnFusedInferAttentionScore(workspace, bytes, executor, null_mut()));
        let status = aclrtSynchronizeStream(null_mut());
        for tensor in [query, output, of_table, of_mask] {
            ok(aclDestroyTensor(tensor));
        }
        for list in caches {
            ok(aclDestroyTensorList(list));
        }
        for array in [query_rows, key_rows] {
            ok(aclDestroyIntArray(array));
        }
        status
    };
    [cache[0], cache[1], rows[0], rows[1], table, mask, workspace].into_iter().for_each(free);
    status
}

#[test]
fn a_window_may_begin_and_end_in_one_block() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    // The rows see the keys from 46 on: those of block 0 from there, and its first 46 ones again as keys 256 to 301.
    assert_eq!(ring(255, above_diagonal), 0);
    let said = "block table entries [0, 0] and [0, 2] name block 1 both";
    fails(ring(256, above_diagonal), 507_015, &[said]);
}

#[test]
fn a_compressed_mask_that_is_not_the_template() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    type Hides = fn(usize, usize) -> bool;
    let wrong: [(Hides, &str); 4] = [
        (|_, _| false, "attenMask [0, 16] is 0, but"),
        (|row, column| column <= row, "attenMask [0, 0] is 1, but"),
        (|row, column| column < row, "attenMask [2047, 0] is 1, but"),
        (|row, column| column > row + usize::from(row >= 900), "attenMask [912, 913] is 0, but"),
    ];
    for (hides, place) in wrong {
        fails(ring(255, hides), 507_015, &["compressed mask that is not the template", place]);
    }
}

const ROWS: usize = 8;
const KEYS: usize = 32;
const DIM: usize = 16;

/// The status of a prefill of one head with a mask and a position bias, either of which may be left out.
fn prefill(mask: Option<&[u8]>, bias: Option<&[f16]>) -> i32 {
    let inputs = [ROWS, KEYS, KEYS].map(|rows| upload(&vec![f16::ONE; rows * DIM]));
    let out = upload(&vec![f16::ZERO; ROWS * DIM]);
    let workspace = malloc(16 << 20);
    let mut tensors: Vec<*mut aclTensor> = Vec::new();
    let mut new = |dtype, shape: [usize; 4], at: *mut c_void| {
        tensors.push(tensor(dtype, &shape.map(|n| n as i64), at));
        tensors[tensors.len() - 1]
    };
    let [query, key, value] =
        [(0, ROWS), (1, KEYS), (2, KEYS)].map(|(at, rows)| new(HALF, [1, 1, rows, DIM], inputs[at]));
    let output = new(HALF, [1, 1, ROWS, DIM], out);
    let mut memory = vec![out, workspace];
    memory.extend(inputs);
    let scores = [1, 1, ROWS, KEYS];
    let mask = mask.map_or(null_mut(), |mask| {
        memory.push(upload(mask));
        new(aclDataType::ACL_BOOL, scores, memory[memory.len() - 1])
    });
    let bias = bias.map_or(null_mut(), |bias| {
        memory.push(upload(bias));
        new(HALF, scores, memory[memory.len() - 1])
    });
    let (keys, values) = (list(&[key]), list(&[value]));
    let (mut bytes, mut executor) = (0, null_mut());
    let status = unsafe {
        ok(aclnnFusedInferAttentionScoreGetWorkspaceSize(
            query,
            keys,
            values,
            bias,
            mask,
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            null(),
            1,
            0.25,
            i64::from(i32::MAX),
            i64::from(i32::MAX),
            c"BNSD".as_ptr().cast_mut(),
            1,
            0,
            0,
            0,
            0,
            false,
            output,
            null(),
            &mut bytes,
            &mut executor,
        ));
        ok(aclnnFusedInferAttentionScore(workspace, bytes, executor, null_mut()));
        let status = aclrtSynchronizeStream(null_mut());
        // The lists own their tensors.
        for tensor in [query, output, mask, bias].into_iter().filter(|tensor| !tensor.is_null()) {
            ok(aclDestroyTensor(tensor));
        }
        ok(aclDestroyTensorList(keys));
        ok(aclDestroyTensorList(values));
        status
    };
    memory.into_iter().for_each(free);
    status
}

/// A mask of a function of row and key.
fn mask(hides: impl Fn(usize, usize) -> bool) -> Vec<u8> {
    let places = (0..ROWS).flat_map(|row| (0..KEYS).map(move |key| (row, key)));
    places.map(|(row, key)| u8::from(hides(row, key))).collect()
}

#[test]
fn an_infinity_or_nan_in_a_position_bias() {
    let _bench = Bench::new();
    let mut bias = vec![f16::from_f32(-3.0); ROWS * KEYS];
    bias[7] = f16::MIN;
    let strict = check_scope(Check::Strict);
    assert_eq!(prefill(None, Some(&bias)), 0);
    let warned = || {
        let all = findings().into_iter();
        let of_bias = all.filter(|of| of.kind == FindingKind::NonFiniteBias);
        of_bias.map(|of| of.message).collect::<Vec<_>>()
    };
    assert!(warned().is_empty());
    let mut last = bias.clone();
    for (value, text) in [
        (f16::NEG_INFINITY, "-inf, which hardware may make NaN"),
        (f16::INFINITY, "inf, which makes NaN"),
        (f16::NAN, "NaN, which makes NaN"),
    ] {
        last[2 * KEYS + 5] = value;
        let place = format!("sequence 0, head 0, row 2, key 5 is {text}");
        fails(prefill(None, Some(&last)), 507_015, &[&place, "infinity or NaN in a position bias"]);
    }
    drop(strict);
    last[2 * KEYS + 5] = f16::NEG_INFINITY;
    let before = warned().len();
    assert_eq!(before, 3);
    // Otherwise it is a warning: the key is hidden, as it is on some hardware.
    assert_eq!(prefill(None, Some(&last)), 0);
    assert!(warned()[before].contains("attenMask"));
    // Nor does it stop a client that nobody can change; other kinds still do.
    let _rest = check_scope("strict,-non_finite_bias".parse().unwrap());
    assert_eq!(prefill(None, Some(&last)), 0);
    assert_eq!(warned().len(), before + 2);
    last[ROWS * KEYS - KEYS..].fill(f16::MIN);
    fails(prefill(None, Some(&last)), 507_015, &["every key is hidden"]);
}

#[test]
fn a_position_bias_that_hides_every_key_of_a_row() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let mut bias = vec![f16::ZERO; ROWS * KEYS];
    // All keys but one of row 3: what a causal bias does.
    bias[3 * KEYS..4 * KEYS].fill(f16::MIN);
    bias[3 * KEYS + 9] = f16::ZERO;
    assert_eq!(prefill(None, Some(&bias)), 0);
    bias[3 * KEYS + 9] = f16::MIN;
    let said = ["row whose every key is hidden", "row 3 is -65504 for every key", "hide keys with attenMask"];
    fails(prefill(None, Some(&bias)), 507_015, &said);
}

#[test]
fn a_mask_in_which_true_keeps_a_key() {
    let _bench = Bench::new();
    let _strict = check_scope(Check::Strict);
    let shift = KEYS - ROWS;
    let causal = |row: usize, key: usize| key > row + shift;
    assert_eq!(prefill(Some(&mask(causal)), None), 0);
    let said = [
        "row whose every key is hidden",
        "every key from row 7 of sequence 0",
        "invert one whose bytes mean the opposite",
    ];
    fails(prefill(Some(&mask(|row, key| !causal(row, key))), None), 507_015, &said);
    // Rows of padding see nothing, and a call of padding alone may be one that warms up.
    assert_eq!(prefill(Some(&mask(|_, _| true)), None), 0);
    assert_eq!(prefill(Some(&mask(|row, key| row > 0 || causal(row, key))), None), 0);
    assert_eq!(prefill(Some(&mask(|row, key| row == 7 || causal(row, key))), None), 0);
    // Keys of an encoder: padding at the end is hidden, and every row sees some.
    assert_eq!(prefill(Some(&mask(|_, key| key > 3)), None), 0);
}
