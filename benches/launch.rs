//! What planning and launching cost on the host: `cargo bench --bench launch`.
//!
//! The call is a decoding step of many requests over a paged cache. Phase two is replaced by a function that does
//! nothing, so that a launch is what the host does for it; everything else is the emulation. `by_table` makes the
//! calls of the C ABI that cannot be left out; `by_plan` is this crate. Compare the fastest times.
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::{Arc, OnceLock};

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::sys::bindings::{
    aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclTensor, aclTensorList, aclnnStatus, aclrtStream,
};
use ascend_attention::sys::{Api, Functions};
use ascend_attention::{AnyTensor, FusedInferAttention, Layout, Output, Runtime, Stream, Tensor, bf16};
use divan::Bencher;

const HEADS: usize = 32;
const BLOCK_SIZE: usize = 128;
const COLUMNS: usize = 8;
const BATCHES: [usize; 3] = [1, 16, 256];

fn main() {
    divan::main();
}

unsafe extern "C" fn nothing(_: *mut c_void, _: u64, _: *mut aclOpExecutor, _: aclrtStream) -> aclnnStatus {
    0
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        // A plan takes the version that the release recommends.
        let functions = Functions {
            aclnnFusedInferAttentionScore: Some(nothing),
            aclnnFusedInferAttentionScoreV2: Some(nothing),
            aclnnFusedInferAttentionScoreV3: Some(nothing),
            aclnnFusedInferAttentionScoreV4: Some(nothing),
            aclnnFusedInferAttentionScoreV5: Some(nothing),
            ..ascend_emu::functions()
        };
        let api = Arc::new(Api::from_functions(functions, "emulation without phase two"));
        // SAFETY: all functions are the emulation's but phase two of one operator, which queues and reads nothing.
        unsafe { Runtime::from_api(api) }.unwrap()
    })
}

/// What one layer reads and writes.
struct Layer {
    query: Tensor<bf16>,
    key: Tensor<bf16>,
    value: Tensor<bf16>,
    table: BlockTable,
    output: Output<bf16>,
}

struct Step {
    stream: Stream,
    call: FusedInferAttention,
    lengths: Vec<usize>,
    layers: Vec<Layer>,
}

impl Step {
    fn new(batch: usize) -> Self {
        let device = runtime().device(0).unwrap();
        let stream = device.stream().unwrap();
        let lengths: Vec<usize> = (0..batch).map(|b| 1 + b % 1000).collect();
        let call = FusedInferAttention::new(Layout::Bsnd)
            .scale(1.0)
            .heads(HEADS)
            .kv_heads(1)
            .actual_seq_lengths_kv(lengths.clone());
        let empty = |shape: &[usize]| Tensor::empty(&device, shape).unwrap();
        let layer = || {
            let query = empty(&[batch, 1, HEADS, 128]);
            let key = empty(&[batch * COLUMNS, BLOCK_SIZE, 128]);
            let value = empty(&[batch * COLUMNS, BLOCK_SIZE, 128]);
            let table = BlockTable::zeroed(&device, batch, COLUMNS, BLOCK_SIZE).unwrap();
            let inputs = Inputs::new(&query, &key, &value).paged(&table);
            let output = call.plan(inputs).unwrap().output().unwrap();
            Layer { query, key, value, table, output }
        };
        let layers = vec![layer(), layer()];
        Self { stream, call, lengths, layers }
    }
}

impl Layer {
    fn inputs(&self) -> Inputs<'_, bf16> {
        Inputs::new(&self.query, &self.key, &self.value).paged(&self.table)
    }
}

/// A call prepared by the function table alone.
struct Raw<'a> {
    api: &'a Api,
    tensors: [*mut aclTensor; 5],
    lists: [*mut aclTensorList; 2],
    lengths: *mut aclIntArray,
    executor: *mut aclOpExecutor,
    bytes: u64,
}

fn describe(api: &Api, tensor: &AnyTensor) -> *mut aclTensor {
    let (shape, strides) = (&*tensor.desc().shape, tensor.strides());
    // SAFETY: shape and strides are arrays of that rank.
    unsafe {
        api.aclCreateTensor().unwrap()(
            shape.as_ptr(),
            shape.len() as u64,
            aclDataType(tensor.dtype().acl()),
            strides.as_ptr(),
            0,
            aclFormat(tensor.desc().format.acl()),
            shape.as_ptr(),
            shape.len() as u64,
            tensor.as_raw(),
        )
    }
}

