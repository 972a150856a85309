//! The problems of FlashAttentionScore: the kernels and the oracle against golden cases, and against each other.

use super::data::levels;
use super::flash_calls::{FlashCall, TARGET};
use super::golden::{self, Golden, elements};
use crate::kernel::Buffers;
use crate::kernel::reference::{self, Inputs};
use crate::kernel::simd::Level;
use ascend_spec::attention_problem::{AttentionProblem, TensorRole, Work};
use ascend_spec::geometry::{Lengths, Sparsity};
use ascend_spec::ops::flash_attention_score::{Arguments, FlashAttentionCall, Parameter, Version};
use ascend_spec::ops::fused_infer_attention_score::{self as fia, FiaCall};
use ascend_spec::{DType, SparseMode, TensorDesc};
use std::collections::HashMap;
use std::ptr;

const OUTPUTS: [Parameter; 3] = [Parameter::AttentionOut, Parameter::SoftmaxMax, Parameter::SoftmaxSum];

/// The bytes of each tensor.
type Data = HashMap<Parameter, Vec<u8>>;

/// Runs the kernels, and returns the outputs.
pub(super) fn compute(data: &Data, problem: &AttentionProblem<'_>, level: Level) -> Data {
    let mut data = data.clone();
    let base: HashMap<Parameter, *mut u8> =
        data.iter_mut().map(|(&parameter, bytes)| (parameter, bytes.as_mut_ptr())).collect();
    let base = |role: TensorRole| {
        let address = Parameter::of_role(role).and_then(|parameter| base.get(&parameter));
        address.copied().unwrap_or(ptr::null_mut())
    };
    // SAFETY: the tensors have the sizes of the descriptions that the problem was made from, but for a compressed
    // mask, which is not read.
    level.with(|| unsafe { crate::kernel::run(problem, &Buffers(&base)) }).unwrap();
    data.retain(|parameter, _| parameter.is_output());
    data
}

/// Computes the oracle's elements of each output, at their positions in the tensors; NaN where nothing is written.
fn expect(
    arguments: &Arguments<TensorDesc>,
    data: &Data,
    problem: &AttentionProblem<'_>,
) -> HashMap<Parameter, Vec<f32>> {
    let bytes = |role: TensorRole| {
        let bytes = Parameter::of_role(role).and_then(|parameter| data.get(&parameter));
        bytes.map_or(&[][..], Vec::as_slice)
    };
    let inputs = Inputs { dtype: problem.dtype(), bytes: &bytes, geometry: None };
    let want = reference::attention(problem, &inputs);
    let blank = |out: Parameter| {
        let dtype = arguments.tensor(out).map(|desc| desc.dtype);
        let size = dtype.and_then(DType::size).unwrap_or(1);
        (out, vec![f32::NAN; data[&out].len() / size])
    };
    let mut expected = HashMap::from(OUTPUTS.map(blank));
    let mut put = |out: Parameter, element: i64, number: f64| {
        let place = expected.get_mut(&out).and_then(|all| all.get_mut(element as usize));
        *place.expect("an element of the output") = number as f32;
    };
    for b in 0..problem.batch {
        let (place, rows, first) = match problem.packed && problem.work == Work::Attend {
            true => {
                let extent = problem.sequence(b, Default::default());
                (0, extent.q_len, extent.q_first)
            }
            false => (b, problem.query_rows, 0),
        };
        for (head, i) in (0..problem.heads).flat_map(|n| (0..rows).map(move |i| (n, i))) {
            let row = (place * problem.heads + head) * problem.query_rows + first + i;
            let view = problem.out.view;
            for d in 0..problem.value_dim {
                let element = view.at(place, head, first + i) + d as i64 * view.dim;
                let number = want.attention[row * problem.value_dim + d];
                put(Parameter::AttentionOut, element, number);
            }
            let softmax = problem.terms[b].softmax;
            let element = softmax.at(0, head, i);
            for copy in 0..8 {
                put(Parameter::SoftmaxMax, element + copy, want.softmax_max[row]);
                put(Parameter::SoftmaxSum, element + copy, want.softmax_sum[row]);
            }
        }
    }
    expected
}

/// Finds an element of an output that was written and should not have been.
fn overwritten(found: &[u8], size: usize, mut unspecified: impl Iterator<Item = usize>) -> Option<usize> {
    unspecified.find(|at| found[at * size..][..size] != [0xff; 4][..size])
}

