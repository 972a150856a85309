//! What the tensors of a call hold.

use super::{Call, Random};
use ascend_spec::minifloat::{Float8E4M3Fn, Float8E8M0, HiFloat8};
use ascend_spec::ops::fused_infer_attention_score::{Argument, FiaCall, Parameter};
use ascend_spec::{CompressedMask, DType, TensorDesc};
use half::{bf16, f16};
use std::sync::LazyLock;

/// The bytes of one number.
pub fn encode(dtype: DType, value: f32) -> Vec<u8> {
    let mut bytes = Vec::new();
    put(dtype, value, &mut bytes);
    bytes
}

fn put(dtype: DType, value: f32, bytes: &mut Vec<u8>) {
    match dtype {
        DType::Float16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
        DType::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
        DType::Float8E4M3Fn => bytes.push(Float8E4M3Fn::from_f32(value).to_bits()),
        DType::HiFloat8 => bytes.push(HiFloat8::from_f32(value).to_bits()),
        DType::Float8E8M0 => bytes.push(Float8E8M0::from_f32(value).to_bits()),
        // A scale in the hardware's form; what is above the number does not count.
        DType::UInt64 => {
            let bits = 0x5a5a_0000_0000_0000 | u64::from(value.to_bits());
            bytes.extend(bits.to_le_bytes());
        }
        _ => bytes.extend(value.to_le_bytes()),
    }
}

/// The compressed mask of sparse modes 2 to 4.
static TEMPLATE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let [rows, columns] =
        [CompressedMask::Causal.shape()[0], CompressedMask::Causal.shape()[1]].map(|side| side as u64);
    let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    cells.map(|(row, column)| u8::from(CompressedMask::Causal.hides(row, column).unwrap())).collect()
});

/// Every tensor of a call.
pub fn arguments_of(call: &FiaCall<'_>) -> Vec<Argument> {
    call.each_tensor().map(|(argument, _)| argument).collect()
}

impl Call {
    /// What an input holds: what the call was made with, or random numbers.
    pub fn contents(&self, argument: Argument, desc: &TensorDesc, random: &mut Random) -> Vec<u8> {
        let made = self.contents.iter().find(|(of_argument, _)| *of_argument == argument);
        match made {
            Some((_, bytes)) => bytes.clone(),
            None => fill(argument.parameter, desc, desc.dtype, random),
        }
    }
}

/// Whether a tensor holds rows, rather than the numbers of a grid, which have their own type whatever is measured.
pub fn is_rows(parameter: Parameter) -> bool {
    matches!(
        parameter,
        Parameter::Query
            | Parameter::Key
            | Parameter::Value
            | Parameter::PseShift
            | Parameter::QueryRope
            | Parameter::KeyRope
            | Parameter::KeySharedPrefix
            | Parameter::ValueSharedPrefix
            | Parameter::AttentionOut
    )
}

/// Elements up to the last of a tensor; of `INT4`, bytes times two.
pub fn reach(desc: &TensorDesc) -> usize {
    let bytes = desc.byte_range().unwrap().end as usize;
    bytes * 8 / desc.dtype.bits() as usize
}

/// Random contents of an input. Of the tensors whose contents steer the computation, zeros.
pub fn fill(parameter: Parameter, desc: &TensorDesc, held: DType, random: &mut Random) -> Vec<u8> {
    let count = reach(desc);
    match (parameter, held) {
        (Parameter::AttenMask, _) if desc.shape.ends_with(&CompressedMask::Causal.shape()) => {
            TEMPLATE.iter().copied().cycle().take(count).collect()
        }
        (Parameter::AttenMask | Parameter::BlockTable, _) | (_, DType::Int64) => {
            vec![0; (count * held.bits() as usize).div_ceil(8)]
        }
        // Quantised numbers of every size.
        (_, DType::Int8 | DType::Int4 | DType::Int32 | DType::Float4E2M1) => {
            let bytes = desc.byte_range().unwrap().end as usize;
            (0..bytes).map(|_| random.below(256) as u8).collect()
        }
        _ => {
            let mut bytes = Vec::new();
            let floats = matches!(held, DType::Float8E4M3Fn | DType::HiFloat8);
            // They are quantised, too.
            let size = if floats { 30.0 } else { 1.0 };
            for _ in 0..count {
                put(held, number(parameter, random) * size, &mut bytes);
            }
            bytes
        }
    }
}

/// A number of the size that its tensor has in use.
fn number(parameter: Parameter, random: &mut Random) -> f32 {
    let value = random.next();
    match parameter {
        // What is quantised has a size of 1 again after it.
        Parameter::AntiquantScale
        | Parameter::KeyAntiquantScale
        | Parameter::ValueAntiquantScale
        | Parameter::DequantScaleQuery => (value.abs() + 0.1) / 100.0,
        Parameter::AntiquantOffset | Parameter::KeyAntiquantOffset | Parameter::ValueAntiquantOffset => value * 5.0,
        Parameter::DeqScale1 => (value.abs() + 0.1) / 5000.0,
        Parameter::QuantScale1 => 127.0,
        Parameter::DeqScale2 => (value.abs() + 0.1) / (127.0 * 50.0),
        Parameter::QuantScale2 => value * 40.0,
        Parameter::QuantOffset2 => value * 10.0,
        _ => value,
    }
}
