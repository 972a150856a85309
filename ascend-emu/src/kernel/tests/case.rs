//! One call with data, run by the kernels and by the oracle.

use crate::kernel::reference::{self, Inputs, Outputs};
use crate::kernel::simd::Level;
use crate::kernel::{Buffers, run_as};
use ascend_spec::fia::{FiaCall, Problem, Version};
use ascend_spec::{DType, Dims, Extents, Layout, Soc, SparseMode, TensorDesc, View};
use half::{bf16, f16};
use std::fmt;

/// Bytes around every tensor; odd, so that no tensor is aligned.
const MARGIN: usize = 67;

/// What the margins hold.
const FENCE: u8 = 0xa5;

/// A full mask.
#[derive(Clone)]
pub(super) struct Mask {
    pub(super) shape: Vec<i64>,
    pub(super) dtype: DType,
    pub(super) bytes: Vec<u8>,
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = self.bytes.iter().filter(|&&byte| byte != 0).count();
        write!(f, "{} {:?} hiding {hidden}", self.dtype, self.shape)
    }
}

/// A call in plain words.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) layout: Layout,
    pub(super) batch: usize,
    pub(super) kv_heads: usize,
    pub(super) group: usize,
    pub(super) rows: usize,
    /// Rows of the key tensor, or of each if there is more than one.
    pub(super) key_rows: Vec<usize>,
    pub(super) dim: usize,
    pub(super) mode: SparseMode,
    pub(super) mask: Option<Mask>,
    pub(super) tokens: (i64, i64),
    pub(super) q_lens: Option<Vec<i64>>,
    pub(super) kv_lens: Option<Vec<i64>>,
    pub(super) inner_precise: i64,
    pub(super) lse: bool,
    pub(super) scale: f64,
    /// Distance of neighbouring elements of query, key, value and outputs.
    pub(super) spread: i64,
    pub(super) seed: u64,
}

impl Case {
    /// Causal or not, without lengths.
    pub(super) fn plain(
        dtype: DType,
        [batch, kv_heads, group, rows, keys, dim]: [usize; 6],
    ) -> Self {
        Case {
            dtype,
            layout: Layout::Bnsd,
            batch,
            kv_heads,
            group,
            rows,
            key_rows: vec![keys],
            dim,
            mode: SparseMode::DefaultMask,
            mask: None,
            tokens: (FiaCall::ALL_TOKENS, FiaCall::ALL_TOKENS),
            q_lens: None,
            kv_lens: None,
            inner_precise: 0,
            lse: true,
            scale: 1.0 / (dim as f64).sqrt(),
            spread: 1,
            seed: 1,
        }
    }

    pub(super) fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn extents(&self, heads: usize, rows: usize) -> Extents {
        let [batch, heads, rows, dim] = [self.batch, heads, rows, self.dim].map(|n| n as i64);
        Extents {
            batch,
            heads,
            rows,
            dim,
        }
    }

    /// The call's descriptors in its dtype; f32 calls pass the rules as FLOAT16 ones.
    fn described_dtype(&self) -> DType {
        if self.dtype == DType::Float {
            DType::Float16
        } else {
            self.dtype
        }
    }

