//! Operators of ATB: the orders of 310P, which PyTorch does not reach, and the statuses of refused calls.

use crate::bench::*;
use crate::flash_family::call::on_chip;
use ascend_emu::abi::aclrtSynchronizeStream;
use ascend_emu::atb::{Operation, OperationParameters, Refusal, Tensor, Version};
use half::f16;
use std::ffi::c_void;
use std::ptr::null_mut;

pub(crate) const FLOAT16: i32 = 1;
const INT32: i32 = 3;
pub(crate) const ND: i32 = 2;
const FRACTAL_NZ: i32 = 29;
const PAGED: OperationParameters = OperationParameters {
    version: Version::Paged,
    heads: 4,
    kv_heads: 2,
    scale: 0.25,
    masked: false,
    triangle: false,
    precise: false,
    other_output: false,
    clamped: false,
};
const WORKSPACE: usize = 16 << 20;

pub(crate) fn on_device(dtype: i32, format: i32, shape: &[i64], at: *mut c_void) -> Tensor<'_> {
    Tensor { dtype, format, shape, address: at.addr(), host: None }
}

pub(crate) fn on_host<'a>(shape: &'a [i64], values: &'a [i32]) -> Tensor<'a> {
    Tensor { host: Some(values), ..on_device(INT32, ND, shape, null_mut()) }
}

fn attention(parameters: OperationParameters) -> Operation {
    Operation::Attention { parameters, compressed: false }
}

pub(crate) fn run(operation: Operation, inputs: &[Tensor<'_>], outputs: &[Tensor<'_>]) -> Result<(), Refusal> {
    let bytes = operation.setup(inputs, outputs)?;
    assert!(bytes <= WORKSPACE as u64);
    let (workspace, stream) = (malloc(WORKSPACE), stream());
    let queued = operation.execute(inputs, outputs, (workspace, bytes), stream);
    // SAFETY: the stream is one that was made here.
    let synced = unsafe { aclrtSynchronizeStream(stream) };
    let failed = Refusal { status: synced, message: message() };
    destroy(stream);
    free(workspace);
    queued.and(if synced == 0 { Ok(()) } else { Err(failed) })
}

/// Three tokens of two heads of 32 elements, in blocks of 16 tokens: slots 17 to 19, which the second block has.
#[test]
fn caches_of_310p_are_written_and_read() {
    const DIM: usize = 32;
    let _bench = on_chip("Ascend310P3");
    let new = numbers(1, 3 * 2 * DIM);
    let values = numbers(2, 3 * 2 * DIM);
    let query = numbers(3, 4 * DIM);
    let tokens = [&new, &values].map(|tokens| upload(tokens));
    let cache = [(); 2].map(|()| upload(&[f16::ZERO; 2 * 16 * 2 * DIM]));
    let (slots, table) = (upload(&[17, 18, 19]), upload(&[1]));
    let (rows, out) = (upload(&query), upload(&[f16::NAN; 4 * DIM]));
    let nz = [2, 4, 16, 16];
    let caches = cache.map(|at| on_device(FLOAT16, FRACTAL_NZ, &nz, at));
    let [keys, kept] = tokens.map(|at| on_device(FLOAT16, ND, &[3, 2, DIM as i64], at));
    let slots_given = on_device(INT32, ND, &[3], slots);
    let write = Operation::ReshapeAndCache { keys_alone: false, nz: true };
    let inputs = [keys, kept, caches[0], caches[1], slots_given];
    run(write, &inputs, &caches).unwrap();
    let stored = download::<f16>(cache[0], 2 * 16 * 2 * DIM);
    for (token, row) in new.chunks(2 * DIM).enumerate() {
        for (element, number) in row.iter().enumerate() {
            let place = ((4 + element / 16) * 16 + 1 + token) * 16 + element % 16;
            assert_eq!(stored[place], *number);
        }
    }
    // Token 0 of the block is nobody's, so that four keys are read, of which the first is 0.
    let given = on_device(FLOAT16, ND, &[1, 4, DIM as i64], rows);
    let output = on_device(FLOAT16, ND, &[1, 4, DIM as i64], out);
    let table_given = on_device(INT32, ND, &[1, 1], table);
    let inputs = [given, caches[0], caches[1], table_given, on_host(&[1], &[4])];
    run(attention(PAGED), &inputs, &[output]).unwrap();
    let computed = download::<f16>(out, 4 * DIM);
    for head in 0..4 {
        let of = |all: &[f16], token: usize, d: usize| match token {
            0 => 0.0,
            _ => all[((token - 1) * 2 + head / 2) * DIM + d].to_f64(),
        };
        let score = |token| {
            let products = (0..DIM).map(|d| query[head * DIM + d].to_f64() * of(&new, token, d));
            (products.sum::<f64>() * 0.25).exp()
        };
        let total: f64 = (0..4).map(score).sum();
        for d in 0..DIM {
            let want = (0..4).map(|token| score(token) * of(&values, token, d)).sum::<f64>() / total;
            let got = computed[head * DIM + d].to_f64();
            assert!((got - want).abs() < 2e-3, "{got} for {want}");
        }
    }
    for memory in tokens.into_iter().chain(cache).chain([slots, table, rows, out]) {
        free(memory);
    }
}

