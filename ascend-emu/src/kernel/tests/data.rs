//! The tensors of one call, run by the kernels and by the oracle.

use super::calls::Random;
use super::calls::compare::Written;
use super::calls::contents::{arguments_of, fill, is_rows, reach};
use crate::kernel::reference::{self, Inputs, Outputs};
use crate::kernel::simd::Level;
use crate::kernel::{Buffers, RunOptions, run_with};
use ascend_spec::attention_problem::{AttentionProblem, Rows, TensorRole};
use ascend_spec::ops::fused_infer_attention_score::{Argument, CheckedCall, Parameter};
use ascend_spec::{DType, MaskGeometry};
use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::AtomicUsize;

/// The instruction sets to test: the one that the environment selects, or all.
pub(super) fn levels() -> Vec<Level> {
    Level::of_environment().map_or_else(Level::all, |level| vec![level])
}

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

/// The data of one call.
#[derive(Clone, Debug)]
pub(super) struct Data {
    /// Element type of the tensors whose description has the call's type.
    dtype: DType,
    tensors: HashMap<Argument, Fenced>,
    /// Visible keys in place of the problem's.
    pub(super) geometry: Option<MaskGeometry>,
    /// Bytes of working memory that the last run took.
    pub(super) working_memory: usize,
    /// Whether the kernels run in the order that depends on each row alone.
    deterministic: bool,
}

impl Data {
    /// Random numbers in every input, poison in the outputs. With `dtype` FLOAT, the tensors of the problem's own
    /// type hold single precision instead.
    pub(super) fn new(checked: &CheckedCall<'_>, dtype: DType, seed: u64) -> Self {
        let (call, problem) = (checked.call, &checked.problem);
        let mut random = Random(seed);
        let mut tensors = HashMap::new();
        for argument in arguments_of(call) {
            let Some(desc) = call.tensor(argument) else {
                continue;
            };
            let own = desc.dtype == problem.dtype() && is_rows(argument.parameter);
            let held = if own { dtype } else { desc.dtype };
            let tensor = match argument.parameter {
                Parameter::AttentionOut | Parameter::SoftmaxLse => Fenced::poisoned(reach(desc) * held.size().unwrap()),
                _ => Fenced::new(fill(argument.parameter, desc, held, &mut random).into_iter()),
            };
            tensors.insert(argument, tensor);
        }
        Data { dtype, tensors, geometry: None, working_memory: 0, deterministic: false }
    }

    /// Replaces the content of an input.
    pub(super) fn put(&mut self, argument: impl Into<Argument>, bytes: impl IntoIterator<Item = u8>) {
        self.tensors.insert(argument.into(), Fenced::new(bytes.into_iter()));
    }

    pub(super) fn bytes(&self, argument: impl Into<Argument>) -> &[u8] {
        self.tensors.get(&argument.into()).map_or(&[], Fenced::bytes)
    }

    pub(super) fn bytes_mut(&mut self, argument: impl Into<Argument>) -> &mut [u8] {
        self.tensors.get_mut(&argument.into()).unwrap().bytes_mut()
    }

    /// Calls `work` with the addresses of the tensors.
    pub(super) fn with_buffers<R>(&mut self, work: impl FnOnce(&Buffers<'_>) -> R) -> R {
        let base: HashMap<Argument, *mut u8> =
            self.tensors.iter_mut().map(|(&argument, tensor)| (argument, tensor.bytes_mut().as_mut_ptr())).collect();
        let base = |role: TensorRole| {
            let tensor = Argument::of_role(role).and_then(|argument| base.get(&argument));
            tensor.copied().unwrap_or(ptr::null_mut())
        };
        work(&Buffers(&base))
    }

    /// Runs the kernels.
    pub(super) fn run(&mut self, problem: &AttentionProblem<'_>, level: Level) {
        let dtype = self.dtype;
        let geometry = self.geometry;
        let bytes = AtomicUsize::new(0);
        let options = RunOptions {
            deterministic: self.deterministic,
            single: dtype == DType::Float,
            geometry: geometry.as_ref(),
            working_memory: Some(&bytes),
        };
        // SAFETY: the tensors have the sizes of the descriptors that the problem was made from, or what a test put
        // into their place together with its own views.
        self.with_buffers(|buffers| unsafe {
            level.with(|| run_with(problem, buffers, &options)).unwrap();
        });
        self.working_memory = bytes.into_inner();
    }

    /// Computes the oracle's outputs.
    pub(super) fn oracle(&self, problem: &AttentionProblem<'_>) -> Outputs {
        let bytes = |role| Argument::of_role(role).map_or(&[][..], |argument| self.bytes(argument));
        let inputs = Inputs { dtype: self.dtype, bytes: &bytes, geometry: self.geometry.as_ref() };
        reference::attention(problem, &inputs)
    }

    /// Runs the kernels, deterministic ones and others, and compares both outputs of each with the oracle's.
    pub(super) fn check(&mut self, problem: &AttentionProblem<'_>, level: Level) -> Result<(), String> {
        let want = self.oracle(problem);
        let mut deterministic = Data { deterministic: true, ..self.clone() };
        for data in [self, &mut deterministic] {
            data.run(problem, level);
            data.compare(problem, &want).map_err(|why| match data.deterministic {
                true => format!("deterministic: {why}"),
                false => why,
            })?;
        }
        Ok(())
    }

    /// Both outputs.
    pub(super) fn written(&self) -> Written<'_> {
        Written {
            dtype: self.dtype,
            attention_out: self.bytes(Parameter::AttentionOut),
            softmax_lse: self.bytes(Parameter::SoftmaxLse),
        }
    }

    /// Element of the output.
    pub(super) fn output(&self, rows: &Rows, row: (usize, usize, usize), d: usize) -> f64 {
        self.written().output(rows, row, d)
    }

    /// Log-sum-exp of a row.
    pub(super) fn lse(&self, rows: &Rows, row: (usize, usize, usize)) -> f64 {
        self.written().lse(rows, row)
    }

    /// Compares both outputs with the oracle's; nothing else may have changed.
    pub(super) fn compare(&self, problem: &AttentionProblem<'_>, want: &Outputs) -> Result<(), String> {
        self.written().compare(problem, &want.attention, &want.lse)?;
        if self.tensors.values().any(|tensor| !tensor.intact()) {
            return Err("bytes around a tensor changed".into());
        }
        Ok(())
    }
}