    /// Hands the call and its data to `work`.
    pub(super) fn with<R>(&self, work: impl FnOnce(&Problem<'_>, &mut Tensors) -> R) -> R {
        let described = self.described_dtype();
        let axes = self.layout.input();
        let spread = |mut desc: TensorDesc| {
            let strides: Vec<i64> = desc
                .strides
                .iter()
                .map(|stride| stride * self.spread)
                .collect();
            desc.strides = Dims::new(&strides).unwrap();
            desc
        };
        let desc = |extents| spread(TensorDesc::packed(described, axes.shape(extents)));
        let query = desc(self.extents(self.heads(), self.rows));
        let list = self.key_rows.len() > 1;
        let keys: Vec<TensorDesc> = self
            .key_rows
            .iter()
            .map(|&rows| {
                let mut of = self.extents(self.kv_heads, rows);
                if list {
                    of.batch = 1;
                }
                desc(of)
            })
            .collect();
        let mut call = FiaCall::new(self.layout.as_str());
        call.query = Some(query);
        (call.key, call.value) = (&keys, &keys);
        let of_out = self.extents(self.heads(), self.rows);
        let out = spread(TensorDesc::packed(described, self.layout.out_shape(of_out)));
        let lse = spread(TensorDesc::packed(
            DType::Float,
            self.layout.lse_shape(of_out),
        ));
        call.attention_out = Some(out);
        call.softmax_lse = self.lse.then_some(lse);
        call.softmax_lse_flag = self.lse;
        call.num_heads = self.heads() as i64;
        call.num_key_value_heads = self.kv_heads as i64;
        call.sparse_mode = self.mode as i64;
        (call.pre_tokens, call.next_tokens) = self.tokens;
        call.actual_seq_lengths = self.q_lens.as_deref();
        call.actual_seq_lengths_kv = self.kv_lens.as_deref();
        call.inner_precise = self.inner_precise;
        call.scale = self.scale;
        call.atten_mask = match &self.mask {
            Some(mask) => Some(TensorDesc::packed(
                mask.dtype,
                Dims::new(&mask.shape).unwrap(),
            )),
            None if self.mode.takes_compressed_mask() => {
                Some(TensorDesc::packed(DType::Int8, Dims::of([2048, 2048])))
            }
            None => None,
        };
        let problem = match call.check(Version::V3, Soc::AtlasA2) {
            Ok(problem) => problem,
            Err(refusal) => panic!("{refusal}\n{self:?}"),
        };

        let mut random = Random(self.seed);
        let mut tensor = |desc: &TensorDesc| {
            let count = desc.elements().unwrap() as usize * self.spread as usize;
            self.encode((0..count).map(|_| random.next()))
        };
        let size = if self.dtype == DType::Float { 4 } else { 2 };
        let mut tensors = Tensors {
            dtype: self.dtype,
            query: tensor(&query),
            key: keys.iter().map(&mut tensor).collect(),
            value: keys.iter().map(&mut tensor).collect(),
            mask: Fenced::new(self.mask.iter().flat_map(|mask| mask.bytes.iter().copied())),
            out: Fenced::poisoned((out.elements().unwrap() * self.spread as u64) as usize * size),
            lse: Fenced::poisoned((lse.elements().unwrap() * self.spread as u64) as usize * 4),
        };
        work(&problem, &mut tensors)
    }

    fn encode(&self, values: impl Iterator<Item = f32>) -> Fenced {
        Fenced::new(values.flat_map(|value| encode(self.dtype, value)))
    }

    /// Runs the call and compares all of output and log-sum-exp with the oracle.
    pub(super) fn check(&self, level: Level) -> Result<(), String> {
        self.with(|problem, tensors| {
            let want = tensors.oracle(problem);
            tensors.run(problem, level);
            tensors.compare(problem, &want)
        })
    }
}

/// The bytes of one number.
pub(super) fn encode(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::Float16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// Numbers of a linear congruential generator, between -2 and 2, most of them small.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        let mut unit = || {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1 << 24) as f32
        };
        (unit() + unit() + unit() + unit()) * 2.0 - 4.0 + unit() * 1e-3
    }
}

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
pub(super) struct Tensors {
    dtype: DType,
    pub(super) query: Fenced,
    pub(super) key: Vec<Fenced>,
    pub(super) value: Vec<Fenced>,
    pub(super) mask: Fenced,
    pub(super) out: Fenced,
    pub(super) lse: Fenced,
}

impl Tensors {
    /// Runs the kernels.
    pub(super) fn run(&mut self, problem: &Problem<'_>, level: Level) {
        let pointers =
            |list: &[Fenced]| list.iter().map(|t| t.bytes().as_ptr()).collect::<Vec<_>>();
        let (key, value) = (pointers(&self.key), pointers(&self.value));
        let buffers = Buffers {
            query: self.query.bytes().as_ptr(),
            key: &key,
            value: &value,
            atten_mask: self.mask.bytes().as_ptr(),
            attention_out: self.out.bytes_mut().as_mut_ptr(),
            softmax_lse: self.lse.bytes_mut().as_mut_ptr(),
        };
        // SAFETY: the buffers have the sizes of the descriptors that the problem was made from, or what a test put
        // into their place together with its own views.
        unsafe {
            match self.dtype {
                DType::Float16 => run_as::<f16>(problem, &buffers, level),
                DType::Bf16 => run_as::<bf16>(problem, &buffers, level),
                _ => run_as::<f32>(problem, &buffers, level),
            }
        }
    }

