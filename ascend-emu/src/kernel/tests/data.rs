//! The tensors of one call, run by the kernels and by the oracle.

use super::calls::Random;
use crate::kernel::reference::{self, Inputs, Outputs};
use crate::kernel::simd::Level;
use crate::kernel::{Buffers, run_as};
use ascend_spec::fia::{Operand, Problem, Rows};
use ascend_spec::{DType, TensorDesc};
use half::{bf16, f16};
use std::collections::HashMap;
use std::ptr;

/// Bytes around every tensor; odd, so that no tensor is aligned.
const MARGIN: usize = 67;

/// What the margins hold.
const FENCE: u8 = 0xa5;

/// Bytes of a tensor between two margins.
#[derive(Clone, Debug)]
pub(super) struct Fenced(Vec<u8>);

impl Fenced {
    pub(super) fn new(bytes: impl Iterator<Item = u8>) -> Self {
        let mut all = vec![FENCE; MARGIN];
        all.extend(bytes);
        all.extend([FENCE; MARGIN]);
        Fenced(all)
    }

    /// Every element is NaN.
    fn poisoned(len: usize) -> Self {
        Fenced::new(std::iter::repeat_n(0xff, len))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0[MARGIN..self.0.len() - MARGIN]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let end = self.0.len() - MARGIN;
        &mut self.0[MARGIN..end]
    }

    fn intact(&self) -> bool {
        let (front, rest) = self.0.split_at(MARGIN);
        let back = &rest[rest.len() - MARGIN..];
        front.iter().chain(back).all(|&byte| byte == FENCE)
    }
}