impl FlashCall {
    /// Compares the kernels with the oracle.
    pub(super) fn check(&self, level: Level) -> Result<(), String> {
        let call = self.arguments.call();
        let problem = match call.check(self.version, TARGET) {
            Ok(problem) => problem.attention().expect("a call that is computed"),
            Err(refusal) => return Err(refusal.to_string()),
        };
        let expected = expect(&self.arguments, &self.data, &problem);
        let found = compute(&self.data, &problem, level);
        for out in OUTPUTS {
            let dtype = self.arguments.tensor(out).map_or(DType::Float, |desc| desc.dtype);
            let tolerance = match (out, problem.dtype()) {
                (Parameter::AttentionOut, DType::Bf16) => 2e-2,
                (Parameter::AttentionOut, DType::Float16) => 3e-3,
                _ => 1e-4,
            };
            let numbers = elements(dtype, &found[&out]);
            for (at, (&found, &want)) in numbers.iter().zip(&expected[&out]).enumerate() {
                let near = (found - want).abs() <= tolerance * want.abs().max(1.0);
                if !(want.is_nan() || found == want || near) {
                    return Err(format!("{out} {at}: {found}, not {want}"));
                }
            }
            let nothing = expected[&out].iter().enumerate();
            let nothing = nothing.filter(|(_, want)| want.is_nan()).map(|(at, _)| at);
            let size = dtype.size().unwrap_or(1);
            if let Some(at) = overwritten(&found[&out], size, nothing) {
                return Err(format!("{out} {at} was written"));
            }
        }
        Ok(())
    }

    /// The output.
    pub(super) fn compute(&self, level: Level) -> Vec<u8> {
        let call = self.arguments.call();
        let problem = call.check(self.version, TARGET).expect("a call that holds");
        let problem = problem.attention().expect("a call that is computed");
        compute(&self.data, &problem, level)[&Parameter::AttentionOut].clone()
    }

    /// The output of the same call of another operator.
    pub(super) fn compute_as(&self, call: &FiaCall<'_>, level: Level) -> Vec<u8> {
        let checked = call.check(fia::Version::V4, TARGET).expect("a call that holds");
        compute(&self.data, &checked.problem, level)[&Parameter::AttentionOut].clone()
    }
}

