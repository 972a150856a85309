//! Decoding over a paged cache: one plan for all layers of a step, another block table without a new plan.
//!
//! ```sh
//! cargo run --example 10-paged-decode
//! ```

use ascend_attention::prelude::*;

const LAYERS: usize = 4;
const BLOCKS: usize = 12;
const BLOCK_SIZE: usize = 16;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// A layer's cache in device memory.
struct LayerCache {
    key: Tensor<bf16>,
    value: Tensor<bf16>,
}

/// The values of a layer say which block they are in, so that the output says which blocks were read.
fn layer(stream: &Stream, number: usize) -> Result<LayerCache, Box<dyn std::error::Error>> {
    let sizes = [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM].map(|size| size as i64);
    let [blocks, block_size, heads, dim] = sizes;
    let shape = Cache::BnBsH.shape(bf16::DTYPE, blocks, block_size, heads, dim);
    let shape = shape.ok_or("sizes that make no cache")?;
    let shape = shape.iter().map(|&size| usize::try_from(size)).collect::<Result<Vec<_>, _>>()?;
    let block = BLOCK_SIZE * KV_HEADS * DIM;
    let value = (0..BLOCKS * block).map(|at| bf16::from_f32((at / block + number) as f32));
    Ok(LayerCache {
        key: stream.upload(&vec![bf16::ZERO; BLOCKS * block], &shape)?,
        value: stream.upload(&value.collect::<Vec<_>>(), &shape)?,
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::auto()?;
    let stream = runtime.device(0)?.stream()?;
    let layers = (0..LAYERS).map(|number| layer(&stream, number)).collect::<Result<Vec<_>, _>>()?;

    // Sequence 0 has 40 keys in the blocks 9, 2 and 7; sequence 1 has 16 in block 4.
    let table = BlockTable::from_rows(&stream, &[vec![9, 2, 7], vec![4]], BLOCK_SIZE)?;
    let lengths = [40, 16];
    let query = stream.upload(&vec![bf16::ONE; 2 * HEADS * DIM], [2, 1, HEADS * DIM])?;

    // The step's plan: every layer has these shapes and lengths.
    let inputs = Inputs::new(&query, &layers[0].key, &layers[0].value).paged(&table);
    let plan = FusedInferAttention::new(Layout::Bsh)
        .heads(HEADS)
        .kv_heads(KV_HEADS)
        .scale(1.0 / (DIM as f64).sqrt())
        .actual_seq_lengths_kv(lengths)
        .plan(inputs)?;
    println!("{plan:?}");

    // All keys are equal, so that a sequence's output is the mean of its values.
    let means = |output: &[bf16]| [output[0].to_f32(), output[HEADS * DIM].to_f32()];
    for (number, layer) in layers.iter().enumerate() {
        let inputs = Inputs::new(&query, &layer.key, &layer.value).paged(&table);
        let output = plan.launch(&stream, inputs)?;
        let output = output.attention.download(&stream)?;
        println!("layer {number}: {:?}", means(&output));
        let first = (9.0 * 16.0 + 2.0 * 16.0 + 7.0 * 8.0) / 40.0 + number as f32;
        let expected = [first, (4 + number) as f32];
        for (got, want) in means(&output).iter().zip(expected) {
            assert!((got - want).abs() < 0.05, "{got}, not {want}");
        }
    }

    // Sequence 1 moved to block 11. Another table of this shape needs no other plan.
    let moved = BlockTable::from_rows(&stream, &[vec![9, 2, 7], vec![11]], BLOCK_SIZE)?;
    let inputs = Inputs::new(&query, &layers[0].key, &layers[0].value).paged(&moved);
    let output = plan.launch(&stream, inputs)?;
    let output = output.attention.download(&stream)?;
    println!("moved: {:?}", means(&output));
    assert_eq!(means(&output)[1], 11.0);
    Ok(())
}