    /// What the oracle computes.
    pub(super) fn oracle(&self, problem: &Problem<'_>) -> Outputs {
        let slices =
            |list: &'_ [Fenced]| list.iter().map(|t| t.bytes().to_vec()).collect::<Vec<_>>();
        let (key, value) = (slices(&self.key), slices(&self.value));
        let key: Vec<&[u8]> = key.iter().map(|t| &t[..]).collect();
        let value: Vec<&[u8]> = value.iter().map(|t| &t[..]).collect();
        let inputs = Inputs {
            dtype: self.dtype,
            query: self.query.bytes(),
            key: &key,
            value: &value,
            atten_mask: self.mask.bytes(),
        };
        reference::attention(problem, &inputs)
    }

    /// Element of the output.
    pub(super) fn output(&self, view: &View, at: (usize, usize, usize), d: usize) -> f64 {
        let index = (view.at(at.0, at.1, at.2) + d as i64 * view.dim) as usize;
        let bytes = self.out.bytes();
        match self.dtype {
            DType::Float16 => f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64(),
            DType::Bf16 => bf16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64(),
            _ => single(bytes, index),
        }
    }

    /// Log-sum-exp of a row.
    pub(super) fn lse(&self, view: &View, at: (usize, usize, usize)) -> f64 {
        single(self.lse.bytes(), view.at(at.0, at.1, at.2) as usize)
    }

    /// Compares output and log-sum-exp, as far as it is written, with the oracle's. Weights and output are rounded to
    /// the element type: some units of its precision are allowed, absolute and relative. Scores of a size of 10 have
    /// an error of 1e-6 in single precision.
    pub(super) fn compare(&self, problem: &Problem<'_>, want: &Outputs) -> Result<(), String> {
        let tolerance = match self.dtype {
            DType::Float16 => 2e-3,
            DType::Bf16 => 1.5e-2,
            _ => 2e-5,
        };
        let close = |got: f64, want: f64, tolerance: f64| {
            got == want
                || (got.is_nan() && want.is_nan())
                || (got - want).abs() <= tolerance * (1.0 + want.abs())
        };
        let size = if self.dtype == DType::Float { 4 } else { 2 };
        let (mut out_gaps, mut lse_gaps) = (self.out.bytes().to_vec(), self.lse.bytes().to_vec());
        let mut element = want.attention.iter();
        let mut rows = want.lse.iter();
        for b in 0..problem.batch {
            for head in 0..problem.heads {
                for row in 0..problem.query_rows {
                    let at = (b, head, row);
                    for d in 0..problem.value_dim {
                        let (got, &want) =
                            (self.output(&problem.out, at, d), element.next().unwrap());
                        if !close(got, want, tolerance) {
                            return Err(format!("output {at:?} element {d} is {got}, not {want}"));
                        }
                        let index =
                            (problem.out.at(b, head, row) + d as i64 * problem.out.dim) as usize;
                        out_gaps[index * size..][..size].fill(0xff);
                    }
                    let want = *rows.next().unwrap();
                    if let Some(view) = &problem.lse {
                        let got = self.lse(view, at);
                        if !close(got, want, 2e-5) {
                            return Err(format!("log-sum-exp {at:?} is {got}, not {want}"));
                        }
                        lse_gaps[view.at(b, head, row) as usize * 4..][..4].fill(0xff);
                    }
                }
            }
        }
        if !self.out.intact() || !self.lse.intact() {
            return Err("bytes around an output changed".into());
        }
        if out_gaps.iter().chain(&lse_gaps).any(|&byte| byte != 0xff) {
            return Err("bytes between the elements of an output changed".into());
        }
        Ok(())
    }
}

fn single(bytes: &[u8], index: usize) -> f64 {
    let bytes: [u8; 4] = bytes[4 * index..][..4].try_into().unwrap();
    f64::from(f32::from_le_bytes(bytes))
}
