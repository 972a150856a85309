//! New latents quantised into rows with scales of their own.

use ascend_attention::quant_sparse_flash::quantised_rows;
use ascend_attention::spec::ops::kv_quant_sparse_flash_attention::QuantisedRow;
use ascend_attention::{Element, Stream, Tensor, bf16, f16};

use crate::error::Result;

use super::quantised_type::QueryType;
use super::rows_on_host::rows_to_quantise;

/// Quantises the latents of a step on the host, each joined with its rotary key and its scales: no operator of the
/// library finds the largest number of a group.
#[derive(Debug)]
pub(in crate::kv) struct LatentQuantiser {
    /// Slots of the rows up to the last one that is written.
    slots: Vec<Option<usize>>,
    /// Shapes of latents and of rotary keys.
    planned: [Vec<usize>; 2],
    /// The quantised rows of a layer, used by one layer after the other, and an empty tensor of values.
    quantised: [Tensor<i8>; 2],
}

impl LatentQuantiser {
    pub(in crate::kv) fn new(slots: Vec<Option<usize>>, planned: [Vec<usize>; 2], quantised: [Tensor<i8>; 2]) -> Self {
        Self { slots, planned, quantised }
    }

    /// Waits for the latents and rotary keys of a layer, and quantises them. Rows without a slot are those of zeros.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        stream: &Stream,
        [latents, ropes]: [&Tensor<T>; 2],
    ) -> Result<[&Tensor<i8>; 2]> {
        let [of_latents, of_ropes] = &self.planned;
        let latents = self.written("latent", stream, latents, of_latents)?;
        let ropes = self.written("key_rope", stream, ropes, of_ropes)?;
        let rows: Vec<i8> = match QueryType::of::<T>()? {
            QueryType::Float16 => quantised_rows(&each(&latents, f16::from_f32), &each(&ropes, f16::from_f32))?,
            QueryType::Bf16 => quantised_rows(&each(&latents, bf16::from_f32), &each(&ropes, bf16::from_f32))?,
        };
        let [first, _] = &self.quantised;
        first.narrow(0, 0..rows.len() / QuantisedRow::BYTES)?.overwrite(stream, &rows)?;
        Ok(self.quantised.each_ref())
    }

    /// The numbers of the rows, zeros in those without a slot.
    fn written<T: Element>(
        &self,
        argument: &'static str,
        stream: &Stream,
        rows: &Tensor<T>,
        planned: &[usize],
    ) -> Result<Vec<f32>> {
        let (mut numbers, elements) = rows_to_quantise(stream, argument, rows, planned, &self.slots)?;
        clear_others(&mut numbers, elements, &self.slots);
        Ok(numbers)
    }
}

/// Numbers in another type, which holds them.
fn each<H>(numbers: &[f32], half: impl Fn(f32) -> H) -> Vec<H> {
    numbers.iter().copied().map(half).collect()
}

/// Makes rows without a slot zeros.
pub(super) fn clear_others(numbers: &mut [f32], elements: usize, slots: &[Option<usize>]) {
    for (row, slot) in numbers.chunks_mut(elements.max(1)).zip(slots) {
        if slot.is_none() {
            row.fill(0.0);
        }
    }
}