/// The bytes of one number.
pub(super) fn encode(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::Float16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        // A scale in the hardware's form; what is above the number does not count.
        DType::UInt64 => (0x5a5a_0000_0000_0000 | u64::from(value.to_bits()))
            .to_le_bytes()
            .to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// The data of one call.
#[derive(Clone, Debug)]
pub(super) struct Data {
    /// Element type of the tensors that have the call's own.
    dtype: DType,
    of: HashMap<Operand, Fenced>,
}

/// Every operand but the lists.
const SINGLE: &[Operand] = &[
    Operand::Query,
    Operand::PseShift,
    Operand::AttenMask,
    Operand::DeqScale1,
    Operand::QuantScale1,
    Operand::DeqScale2,
    Operand::QuantScale2,
    Operand::QuantOffset2,
    Operand::AntiquantScale,
    Operand::AntiquantOffset,
    Operand::BlockTable,
    Operand::QueryPaddingSize,
    Operand::KvPaddingSize,
    Operand::KeyAntiquantScale,
    Operand::KeyAntiquantOffset,
    Operand::ValueAntiquantScale,
    Operand::ValueAntiquantOffset,
    Operand::KeySharedPrefix,
    Operand::ValueSharedPrefix,
    Operand::QueryRope,
    Operand::KeyRope,
    Operand::DequantScaleQuery,
    Operand::LearnableSink,
    Operand::AttentionOut,
    Operand::SoftmaxLse,
];

impl Data {
    /// Random numbers in every input, poison in the outputs. With `dtype` FLOAT, the tensors of the problem's own type
    /// hold single precision instead.
    pub(super) fn new(problem: &Problem<'_>, dtype: DType, seed: u64) -> Self {
        let call = problem.call;
        let mut random = Random(seed);
        let keys = (0..call.key.len()).map(Operand::Key);
        let values = (0..call.value.len()).map(Operand::Value);
        let mut of = HashMap::new();
        for operand in SINGLE.iter().copied().chain(keys).chain(values) {
            let Some(desc) = operand.of(call) else {
                continue;
            };
            let own = desc.dtype == problem.dtype() && is_rows(operand);
            let held = if own { dtype } else { desc.dtype };
            let tensor = match operand {
                Operand::AttentionOut | Operand::SoftmaxLse => {
                    Fenced::poisoned(reach(desc) * held.size().unwrap())
                }
                _ => fill(operand, desc, held, &mut random),
            };
            of.insert(operand, tensor);
        }
        Data { dtype, of }
    }

    /// Replaces what an input holds.
    pub(super) fn put(&mut self, operand: Operand, bytes: impl IntoIterator<Item = u8>) {
        self.of.insert(operand, Fenced::new(bytes.into_iter()));
    }

    pub(super) fn bytes(&self, operand: Operand) -> &[u8] {
        self.of.get(&operand).map_or(&[], Fenced::bytes)
    }

    pub(super) fn bytes_mut(&mut self, operand: Operand) -> &mut [u8] {
        self.of.get_mut(&operand).unwrap().bytes_mut()
    }

    /// Hands the addresses of the tensors to `work`.
    pub(super) fn with_buffers<R>(&mut self, work: impl FnOnce(&Buffers<'_>) -> R) -> R {
        let base: HashMap<Operand, *mut u8> = self
            .of
            .iter_mut()
            .map(|(&operand, tensor)| (operand, tensor.bytes_mut().as_mut_ptr()))
            .collect();
        let base = |operand| base.get(&operand).copied().unwrap_or(ptr::null_mut());
        work(&Buffers(&base))
    }

    /// Runs the kernels.
    pub(super) fn run(&mut self, problem: &Problem<'_>, level: Level) {
        let dtype = self.dtype;
        // SAFETY: the tensors have the sizes of the descriptors that the problem was made from, or what a test put
        // into their place together with its own views.
        self.with_buffers(|buffers| unsafe {
            match dtype {
                DType::Float16 => run_as::<f16>(problem, buffers, level),
                DType::Bf16 => run_as::<bf16>(problem, buffers, level),
                _ => run_as::<f32>(problem, buffers, level),
            }
        });
    }

    /// What the oracle computes.
    pub(super) fn oracle(&self, problem: &Problem<'_>) -> Outputs {
        let bytes = |operand| self.bytes(operand);
        let inputs = Inputs {
            dtype: self.dtype,
            bytes: &bytes,
        };
        reference::attention(problem, &inputs)
    }

    /// Element of the output.
    pub(super) fn output(&self, rows: &Rows, at: (usize, usize, usize), d: usize) -> f64 {
        let index = (rows.view.at(at.0, at.1, at.2) + d as i64 * rows.view.dim) as usize;
        let bytes = self.bytes(Operand::AttentionOut);
        match self.out_dtype(rows) {
            DType::Float16 => f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64(),
            DType::Bf16 => bf16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64(),
            DType::Int8 => f64::from(bytes[index].cast_signed()),
            _ => single(bytes, index),
        }
    }

    fn out_dtype(&self, rows: &Rows) -> DType {
        match rows.dtype {
            DType::Int8 => DType::Int8,
            _ => self.dtype,
        }
    }

    /// Log-sum-exp of a row.
    pub(super) fn lse(&self, rows: &Rows, at: (usize, usize, usize)) -> f64 {
        let index = rows.view.at(at.0, at.1, at.2) as usize;
        single(self.bytes(Operand::SoftmaxLse), index)
    }

    /// Compares output and log-sum-exp, as far as it is written, with the oracle's. Weights and output are rounded to
    /// the element type: some units of its precision are allowed, absolute and relative, and an integer may round the
    /// other way. Scores of a size of 10 have an error of 1e-6 in single precision.
    pub(super) fn compare(&self, problem: &Problem<'_>, want: &Outputs) -> Result<(), String> {
        let int8 = problem.int8_query.is_some();
        let tolerance = match (self.out_dtype(&problem.out), self.dtype) {
            // A weight that is rounded the other way moves an output by one value in 127.
            (DType::Int8, _) => 1.0 + if int8 { 4.0 } else { 0.0 },
            _ if int8 => 5e-2,
            (_, DType::Float16) => 2e-3,
            (_, DType::Bf16) => 1.5e-2,
            _ => 2e-5,
        };
        let close = |got: f64, want: f64, tolerance: f64| {
            got == want
                || (got.is_nan() && want.is_nan())
                || (got - want).abs() <= tolerance * (1.0 + want.abs())
        };
        let size = self.out_dtype(&problem.out).size().unwrap();
        let mut out_gaps = self.bytes(Operand::AttentionOut).to_vec();
        let mut lse_gaps = self.bytes(Operand::SoftmaxLse).to_vec();
        let mut element = want.attention.iter();
        let mut rows = want.lse.iter();
        let batch = if problem.is_packed() {
            1
        } else {
            problem.batch
        };
        for b in 0..batch {
            for head in 0..problem.heads {
                for row in 0..problem.query_rows {
                    let at = (b, head, row);
                    for d in 0..problem.value_dim {
                        let (got, &want) =
                            (self.output(&problem.out, at, d), element.next().unwrap());
                        if !close(got, want, tolerance) {
                            return Err(format!("output {at:?} element {d} is {got}, not {want}"));
                        }
                        let view = &problem.out.view;
                        let index = (view.at(b, head, row) + d as i64 * view.dim) as usize;
                        out_gaps[index * size..][..size].fill(0xff);
                    }
                    let want = *rows.next().unwrap();
                    if let Some(lse) = &problem.lse {
                        let got = self.lse(lse, at);
                        if !close(got, want, 2e-5) {
                            return Err(format!("log-sum-exp {at:?} is {got}, not {want}"));
                        }
                        lse_gaps[lse.view.at(b, head, row) as usize * 4..][..4].fill(0xff);
                    }
                }
            }
        }
        if self.of.values().any(|tensor| !tensor.intact()) {
            return Err("bytes around a tensor changed".into());
        }
        if out_gaps.iter().chain(&lse_gaps).any(|&byte| byte != 0xff) {
            return Err("bytes between the elements of an output changed".into());
        }
        Ok(())
    }
}

/// Whether a tensor holds rows, rather than the numbers of a grid, which have their own type whatever is measured.
fn is_rows(operand: Operand) -> bool {
    matches!(
        operand,
        Operand::Query
            | Operand::Key(_)
            | Operand::Value(_)
            | Operand::PseShift
            | Operand::QueryRope
            | Operand::KeyRope
            | Operand::KeySharedPrefix
            | Operand::ValueSharedPrefix
            | Operand::AttentionOut
    )
}

/// Elements up to the last of a tensor; of `INT4`, bytes times two.
fn reach(desc: &TensorDesc) -> usize {
    let bytes = desc.byte_range().unwrap().end as usize;
    bytes * 8 / desc.dtype.bits() as usize
}

/// Random contents of an input. Of the tensors whose contents steer the computation, zeros.
fn fill(operand: Operand, desc: &TensorDesc, held: DType, random: &mut Random) -> Fenced {
    let count = reach(desc);
    match (operand, held) {
        (Operand::AttenMask | Operand::BlockTable, _) | (_, DType::Int64) => {
            Fenced::new(std::iter::repeat_n(0, count * held.size().unwrap()))
        }
        // Quantised numbers of every size.
        (_, DType::Int8 | DType::Int4 | DType::Int32) => {
            let bytes = desc.byte_range().unwrap().end as usize;
            Fenced::new((0..bytes).map(|_| random.below(256) as u8))
        }
        _ => Fenced::new((0..count).flat_map(|_| encode(held, number(operand, random)))),
    }
}

/// A number of the size that its tensor has in use.
fn number(operand: Operand, random: &mut Random) -> f32 {
    let value = random.next();
    match operand {
        // What is quantised has a size of 1 again after it.
        Operand::AntiquantScale
        | Operand::KeyAntiquantScale
        | Operand::ValueAntiquantScale
        | Operand::DequantScaleQuery => (value.abs() + 0.1) / 100.0,
        Operand::AntiquantOffset | Operand::KeyAntiquantOffset | Operand::ValueAntiquantOffset => {
            value * 5.0
        }
        Operand::DeqScale1 => (value.abs() + 0.1) / 5000.0,
        Operand::QuantScale1 => 127.0,
        Operand::DeqScale2 => (value.abs() + 0.1) / (127.0 * 50.0),
        Operand::QuantScale2 => value * 40.0,
        Operand::QuantOffset2 => value * 10.0,
        _ => value,
    }
}

fn single(bytes: &[u8], index: usize) -> f64 {
    let bytes: [u8; 4] = bytes[4 * index..][..4].try_into().unwrap();
    f64::from(f32::from_le_bytes(bytes))
}