impl<'a> Raw<'a> {
    fn new(step: &Step) -> Raw<'static> {
        let api = runtime().api();
        let layer = &step.layers[0];
        let of = |tensor: &AnyTensor| describe(api, tensor);
        let query = of(&layer.query);
        let out = of(&layer.output.attention);
        let table = of(layer.table.tensor());
        let (key, value) = (of(&layer.key), of(&layer.value));
        let mut raw = Raw {
            api,
            tensors: [query, table, out, key, value],
            lists: [null_mut(); 2],
            lengths: null_mut(),
            executor: null_mut(),
            bytes: 0,
        };
        let lengths: Vec<i64> = step.lengths.iter().map(|len| *len as i64).collect();
        // SAFETY: every argument is null where the operator allows that, or a live object of this call.
        unsafe {
            let list = |member: *mut aclTensor| api.aclCreateTensorList().unwrap()(&member.cast_const(), 1);
            raw.lists = [list(key), list(value)];
            raw.lengths = api.aclCreateIntArray().unwrap()(lengths.as_ptr(), lengths.len() as u64);
            let status = api.aclnnFusedInferAttentionScoreGetWorkspaceSize().unwrap()(
                query,
                raw.lists[0],
                raw.lists[1],
                null(),
                null(),
                null(),
                raw.lengths,
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                table,
                null(),
                null(),
                HEADS as i64,
                1.0,
                i64::from(i32::MAX),
                i64::from(i32::MAX),
                c"BSND".as_ptr().cast_mut(),
                1,
                0,
                0,
                BLOCK_SIZE as i64,
                0,
                false,
                out,
                null(),
                &mut raw.bytes,
                &mut raw.executor,
            );
            assert_eq!(status, 0);
            assert_eq!(api.aclSetAclOpExecutorRepeatable().unwrap()(raw.executor), 0);
        }
        raw
    }

    fn launch(&self, layer: &Layer, workspace: *mut c_void, stream: &Stream) {
        let api = self.api;
        let [query, table, out, ..] = self.tensors;
        // SAFETY: the executor is repeatable and alive, and the tensors are those that it was made of.
        let status = unsafe {
            let set = api.aclSetInputTensorAddr().unwrap();
            let set_list = api.aclSetDynamicInputTensorAddr().unwrap();
            set(self.executor, 0, query, layer.query.as_raw())
                | set_list(self.executor, 1, 0, self.lists[0], layer.key.as_raw())
                | set_list(self.executor, 2, 0, self.lists[1], layer.value.as_raw())
                | set(self.executor, 14, table, layer.table.tensor().as_raw())
                | api.aclSetOutputTensorAddr().unwrap()(self.executor, 0, out, layer.output.attention.as_raw())
                | api.aclnnFusedInferAttentionScore().unwrap()(workspace, self.bytes, self.executor, stream.as_raw())
        };
        assert_eq!(status, 0);
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        let api = self.api;
        let [query, table, out, ..] = self.tensors;
        // SAFETY: each object is destroyed once; the lists destroy their members.
        unsafe {
            api.aclDestroyAclOpExecutor().unwrap()(self.executor);
            for tensor in [query, table, out] {
                api.aclDestroyTensor().unwrap()(tensor);
            }
            for list in self.lists {
                api.aclDestroyTensorList().unwrap()(list);
            }
            api.aclDestroyIntArray().unwrap()(self.lengths);
        }
    }
}

/// Check, descriptors, phase one, and their end.
#[divan::bench_group(sample_size = 100)]
mod plan {
    use super::*;

    #[divan::bench(args = BATCHES)]
    fn by_table(bencher: Bencher<'_, '_>, batch: usize) {
        let step = Step::new(batch);
        bencher.bench_local(|| Raw::new(&step));
    }

    #[divan::bench(args = BATCHES)]
    fn by_plan(bencher: Bencher<'_, '_>, batch: usize) {
        let step = Step::new(batch);
        bencher.bench_local(|| step.call.plan(step.layers[0].inputs()).unwrap());
    }
}

/// Two launches, with other addresses each.
#[divan::bench_group(sample_size = 1000)]
mod two_launches {
    use super::*;

    #[divan::bench(args = BATCHES)]
    fn by_table(bencher: Bencher<'_, '_>, batch: usize) {
        let step = Step::new(batch);
        let raw = Raw::new(&step);
        let bytes = usize::try_from(raw.bytes).unwrap();
        let workspace = step.stream.device().alloc::<u8>(bytes).unwrap();
        bencher.bench_local(|| {
            for layer in &step.layers {
                raw.launch(layer, workspace.as_raw(), &step.stream);
            }
        });
    }

    #[divan::bench(args = BATCHES)]
    fn by_plan(bencher: Bencher<'_, '_>, batch: usize) {
        let mut step = Step::new(batch);
        let plan = step.call.plan(step.layers[0].inputs()).unwrap();
        let stream = &step.stream;
        bencher.bench_local(|| {
            for layer in &mut step.layers {
                let inputs = Inputs::new(&layer.query, &layer.key, &layer.value).paged(&layer.table);
                plan.launch_into(stream, inputs, &mut layer.output).unwrap();
            }
        });
    }
}