#[test]
fn golden_cases_of_flash_attention_score_are_met() {
    let mut count = 0;
    let mut wrong = Vec::new();
    let files = golden::files();
    for golden in files.iter().filter_map(|path| Golden::read(path)) {
        count += 1;
        let call = golden.arguments.call();
        let problem = match call.check(golden.version, TARGET) {
            Ok(problem) => problem.attention().expect("a call that is computed"),
            Err(refusal) => panic!("{}: {refusal}", golden.name),
        };
        let expected = expect(&golden.arguments, &golden.data, &problem);
        let judged = golden.compare_elements(&|out| expected[&out].clone());
        if let Err(difference) = judged {
            wrong.push(format!("{} by the oracle: {difference}", golden.name));
        }
        for level in levels() {
            let found = compute(&golden.data, &problem, level);
            if let Err(difference) = golden.compare(&|out| found[&out].clone()) {
                wrong.push(format!("{} with {level:?}: {difference}", golden.name));
            }
            for out in OUTPUTS {
                let dtype = golden.arguments.tensor(out).map(|desc| desc.dtype);
                let size = dtype.and_then(DType::size).unwrap_or(1);
                if let Some(at) = overwritten(&found[&out], size, golden.unspecified(out)) {
                    wrong.push(format!("{} {out} {at} was written", golden.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {count} wrong:\n{}", wrong.len(), wrong.join("\n"));
    let operators = ["flash_attention_score", "flash_attention_varlen_score"];
    assert_eq!(count, golden::naming(&files, &operators));
    let own = files.iter().filter(|path| path.starts_with(golden::own()));
    let own: Vec<_> = own.cloned().collect();
    assert_eq!(golden::naming(&own, &operators), 10);
}

/// A call whose output shows which keys each row sees: all scores are equal, and the value of key `j` is 1 only at
/// `j`.
fn seen(mode: SparseMode, (rows, keys): (usize, usize), tokens: (i64, i64), prefix: i64) -> Option<Vec<bool>> {
    const DIM: usize = 40;
    let packed = matches!(mode, SparseMode::RightDownCausalBand | SparseMode::BandLeftUpCausal);
    let last = mode == SparseMode::RightDownCausalBand;
    let desc = |dtype, shape: &[usize]| {
        let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        TensorDesc::contiguous(dtype, &shape).unwrap()
    };
    // Another sequence of two rows and two keys, which is before or after the cut one.
    let before = if last { 2 } else { 0 };
    let (all_rows, all_keys) = if packed { (rows + 2, keys + 2) } else { (rows, keys) };
    let tensor = |rows: usize| match packed {
        true => desc(DType::Float, &[rows, 1, DIM]),
        false => desc(DType::Float, &[1, rows, 1, DIM]),
    };
    let mut arguments = FlashAttentionCall::new(if packed { "TND" } else { "BSND" }).to_arguments();
    arguments.query = Some(tensor(all_rows));
    (arguments.key, arguments.value) = (Some(tensor(all_keys)), Some(tensor(all_keys)));
    arguments.attention_out = Some(tensor(all_rows));
    let softmax = match packed {
        true => desc(DType::Float, &[all_rows, 1, 8]),
        false => desc(DType::Float, &[1, 1, rows, 8]),
    };
    (arguments.softmax_max, arguments.softmax_sum) = (Some(softmax), Some(softmax));
    arguments.sparse_mode = mode.acl();
    (arguments.pre_tokens, arguments.next_tokens) = tokens;
    let mask = match mode {
        SparseMode::Prefix => desc(DType::Bool, &[1, 1, rows, keys]),
        SparseMode::PrefixCompress => desc(DType::Bool, &[3072, 2048]),
        _ => desc(DType::Bool, &[2048, 2048]),
    };
    arguments.atten_mask = Some(mask);
    arguments.inner_precise = 2;
    if packed {
        let ends = |len: usize| match last {
            true => vec![2, len as i64 + 2],
            false => vec![len as i64, len as i64 + 2],
        };
        arguments.actual_seq_lengths = Some(ends(rows));
        arguments.actual_seq_lengths_kv = Some(ends(keys));
    } else {
        arguments.prefix = Some(vec![prefix]);
    }
    let version = if packed { Version::VarLenV1 } else { Version::V1 };
    let call = arguments.call();
    let problem = call.check(version, TARGET).ok()?.attention().ok()?;
    let geometry = Sparsity {
        pre_tokens: tokens.0,
        next_tokens: tokens.1,
        prefix: &[prefix],
        ..Sparsity::new(mode, Lengths::Dense { batch: 1, q_len: rows as u64, kv_len: keys as u64 })
    };
    let geometry = geometry.geometry(0);
    let ones = |count: usize, one: &dyn Fn(usize, usize) -> bool| -> Vec<u8> {
        let cells = (0..count).flat_map(|row| (0..DIM).map(move |d| (row, d)));
        let number = |(row, d)| if one(row, d) { 1.0f32 } else { 0.0 };
        cells.flat_map(|cell| number(cell).to_le_bytes()).collect()
    };
    let first = if packed { before } else { 0 };
    let mut data = HashMap::from([
        (Parameter::Query, ones(all_rows, &|_, _| false)),
        (Parameter::Key, ones(all_keys, &|_, _| true)),
        (Parameter::Value, ones(all_keys, &|key, d| key == d + first)),
        (Parameter::AttentionOut, ones(all_rows, &|_, _| false)),
    ]);
    for out in [Parameter::SoftmaxMax, Parameter::SoftmaxSum] {
        data.insert(out, vec![0; all_rows * 32]);
    }
    if mode == SparseMode::Prefix {
        // The formula, as the operator wants it of the mask.
        let cells = (0..rows as u64).flat_map(|i| (0..keys as u64).map(move |j| (i, j)));
        let mask = cells.map(|(i, j)| u8::from(!geometry.sees(i, j)));
        data.insert(Parameter::AttenMask, mask.collect());
    }
    let found = compute(&data, &problem, levels()[0]);
    let out = elements(DType::Float, &found[&Parameter::AttentionOut]);
    let sees = |i: usize, j: usize| out[(i + first) * DIM + j] != 0.0;
    let cells = (0..rows).flat_map(|i| (0..keys).map(move |j| (i, j)));
    Some(cells.map(|(i, j)| sees(i, j) == geometry.sees(i as u64, j as u64)).collect())
}

#[test]
fn sparse_modes_5_to_8_are_the_predicate_of_the_geometry() {
    let mut computed = [0; 9];
    for (rows, keys) in (1..=40).flat_map(|rows| (1..=40).map(move |keys| (rows, keys))) {
        let (q, kv) = (rows as i64, keys as i64);
        let prefixes = [(kv - q).max(0), kv / 2, kv];
        let bands = [(kv, 0), (kv, q - kv), (kv + 3, -1), (kv, 2)];
        for mode in [5, 6, 7, 8] {
            let sparse_mode = SparseMode::from_acl(mode).unwrap();
            for index in 0..4 {
                let prefix = prefixes[index % 3].max(kv - q);
                let tokens = if mode < 7 { (0, 0) } else { bands[index] };
                let Some(agrees) = seen(sparse_mode, (rows, keys), tokens, prefix) else {
                    continue;
                };
                let wrong = agrees.iter().position(|agrees| !agrees);
                assert_eq!(wrong, None, "mode {mode}, {rows} x {keys}, {tokens:?}, {prefix}");
                computed[mode as usize] += 1;
            }
        }
    }
    // Every size in modes 5 and 6; modes 7 and 8 as far as their bands reach.
    assert_eq!(computed[5..7], [6400, 6400]);
    assert!(computed[7..].iter().all(|&count| count > 1600), "{computed:?}");
}
