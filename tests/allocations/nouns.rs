//! Launches of the operators beside FusedInferAttentionScore allocate nothing on the host.

use crate::allocations;
use crate::harness;

use allocations::in_steady_state;
use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::flash::{Dropout, FlashAttention, FlashInputs, InputLayout, PositionBias};
use ascend_attention::incre::IncreFlashAttention;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::matmul::BatchMatMul;
use ascend_attention::prompt::PromptFlashAttention;
use ascend_attention::ring::RingUpdate;
use ascend_attention::{Layout, Mask, Stream, Tensor, f16};
use harness::halves;

fn tensor(stream: &Stream, seed: u64, shape: &[usize]) -> Tensor<f16> {
    let elements = halves(seed, shape.iter().product());
    stream.upload(&elements, shape).unwrap()
}

/// Checks that rounds of launches on a stream allocate nothing once the first are over.
#[track_caller]
fn allocate_nothing(stream: &Stream, mut launches: impl FnMut()) {
    let allocated = in_steady_state(|| {
        launches();
        stream.synchronize().unwrap();
    });
    assert_eq!(allocated, 0);
}

#[test]
fn a_launch_of_prompts_allocates_nothing() {
    let stream = harness::stream();
    let layers = [1, 2, 3].map(|seed| tensor(&stream, seed, &[1, 2, 9, 64]));
    // The device's own masks are counted by other tests.
    let causal = HostMask::from_fn(9, 9, MaskForm::INT8, |row, key| key <= row);
    let masks = stream.device().masks();
    let causal = Mask::all_mask(masks.custom_matrix(&causal.unwrap()).unwrap());
    let call = PromptFlashAttention::new(Layout::Bnsd).heads(2).scale(0.125);
    let plan = call.mask(causal).plan((&layers[0], &layers[0], &layers[0]));
    let plan = plan.unwrap();
    let mut outputs = layers.each_ref().map(|_| plan.output::<f16>().unwrap());
    allocate_nothing(&stream, || {
        for (x, output) in layers.iter().zip(&mut outputs) {
            plan.launch_into(&stream, (x, x, x), output).unwrap();
        }
    });
}

#[test]
fn a_launch_of_single_rows_over_a_paged_cache_allocates_nothing() {
    let stream = harness::stream();
    let layers = [1, 2, 3].map(|seed| {
        let query = tensor(&stream, seed, &[2, 1, 128]);
        let cache = tensor(&stream, seed + 10, &[6, 16, 128]);
        let table = BlockTable::from_rows(&stream, &[[4, 1], [0, 5]], 16).unwrap();
        (query, cache, table)
    });
    let inputs = layers.each_ref().map(|(query, cache, table)| Inputs::new(query, cache, cache).paged(table));
    let call = IncreFlashAttention::new(Layout::Bsh).scale(0.125);
    let plan = call.actual_seq_lengths_kv([20, 32]).plan(inputs[0]);
    let plan = plan.unwrap();
    let mut outputs = layers.each_ref().map(|_| plan.output::<f16>().unwrap());
    allocate_nothing(&stream, || {
        for (inputs, output) in inputs.iter().zip(&mut outputs) {
            plan.launch_into(&stream, inputs, output).unwrap();
        }
    });
}

#[test]
fn a_launch_of_training_attention_allocates_nothing() {
    let stream = harness::stream();
    let layers = [1, 2, 3].map(|seed| {
        let x = tensor(&stream, seed, &[1, 2, 9, 64]);
        let bias = tensor(&stream, seed + 10, &[1, 2, 9, 9]);
        let keeps = (0..2 * 81).map(|bit| bit % 3 != 0);
        (x, bias, Dropout::new(&stream, keeps, 0.5).unwrap())
    });
    let inputs = layers.each_ref().map(|(x, bias, dropout)| {
        let inputs = FlashInputs::new(x, x, x).dropout(dropout);
        inputs.bias(PositionBias::AfterScale(bias))
    });
    let call = FlashAttention::new(InputLayout::Bnsd).heads(2).scale(0.125);
    let plan = call.plan(inputs[0]).unwrap();
    let mut outputs = layers.each_ref().map(|_| plan.output::<f16>().unwrap());
    allocate_nothing(&stream, || {
        for (inputs, output) in inputs.iter().zip(&mut outputs) {
            plan.launch_into(&stream, inputs, output).unwrap();
        }
    });
}

#[test]
fn a_merge_of_a_ring_allocates_nothing() {
    let stream = harness::stream();
    let x = tensor(&stream, 1, &[9, 2, 64]);
    let call = FlashAttention::new(InputLayout::Tnd).heads(2).scale(0.125);
    let call = call.actual_seq_lengths([4, 9]).actual_seq_lengths_kv([4, 9]);
    let plan = call.plan((&x, &x, &x)).unwrap();
    let parts = [(); 3].map(|()| plan.launch(&stream, (&x, &x, &x)).unwrap());
    let plan = RingUpdate::new().plan(&stream, (&parts[0], &parts[1])).unwrap();
    let mut merged = plan.output::<f16>().unwrap();
    allocate_nothing(&stream, || {
        for part in &parts {
            plan.launch_into(&stream, (&parts[0], part), &mut merged).unwrap();
        }
    });
}

#[test]
fn a_launch_of_products_allocates_nothing() {
    let stream = harness::stream();
    let layers = [1, 2, 3].map(|seed| {
        let right = tensor(&stream, seed + 10, &[2, 5, 4]);
        let right = right.permute([0, 2, 1]).unwrap();
        (tensor(&stream, seed, &[2, 3, 4]), right)
    });
    let [(left, right), ..] = &layers;
    let plan = BatchMatMul::new().plan((left, right)).unwrap();
    let mut outputs = layers.each_ref().map(|(left, right)| plan.launch(&stream, (left, right)).unwrap());
    allocate_nothing(&stream, || {
        for ((left, right), out) in layers.iter().zip(&mut outputs) {
            plan.launch_into(&stream, (left, right), out).unwrap();
        }
    });
}