#[test]
fn refused_calls_have_the_statuses_of_atb() {
    let _bench = Bench::new();
    let memory = malloc(1 << 20);
    let half = |shape| on_device(FLOAT16, ND, shape, memory);
    let (query, cache, lengths) = (half(&[2, 4, 32]), half(&[2, 16, 2, 32]), [5, 6]);
    let table = on_device(INT32, ND, &[2, 1], memory);
    let inputs = [query, cache, cache, table, on_host(&[2], &lengths)];
    let with = |index: usize, tensor| {
        let mut changed = inputs;
        changed[index] = tensor;
        changed
    };
    let fails = |operation: Operation, inputs: &[Tensor<'_>], status: i32, part: &str| {
        let refusal = operation.setup(inputs, &[query]).unwrap_err();
        assert_eq!(refusal.status, status, "{}", refusal.message);
        assert!(refusal.message.starts_with(operation.name()));
        assert!(refusal.message.contains(part), "{}", refusal.message);
        assert_eq!(message(), refusal.message);
    };
    let paged = attention(PAGED);
    assert!(paged.setup(&inputs, &[query]).unwrap() > 0);
    fails(paged, &inputs[..4], 5, "given 4 input tensors, allowed: 5");
    let three = OperationParameters { kv_heads: 3, ..PAGED };
    fails(attention(three), &inputs, 1, "atb.heads");
    fails(paged, &with(1, half(&[2, 16, 4, 16])), 8, "atb.keys");
    fails(paged, &with(3, on_device(INT32, ND, &[1, 1], memory)), 8, "atb.table");
    fails(paged, &with(4, on_host(&[2], &[5, 17])), 8, "atb.table");
    fails(paged, &with(4, on_host(&[2], &[5, -1])), 1, "atb.lengths");
    fails(paged, &with(4, table), 1, "contextLens: given no hostData");
    fails(paged, &with(2, on_device(27, ND, cache.shape, memory)), 6, "atb.dtype");
    fails(paged, &with(0, on_device(FLOAT16, FRACTAL_NZ, query.shape, memory)), 7, "atb.format");
    fails(paged, &with(0, on_device(FLOAT16, ND, query.shape, null_mut())), 14, "deviceData");
    fails(paged, &with(0, on_device(99, ND, query.shape, memory)), 6, "aclDataType");
    fails(paged, &with(0, on_device(FLOAT16, 99, query.shape, memory)), 7, "aclFormat");
    fails(paged, &with(0, half(&[-2, 4, 32])), 8, "a shape");
    fails(paged, &with(0, half(&[i64::MAX, 4, 32])), 8, "a shape");
    let packed = |masked, compressed| Operation::Attention {
        parameters: OperationParameters { version: Version::Packed, kv_heads: 4, masked, ..PAGED },
        compressed,
    };
    let length = [2];
    let lens = on_host(&[1], &length);
    fails(packed(true, false), &[query, query, query, half(&[1, 1]), lens], 8, "atb.mask");
    fails(packed(true, true), &[query, query, query, half(&[2, 2]), lens], 8, "atb.mask");
    fails(packed(false, false), &[query, query, query, on_host(&[1], &[3])], 1, "atb.lengths");
    let write = Operation::ReshapeAndCache { keys_alone: true, nz: false };
    let key = half(&[2, 2, 32]);
    let slots = on_device(INT32, ND, &[2], memory);
    let refusal = write.setup(&[key, cache, slots], &[half(&[2, 16, 2, 16])]).unwrap_err();
    assert_eq!(refusal.status, 14, "{}", refusal.message);
    let refusal = write.setup(&[half(&[2, 3, 32]), cache, slots], &[cache]).unwrap_err();
    assert_eq!(refusal.status, 8, "{}", refusal.message);
    // The device is usable afterwards.
    assert!(paged.setup(&inputs, &[query]).unwrap() > 0);
    let stream = stream();
    let small = paged.execute(&inputs, &[query], (null_mut(), 0), stream).unwrap_err();
    assert_eq!(small.status, 22, "{}", small.message);
    destroy(stream);
    free(memory);
}
