//! PagedAttention and SelfAttention of ATB.

use super::attention::{Attention, AttentionCall};
use super::launch::Launch;
use crate::fault::Fault;
use crate::host_memory::try_repeat;
use ascend_spec::attention_problem::MaskUse;
use ascend_spec::ops::atb_attention::{Arguments, Hiding, Parameter};
use ascend_spec::{DType, TensorDesc};
use half::{bf16, f16};

/// A call of one of the operators that holds every rule.
pub(crate) type AtbAttention = Attention<Arguments<TensorDesc>>;

impl AttentionCall for Arguments<TensorDesc> {
    unsafe fn truth_values(launch: &Launch<'_, AtbAttention>) -> Result<Option<Vec<u8>>, Fault> {
        let op = launch.op;
        let (Some(problem), Some(mask)) = (&op.problem, op.arguments.mask) else {
            return Ok(None);
        };
        let MaskUse::Full(places) = problem.mask else {
            return Ok(None);
        };
        let elements = usize::try_from(mask.elements().unwrap_or(0)).unwrap_or(usize::MAX);
        let mut values = try_repeat(0u8, elements).map_err(|why| launch.fault(why))?;
        let first = launch.first(Parameter::Mask).cast::<u16>();
        let masks = if places.batch == 0 { 1 } else { problem.batch };
        for sequence in 0..masks {
            let (rows, keys) = match places.batch {
                0 => (0..problem.batch).fold((0, 0), |(rows, keys), b| {
                    (rows.max(problem.q_len(b)), keys.max(problem.kv_len(b)))
                }),
                _ => (problem.q_len(sequence), problem.kv_len(sequence)),
            };
            let start = sequence.saturating_mul(places.batch as usize);
            for (row, key) in (0..rows).flat_map(|row| (0..keys).map(move |key| (row, key))) {
                let place = start + row * places.row as usize + key;
                let Some(value) = values.get_mut(place) else {
                    continue;
                };
                // SAFETY: the caller's promise; the place is one of the mask's elements. Alignment is not required.
                let bits = unsafe { first.add(place).read_unaligned() };
                let number = match mask.dtype {
                    DType::Bf16 => bf16::from_bits(bits).to_f32(),
                    _ => f16::from_bits(bits).to_f32(),
                };
                *value = match Hiding::of(number, op.arguments.times_lowest) {
                    Hiding::Shows => 0,
                    Hiding::Hides => 1,
                    Hiding::Weighs => {
                        let hides = if op.arguments.times_lowest {
                            "1 or more"
                        } else {
                            "-10000 or less"
                        };
                        return Err(launch.fault(format_args!(
                            "mask: {number} for row {row} and key {key} is not emulated: 0 shows a key, and {hides} \
                             hides it"
                        )));
                    }
                };
            }
        }
        Ok(Some(values))
    }
}
